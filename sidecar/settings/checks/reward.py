"""Check the section of the reward. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sidecar.settings.checks.problem import DEFAULT_PROJECT, Problem, is_changed, unsendable
from sidecar.settings.reward import (
    EntryPointVerifier,
    HttpVerifier,
    JsonSchemaVerifier,
    LengthVerifier,
    RegexVerifier,
    Reward,
    VerifierSection,
    is_found_everywhere,
)

if TYPE_CHECKING:
    from sidecar.settings.sections import Settings


def reward(reward: Reward) -> Iterator[Problem]:
    """Yield what is wrong with the verifiers and how they join the judge."""
    gates = [name for name, one in reward.verifiers.items() if one.gate]
    if reward.combine == "gate_then_rank" and not gates:
        yield (
            ("reward", "combine"),
            'is "gate_then_rank" and no verifier is a gate; give one of them gate = true',
        )
    if reward.combine == "weights" and gates:
        yield (
            ("reward", "verifiers", gates[0], "gate"),
            'is true and reward.combine is "weights", so it would not be used; set reward.combine '
            '= "gate_then_rank"',
        )
    for name, one in reward.verifiers.items():
        where = ("reward", "verifiers", name)
        if is_changed(one, "pass_at") and not one.gate:
            yield (
                (*where, "pass_at"),
                f"is {one.pass_at:g} and gate is false, so it would not be used; set gate = true, "
                "or leave it out",
            )
        if isinstance(one, EntryPointVerifier):
            yield from unsendable((*where, "params"), one.params)
        if isinstance(one, JsonSchemaVerifier):
            yield from unsendable((*where, "json_schema"), one.json_schema)
        if isinstance(one, LengthVerifier):
            yield from _length(where, one)


def _length(where: tuple[str, ...], one: LengthVerifier) -> Iterator[Problem]:
    if one.fade and one.max_characters is None and one.max_tokens is None:
        yield (
            (*where, "fade"),
            f"is {one.fade:g} and there is no maximum to fade beyond (a minimum has no fade), so "
            "it would not be used; give max_tokens or max_characters, or leave it out",
        )


def useless_reward_settings(settings: Settings) -> Iterator[Problem]:
    """Yield settings of the reward that have no effect."""
    reward = settings.reward
    if not reward.verifiers:
        for name in ("judge_weight", "processes", "memory_bytes", "cache_findings"):
            if is_changed(reward, name):
                yield (
                    ("reward", name),
                    "is set and there are no verifiers, so the reward is the judge's score "
                    "whatever it says; add [reward.verifiers.NAME], or leave it out",
                )
        return
    if all(isinstance(one, HttpVerifier) for one in reward.verifiers.values()):
        for name in ("processes", "memory_bytes"):
            if is_changed(reward, name):
                yield (
                    ("reward", name),
                    'is set and every verifier is of kind "http", which needs no process; leave '
                    "it out",
                )
    for key, one in reward.verifiers.items():
        yield from _useless_verifier(settings, ("reward", "verifiers", key), one)


def _useless_verifier(
    settings: Settings, where: tuple[str, ...], one: VerifierSection
) -> Iterator[Problem]:
    if one.weight == 0 and not one.gate:
        yield (
            (*where, "weight"),
            "is 0 and gate is false, so what it finds is stored and counts for nothing; give a "
            "weight once you trust it",
        )
    if one.gate and is_changed(one, "weight"):
        yield (
            (*where, "weight"),
            "is set and gate is true: a gate is no part of the ranking, so the weight changes "
            "`independent_reward` alone and not the reward; leave it out",
        )
    if one.projects and settings.access.mode != "keys" and DEFAULT_PROJECT not in one.projects:
        yield (
            (*where, "projects"),
            f'is without "{DEFAULT_PROJECT}", and with access.mode = "{settings.access.mode}" all '
            f'traffic is of that project, so it would check nothing; add "{DEFAULT_PROJECT}", or '
            'set access.mode = "keys"',
        )
    if (
        isinstance(one, JsonSchemaVerifier)
        and one.json_schema is None
        and settings.groups.structured_output == "off"
    ):
        yield (
            where,
            'has no json_schema, and with groups.structured_output = "off" requests with a '
            "response_format of JSON become no groups, so it would check nothing; give a "
            'json_schema, or set groups.structured_output = "free_tokens"',
        )
    if isinstance(one, RegexVerifier) and is_found_everywhere(one.pattern):
        same = "right" if one.must == "match" else "wrong"
        yield (
            (*where, "pattern"),
            f"is found in every text, also the empty one, so every answer is {same}; give one that "
            "tells answers apart",
        )
