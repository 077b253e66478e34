"""The sections of the settings file for learning: groups, best of N, learner, canary, watch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from sidecar.settings.kinds import (
    Between,
    Budget,
    Count,
    Parallel,
    Section,
    Share,
    Timeout,
    Upstream,
    WebUrlOrNone,
)
from sidecar.settings.outside import MAX_METRICS, Metric, MetricName

SIZES = (2, 16)
"""Candidates that a judge is shown at once."""
ADVISED_SIZES = (4, 8)
"""As RULER's authors advise (ruler.mdx of ART): "very large groups confuse the judge", and few
answers differ by little."""


class Groups(Section):
    """Which exchanges become groups, and how the extra candidates are sampled."""

    size: Annotated[
        int, Between(*SIZES, "one answer has nothing to differ from, and a judge compares no more")
    ] = 8
    """Answers per group, including the served one; 4 to 8 are best for a judge."""
    rate: Share = 1.0
    """Share of eligible exchanges that are chosen, 0..1."""
    held_out_rate: Annotated[
        float, Between(0, 1, "with all of them held out nothing is learned", below_high=True)
    ] = 0.2
    """Share of sessions, by hash of how they begin, never trained on; they feed the deployment
    gate."""
    settle_s: Annotated[float, Between(0, 3_600, "nothing is learned from before", "s")] = 60.0
    """An exchange is decided so long after it was stored: an earlier turn of its conversation may
    still come, from another proxy, and move it to another session. 0: at once."""
    max_groups_per_session: Count = 4
    """Groups of one session within a day; its further exchanges are not chosen."""
    choose: Literal["uniform", "prefer"] = "uniform"
    """`uniform`: `rate` draws every step with the same probability. `prefer`: steps whose answers
    are likely to earn different scores are drawn more often than the others."""
    max_groups_per_near_prompt: Annotated[
        int, Between(0, 10_000, "0 sets no limit; the groups below it are counted")
    ] = 0
    """Groups of near-identical prompts of a project within a day. 0: no limit."""
    tokens_per_day: Annotated[
        int, Between(1, 10**15, "with none no group is completed; groups.rate = 0 chooses none")
    ] = 5_000_000
    """Sampled candidate tokens a day. When they are spent, sampling waits for midnight UTC."""
    concurrency: Parallel = 16
    """Candidates sampled at once."""
    sampling_upstreams: tuple[Upstream, ...] = ()
    """Base URLs of vLLMs that sample candidates in place of `serving.upstreams`: the same model,
    options and key. Control loads the adapters there too."""
    max_slowdown: Annotated[float, Between(0, 10, "it is a share of a step's time")] = 0.05
    """Share by which candidates may slow users in a vLLM, as fitted to its metrics. 0: no limit."""


class BestOf(Section):
    """Best of N at serving time."""

    enabled: bool = False
    """When off, a request that asks for it is answered with 400."""
    timeout_s: Timeout = 5.0
    """Longest wait for the judge, in seconds; then the client gets the first answer."""


class Tasks(Section):
    """Learning from whole sessions: attempts at one task, compared by how they ended."""

    learn: Literal["off", "outcome", "ruler", "mixed"] = "off"
    """What a session is rewarded by. outcome: what clients report; ruler: the judge, over whole
    sessions; mixed: outcomes decide, and the judge ranks those with equal outcomes."""
    key: Literal["header", "prompt", "template"] = "header"
    """The weakest thing in common that makes sessions attempts at one task. header:
    `x-sidecar-task`; prompt: also an equal first prompt; template: also a first message that is
    equal but for names and numbers."""
    size: Annotated[int, Between(2, 8, "one session has nothing to differ from")] = 4
    """Sessions in a group, and attempts of a rehearsal."""


class Rehearsals(Section):
    """Attempts at recorded tasks, played by the agent team's own runner while vLLM is idle."""

    runner: WebUrlOrNone = ""
    """URL of the runner; empty: nothing is rehearsed."""
    tokens_per_day: Budget = 0
    """Completion tokens of rehearsals a day. 0: nothing is rehearsed."""

    @property
    def are_on(self) -> bool:
        """Tasks are rehearsed."""
        return bool(self.runner) and self.tokens_per_day > 0


MOST_WEIGHT = 9_000
"""Largest weight of a step that is played, in basis points. Guards compare the candidate's sessions
with the champion's: at 95 % a candidate that failed 30 % of its sessions was noticed by them after
1,166 of these in the median, and at 100 % never (docs/log.md, 2026-11-27)."""


class Canary(Section):
    """The gate and the ramp of a new adapter (docs/canary.md)."""

    promote_on: Literal["no_worse", "better", "quick"] = "no_worse"
    """What promotes a candidate. no_worse: proof that it is worse by `margin` neither than the
    champion nor than the anchor; better: proof that it is better than the champion, and the same of
    the anchor; quick: its mean over the gate's prompts is less than `margin` below the champion's,
    which proves nothing."""
    margin: Annotated[
        float, Between(0.005, 1, "a smaller loss is never proven", below_high=True)
    ] = 0.05
    """Loss of judged score that is accepted: to the champion, and over all promotions together to
    the anchor."""
    turn_wait_s: Annotated[float, Between(0, 86_400, "guards see nothing earlier", "s")] = 120.0
    """How long a user's request waits, from its beginning, for those that began before it to end:
    guards count requests in the order of their beginning. Longer than nearly all replies take."""
    gate_prompts: Annotated[int, Between(1, 10_000, "each is sampled and judged")] = 40
    """Held-out prompts on which candidate, champion and anchor are compared before the ramp; up to
    three times as many while something speaks against the candidate."""
    gate_answers: Annotated[
        int, Between(1, 4, "both arms make one group, and a judge reads 8 answers")
    ] = 2
    """Answers of each per prompt; together they make one blind group. With an anchor at most 3."""
    gate_min_prompts: Annotated[int, Between(1, 10_000, "without a prompt nothing is compared")] = 4
    """With fewer held-out prompts than this the candidate waits."""
    max_tokens: Annotated[int, Between(1, 10_000_000, "an answer has a token")] = 256
    """Most tokens of a gate answer; the request's own limit if that is lower."""
    groups_per_hour: Annotated[int, Between(0, 100_000, "each is sampled and judged")] = 120
    """Groups of candidate, champion and anchor that are judged in an hour of the ramp."""
    max_groups: Annotated[int, Between(1, 100_000, "each is sampled and judged")] = 1_500
    """Judged groups, the gate's with them, after which an undecided canary is inconclusive."""
    steps: tuple[
        Annotated[int, Between(100, 10_000, "basis points: 100 is 1 %, 10000 every session")], ...
    ] = (2_000, 5_000)
    """Weights of the ramp, in basis points; the candidate is promoted after the last step. A larger
    one than `MOST_WEIGHT` is taken as that."""
    step_min_s: Annotated[float, Between(0, 2_592_000, "up to a month", "s")] = 60.0
    """Shortest step; not over `step_max_s`."""
    step_min_exchanges: Count = 20
    """Canary exchanges that a step must see."""
    step_min_sessions: Annotated[int, Between(1, 500, "more take days")] = 20
    """Sessions of the canary that a step must see."""
    step_max_s: Annotated[
        float, Between(1, 31_536_000, "a shorter step sees nobody, a longer one never ends", "s")
    ] = 86_400.0
    """A step that has not seen its exchanges and sessions by then ends inconclusive: the champion
    stays. Slow traffic gives it up to 28 times as long."""
    metrics: Annotated[Mapping[MetricName, Metric], Field(max_length=MAX_METRICS)] = Field(
        default_factory=dict
    )
    """Numbers from outside, by name: `[canary.metrics.NAME]`."""

    @property
    def ramp(self) -> tuple[int, ...]:
        """The steps as they are played: none beyond `MOST_WEIGHT`, and each once."""
        return tuple(dict.fromkeys(min(one, MOST_WEIGHT) for one in self.steps))


class Watch(Section):
    """When the learner is held because a reward is earned without better answers
    (docs/reward-watch.md)."""

    hold: bool = True
    """Whether a finding holds the learner; false only shows it."""
