"""The lines of `sidecar status` about verifiers: last good, last error, who waits. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from deploy.cli.times import shown_time
from sidecar.plurals import counted


class Verifier(msgspec.Struct):
    """One of `verifiers` of `GET /admin/v1/status`."""

    name: str
    kind: str
    fails: bool
    good_at: float | None
    error_at: float | None
    error: str
    waiting: int


def verifier_lines(verifiers: Sequence[Verifier], now: float) -> Iterator[str]:
    """Yield a line for each verifier. now: Unix seconds."""
    for one in verifiers:
        good = "never" if one.good_at is None else shown_time(one.good_at, now)
        said = f"FAILS: {one.error}" if one.fails else "works"
        if one.good_at is None and one.error_at is None:
            said = "has not been tried yet"
        groups = counted(one.waiting, "group waits", "groups wait")
        waits = f" {groups} for it." if one.waiting else ""
        yield f"Verifier {one.name} ({one.kind}): {said}. Last good: {good}.{waits}"
        if one.error_at is not None and not one.fails:
            yield f"  Last error {shown_time(one.error_at, now)}: {one.error}"
