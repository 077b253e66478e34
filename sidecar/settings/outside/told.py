"""The settings of web hooks: whom control tells of transitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from sidecar.settings.kinds import Between, WebUrl, Word
from sidecar.settings.outside.asked import CallTimeout, EnvName, MetricName
from sidecar.settings.section import Section

MAX_HOOKS = 16


def _events(events: tuple[str, ...]) -> tuple[str, ...]:
    if not events or len(events) > 100 or not all(0 < len(one) <= 64 for one in events):
        raise ValueError('must be names of events such as "canary.*", 1 to 100 of them')
    return events


class Hook(Section):
    """One receiver of events."""

    url: WebUrl
    """Where each event is posted."""
    events: Annotated[tuple[str, ...], AfterValidator(_events)] = (
        "canary.*",
        "rollback",
        "alias.champion",
        "learner.*",
        "adapter.altered",
    )
    """Actions of the audit that are told; `*` stands for any text."""
    secret_env: EnvName = ""
    """Environment variable of control with the secret that signs: any text, or `whsec_` and
    base64."""
    secret_file: Word = ""
    """A file with the secret, instead of `secret_env`."""

    @model_validator(mode="after")
    def _one_secret(self) -> Hook:
        if bool(self.secret_env) == bool(self.secret_file):
            raise ValueError("has no secret, or two; give secret_env or secret_file")
        return self


class Notify(Section):
    """Signed web hooks on transitions (docs/outside.md)."""

    timeout_s: CallTimeout = 5.0
    """Longest time of one delivery."""
    retries: Annotated[int, Between(0, 100, "0 tries once")] = 12
    """Tries after the first one; the wait doubles from 5 s to at most an hour."""
    max_age_s: Annotated[float, Between(60, 31_536_000, "so old news help nobody", "s")] = 86_400.0
    """An event that is older is given up without a further try."""
    hooks: Annotated[Mapping[MetricName, Hook], Field(max_length=MAX_HOOKS)] = Field(
        default_factory=dict
    )
    """Receivers by name: `[notify.hooks.NAME]`."""
