"""Set up logging, in the same way for every process: events with fields, no sentences, no secrets.

Fields may quote untrusted text; on a terminal it is shown without escape codes. JSON escapes it by
itself. A stream that refuses a line, such as a file on a full disk, costs that line and nothing
else: the next line that can be written says how many are missing.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TextIO

import structlog
from structlog.typing import EventDict

from sidecar.hiding import hide_values, values_beside_path
from sidecar.settings import Telemetry
from sidecar.visible import visible

IN_WORDS = "in_words"
"""Key of an event that whoever logs it also says in words where stderr is a terminal: True. Text on
a terminal has the words alone. The key itself is never written."""
DIGITS = 4
"""Significant digits of a number in text logs, which people read; JSON has all of them."""


def configure_logging(telemetry: Telemetry, process: str) -> None:
    """Send events to stderr, one line each, with the process's name bound to all of them."""
    level, lines = logging.getLevelNamesMapping()[telemetry.log_level.upper()], Lines(sys.stderr)
    renderers: list[structlog.typing.Processor] = (
        [structlog.processors.JSONRenderer()]
        if telemetry.log_json
        else [_escape, _rounded, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    in_words = sys.stderr.isatty() and not telemetry.log_json

    def unmarked(_logger: object, _method: str, event: EventDict) -> EventDict:
        """Drop an event that a person at the terminal is told in words."""
        if event.pop(IN_WORDS, False) and in_words:
            raise structlog.DropEvent
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            unmarked,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
    # Libraries log only warnings; their info lines would hide ours.
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[_OfLibraries(telemetry)])


class Lines:
    """A structlog logger that writes each event as one line, and outlives a stream that refuses."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._missing = 0
        self._why = ""

    def msg(self, message: str) -> None:
        """Write a line, after the number of lines that could not be written before it."""
        with self._lock:
            try:
                if self._missing:
                    self._stream.write(f"{self._account()}\n")
                self._stream.write(f"{message}\n")
                self._stream.flush()
            # ValueError: the stream is closed, as at the end of a process.
            except (OSError, ValueError) as error:
                self._missing += 1
                self._why = str(error)
            else:
                self._missing = 0

    def _account(self) -> str:
        fields = {"event": "log_lines_missing", "lines": self._missing, "error": self._why}
        return json.dumps({**fields, "level": "warning"})

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


class _OfLibraries(logging.Handler):
    """Logs what libraries log as events of ours, and hides what the telemetry URLs hold beside
    their path: the exporters' libraries quote it."""

    def __init__(self, telemetry: Telemetry) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))
        endpoints = (telemetry.otlp_endpoint, telemetry.otlp_metrics_endpoint)
        self._secrets = [text for url in endpoints for text in values_beside_path(url)]

    def emit(self, record: logging.LogRecord) -> None:
        said = hide_values(self.format(record), self._secrets)
        level = max(logging.DEBUG, min(logging.CRITICAL, record.levelno // 10 * 10))
        structlog.get_logger().log(level, "library_said", library=record.name, said=said)


def _rounded(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Return the event with numbers that a person can read."""
    return {key: rounded(value) for key, value in event.items()}


def rounded(value: object) -> object:
    """Return a float with `DIGITS` significant digits, a longer one as a whole number. Pure.

    Digits before the point stay: a time or a number of bytes is no estimate.
    """
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return round(value) if abs(value) >= 10**DIGITS else float(f"{value:.{DIGITS}g}")


def _escape(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Return text fields without control characters; a traceback keeps its lines."""
    for key, value in event.items():
        if isinstance(value, str):
            lines = value.split("\n") if key in ("exception", "stack") else [value]
            event[key] = "\n".join(map(visible, lines))
    return event


# Log what may happen to every request, without a line for every request.

log = structlog.get_logger()


class RateLimitedLog:
    """At most one line an event in each interval; the next one says how many were left out."""

    def __init__(
        self, *, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._last: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def warning(self, event: str, **fields: object) -> None:
        now = self._clock()
        last = self._last.get(event)
        if last is not None and now - last < self._interval_s:
            self._left_out[event] += 1
            return
        self._last[event] = now
        log.warning(event, left_out=self._left_out.pop(event, 0), **fields)
