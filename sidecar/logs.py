"""Log set-up, the same for every process: events with fields, never sentences, never secrets."""

from __future__ import annotations

import logging
import sys

import structlog

from sidecar.settings import Telemetry


def configure_logging(telemetry: Telemetry, process: str) -> None:
    """Send events to stderr, one line each, with the process's name bound to all of them."""
    level = logging.getLevelNamesMapping()[telemetry.log_level.upper()]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if telemetry.log_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
    # Libraries keep to warnings: their info lines would drown ours.
    logging.basicConfig(level=max(level, logging.WARNING), stream=sys.stderr)
