"""What is said when something that is to be measured cannot be."""

from __future__ import annotations


class UnavailableError(Exception):
    """A contender cannot be started; the message says why and what to do."""
