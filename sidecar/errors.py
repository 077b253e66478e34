"""Errors of the data plane. One base; one class per thing a caller can do about it."""

from __future__ import annotations

UNREADABLE_JSON = (ValueError, RecursionError)
"""Raised by msgspec and Python's json for text that is not JSON or not UTF-8, for a number with too
many digits (all ValueErrors), and for JSON that is nested too deeply."""


class SidecarError(Exception):
    """Base of every error the sidecar raises on purpose."""


class SettingsError(SidecarError, ValueError):
    """A setting is unknown, malformed or unsafe; the message says which, why, and what to do."""


class BadRequestError(SidecarError, ValueError):
    """The request body is not a JSON object that vLLM would accept: answer 400 as vLLM does."""


class InvalidKeyError(SidecarError, ValueError):
    """An API key's record breaks a rule: project, scope or limit. Never contains the key."""


class UnstorableError(SidecarError, ValueError):
    """A record holds a value that no store can hold, too long a name for one: put it aside."""


class UpstreamError(SidecarError, ConnectionError):
    """vLLM refused, dropped or never answered before the first byte of a reply: answer 502."""


class OutOfFilesError(UpstreamError):
    """This process may open no further file, so it could not connect: answer 503."""


class StateLockError(SidecarError, OSError):
    """Another process works with this `state_dir`, or it cannot be written or locked."""


class StoreError(SidecarError, OSError):
    """The store cannot be reached, or its schema is not the one this version expects."""


class StoreNewerError(StoreError):
    """A newer release has migrated the store: install that release."""


class StoreOlderError(StoreError):
    """The store's schema is older than the baseline, so no migration leads from it to today's."""


class StoreBusyError(StoreError):
    """The store rolled a transaction back because it conflicts with another one: repeat it."""


class StoreLockedError(StoreError):
    """Another program has held the store's lock for longer than a writer waits."""


class DamagedColumnError(SidecarError):
    """A column holds another type than its own, or no JSON. `Database` alone catches it: the row
    goes into quarantine, and the caller gets a StoreBusyError."""


class OutboxError(SidecarError, OSError):
    """The outbox refused a write (locked, full, read-only, deleted). `reason` labels the
    counter."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ForwardingError(SidecarError, ConnectionError):
    """Kafka did not take a record; it stays in the outbox. `reason` labels the counter."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
