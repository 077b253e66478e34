"""The acceptance scenarios, in the order in which they were listed, and the tests of each.

Where they come from: 1-4 Argo Rollouts, 5-7 Flagger, 8 KServe, 12 Kayenta, 13 TensorZero.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HERE = "tests/deploy/scenarios"
LIFE, JUDGED, SERVING = (
    f"{HERE}/test_lifecycle.py",
    f"{HERE}/test_judged.py",
    f"{HERE}/test_serving.py",
)
CRASHES = "tests/deploy/crashes"
BENCH = "benchmarks/canary/run.py"
"""`make bench BENCH=canary`: too long for the suite."""

TABLE: Mapping[str, tuple[str, ...]] = {
    "1 abort, retry, promote": (f"{LIFE}::test_abort_retry_promote",),
    "2 promote-full from a pause, in mid-analysis, after an abort": (
        f"{LIFE}::test_promote_full_from_a_pause",
        f"{LIFE}::test_promote_full_in_mid_analysis_is_refused_at_the_gate",
        f"{LIFE}::test_promote_full_in_mid_ramp_makes_no_further_comparison",
        f"{LIFE}::test_promote_full_after_an_abort_is_refused",
    ),
    "3 inconclusive says why, and is gone past once": (
        f"{LIFE}::test_an_inconclusive_one_says_why_and_is_tried_past_it_once",
        f"{LIFE}::test_a_resume_goes_past_a_pause_once",
    ),
    "4 a rollback inside the window runs no analysis": (
        f"{LIFE}::test_a_rollback_inside_the_window_runs_no_analysis",
        f"{LIFE}::test_outside_the_window_only_a_canary_leads_there",
    ),
    "5 Flagger's scheduler": (
        f"{LIFE}::test_the_first_start_begins_nothing",
        f"{LIFE}::test_a_new_revision_waits_and_the_newest_of_them_is_next",
        f"{LIFE}::test_the_analysis_of_the_ramp_can_be_skipped_by_hand",
        f"{LIFE}::test_a_promotion_survives_a_vllm_that_dies_after_the_shift",
        f"{LIFE}::test_a_rollback_is_honoured_in_every_waiting_state",
        f"{LIFE}::test_the_guards_act_while_others_wait",
        "tests/deploy/canary/test_controller.py::test_a_good_candidate_goes_all_the_way",
    ),
    "6 the champion's bytes, a rejected digest": (
        f"{LIFE}::test_the_bytes_of_the_champion_start_no_canary",
        f"{LIFE}::test_a_rejected_digest_is_refused",
    ),
    "7 affinity in both directions": (
        f"{LIFE}::test_two_clients_keep_their_arms_while_the_weight_grows_and_go_back_together",
        "tests/sidecar/routing/test_routing_live.py"
        "::test_the_bucket_and_the_weight_say_who_answers_and_no_raise_moves_a_session_out",
    ),
    "8 a life under traffic, without an error for a client": (
        "tests/sidecar/routing/test_routing_live.py"
        "::test_a_life_from_nine_to_one_to_all_and_back_under_traffic_without_an_error",
        "tests/end_to_end/test_loop.py::test_every_request_was_served_and_nothing_leaked",
        "tests/end_to_end/test_loop.py::test_rollback_is_obeyed_and_fails_no_request",
        "benchmarks/rollback/run.py::main",
        "benchmarks/sabotage/run.py::main",
    ),
    "9 A/A": (f"{BENCH}::equal",),
    "10 power": (f"{BENCH}::power", f"{BENCH}::stopped"),
    "11 ratchet": (f"{BENCH}::slides",),
    "12 Kayenta's suite": (
        f"{JUDGED}::test_identical_data_is_neither_worse_nor_better",
        f"{JUDGED}::test_tied_groups_are_counted_and_not_dropped",
        f"{JUDGED}::test_scores_of_zero_are_scores",
        f"{JUDGED}::test_half_of_the_groups_missing",
        f"{JUDGED}::test_a_champion_without_errors_is_a_baseline",
        f"{JUDGED}::test_no_data_promotes_nobody_and_rolls_nobody_back",
        f"{JUDGED}::test_the_sign_decides",
    ),
    "13 TensorZero's set, and the latch": (
        f"{JUDGED}::test_few_samples_decide_nothing_however_good_they_are",
        f"{JUDGED}::test_a_smaller_chance_of_error_takes_more_groups",
        f"{JUDGED}::test_a_smaller_margin_takes_more_groups",
        f"{JUDGED}::test_who_has_won_or_lost_takes_part_no_more",
        f"{JUDGED}::test_a_control_that_starts_after_the_end_decides_nothing_again",
        f"{JUDGED}::test_a_late_score_flips_no_verdict",
        f"{JUDGED}::test_a_group_that_ends_after_the_verdict_is_of_no_consequence",
    ),
    "14 SIGKILL at every transition": (
        f"{CRASHES}/test_crashes.py::test_it_ends_as_if_it_had_never_been_killed",
        f"{CRASHES}/test_crashes.py::test_the_same_on_each_store",
        f"{CRASHES}/test_commands.py"
        "::test_a_rollback_without_control_is_done_or_not_and_may_be_repeated",
        f"{CRASHES}/test_commands.py::test_an_import_is_one_version_or_none_and_may_be_repeated",
    ),
    "15 vLLM restarts in mid-canary": (
        "tests/deploy/engine/test_reconcile.py::test_adapters_come_back_after_vllm_restarted",
        "tests/deploy/canary/test_ramp_counts.py"
        "::test_a_step_does_not_end_while_vllm_has_lost_the_canary",
        "tests/sidecar/routing/test_routing.py"
        "::test_a_missing_canary_is_answered_for_by_the_champion_then_the_base",
        f"{SERVING}::test_sixteen_replicas_that_come_and_go_end_with_what_is_decided",
    ),
    "16 a load that fails on one of two replicas": (
        f"{SERVING}::test_a_load_that_fails_on_one_of_two_replicas_moves_no_alias",
    ),
    "17 one name, one content": (
        "tests/deploy/engine/test_reconcile.py"
        "::test_an_adapter_altered_on_disk_is_not_loaded_after_a_restart_of_vllm",
        "tests/deploy/engine/test_reconcile.py"
        "::test_a_folder_swapped_while_vllm_reads_it_does_not_stay_loaded",
    ),
    "18 the judge is down, or fails on one arm": (
        "tests/deploy/canary/test_shadow.py"
        "::test_a_judge_that_is_away_holds_the_promotion_and_its_clock",
        "tests/deploy/canary/test_shadow.py"
        "::test_a_candidate_that_the_judge_always_refuses_is_rejected",
        f"{JUDGED}::test_half_of_the_groups_missing",
    ),
    "19 the API, and fifty writers": (
        f"{SERVING}::test_fifty_racing_writers_and_one_rollback_wins_at_once",
        f"{SERVING}::test_of_fifty_racing_promotions_one_wins_and_the_others_are_told",
        "tests/deploy/admin/test_api.py::test_paging_shows_every_row_once_though_rows_are_added",
        "tests/deploy/admin/test_scopes.py::test_the_server_holds_a_token_to_its_scopes",
        "tests/end_to_end/test_loop.py"
        "::test_adapter_endpoints_of_vllm_cannot_be_reached_through_the_proxy",
    ),
    "20 who held an alias when": (
        "tests/deploy/registry/test_alias_history.py::test_who_was_champion_at_any_time",
        "tests/deploy/registry/test_alias_history.py::test_an_edit_of_the_past_is_seen",
    ),
    "21 traffic that is not split by the weight": (
        f"{JUDGED}::test_traffic_that_is_not_split_by_the_weight_holds_the_canary_within_4000_sessions",
    ),
    "22 golden vectors": (
        "tests/deploy/evidence/test_betting.py::test_evidence_is_that_of_confseq",
        "tests/deploy/evidence/test_betting.py::test_the_confidence_sequence_is_that_of_confseq",
        "tests/benchmarks/test_canary.py::test_the_rival_s_interval_is_that_of_gbstats",
    ),
}


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, kinds))


@pytest.mark.parametrize("scenario", TABLE)
def test_each_scenario_has_its_tests(scenario: str) -> None:
    missing = [
        one for one in TABLE[scenario] if one.split("::")[1] not in functions(one.split("::")[0])
    ]

    assert missing == []


def test_all_of_them_are_here() -> None:
    assert [int(scenario.split()[0]) for scenario in TABLE] == list(range(1, 23))
