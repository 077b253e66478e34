"""Whose fault a failed call is, by hand-worked stories."""

from __future__ import annotations

from typing import Any

from ingest.ruler.blame import FAILED_IN_A_ROW, UNUSABLE_IN_A_ROW, WAITS, Blame, Failed
from ingest.ruler.group import SetAside


def failed(name: str, reason: str = "judge_rejected", **rest: Any) -> Failed:
    return Failed(group_id=name, reason=reason, detail="said", **rest)


def test_while_it_is_open_no_further_group_is_asked_and_the_probe_is_wanted_at_once() -> None:
    blame = Blame()
    assert blame.room(8, 0.0) == 8
    assert not blame.wants_probe(0.0)
    blame.failed(failed("a"), 0.0)
    assert blame.room(8, 0.0) == 0
    assert blame.wants_probe(0.0)


def test_another_group_that_is_scored_proves_own_faults_without_a_probe() -> None:
    blame = Blame()
    blame.failed(failed("a"), 0.0)
    cleared = blame.works(1.0)
    assert [one.group_id for one in cleared.own_faults] == ["a"]
    assert not blame.wants_probe(1.0)
    assert blame.room(8, 1.0) == 8
    assert blame.works(2.0).own_faults == ()


def test_a_probe_that_fails_proves_an_outage_and_blames_nobody() -> None:
    blame = Blame()
    blame.failed(failed("a"), 0.0)
    blame.down(0.0, longest_s=60.0)
    assert [one.group_id for one in blame.release()] == ["a"]
    assert [blame.room(8, now) for now in (0.5, 1.0)] == [0, 1]
    cleared = blame.works(3.0)
    assert cleared.own_faults == ()
    assert cleared.outage_s == 3.0


def test_a_limit_pauses_all_and_no_group_is_held() -> None:
    blame = Blame()
    assert blame.failed(failed("a", "judge_busy"), 0.0)
    assert not blame.failed(failed("b", "judge_busy", retry_after_s=20.0), 0.5), "it lasts already"
    assert [blame.room(8, now) for now in (20.4, 20.5)] == [0, 8]
    assert not blame.wants_probe(1_000.0)


def test_a_limit_counts_against_a_group_only_when_the_probe_is_scored_right_after_it() -> None:
    blame = Blame()
    blame.failed(failed("a", "judge_busy"), 0.0)
    assert blame.works(1.0).own_faults == ()
    assert not blame.failed(failed("a", "judge_busy", retry_after_s=60.0), 2.0), "no second pause"
    assert blame.wants_probe(2.0)
    assert [one.group_id for one in blame.works(2.0).own_faults] == ["a"]
    assert blame.room(8, 2.0) == 8


def test_failures_in_a_row_are_an_outage_though_the_judge_answers_a_sum() -> None:
    blame = Blame()
    for number in range(FAILED_IN_A_ROW - 1):
        blame.failed(failed(f"g{number}"), 0.0)
    assert not blame.answers(0.0, longest_s=60.0).all_fail
    assert blame.room(8, 0.0) == 8
    blame.failed(failed("last"), 0.0)
    assert blame.answers(0.0, longest_s=60.0).all_fail
    assert [blame.room(8, now) for now in (0.5, 1.0)] == [0, 1]
    cleared = blame.works(1.0)
    assert (cleared.own_faults, cleared.outage_s) == ((), 1.0)


def test_a_group_that_fails_twice_shows_that_no_other_is_left_to_try() -> None:
    blame = Blame()
    for name, all_fail in (("a", False), ("b", False), ("b", False), ("c", False), ("a", True)):
        blame.failed(failed(name), 0.0)
        assert blame.answers(0.0, longest_s=60.0).all_fail is all_fail


def test_a_judge_that_fails_over_what_it_scored_before_is_at_fault() -> None:
    blame = Blame()
    blame.failed(failed("a"), 0.0)
    assert blame.answers(0.0, longest_s=60.0, again_failed=True).all_fail


def test_a_time_that_the_judge_asks_for_is_kept_though_others_are_scored() -> None:
    blame = Blame()
    blame.failed(failed("a", "judge_busy", retry_after_s=20.0), 0.0)
    blame.works(1.0)
    assert [blame.room(8, now) for now in (19.0, 20.0)] == [0, 8]


def test_some_groups_in_a_row_are_refused_on_the_judges_word_and_then_the_probe_decides() -> None:
    blame = Blame()
    assert [blame.unusable() for _ in range(UNUSABLE_IN_A_ROW + 1)] == [True] * 3 + [False]
    blame.works(0.0)
    assert blame.unusable()


def test_an_unusable_reply_is_believed_and_not_final_and_a_refusal_is_final() -> None:
    blame = Blame()
    rubbish = blame.failure("a", SetAside(reason="judge_rubbish", detail="hm", asked=True))
    assert rubbish is not None
    assert (rubbish.believed, rubbish.final) == (True, False)
    refused = SetAside(reason="judge_refused", detail="no", asked=True)
    assert blame.failure("b", refused) is None
    for _ in range(UNUSABLE_IN_A_ROW):
        found = blame.failure("c", refused)
    assert found is not None
    assert (found.believed, found.final) == (False, True)


def test_a_groups_wait_doubles_up_to_an_hour() -> None:
    assert [WAITS.wait_s(attempts) for attempts in (1, 2, 10, 11)] == [5.0, 10.0, 2560.0, 3600.0]
