"""The settings of what control asks outside: metrics of a canary, and the approval service."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from sidecar.settings.kinds import Between, Section, WebUrl, WebUrlOrNone, Word, matching

MAX_METRICS = 16
MAX_QUERY = 4_000
"""Characters of a query: it is sent in the URL."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_POINTER = re.compile(r"(/([^~/]|~[01])*)*")


def _env_name(name: str) -> str:
    if name and _ENV_NAME.fullmatch(name) is None:
        raise ValueError("is no name of an environment variable; give one such as METRICS_TOKEN")
    if name.upper().startswith("SIDECAR_"):
        raise ValueError("begins with SIDECAR_, as settings do; give the variable another name")
    return name


def _query(query: str) -> str:
    if len(query) > MAX_QUERY or not query.isprintable():
        raise ValueError(f"must be one line of at most {MAX_QUERY} characters")
    return query


def _pointer(pointer: str) -> str:
    if _POINTER.fullmatch(pointer) is None or len(pointer) > MAX_QUERY:
        raise ValueError("is no JSON pointer (RFC 6901); give one such as /data/0/value")
    return pointer


EnvName = Annotated[str, AfterValidator(_env_name)]
"""Name of an environment variable that holds a secret; empty: there is none."""
MetricName = Annotated[
    str,
    matching(
        r"[a-z][a-z0-9_]{0,31}",
        "is no name of a metric: small letters, digits and underscores, 32 at most, such as "
        "error_share",
    ),
]
CallTimeout = Annotated[float, Between(0.05, 60, "a service is waited for with each call", "s")]


class Metric(Section):
    """A number from outside that a canary is held to (docs/outside.md)."""

    kind: Literal["prometheus", "http_json"]
    """`prometheus`: an instant query; `http_json`: a number in a JSON document."""
    url: WebUrl
    """`prometheus`: the server, such as http://prometheus:9090; `http_json`: the document."""
    query: Annotated[str, AfterValidator(_query)] = ""
    """For `prometheus`: the query, which gives one number. `{adapter}`, `{champion}` and `{canary}`
    in it are replaced by names; write them between double quotes."""
    pointer: Annotated[str, AfterValidator(_pointer)] = ""
    """For `http_json`: JSON pointer of the number; empty: the document is the number."""
    mode: Literal["dry_run", "signal", "guardrail"] = "dry_run"
    """`dry_run`: computed and shown; `signal`: the ramp stands while it fails; `guardrail`: rolls
    the canary back."""
    min: Annotated[float, Between(-1e15, 1e15, "a smaller value fails")] | None = None
    """The smallest value that is good."""
    max: Annotated[float, Between(-1e15, 1e15, "a larger value fails")] | None = None
    """The largest value that is good."""
    failures: Annotated[int, Between(1, 1_000, "the first failure rolls back with 1")] = 3
    """Failing checks in a row after which a guardrail rolls back and a signal holds."""
    errors: Annotated[int, Between(1, 1_000, "the first error holds with 1")] = 5
    """Checks in a row without an answer after which the ramp stands."""
    every_s: Annotated[float, Between(1, 86_400, "each is a call", "s")] = 60.0
    """Time between two checks."""
    timeout_s: CallTimeout = 5.0
    """Longest time of one check."""
    token_env: EnvName = ""
    """Environment variable of control with a bearer token; empty: none is sent."""

    @model_validator(mode="after")
    def _complete(self) -> Metric:
        if self.min is None and self.max is None:
            raise ValueError("has no limit; give min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError("has min over max, so every value would fail")
        if (self.kind == "prometheus") != bool(self.query):
            raise ValueError("needs a query for kind prometheus, and none for http_json")
        if self.kind == "prometheus" and self.pointer:
            raise ValueError("has a pointer, which is for kind http_json")
        return self


class Approval(Section):
    """A service of yours that may veto a ramp or a promotion (docs/outside.md)."""

    url: WebUrlOrNone = ""
    """Where control posts the evidence and asks; empty: nobody is asked."""
    before: tuple[Literal["ramp", "promotion"], ...] = ("promotion",)
    """What waits for its answer: `ramp`, `promotion`, or both."""
    token_env: EnvName = ""
    """Environment variable of control with a bearer token; empty: none is sent."""


# The settings of web hooks: whom control tells of transitions.

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

    hooks: Annotated[Mapping[MetricName, Hook], Field(max_length=MAX_HOOKS)] = Field(
        default_factory=dict
    )
    """Receivers by name: `[notify.hooks.NAME]`."""
