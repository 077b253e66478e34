"""Try a verifier once, before the first group: is its code loaded, does its service answer?

Code is loaded and not run. A service is asked about one answer of our own, on the path that every
group takes: "2 + 3 = 5" to the question "What is 2 + 3?". Whatever it finds of it is right.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from ingest.records import Answer
from ingest.verifiers.checkers import Checker, NotLoadedError
from ingest.verifiers.hook import HttpChecker
from ingest.verifiers.records import Failure
from sidecar.settings import VerifierSection

REQUEST = json.dumps({"messages": [{"role": "user", "content": "What is 2 + 3?"}]}).encode()
ANSWER = Answer(
    index=0,
    origin="served",
    message=json.dumps({"role": "assistant", "content": "2 + 3 = 5"}).encode(),
    finish_reason="stop",
)
DEFAULT_PROJECT = "default"


async def prove(checker: Checker, settings: VerifierSection) -> str | Failure:
    """Try a verifier. Returns: its version, or why it cannot be used."""
    try:
        version = await checker.version()
    except NotLoadedError as error:
        return Failure(reason="not_loaded", why=str(error))
    if not isinstance(checker, HttpChecker):
        return version
    project = settings.projects[0] if settings.projects else DEFAULT_PROJECT
    (result,) = await checker.check(REQUEST, [ANSWER], project)
    return result if isinstance(result, Failure) else version


async def prove_all(
    checkers: Mapping[str, Checker], settings: Mapping[str, VerifierSection]
) -> dict[str, str | Failure]:
    """Try all verifiers at once. Returns: version, or failure, by name."""
    tried = await asyncio.gather(*(prove(one, settings[name]) for name, one in checkers.items()))
    return dict(zip(checkers, tried, strict=True))
