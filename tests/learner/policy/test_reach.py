"""`learner.pack_tokens = "auto"`: how long an input can be trained on, and who is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ingest.grouping.selection import TRAINABLE_FLAG, UNTOLD_TOKENS, rules_now, rules_of
from learner.base_weights import BaseSize
from learner.errors import ParentError
from learner.once import with_pack_tokens
from learner.policy import memory as of_reach
from learner.policy.adapter_io import load_policy
from learner.policy.costs import CHUNK_BYTES, Sizes, known_base
from learner.policy.memory import Reach, Room, check_room, longest_input, reach
from learner.records import Parent
from sidecar.settings import Learner, Settings
from sidecar.store.database import Database, get_flag, set_flag
from tests.learner.policy.test_architecture import PACKED, saved

CPU = torch.device("cpu")


def test_what_the_memory_holds_beside_the_weights_by_hand() -> None:
    """One layer of width 1: a token keeps 1 input and 6 + 3 + 4 + 4 numbers of 4 bytes, 72 bytes;
    10 weights and a LoRA of rank 1 over widths 2, of 4 bytes, take 40 + 64. 0.8 of 1,000 remain."""
    model = Sizes(layers=1, hidden=1, queries=1, keys=1, inner=1)
    base = BaseSize(numbers=10, in_blocks=8, widths=2)

    found = longest_input(
        base,
        model,
        40 + 64 + 1_000 + int(2 * CHUNK_BYTES / 0.8) + 1,
        rank=1,
        cuda=False,
        autocast=False,
        checkpointing=True,
        answers=8,
    )

    assert found == 800 // 72


def test_no_model_is_trained_beyond_its_positions(
    tiny_base: Path, learner_settings: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_reach, "room_of", lambda *_: Room(total=10**12, free=10**12, share=1))
    assert reach(str(tiny_base), learner_settings, CPU, answers=8) == Reach(128, 128)

    monkeypatch.setattr(of_reach, "room_of", lambda *_: Room(total=10**9, free=10**6, share=1))
    assert reach(str(tiny_base), learner_settings, CPU, answers=8) == Reach(0, 0)


@pytest.mark.parametrize(
    ("family", "masks", "scores"), [("llama", 0, 0), ("gemma2", 2, 12), ("gpt-oss", 2, 12)]
)
def test_masks_and_scores_of_all_pairs_count_where_the_models_own_code_attends(
    family: str, masks: int, scores: int, tmp_path: Path
) -> None:
    """Two types of layers have a mask each; 4 heads keep 3 numbers of a pair."""
    known = known_base(str(saved(tmp_path, *PACKED[family])))

    assert known is not None
    assert (known.sizes.masks, known.sizes.scores) == (masks, scores)


@pytest.mark.parametrize("broken", ["nobody/nothing-of-this-name", ""])
def test_what_is_not_known_is_none(broken: str, learner_settings: Learner) -> None:
    assert reach(broken, learner_settings, CPU, answers=8) is None


@pytest.mark.parametrize("damage", [{"hidden_size": -1}, {"hidden_size": "x"}, {"model_type": 7}])
def test_of_a_base_with_a_damaged_config_nothing_is_known_and_its_loading_says_why(
    damage: dict[str, object], tiny_base: Path, learner_settings: Learner, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_base, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, **damage}))

    assert reach(str(base), learner_settings, CPU, answers=8) is None
    check_room(str(base), learner_settings, CPU)  # not known: it refuses nothing
    with pytest.raises(ParentError, match="cannot be loaded"):
        load_policy(str(base), Parent(name="base"), learner_settings)


def test_auto_is_told_to_ingest_through_the_store(settings: Settings, database: Database) -> None:
    learner = Learner.model_validate({**settings.learner.model_dump(), "pack_tokens": "auto"})
    settings = settings.model_copy(update={"learner": learner})
    rules = rules_of(settings)
    with database.read() as session:
        assert rules_now(session, rules).max_trained_tokens == UNTOLD_TOKENS

    used = with_pack_tokens(settings, database, now=1.0).learner.pack_tokens

    assert used == 128  # the positions of the tiny base
    with database.read() as session:
        assert get_flag(session, TRAINABLE_FLAG) == "128"
        assert rules_now(session, rules).max_trained_tokens == 128


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (0, 750),  # never told
        (750, 750),
        (1_000, 1_000),  # still held
        (1_001, 750),
        (375, 375),
        (374, 750),  # half of what is safe
    ],
)
def test_what_was_told_stays_while_it_is_held_and_not_much_too_small(
    before: int, told: int
) -> None:
    assert Reach(holds=1_000, safe=750).told(before) == told


def test_a_number_is_taken_as_it_is(settings: Settings, database: Database) -> None:
    with database.write() as session:
        set_flag(session, TRAINABLE_FLAG, "9", now=1.0)

    assert with_pack_tokens(settings, database, now=1.0) is settings
    with database.read() as session:
        assert rules_now(session, rules_of(settings)).max_trained_tokens == 2048
