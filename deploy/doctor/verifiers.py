"""Say which verifiers fail: as they were tried just now, else as score last saw them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.doctor.facts import Diagnosis, Facts
from deploy.preflight.verifiers import CAUSE
from sidecar.plurals import counted


def failing_verifiers(facts: Facts) -> Iterator[Diagnosis]:
    """Yield one diagnosis for all verifiers that fail. Groups go on without those that none waits
    for, by rewards of another meaning."""
    named = facts.settings.reward.verifiers
    store = facts.store
    tried = [one for one in facts.findings if one.cause == CAUSE]
    seen = {one.name: one for one in store.verifiers} if store is not None else {}
    waiting = store.waiting_for_verifiers if store is not None else {}
    if facts.verifiers_tried:
        texts = [f"{one.setting}: {one.text.rpartition('; ')[0]}" for one in tried]
    else:
        texts = [
            f"reward.verifiers.{name}: {seen[name].error}"
            for name in named
            if name in seen and seen[name].fails
        ]
    if not texts:
        return
    held = sum(waiting.get(name, 0) for name in named)
    waits = f" ({counted(held, 'group waits', 'groups wait')} for a verifier)" if held else ""
    yield Diagnosis(
        stage="judging",
        cause="verifier_fails",
        text="; ".join(texts) + waits,
        to_do="start the service or install the package, or take the verifier out of [reward]; "
        "`sidecar config check --online` tries each once",
    )
