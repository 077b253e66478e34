"""Groups that say nothing about a judge are left out, and counted by reason."""

from __future__ import annotations

import json
from typing import Any

from ingest.calibration.figures import (
    EQUAL_SCORES,
    IDENTICAL,
    NO_PREFERENCES,
    left_out_lines,
    split_usable,
)
from ingest.calibration.running import read_groups


def line(name: str, *candidates: tuple[str, float | None], **fields: Any) -> str:
    return json.dumps(
        {
            "id": name,
            "messages": [{"role": "user", "content": "How long?"}],
            "candidates": [
                {
                    "message": {"role": "assistant", "content": text},
                    **({} if score is None else {"score": score}),
                }
                for text, score in candidates
            ],
            **fields,
        }
    )


def test_groups_without_a_known_order_or_a_difference_are_left_out_by_reason() -> None:
    text = "\n".join(
        [
            line("good", ("30 days", 1.0), ("90 days", 0.0)),
            line("even", ("30 days", 0.5), ("90 days", 0.5)),
            line("same", ("30 days", 1.0), ("30 days", 0.0)),
            line("none", ("30 days", None), ("90 days", None), preferences=[]),
            line("liked", ("30 days", None), ("90 days", None), preferences=[[0, 1]]),
        ]
    )

    usable, left_out = split_usable(read_groups(text, "f"))

    assert [group.group_id for group in usable] == ["good", "liked"]
    assert left_out == {EQUAL_SCORES: ["even"], IDENTICAL: ["same"], NO_PREFERENCES: ["none"]}


def test_a_reason_is_said_with_its_number_and_some_ids() -> None:
    assert list(left_out_lines({IDENTICAL: list("abcdefg")})) == [
        f"7 left out (a, b, c, d, e, ...): {IDENTICAL}"
    ]
