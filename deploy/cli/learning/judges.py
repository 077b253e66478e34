"""The lines of `sidecar status` about judges: who scores, what it costs, the noise. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from deploy.cli.times import shown_age, shown_time
from ingest.judge_watch.advice import advice_on
from sidecar.plurals import counted


class OneJudge(msgspec.Struct):
    model: str
    breaker: str
    since: float | None
    until: float | None
    error: str
    without: list[str] = []


class Judge(msgspec.Struct):
    state: str
    since: float
    good_at: float | None
    error_at: float | None
    error: str
    until: float | None
    waiting: int
    judges: list[OneJudge] = []
    spent_usd_today: float = 0.0
    tokens_today: int = 0


class GateJudge(msgspec.Struct):
    model: str
    passes: int
    own_rubric: bool
    warning: str


class JudgeNoise(msgspec.Struct):
    groups: int
    passes: int
    sd: float | None
    sd_low: float | None
    sd_high: float | None
    drift: str
    drift_at: float | None
    project: str = ""


def judge_lines(judge: Judge | None, noise: JudgeNoise | None, now: float) -> Iterator[str]:
    """Yield the lines about the judge of the reward. now: Unix seconds."""
    if judge is None:
        yield "Judge: no score process with a judge has run (judge.model)."
        yield from _noise(noise, now)
        return
    since = shown_time(judge.since, now)
    again = ""
    if judge.until is not None and judge.until > now:
        again = f", next {shown_age(now - judge.until)}"
    to_do = advice_on(judge.error)
    said = {
        "unknown": f"is being asked whether it works, since {since}",
        "works": "gives scores",
        "away": f"gives no scores since {since}; {to_do}; it is asked again by itself{again}",
        "spent": f"is not asked: {judge.error}",
        "rejected": f"REJECTS every question since {since}; {to_do}, for score reads the settings "
        f"at its start; meanwhile it is asked again, in case its server is mended{again}",
        "no_credit": f"its account has NO CREDIT since {since}; {to_do}; it is asked again{again}",
    }.get(judge.state, judge.state)
    if judge.state == "works" and (judge.error_at or 0.0) > (judge.good_at or 0.0):
        said = f"answers, but gave the newest group no scores; {to_do}"
    good = "never" if judge.good_at is None else shown_time(judge.good_at, now)
    waits = counted(judge.waiting, "group waits", "groups wait")
    yield f"Judge: {said}. Last good answer: {good}. {waits} for it."
    if judge.tokens_today:
        dollars = "no dollars are counted, since no price is known (judge.price)"
        if judge.spent_usd_today:
            dollars = (
                f"${judge.spent_usd_today:,.2f}" if judge.spent_usd_today >= 0.01 else "under $0.01"
            )
        yield f"  Today (UTC): {dollars}, {counted(judge.tokens_today, 'token')}."
    if len(judge.judges) > 1 and judge.state != "spent":
        yield from _each_judge(judge.judges, now, works=judge.state in ("works", "unknown"))
    for one in judge.judges:
        if one.without:
            yield f"  {one.model} is asked without what it refused: {', '.join(one.without)}."
    yield from _noise(noise, now)
    if judge.error_at is not None and judge.state != "spent":
        yield f"  Last error {shown_time(judge.error_at, now)}: {judge.error}"


def _each_judge(judges: Sequence[OneJudge], now: float, *, works: bool) -> Iterator[str]:
    """Say of each judge, in the order in which they are asked, whether it gives the scores.
    works: one of them does."""
    asked = next((one.model for one in judges if one.breaker == "closed"), None)
    for place, one in enumerate(judges):
        role = "first judge" if place == 0 else f"fallback {place}"
        if one.model == asked and works:
            said = "gives the scores"
        elif one.breaker == "closed" and one.since is None:
            said = "stands by"
        else:
            since = "" if one.since is None else f" since {shown_time(one.since, now)}"
            again = "the next group tries it"
            if one.breaker == "half_open":
                again = "one group tries it now"
            elif one.breaker == "closed":
                again = "it is asked on until it fails three times in a row"
            elif one.until is not None and one.until > now:
                again = f"it is tried again {shown_age(now - one.until)}"
            said = f"fails{since}; {again}. Its error: {one.error}"
        yield f"  {one.model} ({role}): {said}"


def gate_judge_lines(judge: GateJudge | None) -> Iterator[str]:
    """Yield the lines about the judge of the deployment gate."""
    if judge is None or not judge.model:
        return
    rubric = "a rubric of its own" if judge.own_rubric else "judge.rubric"
    passes = counted(judge.passes, "pass", "passes")
    yield f"Gate: judged by {judge.model}, {passes}, by {rubric}."
    if judge.warning:
        yield f"  WARNING: {judge.warning}."


def _noise(noise: JudgeNoise | None, now: float) -> Iterator[str]:
    if noise is None or noise.sd is None:
        return
    between = f" ({noise.sd_low:.3f} to {noise.sd_high:.3f})" if noise.sd_low is not None else ""
    of = counted(noise.groups, "group")
    yield f"  Noise of a score: sd {noise.sd:.3f}{between}, from {of} scored twice."
    if noise.drift:
        since = "" if noise.drift_at is None else f" since {shown_time(noise.drift_at, now)}"
        of = f" --project {noise.project}" if noise.project else ""
        yield f"  The judge is NOT AS IT WAS{since}: {noise.drift}; see `sidecar judge noise{of}`"
