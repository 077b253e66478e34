"""What the judge sees of a group: secrets and personal data are replaced by placeholders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ingest.privacy.detectors import Detectors
from ingest.privacy.texts import Redaction
from sidecar.settings import Privacy


class NotRedactedError(ValueError):
    """The search failed, so the judge must not see the group."""


@dataclass(frozen=True, slots=True)
class View:
    """The arguments of RULER, redacted. Any: JSON."""

    context: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    answers: Sequence[Mapping[str, Any]]


class JudgeView:
    """Redacts groups. One value has one placeholder in the whole group, so that answers stay
    comparable."""

    def __init__(self, settings: Privacy) -> None:
        self._detectors = Detectors(settings.hidden, settings.patterns)
        self._max_bytes = settings.max_bytes

    def __call__(self, seen: View) -> View:
        """Raises: NotRedactedError."""
        redaction = Redaction(self._detectors, max_bytes=self._max_bytes)
        try:
            return View(
                context=redaction.json(list(seen.context)),
                tools=redaction.json(list(seen.tools)),
                answers=redaction.json(list(seen.answers)),
            )
        except Exception as error:  # noqa: BLE001 - a defect costs this group; the message is left
            # out, because it may quote what users wrote
            raise NotRedactedError(
                f"the search for values to hide failed: {type(error).__name__}"
            ) from None


@cache
def default_view() -> JudgeView:
    """The view by the default settings: what a caller has that names no other."""
    return JudgeView(Privacy())
