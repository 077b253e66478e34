"""What the vLLM that answers does unasked: values for unsaid fields, and grammars. Pure.

vLLM fills a sampling field that the agent leaves out from the model's `generation_config.json` or
from its own flags, and may constrain every tool call (`--tool-strict-level`, some tool parsers).
Neither shows in a request or a reply, so both are found out (`ingest.vllm.probe`,
`ingest.grouping.generation_config`) or stated by the operator; what is neither is not learned from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ingest.grouping.chat_request import has_tools
from sidecar.records import Sampling
from sidecar.settings import SamplingField, Serving

Grammar = Literal["as_asked", "with_tools", "always"]
"""When vLLM forbids tokens: as the request asks; for every request with tools; for every one."""
FLAG = "engine_facts"
"""Row of the `flag` table: the facts as JSON, as ingest last found them out."""
NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}
"""Sampling fields that vLLM may fill, and the values that change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What is known; None: not known."""

    defaults: frozenset[str] | None = None
    """Fields of `NEUTRAL` that vLLM fills with another value where the request leaves them out."""
    grammar: Grammar | None = None

    @property
    def known(self) -> bool:
        return self.defaults is not None and self.grammar is not None


UNKNOWN = EngineFacts()


def merge(found: Iterable[EngineFacts]) -> EngineFacts:
    """The facts of several replicas, as one: each field is as bad as on the worst of them."""
    order: tuple[Grammar | None, ...] = ("as_asked", None, "with_tools", "always")
    facts = list(found)
    fields = [one.defaults for one in facts]
    return EngineFacts(
        defaults=None if None in fields else frozenset().union(*(one or () for one in fields)),
        grammar=max((one.grammar for one in facts), key=order.index),
    )


def state(facts: EngineFacts, serving: Serving) -> EngineFacts:
    """The facts with what the operator states in the settings, which wins."""
    return EngineFacts(
        defaults=facts.defaults if serving.sampling_defaults is None else frozenset(),
        grammar=facts.grammar if serving.grammar == "find_out" else serving.grammar,
    )


def dump_facts(facts: EngineFacts) -> str:
    """As JSON, for the `flag` table."""
    fields = None if facts.defaults is None else sorted(facts.defaults)
    return msgspec.json.encode({"defaults": fields, "grammar": facts.grammar}).decode()


def load_facts(text: str) -> EngineFacts:
    """Inverse of `dump_facts`; what cannot be read is `UNKNOWN`."""
    try:
        return msgspec.json.decode(text, type=EngineFacts)
    except (msgspec.MsgspecError, UnicodeError):
        return UNKNOWN


def fill(sampling: Sampling, stated: Mapping[SamplingField, float] | None) -> Sampling:
    """The sampling with the values that the operator states for what the request leaves out."""
    missing: dict[str, Any] = {
        name: value for name, value in (stated or {}).items() if getattr(sampling, name) is None
    }
    if "top_k" in missing:
        missing["top_k"] = int(missing["top_k"])
    return msgspec.structs.replace(sampling, **missing) if missing else sampling


def why_unsaid(sampling: Sampling, defaults: frozenset[str] | None) -> str | None:
    """Why a field that the request leaves out has a value that is not known; None when none has."""
    unsaid = [name for name in NEUTRAL if getattr(sampling, name) is None]
    if defaults is None:
        return "defaults_unknown" if unsaid else None
    return next((f"unsaid_{name}" for name in unsaid if name in defaults), None)


def why_masked(request: Mapping[str, Any], grammar: Grammar | None) -> str | None:
    """Why vLLM may have forbidden tokens that the request does not ask it to forbid."""
    if grammar == "always":
        return "masked_by_server"
    if not has_tools(request) or grammar == "as_asked":
        return None
    return "masking_unknown" if grammar is None else "masked_by_server"
