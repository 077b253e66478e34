"""Errors of the data plane. One base; one class per thing a caller can do about it.

SidecarError
├── SettingsError (ValueError)      the settings file or environment is wrong: fix it, start again
├── BadRequestError (ValueError)    the client's body cannot be read: answer 400 the way vLLM does
├── InvalidKeyError (ValueError)    no API key may be like this: the message says why
├── UnstorableError (ValueError)    no store can hold the record: put it aside, the message says why
├── UpstreamError (ConnectionError) vLLM could not be reached: answer 502, nothing to retry here
│   └── OutOfFilesError             this process may open no more files: answer 503
├── StateLockError (OSError)        state_dir is in use, or cannot be written: stop the other one
├── StoreError (OSError)            the store cannot be reached or is of another revision
│   ├── StoreNewerError             a newer release migrated it: install that release
│   ├── StoreOlderError             no migration leads from its schema: upgrade it as the line says
│   ├── StoreBusyError              the transaction conflicts with another one, or damaged rows
│   │                               went into quarantine: repeat it
│   └── StoreLockedError            another program holds its lock: wait, or end that program
├── OutboxError (OSError)           the outbox could not be written: the capture is lost and counted
├── DamagedColumnError              a column of the store holds no value of its type
└── ForwardingError (ConnectionError) Kafka takes no records: they stay in the outbox
"""

from __future__ import annotations

UNREADABLE_JSON = (ValueError, RecursionError)
"""Raised by msgspec and Python's json for text that is not JSON or not UTF-8, for a number with too
many digits (all ValueErrors), and for JSON that is nested too deeply."""


class SidecarError(Exception):
    """Base of every error the sidecar raises on purpose."""


class SettingsError(SidecarError, ValueError):
    """A setting is unknown, malformed or unsafe; the message says which, why, and what to do."""


class BadRequestError(SidecarError, ValueError):
    """The request body is not a JSON object that vLLM would accept."""


class InvalidKeyError(SidecarError, ValueError):
    """An API key's record breaks a rule: project, scope or limit. Never contains the key."""


class UnstorableError(SidecarError, ValueError):
    """A record holds a value that no store can hold: too long a name, too large a number."""


class UpstreamError(SidecarError, ConnectionError):
    """vLLM refused, dropped or never answered before the first byte of a reply."""


class OutOfFilesError(UpstreamError):
    """This process may open no further file, so it could not connect."""


class StateLockError(SidecarError, OSError):
    """Another process works with this `state_dir`, or it cannot be written or locked."""


class StoreError(SidecarError, OSError):
    """The store cannot be reached, or its schema is not the one this version expects."""


class StoreNewerError(StoreError):
    """A newer release has migrated the store."""


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
