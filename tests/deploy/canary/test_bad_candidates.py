"""One bad candidate ends its own canary: not the controller, not the next candidate."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.canary import controller as controller_module
from deploy.canary.controller import MAX_TICK_ERRORS
from learner.adapter_folder import (
    LINEAGE,
    PROBE,
    WEIGHTS,
    ProbeFile,
    file_digest,
    folder_digest,
    render_probe,
)
from sidecar.errors import StoreError
from sidecar.store.models import AdapterRow, BannedDigestRow, CanaryRow, CounterRow
from tests.deploy.conftest import World

DEEP = b"[" * 100_000 + b"]" * 100_000


def edit_header(folder: Path, edit: Callable[[bytes], bytes]) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = edit(content[8 : 8 + length])
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])


def is_deep(header: bytes) -> bytes:
    return b'{"a": ' + DEEP + b"}"


def has_a_lone_surrogate(header: bytes) -> bytes:
    return header.replace(b"q_proj.lora_A", rb"q_\ud800proj.lora_C")


def add_a_file_whose_name_is_no_text(folder: Path) -> None:
    (folder / "\udcff.md").write_text("x")


BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a deep header": (lambda folder: edit_header(folder, is_deep), "is nested deeper than 16"),
    "a lone surrogate in a name": (
        lambda folder: edit_header(folder, has_a_lone_surrogate),
        r"holds a lone surrogate in 'base_model.model.layers.0.q_\ud800proj",
    ),
    "a file whose name is no text": (
        add_a_file_whose_name_is_no_text,
        r"'\udcff.md': does not belong here",
    ),
}


def register_bad(world: World, version: int, spoil: Callable[[Path], None]) -> str:
    """A version whose registered digest is that of the spoilt folder."""
    name = str(world.register(version))
    path = Path(world.adapter(name).path)
    spoil(path)
    with world.database.write() as session:
        session.get_one(AdapterRow, name).digest = folder_digest(path)
    return name


def counters(world: World) -> dict[tuple[str, str], int]:
    return {(row.stage, row.reason): row.count for row in world.rows(CounterRow)}


@pytest.mark.parametrize(("spoil", "words"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
async def test_a_bad_folder_is_rejected_and_the_next_candidate_is_tried(
    world: World, spoil: Callable[[Path], None], words: str
) -> None:
    bad = register_bad(world, 1, spoil)
    await world.controller().tick()
    good = world.register(2)
    await world.controller().tick()

    assert world.adapter(bad).state == "rejected"
    assert str(world.adapter(bad).reason).startswith("invalid: ")
    assert words in str(world.adapter(bad).reason)
    assert world.canary(bad).phase == "rolled_back"
    assert world.canary(good).phase == "gating"
    assert world.control.calls == [("load", good)]
    assert counters(world) == {
        ("adapter", "rejected"): 1,
        ("adapter", "banned"): 1,  # these files, wherever they come from
        ("canary", "rolled_back"): 1,
    }


async def test_a_changed_folder_is_refused_by_its_digest_before_it_is_parsed(
    world: World,
) -> None:
    name = world.register(1)
    edit_header(Path(world.adapter(name).path), is_deep)

    await world.controller().tick()

    assert "the folder was changed" in str(world.adapter(name).reason)
    assert world.canary(name).phase == "rolled_back"
    assert world.rows(BannedDigestRow) == [], "the registered digest is that of the good files"


@pytest.mark.parametrize("gone", ["adapter_model.safetensors", ""])
async def test_missing_files_end_the_canary_and_ban_nothing(world: World, gone: str) -> None:
    name = world.register(1)
    path = Path(world.adapter(name).path, gone)
    path.rename(path.parent / "moved" if path.is_dir() else path.parent.parent / "moved")

    await world.controller().tick()

    assert "cannot be read (No such file or directory)" in str(world.adapter(name).reason)
    assert world.canary(name).phase == "rolled_back"
    assert world.rows(BannedDigestRow) == [], "a backup brings the registered files back"


async def test_a_changed_lineage_is_refused_though_vllm_does_not_read_it(world: World) -> None:
    name = world.register(1)
    folder = Path(world.adapter(name).path)
    (folder / "lineage.json").write_text("{}")
    world.told_at_registration(name, {"lineage_sha256": "00" * 32})

    await world.controller().tick()

    assert world.adapter(name).reason == (
        "invalid: lineage.json: was changed after it was registered"
    )


@pytest.fixture
def defect(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """defect(error): from now on every validation raises it."""

    def install(error: Exception) -> None:
        def validate(*_: object) -> None:
            raise error

        monkeypatch.setattr(controller_module, "validate_folder", validate)

    return install


async def tick_for(world: World, seconds: float) -> None:
    """As control does, each tick by a controller of its own: nothing lives in its memory."""
    for _ in range(int(2 * seconds)):
        await world.controller().tick()
        world.clock.now += 0.5


async def test_an_error_nobody_expected_ends_the_canary_after_five_tries(
    world: World, defect: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = world.register(1)
    defect(TypeError("unhashable type: \ud800"))

    await tick_for(world, 29.0)
    assert world.canary(bad).phase == "loading"
    assert world.canary(bad).reason == r"try 4 of 5: TypeError: unhashable type: \ud800"
    await tick_for(world, 2.0)

    assert world.adapter(bad).state == "rejected"
    assert world.canary(bad).reason == (
        r"5 tries in a row ended with an error, the last with TypeError: unhashable type: \ud800"
    )
    assert counters(world)[("tick", "TypeError")] == MAX_TICK_ERRORS == 5
    assert world.actions()[-1] == "canary.rolled_back"

    monkeypatch.undo()
    good = world.register(2)
    await world.controller().tick()
    assert world.canary(good).phase == "gating"


async def test_tries_that_end_well_in_between_start_the_count_anew(
    world: World, defect: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = world.register(1)
    defect(RuntimeError("can't start new thread"))
    await tick_for(world, 10.0)
    assert world.canary(name).tick_errors == 3

    monkeypatch.undo()
    await tick_for(world, 20.0)

    assert world.canary(name).phase == "gating"
    assert world.canary(name).tick_errors == 0


@pytest.mark.parametrize(
    "error",
    [
        StoreError("database is locked"),
        OSError(errno.EMFILE, "Too many open files"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_that_is_not_the_candidate_s_is_never_held_against_it(
    world: World, defect: Callable[[Exception], None], error: Exception
) -> None:
    name = world.register(1)
    defect(error)

    for _ in range(2 * MAX_TICK_ERRORS):
        with pytest.raises(type(error)):
            await world.controller().tick()
        world.clock.now += 60.0

    assert world.canary(name).phase == "loading"
    assert world.canary(name).tick_errors == 0


async def test_a_disk_that_fails_while_a_folder_is_hashed_is_not_the_folder_s_fault(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = world.register(1)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", fail)
        with pytest.raises(OSError, match="Input/output error"):
            await world.controller().tick()
    assert world.canary(name).phase == "loading"

    await world.controller().tick()
    assert world.canary(name).phase == "gating"


async def test_a_folder_that_changes_while_vllm_reads_it_is_unloaded_and_rejected(
    world: World,
) -> None:
    name = world.register(1)
    weights = Path(world.adapter(name).path) / WEIGHTS
    content = weights.read_bytes()

    def swap(_: str) -> None:
        other = weights.with_name("other")
        other.write_bytes(content)
        other.rename(weights)

    world.control.on_load = swap

    await world.controller().tick()

    assert world.control.calls == [("load", name), ("unload", name)]
    assert "changed while vLLM read it" in str(world.adapter(name).reason)
    assert world.adapter(name).state == "rejected"


# A candidate's canary begins only when vLLM serves what the learner trained.


TRAINED = ProbeFile(
    prompts=((1,), (1, 2)), likeliest=({11: -1.0, 12: -3.0}, {11: -1.0, 12: -3.0}), tolerance=0.1
)


def with_probe(world: World, content: str = "") -> str:
    name = world.register(1)
    folder = Path(world.adapter(name).path)
    (folder / PROBE).write_text(content or render_probe(TRAINED))
    return name


def evidence_of(world: World) -> dict[str, Any]:
    (row,) = world.rows(CanaryRow)
    return dict(row.evidence)


async def test_a_version_that_is_served_as_trained_goes_on_with_the_numbers_as_evidence(
    world: World,
) -> None:
    name, _ = with_lineage(world)
    world.control.strays = 0.0625

    await world.controller().tick()

    assert world.canary(name).phase == "gating"
    served = evidence_of(world)["served"]
    assert (served["same"], served["tokens"], served["tolerance"]) == (True, 2, 0.1)
    assert served["mean_difference"] == pytest.approx(0.0625)


async def test_a_version_that_is_served_otherwise_is_rejected_with_the_numbers(
    world: World,
) -> None:
    name = with_probe(world)
    world.control.strays = 0.25

    await world.controller().tick()

    assert world.adapter(name).state == "rejected"
    assert "not what was trained: vLLM's log-probabilities are 0.25 nats a token" in (
        world.canary(name).reason or ""
    )
    assert evidence_of(world)["served"]["same"] is False


async def test_one_replica_that_serves_otherwise_is_waited_for_and_all_are_enough(
    world: World,
) -> None:
    from support.fake_control import FakeControl

    world.others["http://second"] = FakeControl()
    world.others["http://second"].strays = 0.25
    name = with_probe(world)

    await world.controller().tick()
    assert world.canary(name).phase == "loading"
    assert "http://second: not what was trained" in (world.canary(name).reason or "")

    world.control.strays = 0.25
    world.clock.now += 2.0
    await world.controller().tick()

    assert world.adapter(name).state == "rejected"
    assert "http://vllm: not what was trained" in (world.canary(name).reason or "")


async def test_a_damaged_probe_file_is_an_invalid_folder(world: World) -> None:
    name = with_probe(world, "{")

    await world.controller().tick()

    assert world.adapter(name).state == "rejected"
    assert "invalid: probe.json" in (world.canary(name).reason or "")


def with_lineage(world: World) -> tuple[str, Path]:
    """A version whose lineage names its `probe.json`. Returns: its name and its folder."""
    name = with_probe(world)
    folder = Path(world.adapter(name).path)
    algorithm = {"probe_sha256": file_digest(folder / PROBE)}
    (folder / LINEAGE).write_text(json.dumps({"algorithm": algorithm}))
    return name, folder


@pytest.mark.parametrize("how", ["is gone", "was changed"])
async def test_a_version_whose_named_file_is_another_one_is_rejected_and_not_banned(
    world: World, how: str
) -> None:
    """The changed file allows 50 times the difference; both files can be read."""
    name, folder = with_lineage(world)
    world.control.strays = 0.25
    (folder / PROBE).unlink()
    if how == "was changed":
        (folder / PROBE).write_text(render_probe(replace(TRAINED, tolerance=5.0)))

    await world.controller().tick()

    assert world.adapter(name).state == "rejected"
    assert f"invalid: probe.json: {how}" in (world.canary(name).reason or "")
    assert world.rows(BannedDigestRow) == []
    assert "served" not in evidence_of(world)


async def test_an_older_version_without_the_file_is_not_asked(world: World) -> None:
    name = world.register(1)
    world.control.strays = 5.0

    await world.controller().tick()

    assert world.canary(name).phase == "gating"
    assert "served" not in evidence_of(world)
