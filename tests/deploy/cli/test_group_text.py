"""`sidecar groups ls` and `groups show` as a person reads them."""

from __future__ import annotations

from typing import Any

from deploy.admin.models import AnswerOut, GroupDetailOut, GroupOut
from deploy.admin.text import group_lines, reply_lines

NOW = 1_772_357_400.0  # 2026-03-01T09:30:00Z


def group(kind: type[GroupOut] = GroupOut, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "group_id": "g-1",
        "exchange_id": "ex_1",
        "session_key": "k",
        "session_id": "default/s",
        "project": "shop",
        "adapter": "base",
        "status": "scored",
        "reason": None,
        "detail": None,
        "judge_attempts": 0,
        "learn_attempts": 0,
        "created_at": NOW - 180.0,
        "scored_at": NOW - 60.0,
        "judge_model": "openai/judge",
        "rubric_hash": "edfa4c8b647712345",
        "disagreement": 0.1,
        "flipped_pairs": 0.25,
        "run_id": None,
    }
    return kind(**{**fields, **changes}).model_dump(mode="json")


def answer(index: int, **changes: Any) -> AnswerOut:
    fields: dict[str, Any] = {
        "index": index,
        "origin": "served",
        "message": {"role": "assistant", "content": "Thirty days.\nTruly."},
        "finish_reason": "stop",
        "tokens": 12,
        "temperature": 1.0,
        "untrainable_reason": None,
        "score": 0.7,
        "disagreement": None,
        "explanation": "Right.\nShort.",
        "independent_reward": None,
        "reward": None,
        "checks": [],
    }
    return AnswerOut(**{**fields, **changes})


def test_groups_are_a_table_of_one_line_each() -> None:
    aside = group(
        group_id="g-22",
        status="set_aside",
        reason="judge_rubbish",
        detail="no\n" + 200 * "x",
        judge_model=None,
        project=None,
    )

    head, first, second = reply_lines("/groups", {"items": [group(), aside]}, NOW)

    assert head.split() == ["group", "made", "status", "judge", "adapter", "project", "why"]
    assert first == "g-1    3 min ago  scored     openai/judge  base     shop     -"
    assert second.startswith("g-22   3 min ago  set_aside  -             base     -        judge_")
    assert "judge_rubbish: no xxx" in second
    assert second.endswith("xxx...")
    assert reply_lines("/groups", {"items": []}, NOW) == ["none"]


def test_a_group_shows_what_was_asked_and_each_answer_apart() -> None:
    checks = [
        {"name": "calls", "version": "1", "score": None, "why": "the request has no tools"},
        {"name": "short", "version": "1", "score": 1.0, "why": "36 characters"},
    ]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + 400 * "A"}}
    asked = {"role": "user", "content": [{"type": "text", "text": "How long?"}, image]}
    call = {"function": {"name": "lookup", "arguments": '{"id": 7}'}}
    found = group(
        GroupDetailOut,
        judge_attempts=2,
        reward_rule=None,
        propensity=1.0,
        chosen_because={"reason": "drawn", "features": {}},
        request={"messages": [asked]},
        answers=[
            answer(0, checks=checks),
            answer(
                1,
                origin="sampled",
                message={"role": "assistant", "content": None, "tool_calls": [call]},
                explanation=None,
                score=None,
                untrainable_reason="greedy",
            ),
        ],
    )

    lines = list(group_lines(found, NOW))

    assert lines[:9] == [
        "Group g-1: scored",
        "  made 2026-03-01T09:27:00Z (3 min ago)",
        "  scored 2026-03-01T09:29:00Z (1 min ago) by openai/judge, rubric edfa4c8b6477",
        "  the judge's passes differ by 0.100; they put 25% of the pairs in other order",
        "  exchange ex_1, session default/s",
        "  adapter base, project shop",
        "  chosen because: drawn, with probability 1",
        "  failed attempts to judge it: 2",
        "",
    ]
    assert lines[9:12] == ["Asked:", "--- user", "How long?"]
    assert "[image/png, 300 bytes" in lines[12]
    assert lines[13:] == [
        "",
        "--- answer 0 (served): score 0.700",
        "Thirty days.",
        "Truly.",
        "  judge: Right.",
        "         Short.",
        "  check calls: does not count (the request has no tools)",
        "  check short: 1.000 (36 characters)",
        "  12 tokens, ended by stop, temperature 1",
        "",
        "--- answer 1 (sampled): no score",
        'calls lookup({"id": 7})',
        "  12 tokens, ended by stop, temperature 1; not learned from: greedy",
    ]


def test_a_group_without_its_exchange_is_shown_all_the_same() -> None:
    found = group(
        GroupDetailOut,
        reward_rule=None,
        propensity=None,
        chosen_because=None,
        answers=[answer(0)],
        request=None,
    )

    lines = list(group_lines(found, NOW))

    assert "Asked: not known, since its exchange is not stored any more" in lines
    assert "Thirty days." in lines
