"""Text from outside is printed without the characters that a terminal obeys."""

from __future__ import annotations

import json

import pytest
import structlog

from sidecar.logs import configure_logging
from sidecar.settings import Telemetry
from sidecar.visible import counted, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("Grüße, 漢字, naïve", "Grüße, 漢字, naïve"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\nb\r\tc\x00\x7f", "a\\nb\\r\\tc\\x00\\x7f"),
        ("\x9b31m \x85", "\\x9b31m \\x85"),
        ("\u202egnp.exe\u2066\u061c\u200f", "\\u202egnp.exe\\u2066\\u061c\\u200f"),
        ("\u2028\u2029\ufeff", "\\u2028\\u2029\\ufeff"),
        ("\U000e0041", "\\U000e0041"),
        ("\ud800", "\\ud800"),
        ("a\u3164\u115fb", "a\\u3164\\u115fb"),
        ("\u1160\uffa0\u034f", "\\u1160\\uffa0\\u034f"),
        ("\u17b4\u17b5\u2800", "\\u17b4\\u17b5\\u2800"),
        ("\u180b\U000e0100", "\\u180b\\U000e0100"),
        ("\u3000\u00a0\u2764\ufe0f", "\u3000\u00a0\u2764\ufe0f"),
        ("می\u200cخواهم 👨\u200d👩", "می\u200cخواهم 👨\u200d👩"),
    ],
)
def test_only_what_a_terminal_obeys_is_escaped(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown


@pytest.fixture
def restored_logging() -> object:
    before = structlog.get_config()
    yield
    structlog.reset_defaults()
    structlog.configure(**before)
    structlog.contextvars.clear_contextvars()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_log_line_holds_no_escape_code_that_a_field_brought(
    as_json: bool, capsys: pytest.CaptureFixture[str], restored_logging: object
) -> None:
    configure_logging(Telemetry(log_json=as_json), "test")

    structlog.get_logger().warning("refused", path="/\x1b[2J\u202e", reason="two\nlines")

    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.rstrip("\n").isprintable()
    if as_json:
        assert json.loads(line)["path"] == "/\x1b[2J\u202e"


def test_a_number_and_its_noun_agree() -> None:
    assert [counted(n, "group") for n in (0, 1, 1_000)] == ["0 groups", "1 group", "1,000 groups"]
    assert [counted(n, "reply", "replies") for n in (1, 3)] == ["1 reply", "3 replies"]
