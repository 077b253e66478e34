"""Errors of the learner. One base; one class per thing a caller can do about it.

The built-in class beside it says which kind it is. A run whose error is no FaultyGroupsError counts
it against every group that it took, unless it is one of `learner.runs.source.ENVIRONMENT`.
"""

from __future__ import annotations

from collections.abc import Mapping

from learner.records import Fault
from sidecar.errors import StoreError


class LearnerError(Exception):
    """Base of every error the learner raises on purpose."""


class GroupTooSmallError(LearnerError, ValueError):
    """Fewer than two answers share the prompt."""


class NothingToLearnError(LearnerError, LookupError):
    """No usable group waits; the message counts the dropped ones by reason."""


class HeldError(LearnerError, RuntimeError):
    """The reward watch found that the reward is earned without better answers; no group was taken.

    The message says what it found. `sidecar learner override` lets runs go on.
    """


class NoRoomError(LearnerError, RuntimeError):
    """A run would not fit into its share of the device's memory; nothing was taken or loaded."""


class FaultyGroupsError(LearnerError):
    """More than half of a run's groups fail; a setting or the base may be wrong. None is dropped.

    Every failure is counted against its group, so that the same groups do not fail for ever.
    """

    def __init__(self, message: str, faults: Mapping[str, Fault] | None = None) -> None:
        super().__init__(message)
        self.faults: Mapping[str, Fault] = faults or {}
        """Group id -> fault; empty when no single group can be named."""


class DriftError(FaultyGroupsError, ValueError):
    """The recorded log-probabilities differ from those of the adapters that sampled the answers."""


class NonFiniteError(FaultyGroupsError, ArithmeticError):
    """A loss, gradient or weight became NaN or infinite; nothing is written or registered."""


class DivergedError(FaultyGroupsError, ArithmeticError):
    """The policy is over `KL_LIMIT` from the base, or broken; nothing is written or registered.

    No group is named: the settings or any of them may be the cause.
    """


class OutOfMemoryError(FaultyGroupsError, MemoryError):
    """No group of the run fits into memory, or not even the base; then no group is named."""


class RankFailedError(FaultyGroupsError, RuntimeError):
    """Another process of the run failed; the text has its error. Nothing is registered."""


class RankLostError(FaultyGroupsError, OSError):
    """Another process of the run is gone, or did not answer in time; nothing is registered.

    A group is named only if that process is known to have been killed while it computed it.
    """


class TinkerServerError(LearnerError, OSError):
    """The server of `learner.tinker_url` is away, too slow, or cannot do what a run needs."""


class SharedFolderError(LearnerError, OSError):
    """The folders at `adapters.url` cannot be reached, or are not what they should be."""


class ParentError(LearnerError, OSError):
    """The base model or the parent adapter is missing, unreadable or of another shape."""


class AlteredParentError(ParentError):
    """The files of the parent adapter changed after it was registered."""


class DeviceError(LearnerError, ValueError):
    """The device of the settings does not exist on this machine, or cannot compute."""


class NotResumedError(LearnerError, RuntimeError):
    """A killed run cannot go on, because something that its weights depend on has changed."""


class CheckpointError(LearnerError, ValueError):
    """A checkpoint is damaged, or of another release or other matrices: start without it."""


class IncompleteAdapterError(LearnerError, ValueError):
    """An adapter folder lacks a LoRA matrix of its own config, or holds one too many."""


class RanksDisagreeError(LearnerError, RuntimeError):
    """The processes of a run have other weights, moments or files; nothing is registered."""


class UnpublishedError(LearnerError, StoreError):
    """A run is trained, and the store cannot be written, or failed as it published; its row and its
    files stay, and the next run goes on with it."""


class FullDiskError(LearnerError, OSError):
    """A run has a checkpoint, and the disk has no space for more; its row and its checkpoint stay,
    and the next run goes on with it."""


class RunInProgressError(LearnerError, RuntimeError):
    """Another run of this model holds the lease; `heartbeat_at` tells whether it is alive."""

    def __init__(self, run_id: str, heartbeat_at: float) -> None:
        super().__init__(f"run {run_id} is in progress; wait for its end, or stop it first")
        self.run_id = run_id
        self.heartbeat_at = heartbeat_at
        """Time of its last heartbeat, in Unix seconds."""


class RunStoppedError(LearnerError, RuntimeError):
    """The run was asked to stop, or another run took its lease; nothing is registered."""
