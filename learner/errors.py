"""Errors of the learner. One base; one class per thing a caller can do about it.

LearnerError
├── GroupTooSmallError (ValueError)     fewer than two answers: skip the group, count it
├── NothingToLearnError (LookupError)   no usable group: the run is skipped, with counts by reason
├── DriftError (ValueError)             recorded and recomputed log-probabilities disagree: refuse
├── ParentError (OSError)               the parent adapter or the base cannot be loaded
└── NonFiniteError (ArithmeticError)    a weight or a loss is not finite: nothing is registered
"""

from __future__ import annotations


class LearnerError(Exception):
    """Base of every error the learner raises on purpose."""


class GroupTooSmallError(LearnerError, ValueError):
    """Fewer than two answers share the prompt."""


class NothingToLearnError(LearnerError, LookupError):
    """Every waiting group was dropped, or none waits; the message counts them by reason."""


class DriftError(LearnerError, ValueError):
    """The recorded log-probabilities are not those of the parent adapter on this base."""


class ParentError(LearnerError, OSError):
    """The base model or the parent adapter is missing, unreadable or of another shape."""


class NonFiniteError(LearnerError, ArithmeticError):
    """A loss, gradient or weight became NaN or infinite; nothing is written or registered."""
