"""Inputs of selection besides the exchange: settings, facts about vLLM, live adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.grouping.engine_facts import FLAG, UNKNOWN, load_facts, state
from ingest.grouping.selection import Rules
from sidecar.lines import line_name
from sidecar.records import BASE
from sidecar.routing.table import decode_table
from sidecar.settings import Settings
from sidecar.store.database import DAMAGE, get_flag
from sidecar.store.models import AliasRow, RoutingRow

log = structlog.get_logger()

TRAINABLE_FLAG = "learner_trainable_tokens"
"""Row of the `flag` table: the longest input that the learner's memory holds, written by it."""
UNTOLD_TOKENS = 2048
"""`learner.pack_tokens = "auto"` before the learner has told what it found."""


def rules_of(settings: Settings) -> Rules:
    """Build selection's rules from the settings."""
    return Rules(
        size=settings.groups.size,
        rate=settings.groups.rate,
        settle_s=settings.groups.settle_s,
        max_groups_per_session=settings.groups.max_groups_per_session,
        session_window_s=settings.groups.session_window_s,
        max_pending_groups=settings.most_pending_groups,
        logprobs_mode=settings.serving.logprobs_mode,
        sampling_defaults=settings.serving.sampling_defaults,
        facts=state(UNKNOWN, settings.serving),
        max_trained_tokens=settings.learner.pack_tokens or UNTOLD_TOKENS,
        learner_tells=not settings.learner.pack_tokens,
        structured_output=settings.groups.structured_output,
        join_served=settings.groups.join_served,
        choose=settings.groups.choose,
        uniform_share=settings.groups.uniform_share,
        max_groups_per_project=settings.groups.max_groups_per_project,
        max_groups_per_near_prompt=settings.groups.max_groups_per_near_prompt,
        own_adapters=settings.serving.own_adapters,
        verified=bool(settings.reward.verifiers),
    )


def rules_now(session: Session, rules: Rules) -> Rules:
    """Add the latest facts about vLLM and the learner to the rules, where there are any."""
    found = get_flag(session, FLAG)
    if found is not None:
        rules = replace(rules, facts=load_facts(found))
    told = get_flag(session, TRAINABLE_FLAG) if rules.learner_tells else None
    return replace(rules, max_trained_tokens=int(told)) if told and told.isdecimal() else rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The adapters that serve now, in each line of adapters."""

    shared: frozenset[str]
    """Adapters that serve on the default line."""
    own: Mapping[str, frozenset[str]]
    """Project -> those of its own line, where it has one."""

    def of(self, project: str) -> frozenset[str]:
        """Return the adapters that answer a project's requests."""
        return self.own.get(project, self.shared)

    @property
    def all(self) -> frozenset[str]:
        return self.shared.union(*self.own.values())


def live_now(session: Session, model: str, rules: Rules) -> Live:
    """Return the adapters that serve now, in every line of a model."""
    return Live(
        shared=live_adapters(session, model),
        own={
            project: live_adapters(session, line_name(model, project))
            for project in rules.own_adapters
        },
    )


def live_adapters(session: Session, model: str) -> frozenset[str]:
    """Return the adapters that the routing table serves now; the base until there is a table.

    model: name of the line.

    A damaged table is not read: until control writes it anew, the champion alone counts.
    """
    row = session.get(RoutingRow, model)
    if row is None:
        return frozenset({BASE})
    try:
        table = decode_table(row.body)
    except DAMAGE as error:
        log.error("routing_table_damaged", model=model, why=f"{type(error).__name__}: {error}")
        alias = session.get(AliasRow, (model, "champion"))
        return frozenset({alias.adapter if alias is not None else BASE})
    return frozenset({table.champion, table.canary or table.champion})


def kept_adapters(session: Session, model: str) -> frozenset[str]:
    """Return the adapters that control keeps loaded in vLLM: those that serve, and the champion's
    and its predecessor's. model: name of the line."""
    aliases = session.scalars(select(AliasRow.adapter).where(AliasRow.model == model))
    return live_adapters(session, model) | frozenset(aliases)
