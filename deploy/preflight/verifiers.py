"""Try every verifier once: load its code, ask its service about one small answer of our own."""

from __future__ import annotations

from deploy.preflight.findings import Finding, error
from ingest.verifiers.proving import prove_all
from ingest.verifiers.records import Failure
from ingest.verifiers.rewarding import BECOMES, close_checkers, kind_of, open_checkers
from ingest.verifiers.state import said_of
from sidecar.settings import HttpVerifier, Settings, VerifierSection

CAUSE = "verifier"
KEYS = {"http": "url", "entry_point": "entry_point"}
"""Kind -> the setting that is wrong most likely."""


async def check_verifiers(settings: Settings) -> list[Finding]:
    """Return the verifiers that cannot be used, as errors: without them the reward is another."""
    verifiers = settings.reward.verifiers
    if not verifiers:
        return []
    checkers, processes = open_checkers(settings)
    try:
        tried = await prove_all(checkers, verifiers)
    finally:
        await close_checkers(checkers, processes)
    return [
        error(f"reward.verifiers.{name}.{KEYS.get(kind_of(one), 'kind')}", _text(one, found), CAUSE)
        for name, found in tried.items()
        if isinstance(found, Failure)
        for one in (verifiers[name],)
    ]


def _text(one: VerifierSection, found: Failure) -> str:
    to_do = (
        "start the service, or correct url, token or timeout_s"
        if isinstance(one, HttpVerifier)
        else "install its package beside the sidecar, or correct it"
    )
    return f"the verifier gives no finding ({said_of(found)}), so {BECOMES[one.on_error]}; {to_do}"
