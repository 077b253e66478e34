"""The command ends at its limit, whatever a check still does."""

from __future__ import annotations

import subprocess
import sys

HANGS = """
import asyncio, sys, threading
import deploy.cli.main as command
from deploy.doctor.collect import run_checks

def hang():
    asyncio.run(asyncio.to_thread(threading.Event().wait))

def run(arguments):
    print(run_checks({"judge": hang}, 0.2)[1]["judge"])
    return 1

command._run = run
sys.exit(command.main())
"""


def test_a_check_that_hangs_in_a_thread_of_its_own_does_not_keep_the_command() -> None:
    command = [sys.executable, "-c", HANGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)

    assert (done.returncode, done.stdout) == (1, "no answer within 0.2 s\n"), done.stderr
