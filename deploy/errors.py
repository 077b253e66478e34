"""Errors of deploy. One base; one class per thing a caller can do about it.

DeployError
├── UnknownAdapterError (LookupError)   no such version: list them with `sidecar adapters ls`
├── UnknownCanaryError (LookupError)     no canary has this id
├── UnknownRecordError (LookupError)    no group, run or exchange has this id
├── DamagedRecordError                   a value of the record is not what its column holds
├── UnknownKeyError (LookupError)       no API key has this id: list them with `sidecar keys ls`
├── TransitionError (ValueError)        the canary is not in a state that allows this
├── BackupError (RuntimeError)          no backup, or not a whole one: the message says what to do
├── StartError (RuntimeError)           `sidecar up` cannot start: the message says what, and why
├── LostLeaseError (ConnectionError)    another control acts: leave the work to it
├── EngineError (ConnectionError)       vLLM refused or did not answer: try again later
└── InvalidAdapterError (ValueError)    the folder is not an adapter this vLLM can serve: rejected
    └── NotAsRegisteredError            its files are gone, or cannot be opened: restore them
        └── AlteredAdapterError         its files were changed after registration: not loaded
"""

from __future__ import annotations


class DeployError(Exception):
    """Base of every error deploy raises on purpose."""


class UnknownAdapterError(DeployError, LookupError):
    """No adapter version has this name, number or alias."""


class UnknownCanaryError(DeployError, LookupError):
    """No canary has this id."""


class UnknownRecordError(DeployError, LookupError):
    """No group, run or exchange has this id."""


class BackupError(DeployError, RuntimeError):
    """A backup cannot be made, or is not whole."""


class DamagedRecordError(DeployError):
    """The store has this record, but a value of it is not what its column holds."""


class UnknownKeyError(DeployError, LookupError):
    """No API key of the data plane has this id."""


class TransitionError(DeployError, ValueError):
    """The canary's state does not allow the action; the message says why."""


class StartError(DeployError, RuntimeError):
    """`sidecar up` cannot start, or gives up a process that dies before it becomes ready."""


class LostLeaseError(DeployError, ConnectionError):
    """This control does not hold the lease any more: another one may act."""


class EngineError(DeployError, ConnectionError):
    """vLLM refused, or could not be reached."""


class InvalidAdapterError(DeployError, ValueError):
    """The adapter folder fails validation and must never be served."""


class NotAsRegisteredError(InvalidAdapterError):
    """Files of the adapter are missing, or cannot be opened. It says nothing of those that were
    registered, so it bans nothing."""


class AlteredAdapterError(NotAsRegisteredError):
    """The files of the adapter changed after it was registered."""


def error_line(error: BaseException) -> str:
    """Format an error as one line that is safe for a log, a database and a terminal.

    Our own errors need their message only; for any other error the line starts with its type.
    """
    text = str(error) if isinstance(error, DeployError) else f"{type(error).__name__}: {error}"
    return (text if text.isprintable() else text.encode("unicode_escape").decode())[:2_000]


class UnknownProjectError(DeployError, ValueError):
    """The project has no line of adapters of its own; the message names those that have."""
