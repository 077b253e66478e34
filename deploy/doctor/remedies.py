"""Which stage a fault stops, and what to do about it: tables that the rules look up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from deploy.funnel.stages import Name
from ingest.judge_watch.advice import advice

OF_CHECKS: Final[Mapping[str, tuple[Name, str]]] = {
    "vllm_away": ("requests", "vllm_away"),
    "vllm_key": ("requests", "vllm_key"),
    "vllm_model": ("requests", "vllm_model"),
    "kafka_away": ("bus", "kafka_away"),
    "no_token_ids": ("selection", "no_token_ids"),
    "fields_refused": ("selection", "fields_refused"),
    "no_load": ("sampling", "vllm_load_unknown"),
    "sampling_away": ("sampling", "sampling_vllm_away"),
    "no_judge": ("sampling", "no_judge"),
    "judge_key": ("judging", "judge_key"),
    "judge": ("judging", "judge_away"),
    "gate_judge_key": ("serving", "gate_judge_key"),
    "gate_judge": ("serving", "gate_judge_away"),
    "no_lora": ("serving", "no_lora"),
}
"""Cause of a preflight's finding -> the stage that it stops, and its name there."""
OF_SETTINGS: Final[Mapping[str, tuple[Name, str]]] = {
    "serving.base_model_path": ("learning", "base_model"),
    "serving": ("requests", "vllm"),
    "bus": ("bus", "bus_away"),
    "kafka": ("bus", "kafka_topics"),
    "store": ("bus", "store_away"),
    "judge": ("judging", "judge_away"),
    "gate_judge": ("serving", "gate_judge_away"),
    "learner": ("learning", "learner_not_ready"),
}
"""Setting, or section, of a finding without such a cause."""
REFUSED: Final[Mapping[str, str]] = {
    "refused_unknown_model": "have agents name `serving.model` as their `model`",
}
"""Why no request was captured -> what to do, where it is no loss and no setting of [capture]."""
SELECTIONS: Final[Mapping[str, str]] = {
    "untrainable:ids_missing": "use vLLM 0.32, which obeys return_token_ids, and no gateway before "
    "it that drops the field",
    "untrainable:no_prompt_token_ids": "use vLLM 0.32, which obeys return_token_ids",
    "untrainable:logprobs_missing": "start vLLM with --max-logprobs of at least 1",
    "untrainable:fields_refused": "use a vLLM that gives both (vLLM 0.32 does); `curl` it with "
    "`logprobs` and `return_token_ids` to see what it says",
    "untrainable:text_only": "have agents ask /v1/chat/completions: other surfaces give no ids",
    "untrainable:masking_unknown": "state serving.grammar; `engine_not_known` in ingest's log "
    "says why it is not found out",
    "untrainable:masked_by_server": "start vLLM without --tool-strict-level, or with another "
    "tool parser",
    "surface": "have agents ask /v1/chat/completions, the one surface that is learned from",
    "outcome": "vLLM fails or agents leave before the end: look at sidecar_exchanges_total of the "
    "proxy and at vLLM's log",
    "stale_adapter": "nothing, after a promotion; else look at what serves: `sidecar status`",
}
"""Selection -> what to do when most exchanges end with it."""
MASKS: Final[Mapping[str, str]] = {
    "temperature_zero": "have agents ask at a temperature above 0 (1 is best); greedy answers are "
    "all alike and teach nothing",
    "temperature_raised": "have agents ask at a temperature of at least 0.01",
    "temperature_differs": "start vLLM with --logprobs-mode processed_logprobs",
    "defaults_unknown": "state serving.sampling_defaults, or name serving.base_model_path",
}
"""Mask of served answers -> what to do when nearly all have it."""
ENDS: Final[Mapping[str, tuple[Name, str, str]]] = {
    "adapter_gone": ("sampling", "adapter_gone", "see why vLLM lost it: `sidecar status`"),
    "prompt_mismatch": (
        "sampling",
        "prompt_mismatch",
        "vLLM renders prompts differently than it did: restart it with the chat template of before",
    ),
    "private": (
        "sampling",
        "private",
        "the candidates hold what privacy.flag names: leave out the kind that is no secret here, "
        "or learn from other prompts",
    ),
    "request_refused": (
        "sampling",
        "request_refused",
        "vLLM refuses (400) to sample again what it has answered: `candidate_dropped` in score's "
        "log has its words; its options, or the chat template, may have changed",
    ),
    "sampling_failed": (
        "sampling",
        "sampling_failed",
        "`candidate_dropped` in score's log says why candidates fail",
    ),
    "identical_answers": (
        "judging",
        "tied",
        "all answers to a prompt are the same: raise the agents' temperature, or give harder tasks",
    ),
    "judge_rejected": ("judging", "judge_key", advice("judge_rejected")),
    "judge_no_credit": ("judging", "judge_no_credit", advice("judge_no_credit")),
    "judge_rubbish": ("judging", "judge_rubbish", advice("judge_rubbish")),
    "judge_refused": ("judging", "judge_refused", "a judge without a content filter"),
    "judge_too_long": (
        "judging",
        "judge_too_long",
        "a judge with a longer context, or judge.context_tokens if the set one is too small",
    ),
    "judge_garbled": ("judging", "judge_garbled", advice("judge_garbled")),
    "judge_unavailable": ("judging", "judge_away", advice("judge_unavailable")),
    "judge_busy": ("judging", "judge_busy", advice("judge_busy")),
    "no_spread": (
        "learning",
        "tied",
        "the judge sees no difference: make judge.rubric say what is better, raise the agents' "
        "temperature, or lower learner.min_spread",
    ),
    "within_noise": (
        "learning",
        "within_noise",
        "the scores differ by no more than the judge's noise (`sidecar judge noise`): more "
        "judge.passes, a steadier judge, or a rubric that tells answers further apart",
    ),
    "stale": ("learning", "stale", "raise learner.max_age_versions, or run less often"),
    "too_few_trainable": (
        "learning",
        "too_few_trainable",
        "most answers are masked: `answer_masked_...` in the counters of stage learn",
    ),
    "too_long": ("learning", "too_long", "raise learner.pack_tokens"),
    "drift": ("learning", "drift", "see `DriftError` among the symptoms in docs/runbook.md"),
    "drift_unchecked": ("learning", "drift", "keep the folders of the last versions"),
    "failed_runs": ("learning", "failed_runs", "see why runs fail: `sidecar status`"),
    "out_of_memory": ("learning", "out_of_memory", "lower learner.pack_tokens"),
}
"""Reason of a group's end -> stage, cause, what to do when most groups end so."""
