"""Check each answer of a group: masks, and log-probabilities that agree with the trainer's.

`excess` says whether recorded log-probabilities are too far from the trainer's.

An answer is left out alone, for its own reason; its siblings are trained on. Where no
log-probabilities were recorded, those that the trainer computes under the adapter that sampled it
take their place: the ratio then holds the age of the answer. An answer whose recorded ones drift is
left out: recomputed ones would hide that it was sampled otherwise than recorded.

Of an answer that a mask of the server restricted, the tokens that it left alone are trained on
(`untouched`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from learner.grpo.advantages import (
    MIN_SPREAD,
    MIN_TRAINABLE,
    assign_rows,
    group_spread,
    session_scores,
    share,
    text_key,
)
from learner.records import CheckedAnswers, Drift, Fault, TrainableRow, TrainingGroup
from sidecar.settings import Learner

# Check that recorded log-probabilities agree with the trainer's. Pure.

TOKEN_NOISE = 0.1
"""Nats: scatter of |recorded - recomputed| over the tokens of good answers. Measured on
SmolLM2-135M, bf16 against an fp32 trainer, 1,682 tokens of 48 answers: mean 0.036, standard
deviation 0.036 (of the signed difference 0.051), largest 0.32; by group 0.030 to 0.043, by answer
0.021 to 0.060. Twice the 0.05, because trained adapters differ more (mean 0.049)."""
NOISE_DEVIATIONS = 3.0
"""Standard errors by which a mean over n tokens may exceed the limit."""


def measure(differences_N: Sequence[float]) -> Drift:
    """Summarise [N] recorded minus recomputed log-probabilities, in nats, N >= 1."""
    tokens = len(differences_N)
    return Drift(
        mean=sum(differences_N) / tokens,  # sum, because fmean refuses infinities of both signs
        mean_abs=sum(map(abs, differences_N)) / tokens,
        max_abs=max(map(abs, differences_N)),
        ratio_mean=sum(map(_ratio, differences_N)) / tokens,
        tokens=tokens,
    )


def excess(drift: Drift, limit: float) -> str | None:
    """Describe how a drift exceeds the limit; None when it does not.

    limit: `learner.max_drift`, nats a token, for a mean over many tokens. The mean over few tokens
        is noisy, so its own limit is higher by `NOISE_DEVIATIONS` standard errors. These use the
        measured noise of good answers, not the sample's own noise: a bad answer with a wide scatter
        must not raise its own limit.
    """
    allowed = limit + NOISE_DEVIATIONS * TOKEN_NOISE / math.sqrt(drift.tokens)
    if not drift.mean_abs <= allowed:
        return (
            f"recorded and recomputed log-probabilities differ by {drift.mean_abs:.4f} nats a "
            f"token over {drift.tokens} tokens; {allowed:.4f} is allowed"
        )
    if not abs(drift.ratio_mean - 1) <= allowed:
        return (
            f"the importance ratio before the first step is {drift.ratio_mean:.4f} and not 1 "
            f"over {drift.tokens} tokens; {allowed:.4f} is the allowed distance"
        )
    return None


def _ratio(difference: float) -> float:
    # exp overflows beyond 709. A token that differs by 50 nats is far over any limit already.
    return math.exp(min(-difference, 50.0))


# Which tokens of an answer a mask of the server left as the policy has them. Pure.

MASK_TOLERANCE = 0.2
"""Recorded minus recomputed log-probability in nats over which a token counts as touched by a mask
of the server (a grammar): it is left out of the loss."""


def untouched(differences_S: Sequence[float], tolerance: float) -> tuple[bool, ...]:
    """Return [S] True where no mask shows: recorded - recomputed is at most the tolerance, in nats.

    Values below are no mask: a mask makes what it allows likelier. They stay, and so does what is
    no number, for the check of drift to see.
    """
    return tuple(not difference > tolerance for difference in differences_S)


DRIFT = "drift"
OUT_OF_VOCABULARY = "token_out_of_vocabulary"
ALL_TOUCHED = "all_tokens_masked"
UNKNOWN = "logprobs_unknown"
GEOMETRIC = "geometric"
TURN_LIMIT = 1.0
"""Nats a token, mean over a turn: a geometric mean ratio outside of [1/e, e] is no mere age."""
SAMPLE_SIZE = "sample_size"
LEAST_SAMPLE_SIZE = 0.5
"""Of a group of sessions: below it half of its tokens would count for nothing."""
TOO_FEW = "too_few_trainable"
NO_SPREAD, WITHIN_NOISE = "no_spread", "within_noise"
QUIET = (NO_SPREAD, WITHIN_NOISE)
"""Reasons of groups whose rewards differ too little, as `learner.runs.selection` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A group that can be trained on."""

    group: TrainingGroup
    answers: CheckedAnswers
    differences: list[float]
    """Recorded minus recomputed log-probabilities of the tokens trained on, in nats, where they
    were recorded."""
    texts: Mapping[int, str]
    """Index of an answer that this decision left out -> the details."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    row: TrainableRow | None = None
    """As it is trained on; None: it is left out."""
    differences: tuple[float, ...] = ()
    """Differences of the tokens that are trained on; empty: no log-probabilities were recorded."""
    reason: str = ""
    text: str = ""
    recomputed: bool = False


def judge_answers(
    group: TrainingGroup,
    recomputed: Mapping[int, Sequence[float] | Fault],
    settings: Learner,
    *,
    least_spread: float = MIN_SPREAD,
) -> Judged | Fault:
    """Decide about every trainable answer, and about the group.

    least_spread: score units; of the group's rewards.
    recomputed: index of a trainable answer -> its log-probabilities, nats, at its temperature; or
        why they cannot be computed.
    Returns: a fault when too few answers are left, the group drifts as a whole, or the rewards of
        what is left differ too little.
    """
    verdicts = {
        place: _look_at(row, recomputed[place], group.masked_by)
        for place, row in enumerate(group.rows)
        if row.trainable
    }
    for place, one in verdicts.items():
        why = excess(measure(one.differences), settings.max_drift) if one.differences else None
        verdicts[place] = one if why is None else _Verdict(reason=DRIFT, text=why)
    return _settled(group, CheckedAnswers(), verdicts, settings, least_spread)


def leave_out_far(
    group: TrainingGroup,
    answers: CheckedAnswers,
    settings: Learner,
    *,
    least_spread: float = MIN_SPREAD,
) -> Judged | Fault:
    """Leave out the sessions from which the policy is too far at the start of the run.

    One is left out with all its rows where a turn is too far off (`TURN_LIMIT`), and the group
    where few of its tokens would carry the whole sum (`sample_size`). What the check has left out
    stays out.
    group: as the check left it, with `TrainableRow.start`. answers: what the check decided.
    Returns: as `judge_answers`; the group as it is where nothing is too far off.
    """
    if not group.sessions:
        return Judged(group=group, answers=answers, differences=[], texts={})
    verdicts = _near_sessions(group)
    if (sample_size([group]) or 0.0) < LEAST_SAMPLE_SIZE:
        text = f"its effective sample size is under {LEAST_SAMPLE_SIZE} of its tokens"
        return Fault(SAMPLE_SIZE, text)
    if all(one.row is not None for one in verdicts.values()):
        return Judged(group=group, answers=answers, differences=[], texts={})
    return _settled(group, answers, verdicts, settings, least_spread)


def _settled(
    given: TrainingGroup,
    known: CheckedAnswers,
    verdicts: Mapping[int, _Verdict],
    settings: Learner,
    least_spread: float,
) -> Judged | Fault:
    """Return the group as it is trained on after these verdicts; a fault when it is not.

    known: what was decided before. least_spread: as for `judge_answers`.
    """
    group = _with_advantages(given, verdicts, settings)
    out = {place: one for place, one in verdicts.items() if one.row is None}
    left = verdicts.keys() - out.keys()
    if len({given.sessions[place] for place in left} if given.sessions else left) < MIN_TRAINABLE:
        return _too_few(out, len(verdicts))
    differences = [value for one in verdicts.values() if one.row for value in one.differences]
    why = excess(measure(differences), settings.max_drift) if differences else None
    if why is not None:
        return Fault(DRIFT, why)
    before = [row.counted for row in given.rows]
    flat = _flat(group, before, least_spread)
    if flat is not None:
        return flat
    hidden = {
        place: known.masked_tokens.get(place, 0) + given.rows[place].kept_tokens - row.kept_tokens
        for place, row in enumerate(group.rows)
        if row.trainable
    }
    answers = CheckedAnswers(
        left_out={**known.left_out, **{place: one.reason for place, one in out.items()}},
        recomputed=(
            *(place for place in known.recomputed if place not in out),
            *(place for place, one in verdicts.items() if one.row and one.recomputed),
        ),
        masked_tokens={place: tokens for place, tokens in hidden.items() if tokens},
        tokens=sum(row.kept_tokens for row in group.rows if row.trainable),
    )
    texts = {place: one.text for place, one in out.items()}
    return Judged(group=group, answers=answers, differences=differences, texts=texts)


def _near_sessions(group: TrainingGroup) -> dict[int, _Verdict]:
    far = {
        number: mean
        for number, row in zip(group.sessions, group.rows, strict=True)
        for mean in (_turns(row) if row.trainable else ())
        if abs(mean) > TURN_LIMIT
    }
    return {
        place: _Verdict(row=row)
        if (mean := far.get(group.sessions[place])) is None
        else _Verdict(reason=GEOMETRIC, text=f"a turn of its session moved {mean:.2f} nats a token")
        for place, row in enumerate(group.rows)
        if row.trainable
    }


def _turns(row: TrainableRow) -> list[float]:
    """Return the mean of log(pi_0 / mu) over each turn of a row, in nats a token."""
    moved = [a - b for a, b in zip(row.start or row.logprobs, row.logprobs, strict=True)]
    kept = row.kept or (True,) * len(moved)
    runs = groupby(zip(kept, moved, strict=True), key=lambda one: one[0])
    turns = [[value for _, value in run] for keep, run in runs if keep]
    return [sum(turn) / len(turn) for turn in turns]


def sample_size(groups: Sequence[TrainingGroup]) -> float | None:
    """Return (sum w)^2 / (n sum w^2) over the n tokens of sessions, w = pi_0 / mu; None: there are
    none. 1 where all are as likely as when they were sampled."""
    ratios = [
        math.exp(min(after - before, 50.0))
        for group in groups
        if group.sessions
        for row in group.rows
        if row.trainable
        for after, before in zip(
            row.of_kept(row.start or row.logprobs), row.of_kept(row.logprobs), strict=True
        )
    ]
    if not ratios:
        return None
    return sum(ratios) ** 2 / (len(ratios) * math.fsum(one**2 for one in ratios))


def _look_at(row: TrainableRow, values: Sequence[float] | Fault, masked_by: str | None) -> _Verdict:
    if isinstance(values, Fault):
        return _Verdict(reason=values.reason, text=values.text)
    if not row.recorded:
        if not all(map(math.isfinite, values)):
            return _Verdict(reason=UNKNOWN, text="its log-probabilities are not known")
        return _Verdict(row=replace(row, logprobs=tuple(values), recorded=True), recomputed=True)
    differences = tuple(a - b for a, b in zip(row.logprobs, values, strict=True))
    if masked_by is not None:
        free = untouched(differences, MASK_TOLERANCE)
        if not any(row.of_kept(free)):
            text = f"no token is the policy's own ({masked_by})"
            return _Verdict(reason=ALL_TOUCHED, text=text)
        row = row if all(free) else _keep(row, free)
    return _Verdict(row=row, differences=tuple(row.of_kept(differences)))


def _keep(row: TrainableRow, free: tuple[bool, ...]) -> TrainableRow:
    kept = row.kept or (True,) * len(free)
    return replace(row, kept=tuple(a and b for a, b in zip(kept, free, strict=True)))


def _with_advantages(
    group: TrainingGroup, verdicts: Mapping[int, _Verdict], settings: Learner
) -> TrainingGroup:
    """Return the group as it is trained on.

    Advantages are taken again where an answer that had a part in the baseline has none any more,
    and so are the rewards that it shared with answers that are the same.
    """

    def counts(place: int) -> bool:
        one = verdicts.get(place)
        # One without a token of its own was drawn as the others were: its reward counts.
        return group.rows[place].counted and (
            one is None or one.row is not None or one.reason == ALL_TOUCHED
        )

    counted = [counts(place) for place in range(len(group.rows))]
    advantages = [row.advantage for row in group.rows]
    enough = len(session_scores(group, counted)) >= MIN_TRAINABLE
    if counted != [row.counted for row in group.rows] and enough:
        if group.unshared:
            texts = [text_key(row.token_ids, row.temperature) for row in group.rows]
            group = replace(group, scores=share(group.unshared, texts, counted))
        advantages = assign_rows(group, counted, settings.advantage)
    rows = []
    for place, row in enumerate(group.rows):
        found = verdicts.get(place)
        kept = row if found is None or found.row is None else found.row
        rows.append(
            replace(
                kept,
                trainable=found is not None and found.row is not None,
                counted=counted[place],
                advantage=advantages[place],
            )
        )
    return replace(group, rows=tuple(rows))


def _flat(group: TrainingGroup, before: Sequence[bool], least: float) -> Fault | None:
    """Return the fault of a group whose spread was that of answers which do not count any more.

    before: [G] which answers counted.
    """
    counted = [row.counted for row in group.rows]
    if counted == before:
        return None  # the gate saw these rewards
    found = group_spread(group, counted)
    text = f"the rewards of the {sum(counted)} answers that count spread by {found:.4f}"
    if found < least:
        why = NO_SPREAD if found < MIN_SPREAD else WITHIN_NOISE
        return Fault(why, f"{text}, least {least:.4f}")
    return None


def _too_few(out: Mapping[int, _Verdict], answers: int) -> Fault:
    if not out:
        return Fault(TOO_FEW, f"{answers} of its answers can be trained on")
    reason, _ = Counter(one.reason for one in out.values()).most_common(1)[0]
    place, one = next((place, one) for place, one in out.items() if one.reason == reason)
    what = "drift" if {one.reason for one in out.values()} == {DRIFT} else "are left out"
    return Fault(reason, f"{len(out)} of {answers} answers {what}; answer {place}: {one.text}")
