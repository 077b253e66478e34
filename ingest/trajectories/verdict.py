"""A judge's verdict as plain text, for a person who looks on. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ingest.ruler.ruler import Judgement
from sidecar.plurals import counted
from sidecar.visible import visible


def verdict_lines(judgement: Judgement) -> Iterator[str]:
    """Yield the verdict, best first: scores, explanations, and what it cost.

    Characters that a terminal obeys are made visible: explanations may quote what agents wrote.
    """
    calls = judgement.calls
    models = ", ".join(dict.fromkeys(call.judge_model for call in calls))
    judged = counted(len(judgement.scores), "trajectory", "trajectories")
    yield visible(f"judge {models}: {judged}, {counted(len(calls), 'call')}")
    order = sorted(range(len(judgement.scores)), key=lambda at: -judgement.scores[at])
    for at in order:
        first, *more = judgement.explanations[at].split("\n")
        yield visible(f"  {judgement.scores[at]:.3f}  [{at}]  {first}")
        yield from (visible(f"              {line}") for line in more)
    for call in calls:
        if call.error is not None:
            yield visible(f"  unusable reply: {call.error}")
    if judgement.disagreement is not None:
        mean, flipped = judgement.disagreement.mean, judgement.disagreement.flipped
        yield f"  passes differ by {mean:.3f} on average, {flipped:.0%} of pairs flipped"
    replies = [call.reply for call in calls]
    tokens = sum((one.prompt_tokens or 0) + (one.completion_tokens or 0) for one in replies)
    costs = [one.cost_usd for one in replies if one.cost_usd is not None]
    priced = f", ${sum(costs):.4f}" if len(costs) == len(replies) else ""
    yield f"  {counted(tokens, 'token')}, {sum(one.seconds for one in replies):.1f} s{priced}"
