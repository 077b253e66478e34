from __future__ import annotations

import pytest

from ingest.grouping.features import is_held_out, share_of


def test_a_sessions_share_never_changes() -> None:
    # sha256("held_out\\0m:a") begins with 1502e1e2...; divided by 2**64.
    assert share_of("held_out\x00m:a") == pytest.approx(0.0820752314354081, abs=1e-15)
    assert share_of("held_out\x00m:c") == pytest.approx(0.2069112121173759, abs=1e-15)


def test_a_session_is_held_out_when_its_share_is_under_the_rate() -> None:
    assert is_held_out("m:a", 0.1)
    assert not is_held_out("m:a", 0.08)
    assert not is_held_out("m:a", 0.0)


def test_raising_the_rate_only_adds_sessions() -> None:
    few = {n for n in range(500) if is_held_out(f"m:{n}", 0.1)}
    more = {n for n in range(500) if is_held_out(f"m:{n}", 0.3)}

    assert few < more
