"""`sidecar doctor`: at which stage records stop, why, and what to do.

Exit codes: 0 nothing found, 1 something stops records, 2 bad use (also unsound settings).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from deploy.cli.context import settings_of
from deploy.cli.output import Output, say_either


@contextmanager
def without_logs() -> Iterator[None]:
    """Log nothing: what the libraries say of a server that is away is among the findings."""
    import structlog

    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def doctor(
    context: typer.Context,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="read the store alone: ask no vLLM, judge or Kafka"),
    ] = False,
    limit_s: Annotated[
        float, typer.Option("--limit", min=1.0, help="longest time for all checks, in seconds")
    ] = 60.0,
    output: Output = "text",
) -> None:
    """At which stage records stop, why, and what to do (exit 1: something does). Asks the judge
    one small question, which is paid for."""
    from deploy.cli.context import admin_client
    from deploy.doctor.collect import collect
    from deploy.doctor.report import report_json, report_lines
    from deploy.doctor.rules import diagnose

    def refused() -> dict[str, str]:
        replicas = admin_client(context).get("/status")["engine"]["replicas"]
        return {name: why for one in replicas.values() for name, why in one["refused"].items()}

    settings = settings_of(context)
    with without_logs():
        facts = collect(settings, online=not offline, refused=refused, limit_s=limit_s)
    found = diagnose(facts)
    say_either(output, report_json(facts, found), report_lines(facts, found))
    if found:
        raise typer.Exit(1)
