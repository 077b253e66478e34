"""The store's tables as row classes: the one place that states each column.

`docs/data-dictionary.md` says what each column means; comments here only say what a name cannot.
Migrations are made from these classes; a test compares both. Times are unix seconds (float). Bodies
are compressed JSON (`body` columns), token arrays are packed (`sidecar.store.arrays`). No
foreign key cascades: a record is kept or deleted on purpose, never as a side effect.
"""

from __future__ import annotations

from sidecar.store.models.base import Base
from sidecar.store.models.capture import ChoiceRow, DeadLetterRow, ExchangeRow
from sidecar.store.models.control import (
    AliasEventRow,
    BannedDigestRow,
    IdempotentReplyRow,
    LeaseRow,
    UnwantedAdapterRow,
)
from sidecar.store.models.deletions import ForgottenRow, GroupDigestRow
from sidecar.store.models.feedback import FeedbackRow, SignalRow
from sidecar.store.models.groups import (
    AnswerRow,
    BestOfScoreRow,
    GroupRow,
    JudgeCallRow,
    JudgeReplyRow,
)
from sidecar.store.models.noise import JudgeNoiseRow, RescoringRow
from sidecar.store.models.polled import ApiKeyRow, BreakerTripRow, RoutingRow, TableTakenRow
from sidecar.store.models.registry import (
    AdapterRow,
    AliasRow,
    AuditRow,
    CanaryRow,
    GateComparisonRow,
)
from sidecar.store.models.runs import RunRow, RunStepRow
from sidecar.store.models.switches import CounterRow, FlagRow, ScheduleJobRow
from sidecar.store.models.watch import AdapterProfileRow, WatchedAnswerRow

__all__ = [
    "AdapterProfileRow",
    "AdapterRow",
    "AliasEventRow",
    "AliasRow",
    "AnswerRow",
    "ApiKeyRow",
    "AuditRow",
    "BannedDigestRow",
    "Base",
    "BestOfScoreRow",
    "BreakerTripRow",
    "CanaryRow",
    "ChoiceRow",
    "CounterRow",
    "DeadLetterRow",
    "ExchangeRow",
    "FeedbackRow",
    "FlagRow",
    "ForgottenRow",
    "GateComparisonRow",
    "GroupDigestRow",
    "GroupRow",
    "IdempotentReplyRow",
    "JudgeCallRow",
    "JudgeNoiseRow",
    "JudgeReplyRow",
    "LeaseRow",
    "RescoringRow",
    "RoutingRow",
    "RunRow",
    "RunStepRow",
    "ScheduleJobRow",
    "SignalRow",
    "TableTakenRow",
    "UnwantedAdapterRow",
    "WatchedAnswerRow",
]
