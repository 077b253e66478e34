"""Look for bytes on which the parsers' invariants do not hold, for a bounded time.

`SIDECAR_TEST_FUZZ_S` sets the seconds for all targets together. What was found once is in
`FOUND`, and tried each time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TARGETS = (
    *("request_parser", "reply_parser", "spans", "strip_whole"),
    *("strip_stream", "strip_odd", "edit", "usage", "split_events"),
)
INPUTS = re.compile(r"Done (?P<done>\d+) |tried (?P<tried>\d+) inputs")
"""What libFuzzer says at its end, and the driver without it."""
BUDGET_S = float(os.environ.get("SIDECAR_TEST_FUZZ_S", "9"))
FOUND = {
    "strip_whole": (b"\xff\x00\x00\xff\x00\x00\x08\x96#\x8b\x00\t\xdc\xdc\xff\xff\xff",),
    "strip_stream": (b"\xec&   vX&\xda! -\x0b)-\x0b\x8c",),
    "strip_odd": (
        b"\x06\x02\x00\xc0\x8c\xdf\x00\x00\x00\x00\xff#\x8c`J.\xa5\xa5\x8c\xd4",
        bytes.fromhex(
            "aaaaaa56ff4a85a54baaaa7b7daaaaaaaaaaaa2e00007fffffff00aaf1aa5455aaaaaaaaaaaaaa85"
        ),
    ),
}


Told = list[dict[str, Any]]


def drive(*arguments: str) -> Told:
    done = subprocess.run(
        [sys.executable, str(HERE / "fuzz_driver.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # the sources: coverage sees no extension
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"target"')]


@pytest.fixture(scope="module")
def searched() -> Told:
    """What was told of each target: one process imports the relay for all."""
    return drive(str(BUDGET_S / len(TARGETS)), *TARGETS)


@pytest.mark.timeout(BUDGET_S + 60)
@pytest.mark.parametrize("target", TARGETS)
def test_no_bytes_are_found_that_break_an_invariant(target: str, searched: Told) -> None:
    (told,) = (one for one in searched if one["target"] == target)

    assert told["code"] == 0, told["said"]
    assert (tried := INPUTS.search(told["said"])) is not None, told["said"]
    assert int(tried["done"] or tried["tried"]) > 0, told["said"]


def test_what_was_found_once_holds_now() -> None:
    asked = [f"{name}={data.hex()}" for name, found in FOUND.items() for data in found]

    told = drive(*asked)

    assert [(one["target"], one["code"]) for one in told] == [
        (one.partition("=")[0], 0) for one in asked
    ], told
