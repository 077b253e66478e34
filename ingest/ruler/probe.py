"""Ask the judge about a group of our own choice: does it work at all?

A failed call does not tell whose fault it was. The probe goes the same way as every group (rubric,
settings, LiteLLM, reading the reply). Best is a group that was scored before. Without one it is two
answers to a sum, which no judge has a reason to refuse; but a judge may answer that and fail over
every real group.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from ingest.records import Answer, Group
from ingest.ruler.group import GroupOutcome, judge_group
from ingest.ruler.judge import Judge
from ingest.ruler.ruler import JudgeCall
from sidecar.settings import Judge as JudgeSettings

SUBJECT = "probe"
"""What stands for a group's id beside the probe's calls in the store."""


async def ask_probe(
    judge: Judge,
    settings: JudgeSettings,
    *,
    seed: int,
    on_call: Callable[[JudgeCall], None],
    group: Group | None = None,
) -> GroupOutcome:
    """Have the probe judged, in one pass.

    group: one that was scored before; None: the sum.
    """
    one_pass = settings.model_copy(update={"passes": 1})
    return await judge_group(group or _sum(), judge, one_pass, seed=seed, on_call=on_call)


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
