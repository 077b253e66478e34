"""One bad candidate ends its own canary: not the controller, not the next candidate."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deploy.canary import controller as controller_module, live_turns
from deploy.canary.controller import MAX_TICK_ERRORS
from deploy.errors import EngineError
from learner.adapter_folder import CONFIG, WEIGHTS, folder_digest
from sidecar.errors import StoreError
from sidecar.store.models import AdapterRow, BannedDigestRow, CounterRow

if TYPE_CHECKING:
    from tests.deploy.conftest import World

DEEP = b"[" * 100_000 + b"]" * 100_000


def edit_header(folder: Path, edit: Callable[[bytes], bytes]) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = edit(content[8 : 8 + length])
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])


def dtype_is_a_list(header: bytes) -> bytes:
    return header.replace(b'"BF16"', b"[]")


def is_deep(header: bytes) -> bytes:
    return b'{"a": ' + DEEP + b"}"


def has_a_lone_surrogate(header: bytes) -> bytes:
    return header.replace(b"q_proj.lora_A", rb"q_\ud800proj.lora_C")


def offsets_are_a_text(header: bytes) -> bytes:
    return header.replace(b'"data_offsets": [', b'"data_offsets": ["', 1).replace(b", 16]", b'"]')


def has_a_huge_integer(header: bytes) -> bytes:
    return header.replace(b"[4, 2]", b"[" + b"9" * 5_000 + b", 2]")


def add_a_file_whose_name_is_no_text(folder: Path) -> None:
    (folder / "\udcff.md").write_text("x")


def edit_config(change: bytes) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / CONFIG).write_bytes(change)

    return edit


BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a dtype that is a list": (
        lambda folder: edit_header(folder, dtype_is_a_list),
        "is []; a LoRA weight is one of",
    ),
    "a deep header": (lambda folder: edit_header(folder, is_deep), "is nested deeper than 16"),
    "a lone surrogate in a name": (
        lambda folder: edit_header(folder, has_a_lone_surrogate),
        r"holds a lone surrogate in 'base_model.model.layers.0.q_\ud800proj",
    ),
    "offsets that are a text": (
        lambda folder: edit_header(folder, offsets_are_a_text),
        "has a broken shape or place",
    ),
    "an integer of 5,000 digits": (
        lambda folder: edit_header(folder, has_a_huge_integer),
        "holds an integer of 5000 digits",
    ),
    "a deep config": (edit_config(b'{"a": ' + DEEP + b"}"), "is nested deeper than 16"),
    "a config that is a list": (edit_config(b"[]"), "is not a JSON object"),
    "a config that is no text": (edit_config(b"\xff\xfe\x00"), "is not UTF-8"),
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


async def test_an_error_in_the_ramp_takes_the_candidate_s_users_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = world.register(1)
    world.hold_out(4)
    for _ in range(3):
        await world.controller().tick()
    assert world.table().canary == name

    def count(*_: object, **__: object) -> None:
        raise KeyError("arm")

    monkeypatch.setattr(live_turns, "count_ramp", count)
    await tick_for(world, 31.0)

    assert world.canary(name).phase == "rolled_back"
    assert world.adapter(name).state == "rolled_back"
    assert world.table().canary is None


async def test_an_adapter_whose_row_is_gone_does_not_hold_up_the_next(world: World) -> None:
    name = world.register(1)
    world.control.away = True
    await world.controller().tick()
    with world.database.write() as session:
        session.delete(session.get_one(AdapterRow, name))
    world.control.away = False

    await tick_for(world, 31.0)
    good = world.register(2)
    await world.controller().tick()

    assert world.canary(name).phase == "rolled_back"
    assert world.canary(good).phase == "gating"


@pytest.mark.parametrize(
    "error",
    [
        StoreError("database is locked"),
        EngineError("vLLM gave no reply"),
        OSError(errno.EIO, "Input/output error"),
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
