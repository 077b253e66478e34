"""Probe the judge with a group of our own choice: does it work at all?"""

from __future__ import annotations

import json
from collections.abc import Callable

from ingest.privacy.texts import JudgeView
from ingest.records import Answer, Group
from ingest.ruler.group import GroupOutcome, judge_group
from ingest.ruler.judge import Judge, replies_kept_for
from ingest.ruler.ruler import JudgeCall
from sidecar.settings import Judge as JudgeSettings

SUBJECT = "probe"
"""Subject of the probe's calls in the store, in place of a group's id."""


async def ask_probe(
    judge: Judge,
    settings: JudgeSettings,
    *,
    seed: int,
    on_call: Callable[[JudgeCall], None],
    group: Group | None = None,
    view: JudgeView | None = None,
) -> GroupOutcome:
    """Send the probe, in one pass.

    group: a group that was scored before; None: the sum question.
    """
    one_pass = settings.model_copy(update={"passes": 1})
    with replies_kept_for(None):  # a kept reply would not tell whether the judge works
        return await judge_group(
            group or _sum(), judge, one_pass, seed=seed, on_call=on_call, view=view
        )


def _sum() -> Group:
    request = {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}
    answers = ("2 + 3 = 5", "2 + 3 = 6")
    return Group(
        group_id=SUBJECT,
        exchange_id=SUBJECT,
        session_key="",
        adapter="",
        request=json.dumps(request).encode(),
        prompt_token_ids=(),
        answers=tuple(
            Answer(
                index=index,
                origin="served",
                message=json.dumps({"role": "assistant", "content": text}).encode(),
            )
            for index, text in enumerate(answers)
        ),
    )
