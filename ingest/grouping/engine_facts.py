"""Facts about vLLM that no request shows: sampling defaults and implicit grammars. Pure.

vLLM takes a sampling field that the agent leaves out from the model's `generation_config.json` or
from its own flags, and may constrain every tool call (`--tool-strict-level`, some tool parsers).
Neither shows in a request or a reply. So both are measured (`ingest.vllm.probe`), read from files
(`ingest.grouping.generation_config`) or stated by the operator; where a fact stays unknown, the
exchange is not learned from.
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
"""The requests for which vLLM forbids tokens: those that ask for it, those with tools, or all."""
FLAG = "engine_facts"
"""Row of the `flag` table: the latest facts as JSON, written by ingest."""
NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}
"""Sampling fields that vLLM may fill -> values without effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about a vLLM. A field is None while it is unknown."""

    defaults: frozenset[str] | None = None
    """Fields of `NEUTRAL` that vLLM fills with another value when the request leaves them out."""
    grammar: Grammar | None = None

    @property
    def known(self) -> bool:
        return self.defaults is not None and self.grammar is not None


UNKNOWN = EngineFacts()


def merge(found: Iterable[EngineFacts]) -> EngineFacts:
    """Merge the facts of several replicas: each field is as restrictive as on the worst replica."""
    order: tuple[Grammar | None, ...] = ("as_asked", None, "with_tools", "always")
    facts = list(found)
    fields = [one.defaults for one in facts]
    return EngineFacts(
        defaults=None if None in fields else frozenset().union(*(one or () for one in fields)),
        grammar=max((one.grammar for one in facts), key=order.index),
    )


def state(facts: EngineFacts, serving: Serving) -> EngineFacts:
    """Override the facts with those that the operator states in the settings."""
    return EngineFacts(
        defaults=facts.defaults if serving.sampling_defaults is None else frozenset(),
        grammar=facts.grammar if serving.grammar == "find_out" else serving.grammar,
    )


def dump_facts(facts: EngineFacts) -> str:
    """Serialise the facts as JSON, for the `flag` table."""
    fields = None if facts.defaults is None else sorted(facts.defaults)
    return msgspec.json.encode({"defaults": fields, "grammar": facts.grammar}).decode()


def load_facts(text: str) -> EngineFacts:
    """Inverse of `dump_facts`. Returns: `UNKNOWN` for unreadable text."""
    try:
        return msgspec.json.decode(text, type=EngineFacts)
    except (msgspec.MsgspecError, UnicodeError):
        return UNKNOWN


def fill(sampling: Sampling, stated: Mapping[SamplingField, float] | None) -> Sampling:
    """Complete the sampling with the operator's values for fields that the request leaves out."""
    missing: dict[str, Any] = {
        name: value for name, value in (stated or {}).items() if getattr(sampling, name) is None
    }
    if "top_k" in missing:
        missing["top_k"] = int(missing["top_k"])
    return msgspec.structs.replace(sampling, **missing) if missing else sampling


def why_unsaid(sampling: Sampling, defaults: frozenset[str] | None) -> str | None:
    """Return the reason why the value of a missing field is unknown; None when all are known."""
    unsaid = [name for name in NEUTRAL if getattr(sampling, name) is None]
    if defaults is None:
        return "defaults_unknown" if unsaid else None
    return next((f"unsaid_{name}" for name in unsaid if name in defaults), None)


def why_masked(request: Mapping[str, Any], grammar: Grammar | None) -> str | None:
    """Return the reason why vLLM may have forbidden tokens unasked; None when it has not."""
    if grammar == "always":
        return "masked_by_server"
    if not has_tools(request) or grammar == "as_asked":
        return None
    return "masking_unknown" if grammar is None else "masked_by_server"
