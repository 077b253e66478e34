"""Keys of older settings files that are no settings any more, and what took the place of each.

A file or an environment that still has one is no error: the value is left out, or put where the key
has moved, and one line on stderr says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)
"""Settings are read before a process sets up its log: Python then writes the line to stderr."""

ADVANCED = ("kl_coef",)
"""Keys of `[learner]` that are in `[learner.advanced]` now."""
RUBRIC_FILE = "rubric_file"
"""A key of rubrics, which name their file themselves now."""

REMOVED: Mapping[str, str] = {
    "adapters.keep_champions": "KEEP_CHAMPIONS in deploy.adapters.prune is 10",
    "approval.max_wait_s": "APPROVAL_MAX_WAIT_S in deploy.outside.approval is 86400.0",
    "approval.every_s": "APPROVAL_EVERY_S in deploy.outside.approval is 30.0",
    "approval.timeout_s": "CALL_TIMEOUT_S in deploy.outside.http is 5.0",
    "best_of.concurrency": "CONCURRENCY in sidecar.scoring is 8",
    "best_of.max_n": "BEST_OF_MAX in sidecar.access.admission is 4",
    "best_of.max_waiting": "MAX_WAITING in sidecar.scoring is 32",
    "bus.batch": "BATCH in ingest.intake.loop is 200",
    "bus.max_rows": "the outbox keeps a record for each 20 kB of bus.max_bytes",
    "bus.poll_interval_s": "POLL_INTERVAL_S in ingest.intake.loop is 0.2",
    "canary.anchor_margin": "canary.margin holds for the anchor too",
    "canary.evidence_max_s": "EVIDENCE_MAX_S in deploy.registry.canary_rule is 604800.0",
    "canary.gate_margin": "canary.margin holds for quick too",
    "canary.gate_timeout_s": "GATE_TIMEOUT_S in deploy.registry.canary_rule is 3600.0",
    "canary.guard_level": "GUARD_LEVEL in deploy.registry.proof_rule is 0.01",
    "canary.guard_ratio": "GUARD_RATIO in deploy.registry.proof_rule is 1.5",
    "canary.harm_level": "HARM_LEVEL in deploy.registry.proof_rule is 0.05",
    "canary.max_base_kl": "MAX_BASE_KL in deploy.canary.loading is 8.0",
    "canary.max_evasive_excess": "MAX_EVASIVE_EXCESS in deploy.registry.proof_rule is 0.05",
    "canary.max_invalid_excess": "MAX_INVALID_EXCESS in deploy.registry.proof_rule is 0.02",
    "canary.max_long_excess": "MAX_LONG_EXCESS in deploy.registry.proof_rule is 0.5",
    "canary.max_missing": "MAX_MISSING in deploy.registry.proof_rule is 0.5",
    "canary.max_narrow_excess": "MAX_NARROW_EXCESS in deploy.registry.proof_rule is 0.25",
    "canary.max_truncated_excess": "MAX_TRUNCATED_EXCESS in deploy.registry.proof_rule is 0.05",
    "canary.poll_s": "POLL_S in deploy.line_loops is 0.5",
    "canary.promote_level": "PROMOTE_LEVEL in deploy.registry.proof_rule is 0.05",
    "canary.split_level": "SPLIT_LEVEL in deploy.registry.proof_rule is 0.001",
    "canary.watch_s": "WATCH_S in deploy.outside.checking is 3600.0",
    "capture.flush_interval_s": "LIMITS.flush_interval_s in sidecar.capture.recorder is 0.1",
    "capture.max_pending": "LIMITS.max_pending in sidecar.capture.recorder is 8000",
    "capture.max_pending_bytes": "LIMITS.max_pending_bytes in sidecar.capture.recorder is 67108864",
    "capture.max_reply_bytes": "LIMITS.max_reply_bytes in sidecar.capture.recorder is 8388608",
    "feedback.abandoned_after_s": "ABANDONED_AFTER_S in ingest.feedback.store is 1800.0",
    "gate_judge.context_tokens": "num_ctx in gate_judge.params, or what LiteLLM knows, holds",
    "gate_judge.json_schema": "the schema is sent unless that judge takes none",
    "gate_judge.passes": "judge.passes holds",
    "gate_judge.projects": "gate_judge.rubric holds for all projects",
    "gate_judge.timeout_s": "judge.timeout_s holds",
    "groups.join_served": "answers of one session are joined",
    "groups.max_groups_per_project": "each project has a fair share of the places",
    "groups.max_kv_cache_usage": "MAX_KV_CACHE_USAGE in ingest.vllm.watch is 0.8",
    "groups.max_pending_groups": "learner.max_groups is as many as may wait",
    "groups.max_running_requests": "MAX_RUNNING_REQUESTS in ingest.vllm.watch is 48",
    "groups.max_share_of_served": "groups.tokens_per_day and groups.rate limit sampling",
    "groups.priority": "vLLM is sent a low priority where it takes one",
    "groups.prompt_tokens_per_day": "groups.tokens_per_day limits sampling",
    "groups.prompt_tokens_per_hour": "groups.tokens_per_day limits sampling",
    "groups.session_window_s": "SESSION_WINDOW_S in ingest.grouping.selection is 86400.0",
    "groups.structured_output": "answers under a grammar are learned from where it changed nothing",
    "groups.timeout_s": "CANDIDATE_S in ingest.vllm.sampler is 120.0",
    "groups.tokens_per_hour": "groups.tokens_per_day limits them",
    "groups.uniform_share": "UNIFORM_SHARE in ingest.grouping.selection is 0.1",
    "judge.budget_per_hour": "judge.budget limits a day",
    "judge.cache_bytes": "CACHE_BYTES in ingest.judges.replies is 67108864",
    "judge.cache_days": "CACHE_DAYS in ingest.judges.replies is 7.0",
    "judge.fallbacks.json_schema": "the schema is sent unless that judge takes none",
    "judge.fallbacks.tokens_per_minute": "the pace is learned from that judge's refusals",
    "judge.json_schema": "the schema is sent unless the judge takes none",
    "judge.rescore_after_s": "noise is measured on the passes of every group, drift once a day",
    "judge.rescore_share": "noise is measured on the passes of every group, drift once a day",
    "judge.show_reasoning": "the judge sees no reasoning, as in the published RULER",
    "judge.tokens_per_minute": "the pace is learned from the judge's refusals",
    "kafka.group": "it is the topic's name with .ingest",
    "kafka.max_message_bytes": "MAX_MESSAGE_BYTES in sidecar.forwarding.sender is 8388608",
    "learner.backend": "learner.tinker_url names a server where there is one",
    "learner.checkpointing": "CHECKPOINTING in learner.grpo.trainer is auto",
    "learner.doubtful_logprobs": "such an answer is left out",
    "learner.idle_window_s": "IDLE_WINDOW_S in learner.schedule.rule is 300.0",
    "learner.kl_limit": "KL_LIMIT in learner.grpo.base_kl is 10.0",
    "learner.loss_length": "LOSS_LENGTH in learner.grpo.losses is 256",
    "learner.mask_tolerance": "MASK_TOLERANCE in learner.grpo.answers is 0.2",
    "learner.max_grad_norm": "MAX_GRAD_NORM in learner.grpo.optimizer is 1.0",
    "learner.min_spread": "MIN_SPREAD in learner.grpo.advantages is 0.02",
    "learner.missing_logprobs": "the trainer computes them",
    "learner.poll_s": "POLL_S in learner.schedule.loop is 2.0",
    "learner.processes_timeout_s": "TIMEOUT_S in learner.ranks is 1800.0",
    "learner.reference_spread": "REFERENCE_SPREAD in learner.grpo.advantages is 0.25",
    "learner.advanced.warmup_steps": "the rate is whole from the first step",
    "learner.seed": "SEED in learner.policy.adapter_io is 0",
    "learner.warmup": "no run takes supervised steps",
    "learner.warmup_steps": "the rate is whole from the first step",
    "learner.steps": "a run takes as many as learner.groups_per_step makes of its groups",
    "kafka.compression": "COMPRESSION in sidecar.forwarding.sender is zstd",
    "kafka.ssl_check_hostname": "the broker's certificate must name its host",
    "notify.max_age_s": "MAX_AGE_S in deploy.outside.telling is 86400.0",
    "notify.retries": "RETRIES in deploy.outside.telling is 12",
    "notify.timeout_s": "CALL_TIMEOUT_S in deploy.outside.http is 5.0",
    "privacy.max_bytes": "SEARCHED_BYTES in ingest.privacy.texts is 16777216",
    "proxy.body_timeout_s": "BODY_TIMEOUT_S in sidecar.relay.client is 30.0",
    "proxy.connect_timeout_s": "CONNECT_TIMEOUT_S in sidecar.proxy is 5.0",
    "proxy.head_timeout_s": "HEAD_TIMEOUT_S in sidecar.relay.client is 10.0",
    "proxy.health_interval_s": "HEALTH_INTERVAL_S in sidecar.proxy is 2.0",
    "proxy.idle_timeout_s": "IDLE_TIMEOUT_S in sidecar.relay.client is 75.0",
    "proxy.max_connections": "MAX_CONNECTIONS in sidecar.relay.server is 4096",
    "proxy.max_held_body_bytes": "a worker holds eight bodies of proxy.max_body_bytes",
    "proxy.max_in_flight": "MAX_IN_FLIGHT in sidecar.relay.context is 2048",
    "proxy.routing_poll_s": "ROUTING_POLL_S in sidecar.proxy is 0.2",
    "proxy.slow_first_byte_s": "SLOW_FIRST_BYTE_S in sidecar.proxy is 10.0",
    "proxy.write_timeout_s": "WRITE_TIMEOUT_S in sidecar.relay.client is 60.0",
    "rehearsals.timeout_s": "ATTEMPT_S in ingest.tasks.attempts is 600.0",
    "retention.dead_letters_days": "DEAD_LETTERS_DAYS in sidecar.forwarding.sender is 30.0",
    "retention.feedback_days": "retention.exchanges_days holds",
    "retention.judge_calls_days": "retention.groups_days holds",
    "retention.runs_days": "RUNS_DAYS in ingest.retention.sweep is 365.0",
    "reward.cache_findings": "CACHE_FINDINGS in ingest.verifiers.rewarding is 10000",
    "reward.combine": "a verifier with gate = true ranks what fails it below the rest",
    "reward.judge_weight": "it is 1; weights of verifiers are beside it",
    "reward.memory_bytes": "MEMORY_BYTES in ingest.verifiers.rewarding is 1073741824",
    "reward.processes": "each verifier has one at most",
    "tasks.idle_s": "IDLE_S in ingest.tasks.keys is 3600.0",
    "telemetry.semantic_conventions": "the newest names are used",
    "telemetry.trace_sample_rate": "every trace that begins at the proxy is sampled",
    **{
        f"learner.{table}{name}": "no token or answer is weighed or left out for its age"
        for table in ("", "advanced.")
        for name in ("geometric_limit", "stale_limit", "tis_cap")
    },
    **{
        f"learner.{table}kl_budget": "KL_BUDGET in learner.grpo.trainer is 0.2"
        for table in ("", "advanced.")
    },
    **{
        f"learner.{table}{name}": f"LossRule in learner/grpo/losses.py has {value}"
        for table in ("", "advanced.")
        for name, value in {
            "clip_high": 0.28, "clip_low": 0.2, "negative_bound": 3.0, "tv_limit": 0.2,
        }.items()
    },
    **{
        f"watch.{name}": f"LIMITS.{name} in ingest.reward_watch.rules is {value}"
        for name, value in {
            "false_holds": 0.01, "judge_gain": 0.05, "max_length_correlation": 0.3,
            "max_length_growth": 1.25, "max_rise": 0.02, "min_answers": 200, "min_groups": 30,
            "users_gain": 0.02, "versions": 3, "window": 2000,
        }.items()
    },
}  # fmt: skip
"""Key -> the constant that took its place, or what holds now."""


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:  # Any: of TOML
    """Return the values of a file or an environment by section, without keys that are removed."""
    found = dict(values)
    for name, section in values.items():
        if isinstance(section, Mapping) and (kept := of_section(name, section)) != section:
            found[name] = kept
            if not kept:
                del found[name]
    return found


def of_section(name: str, section: Mapping[str, Any]) -> dict[str, Any]:  # Any: of TOML
    """Return a section without its removed keys, and with those that moved in their new place."""
    kept: dict[str, Any] = {}
    moved: dict[str, Any] = {}
    moved_rubric: dict[str, Any] = {}
    for key, value in section.items():
        if name == "learner" and key in ADVANCED:
            moved[key] = value
            log.warning("learner.%s is now learner.advanced.%s", key, key)
        elif key == RUBRIC_FILE and name.partition(".")[0] in ("judge", "gate_judge"):
            if value and not section.get("rubric"):
                log.warning('%s.%s was read as %s.rubric = "file:%s"', name, key, name, value)
                moved_rubric = {"rubric": f"file:{value}"}
            elif value:
                log.warning("%s.%s was left out: %s.rubric is set too, and holds", name, key, name)
        elif f"{name}.{key}" in REMOVED:
            log.warning("%s.%s is no longer a setting: %s", name, key, REMOVED[f"{name}.{key}"])
        else:
            within = isinstance(value, Mapping)
            kept[key] = of_section(f"{name}.{key}", value) if within else value
            if isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
                kept[key] = [of_section(f"{name}.{key}", one) for one in value]
    kept |= moved_rubric
    if moved:
        kept["advanced"] = moved | dict(kept.get("advanced", {}))
    return kept


def is_removed(section: str, key: str) -> bool:
    """Tell whether a key was a setting, and is none, or has another place."""
    if key == RUBRIC_FILE:
        return section in ("judge", "gate_judge")
    return f"{section}.{key}" in REMOVED or (section == "learner" and key in ADVANCED)
