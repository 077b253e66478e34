"""Set up logging, in the same way for every process: events with fields, no sentences, no secrets.

Fields may quote untrusted text; on a terminal it is shown without escape codes. JSON escapes it by
itself.
"""

from __future__ import annotations

import logging
import sys

import structlog

from sidecar.hiding import hide_values, values_beside_path
from sidecar.settings import Telemetry
from sidecar.visible import visible


def configure_logging(telemetry: Telemetry, process: str) -> None:
    """Send events to stderr, one line each, with the process's name bound to all of them."""
    level = logging.getLevelNamesMapping()[telemetry.log_level.upper()]
    renderers: list[structlog.typing.Processor] = (
        [structlog.processors.JSONRenderer()]
        if telemetry.log_json
        else [_escape, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
    # Libraries log only warnings; their info lines would hide ours.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Hiding(telemetry))
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler])


class _Hiding(logging.Formatter):
    """Hides what the telemetry URLs hold beside their path: the exporters' libraries quote it."""

    def __init__(self, telemetry: Telemetry) -> None:
        super().__init__(logging.BASIC_FORMAT)
        endpoints = (telemetry.otlp_endpoint, telemetry.otlp_metrics_endpoint)
        self._secrets = [text for url in endpoints for text in values_beside_path(url)]

    def format(self, record: logging.LogRecord) -> str:
        return hide_values(super().format(record), self._secrets)


def _escape(
    _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Return text fields without control characters; a traceback keeps its lines."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = "\n".join(visible(line) for line in _lines(key, value))
    return event


def _lines(key: str, value: str) -> list[str]:
    return value.split("\n") if key in ("exception", "stack") else [value]
