"""The version of the installed package."""

from __future__ import annotations

PACKAGE = "learning-sidecar"


def installed_version() -> str:
    """The version that pip installed, or words that say that it installed none."""
    from importlib.metadata import PackageNotFoundError, version  # slow: 25 ms of each start

    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown (run from a folder that pip did not install)"
