"""Room for a run: sizes from files, what every run needs, and the words of a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from learner.base_weights import BaseSize, base_folder, base_size
from learner.errors import NoRoomError
from learner.policy import costs, memory, memory as room
from learner.policy.costs import CHUNK_BYTES, Sizes
from learner.policy.memory import Room, check_room, least_bytes, shortage
from sidecar.settings import Learner

CPU = torch.device("cpu")
TINY = 48 * 32 + 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 48 * 32 + 2 * 32) + 32
"""Weights that the tiny base has: embeddings, two blocks (q o, k v, MLP, two norms), last norm."""


def test_the_weights_of_a_base_are_counted_from_the_heads_of_its_files(tiny_base: Path) -> None:
    found = base_size(tiny_base)

    widths = 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    assert widths == 928
    assert found == BaseSize(numbers=TINY, in_blocks=TINY - 48 * 32 - 32, widths=widths)


def test_a_folder_that_says_nothing_has_no_size(tmp_path: Path) -> None:
    assert base_size(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    assert base_size(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"[]")
    assert base_size(tmp_path) is None


def test_the_folder_of_a_name_that_is_nowhere_is_not_known(tmp_path: Path) -> None:
    assert base_folder(str(tmp_path)) == tmp_path
    assert base_folder("nobody/nothing-of-this-name") is None
    assert base_folder("a/b/c") is None


def test_what_a_run_needs_by_hand() -> None:
    """10 weights of 2 bytes; rank 3 over widths 7, each weight with 7 numbers beside it in fp32; a
    pack of 256 tokens that keeps the inputs of 2 layers of width 5, and one layer, 2.125 bytes a
    number."""
    model = Sizes(layers=2, hidden=5, queries=5, keys=5, inner=10)
    one_layer = 6 * 5 + 3 * 5 + 4 * 5 + 4 * 10
    pack = 256 * (2 * 5 + one_layer) * 2.125 + 2 * CHUNK_BYTES

    found = least_bytes(
        BaseSize(numbers=10, in_blocks=8, widths=7), model, rank=3, halves=True, autocast=True
    )

    assert found == 20 + 3 * 7 * 4 * 8 + pack


def test_the_budget_is_the_smaller_of_the_share_and_what_is_free() -> None:
    assert Room(total=100, free=60, share=1.0).budget == 60
    assert Room(total=100, free=60, share=0.25).budget == 25


@pytest.mark.parametrize(
    ("share", "free", "lasts"), [(0.01, 10**9, True), (1.0, 10**6, False), (1.0, 10**9, None)]
)
def test_a_shortage_says_whether_it_lasts(
    tiny_base: Path,
    learner_settings: Learner,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    free: int,
    lasts: bool | None,
) -> None:
    total = 10 * 2 * CHUNK_BYTES
    found = Room(total=total, free=min(free, total), share=share)
    monkeypatch.setattr(room, "room_of", lambda *_: found)

    short = shortage(str(tiny_base), learner_settings, CPU)

    assert (None if short is None else short.lasts) == lasts


def test_processes_without_cards_need_as_many_times_the_memory(
    tiny_base: Path, learner_settings: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fits into three times the buffers of the head, and two do not."""
    free = 3 * 2 * CHUNK_BYTES // 2
    monkeypatch.setattr(room, "room_of", lambda *_: Room(total=10**12, free=free, share=1.0))

    check_room(str(tiny_base), learner_settings, CPU)

    two = learner_settings.model_copy(update={"processes": 2})
    with pytest.raises(NoRoomError):
        check_room(str(tiny_base), two, CPU)


@pytest.mark.parametrize(("shared", "weights"), [(False, 1000), (True, 100 + 900 // 3)])
def test_a_card_has_its_part_of_a_shared_base(
    tiny_base: Path,
    learner_settings: Learner,
    monkeypatch: pytest.MonkeyPatch,
    shared: bool,
    weights: int,
) -> None:
    asked: list[int] = []

    def least(base: BaseSize, *_: object, **__: object) -> int:
        asked.append(base.numbers)
        return 0

    monkeypatch.setattr(
        costs, "base_size", lambda _: BaseSize(numbers=1000, in_blocks=900, widths=1)
    )
    monkeypatch.setattr(room, "least_bytes", least)
    monkeypatch.setattr(room, "room_of", lambda *_: Room(total=1, free=1, share=1.0))
    settings = learner_settings.model_copy(update={"processes": 3, "shard_base": shared})

    check_room(str(tiny_base), settings, torch.device("cuda", 0))

    assert asked == [weights]


@pytest.mark.parametrize(
    ("device", "share", "said"),
    [
        (
            "cpu",
            0.5,
            "on cpu, and 0.0 of 80.0 GB are free; free memory, or use a smaller base or another "
            "machine",
        ),
        (
            "cuda:0",
            0.5,
            "on cuda:0, and 0.0 of 80.0 GB are free; give vLLM less (--gpu-memory-utilization), "
            "or set learner.device to another card",
        ),
        (
            "cpu",
            1e-5,
            f"a run needs about {2 * CHUNK_BYTES / 1e9:.1f} GB on cpu, and "
            "learner.memory_fraction = 1e-05 allows 0.0 GB of the 80.0 GB; raise it, or use a "
            "smaller base or another learner.device",
        ),
    ],
)
def test_a_run_that_does_not_fit_is_refused_in_words(
    tiny_base: Path,
    learner_settings: Learner,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    share: float,
    said: str,
) -> None:
    found = Room(total=80 * 10**9, free=10**6, share=share)
    monkeypatch.setattr(room, "room_of", lambda *_: found)

    with pytest.raises(NoRoomError) as refused:
        check_room(str(tiny_base), learner_settings, torch.device(device))

    assert str(refused.value).endswith(said)


def test_a_base_without_sizes_may_begin_and_the_log_says_so(
    tmp_path: Path, learner_settings: Learner
) -> None:
    with capture_logs() as logs:
        check_room(str(tmp_path), learner_settings, CPU)

    assert [entry["event"] for entry in logs] == ["room_not_known"]


def test_torch_is_held_to_the_share_of_a_card_and_never_to_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: limits.append(given)
    )
    card = torch.device("cuda", 1)

    for device, share in ((CPU, 0.5), (card, 1.0), (card, 0.5)):
        room.limit_torch(device, share)

    assert limits == [(0.5, card)]


def test_a_pack_on_a_card_has_what_is_left_of_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (700, 1_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 150)
    card = torch.device("cuda", 0)

    assert memory.within_share(card, 700, 1.0) == 700
    assert memory.within_share(card, 700, 0.5) == 350
    assert memory.within_share(card, 300, 0.5) == 300
    assert memory.within_share(card, 700, 0.1) == 0
    assert memory.within_share(CPU, 700, 0.1) == 700
