"""Ask the judge about two answers to a sum: does it work at all?

A failed call does not tell whose fault it was. The probe goes the same way as every group (rubric,
settings, LiteLLM, reading the reply) with material that no judge has a reason to refuse.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from ingest.judge import Judge
from ingest.judge_group import Fate, judge_group
from ingest.records import Answer, Group
from ingest.ruler import JudgeCall
from sidecar.settings import Judge as JudgeSettings

SUBJECT = "probe"
"""What stands for a group's id beside the probe's calls in the store."""


async def ask_probe(
    judge: Judge, settings: JudgeSettings, *, seed: int, on_call: Callable[[JudgeCall], None]
) -> Fate:
    """Have the probe judged, in one pass. `Scored`: the judge works."""
    one_pass = settings.model_copy(update={"passes": 1})
    return await judge_group(_group(), judge, one_pass, seed=seed, on_call=on_call)


def _group() -> Group:
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
