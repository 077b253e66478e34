"""Hidden characters become escapes of JSON, in one pass over the text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ingest.judge_prompt import escape


def no_pattern(*_: Any) -> str:
    raise AssertionError("a pattern was made of the text's characters")


def test_many_different_hidden_characters_are_escaped_in_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Searched as the class of a pattern, 65,534 of them took 65,534 steps a character."""
    hidden = "".join(map(chr, range(0xF0000, 0xFFFFE)))
    monkeypatch.setattr(re, "sub", no_pattern)

    escaped = escape(json.dumps(f"a\u00e9{hidden}b\u4e2d\u200b", ensure_ascii=False))

    assert escaped.startswith('"a\u00e9\\udb80\\udc00\\udb80\\udc01')
    assert escaped.endswith('\\udbbf\\udffdb\u4e2d\\u200b"')
    assert len(escaped) == 2 + 4 + 6 + 12 * 65_534
    assert json.loads(escaped) == f"a\u00e9{hidden}b\u4e2d\u200b"
