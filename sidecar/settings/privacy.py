"""The section of privacy: what is hidden from the judge, and what becomes of flagged exchanges."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from sidecar.settings.kinds import Between
from sidecar.settings.section import Section

SECRET, EMAIL, PHONE, CARD, IBAN, SSN = "SECRET", "EMAIL", "PHONE", "CREDIT_CARD", "IBAN", "US_SSN"
BUILT_IN = (SECRET, EMAIL, PHONE, IBAN, CARD, SSN)  # a card number may stand within an IBAN
MAX_PATTERN = 1_000
"""Characters of a pattern."""
MAX_PATTERNS = 64
PROGRAM_BYTES = 2**20
"""Memory of a compiled pattern: what RE2 needs to say no to a repetition of repetitions."""
_EDGES = tuple("".join(one) for n in range(3) for one in product("a-\n", repeat=n))
"""In these stand all edges that RE2 tells apart: what is beside one is a letter of a word, another
character, a line's end or nothing."""
_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,31}")


def _kind(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError("is no kind: capitals, digits and underscores, 32 at most, such as EMAIL")
    return name


def _pattern(pattern: str) -> str:
    import re2  # no other setting needs it

    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"a pattern has over {MAX_PATTERN} characters")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = PROGRAM_BYTES
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        why = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else error
        raise ValueError(
            f"the pattern is refused ({why}): it must be one of RE2, which takes linear time: no "
            "backreferences, no look-around, repetitions up to 1000"
        ) from None
    for text in _EDGES:
        for at in range(len(text) + 1):
            match = compiled.search(text, at)
            if match is not None and not match[0]:
                raise ValueError(
                    "the pattern matches the empty text or an edge of words (`\\b` alone), so "
                    "nearly everywhere; let each of its branches take a character"
                )
    return pattern


Kind = Annotated[str, AfterValidator(_kind)]
Policy = Literal["keep_out", "encrypt", "drop"]


class ProjectPrivacy(Section):
    """What one project has otherwise; a key that is left out is as in `[privacy]`."""

    flag: tuple[Kind, ...] | None = None
    flagged: Policy | None = None
    before_storage: bool | None = None


class Privacy(Section):
    """What is personal or secret in exchanges, and what becomes of it."""

    hide: tuple[Kind, ...] | None = None
    """Kinds that the judge does not see. None: all built-in ones and all of `patterns`."""
    flag: tuple[Kind, ...] = (SECRET, CARD, IBAN, SSN)
    """Kinds that flag an exchange."""
    flagged: Policy = "keep_out"
    """What becomes of a flagged exchange: it is not learned from; or it is, and must be stored
    encrypted; or it is not stored."""
    before_storage: bool = False
    """Replace what `hide` names before an exchange is stored. It is then not learned from."""
    patterns: Mapping[Kind, Annotated[str, AfterValidator(_pattern)]] = Field(default_factory=dict)
    """Further kinds, each by a pattern of RE2."""
    max_bytes: Annotated[
        int, Between(1_000, 1_000_000_000, "a text of a sentence is longer; more is no limit")
    ] = 16 * 2**20
    """Bytes of an exchange that are searched. One with more counts as flagged, unseen."""
    projects: Mapping[str, ProjectPrivacy] = Field(default_factory=dict)
    """Other rules for single projects, by name."""

    @field_validator("patterns")
    @classmethod
    def _few(cls, patterns: Mapping[str, str]) -> Mapping[str, str]:
        if len(patterns) > MAX_PATTERNS:
            raise ValueError(f"there are over {MAX_PATTERNS} patterns")
        if taken := set(patterns) & set(BUILT_IN):
            raise ValueError(f"{min(taken)} is built in; give the pattern another name")
        return patterns

    @model_validator(mode="after")
    def _known(self) -> Privacy:
        known = {*BUILT_IN, *self.patterns}
        flags = [self.flag, *(one.flag or () for one in self.projects.values())]
        for name in (*(self.hide or ()), *(kind for kinds in flags for kind in kinds)):
            if name not in known:
                raise ValueError(f"{name} is no kind; known are {', '.join(sorted(known))}")
        return self

    @property
    def hidden(self) -> tuple[str, ...]:
        """The kinds that are hidden."""
        return (*BUILT_IN, *self.patterns) if self.hide is None else self.hide

    def of(self, project: str) -> Privacy:
        """Return the rules of a project."""
        own = self.projects.get(project)
        if own is None:
            return self
        return self.model_copy(update=own.model_dump(exclude_none=True))
