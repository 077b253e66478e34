"""What the rollback benchmark calls the first reply by the old adapter."""

from __future__ import annotations

from benchmarks.rollback.load import Reply
from benchmarks.rollback.run import first_replies


def test_the_first_reply_after_the_call_counts_on_each_proxy() -> None:
    replies = [
        Reply(0, 9.0, 9.5, "old", ""),  # before the call
        Reply(0, 9.9, 10.2, "new", ""),
        Reply(0, 10.3, 10.6, "old", ""),
        Reply(0, 10.2, 10.4, "old", ""),
        Reply(1, 9.9, 10.1, "old", ""),
        Reply(2, 10.1, 10.2, "", "502"),
    ]

    first = first_replies(replies, "old", 10.0)

    assert [None if one is None else round(one, 6) for one in first] == [0.4, 0.1, None]
