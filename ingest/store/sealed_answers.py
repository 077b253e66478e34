"""The answers of a gate's comparison, encrypted in the store when it has a key.

What the gate's rule reads (arm, finish reason, score) stays readable without the key.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy.orm import Session

from sidecar.store.contents import keyring_of
from sidecar.store.keyring import Keyring, place_in
from sidecar.store.models import GateComparisonRow

_SAID = ("content", "tool_calls", "explanation")
"""Members of an answer that are encrypted when the store has a key, together in `sealed`."""


def seal_answer(
    keyring: Keyring, comparison: str, index: int, answer: dict[str, Any]
) -> dict[str, Any]:
    """Encrypt what an answer says; returned as it is when the store has no key."""
    if not keyring:
        return answer
    said = json.dumps({name: answer.get(name) for name in _SAID})
    place = place_in("gate_comparison", "answers", comparison, index)
    shown = {name: value for name, value in answer.items() if name not in _SAID}
    return {**shown, "sealed": keyring.seal_text(said, place)}


def opened_answers(session: Session, row: GateComparisonRow) -> list[dict[str, Any]]:
    """Return the answers of a comparison with all that was said.

    Raises: ValueError when they do not decrypt.
    """
    opened = []
    for index, stored in enumerate(row.answers or []):
        answer = dict(stored)
        if (sealed := answer.pop("sealed", None)) is not None:
            place = place_in("gate_comparison", "answers", row.comparison_id, index)
            answer |= json.loads(keyring_of(session).open_text(sealed, place))
        opened.append(answer)
    return opened
