"""The keys of tasks, and who is compared with whom."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ingest.tasks.keys import (
    WINDOW_S,
    FirstExchange,
    Ready,
    Step,
    draw,
    task_key,
    template_of,
    why_excluded,
)
from ingest.tasks.rewards import Outcome, Scale, reward_of, scale_of


def request(text: str, system: str = "You help.") -> dict[str, object]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": text}]}


def test_the_strongest_thing_in_common_is_the_key_down_to_the_weakest_allowed() -> None:
    first = FirstExchange(project="p", task="refund", prompt_key="aa", request=request("hi"))
    unnamed = FirstExchange(project="p", prompt_key="aa", request=request("hi"), repeats=True)
    rare = FirstExchange(project="p", prompt_key="aa", request=request("hi"))
    played = FirstExchange(project="p", task="refund", origin="rehearsal")

    def kind(one: FirstExchange, weakest: str) -> str | None:
        key = task_key(one, weakest=weakest)
        return None if key is None else key.kind

    assert [kind(first, one) for one in ("header", "prompt", "template")] == ["header"] * 3
    assert [kind(unnamed, one) for one in ("header", "prompt", "template")] == [
        None,
        "prompt",
        "prompt",
    ]
    assert [kind(rare, one) for one in ("prompt", "template")] == ["prompt", "template"]
    assert kind(played, "header") == "rehearsal"
    assert kind(FirstExchange(project="p", origin="rehearsal"), "template") is None


def test_a_key_is_of_one_project_and_of_one_kind() -> None:
    one = task_key(FirstExchange(project="p", task="t"), weakest="header")
    other = task_key(FirstExchange(project="q", task="t"), weakest="header")
    played = task_key(FirstExchange(project="p", task="t", origin="rehearsal"), weakest="header")
    prompt = task_key(FirstExchange(project="p", prompt_key="t"), weakest="prompt")

    assert None not in (one, other, played, prompt)
    assert len({key.digest for key in (one, other, played, prompt) if key is not None}) == 4


def test_a_template_is_a_first_message_without_names_numbers_and_quotations() -> None:
    one = template_of(request("Hi, I am Anna Smith. Where is my order A-1234? anna@x.org"))
    other = template_of(request("Hi, I am Bob. Where is my order B-77? bob@y.net"))
    quoted = template_of(request('Translate "good day" please'))

    assert one == other == "hi 0 am 0 where is my order 0 0"
    assert quoted == template_of(request('Translate "so long" please'))
    assert one != template_of(request("Hi, I am Anna Smith. Where is my money?"))


def step(name: str = "e", **changes: object) -> Step:
    plain = {
        "exchange_id": name,
        "began_at": 1.0,
        "stored_at": 1.0,
        "parent": "p",
        "adapter": "v1",
        "held_out": False,
        "answered": True,
        "trainable": True,
        "task": "t",
        "origin": "user",
        "caller": ("p", "k", "u"),
    }
    return Step(**{**plain, **changes})  # type: ignore[arg-type]


def test_what_speaks_against_a_session() -> None:
    masked, failed = step(trainable=False), step(adapter="v2", answered=False)

    assert why_excluded([step(), masked, failed]) is None
    assert why_excluded([step(), step(held_out=True)]) == "held_out"
    assert why_excluded([step(), step(adapter="v2")]) == "several_adapters"
    assert why_excluded([masked]) == "untrainable"
    assert why_excluded([failed]) == "no_answer"
    assert why_excluded([step(), step(task="u")]) == "several_tasks"
    assert why_excluded([step(), step(origin="rehearsal")]) == "several_origins"
    assert why_excluded([step()] * 513) == "too_long"
    callers = [step(caller=("p", "k", f"u{one}")) for one in range(8)]
    assert why_excluded(callers[1:]) is None
    assert why_excluded(callers) == "too_many_callers"
    assert why_excluded([step(parent=None)] * 256) == "too_many_openings"


def ready(*callers: str, apart_s: float = 1.0) -> list[Ready]:
    return [
        Ready(session_id=f"s{number:03}", caller=caller, began_at=number * apart_s)
        for number, caller in enumerate(callers)
    ]


def test_no_group_has_two_sessions_of_one_user_unless_he_alone_has_the_named_task() -> None:
    crowd = ready("user:a", "user:a", "user:b", "user:a", "user:c")

    assert [one.caller for one in draw(crowd, kind="header", size=3)] == [
        "user:a",
        "user:b",
        "user:c",
    ]
    assert draw(crowd, kind="header", size=4) == ()
    assert draw(ready(*["user:a"] * 4), kind="prompt", size=4) == ()
    assert len(draw(ready(*["user:a"] * 4), kind="header", size=4, known={"user:a"})) == 4
    assert draw(ready(*["user:a"] * 4), kind="header", size=4, known={"user:b"}) == ()
    assert len(draw(crowd, kind="rehearsal", size=5)) == 5


def test_sessions_of_applications_are_spread_as_evenly_as_the_others_allow() -> None:
    crowd = ready("key:a", "key:a", "key:a", "key:b", "key:a", "key:b")

    assert [one.session_id for one in draw(crowd, kind="template", size=4)] == [
        "s000",
        "s001",
        "s003",
        "s005",
    ]
    assert len(draw(ready("", "", "", ""), kind="prompt", size=4)) == 4


def test_a_group_began_within_a_day() -> None:
    apart = ready("user:a", "user:b", "user:c", apart_s=WINDOW_S / 2)

    assert draw(apart, kind="header", size=3) == ()
    assert [one.caller for one in draw(apart, kind="header", size=2)] == ["user:a", "user:b"]
    assert draw(ready("user:a", "user:b", apart_s=WINDOW_S), kind="header", size=2) == ()


@given(
    st.lists(
        st.tuples(st.sampled_from(["user:a", "user:b", "user:c", "key:k", ""]), st.floats(0, 2e5)),
        max_size=12,
    ),
    st.integers(2, 5),
    st.sampled_from(["header", "prompt", "template", "rehearsal"]),
)
def test_a_draw_is_full_or_empty(crowd: list[tuple[str, float]], size: int, kind: str) -> None:
    sessions = [
        Ready(session_id=str(number), caller=caller, began_at=at)
        for number, (caller, at) in enumerate(crowd)
    ]

    found = draw(sessions, kind=kind, size=size)  # type: ignore[arg-type]

    assert found == draw(sessions[::-1], kind=kind, size=size)  # type: ignore[arg-type]
    assert len(found) in (0, size)
    assert len(set(found)) == len(found)
    if found:
        began = [one.began_at for one in found]
        assert max(began) - min(began) < WINDOW_S
    users = [one.caller for one in found if one.caller.startswith("user:")]
    if kind in ("prompt", "template"):
        assert len(set(users)) == len(users)


# The reward of a session by its outcomes.


def told(voice: str = "shop", at: float = 1.0, **changes: object) -> Outcome:
    return Outcome(voice=voice, received_at=at, **changes)  # type: ignore[arg-type]


def test_a_session_that_nobody_told_of_has_no_reward() -> None:
    assert reward_of([], Scale()) is None
    assert reward_of([told(done=True)], Scale()) is None


def test_of_one_voice_the_newest_counts_and_voices_are_averaged() -> None:
    flood = [told("liar", at=float(n), success=True) for n in range(1, 100)]
    corrected = [told(at=1.0, success=True), told(at=2.0, success=False)]

    assert reward_of(corrected, Scale()) == 0.0
    assert reward_of([*corrected, *flood], Scale()) == 0.5
    assert reward_of([*corrected, told(at=3.0, done=True)], Scale()) == 0.0


def test_a_value_says_more_than_success_and_is_clipped() -> None:
    assert reward_of([told(value=0.25, success=True)], Scale()) == 0.25
    assert reward_of([told(value=7.0)], Scale()) == 1.0
    assert reward_of([told(value=-7.0)], Scale()) == 0.0


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([], Scale()),
        ([0.5, 0.52, 0.54], Scale()),
        ([float(n) for n in range(101)], Scale(low=5.0, high=95.0)),
        ([*(float(n) for n in range(100)), 1e9], Scale(low=5.0, high=95.0)),
        ([3.0, 3.0], Scale(low=3.0, high=3.0)),
    ],
)
def test_the_scale_is_by_quantiles_of_no_rewards(values: list[float], scale: Scale) -> None:
    assert scale_of(values) == scale


def test_values_that_are_all_the_same_tell_nothing() -> None:
    assert scale_of([3.0, 3.0]).reward(3.0) == 0.5
    assert scale_of([float(n) for n in range(101)]).reward(50.0) == 0.5
