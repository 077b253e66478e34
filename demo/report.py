"""What the demo shows at its end: the table, the plot, the result file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from demo.exam import ExamAnswer, Interval, bootstrap

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # the backend must be chosen first


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamResult:
    """One adapter's exam, summed up."""

    score: Interval
    tokens: float
    complete: float
    """Share of complete answers, 0..1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Base against champion on the held-out questions."""

    base: ExamResult
    champion: ExamResult
    gain: Interval
    """Confidence interval of the mean paired difference per question."""
    questions: int


def compare(
    graded: Mapping[str, Mapping[str, float]],
    sheets: Mapping[str, Sequence[ExamAnswer]],
    *,
    base: str,
    champion: str,
) -> HeldOut:
    """Sum up two adapters that were graded in the same groups."""
    ids = sorted(graded[base])
    differences = [graded[champion][i] - graded[base][i] for i in ids]
    return HeldOut(
        base=_sum_up(graded[base], sheets[base]),
        champion=_sum_up(graded[champion], sheets[champion]),
        gain=bootstrap(differences),
        questions=len(ids),
    )


def _sum_up(scores: Mapping[str, float], sheet: Sequence[ExamAnswer]) -> ExamResult:
    return ExamResult(
        score=bootstrap(list(scores.values())),
        tokens=sum(answer.tokens for answer in sheet) / len(sheet),
        complete=sum(answer.complete for answer in sheet) / len(sheet),
    )


def table(held_out: HeldOut, *, champion: str, judge: str) -> str:
    """The before/after table, for a terminal."""
    label = "stand-in judge (a stated rule, not an LLM)" if judge == "stand-in" else judge
    base, new, gain = held_out.base, held_out.champion, held_out.gain
    rows = [
        ("", "base", "champion"),
        ("mean judge score", _show(base.score), _show(new.score)),
        ("mean answer length, tokens", f"{base.tokens:.1f}", f"{new.tokens:.1f}"),
        ("complete answers", f"{base.complete:.0%}", f"{new.complete:.0%}"),
    ]
    lines = [
        f"held-out questions: {held_out.questions}, champion: {champion}",
        f"judge: {label}",
        *(f"  {a:<28}{b:<26}{c}" for a, b, c in rows),
        f"  gain {gain.mean:+.3f}  (95% bootstrap interval {gain.low:+.3f} to {gain.high:+.3f})",
    ]
    return "\n".join(lines)


def _show(interval: Interval) -> str:
    return f"{interval.mean:.3f}  [{interval.low:.3f}, {interval.high:.3f}]"


def plot_rounds(
    path: Path, rounds: Sequence[tuple[str, Interval]], *, judge: str, verdicts: Sequence[str]
) -> None:
    """Held-out score of the serving adapter after each round, with its interval."""
    figure, axes = plt.subplots(figsize=(7.5, 4.2), dpi=120)
    xs = range(len(rounds))
    means = [interval.mean for _, interval in rounds]
    below = [interval.mean - interval.low for _, interval in rounds]
    above = [interval.high - interval.mean for _, interval in rounds]
    axes.errorbar(xs, means, yerr=[below, above], marker="o", capsize=4, color="#1f6f8b")
    for x, verdict in zip(xs, verdicts, strict=True):
        if verdict not in ("promoted", "start"):
            axes.annotate(verdict.replace("_", " "), (x, means[x]), xytext=(4, -14),
                          textcoords="offset points", fontsize=8, color="#a33")  # fmt: skip
    axes.set_xticks(list(xs), [name for name, _ in rounds])
    axes.set_xlabel("learn-and-deploy round (adapter that serves after it)")
    axes.set_ylabel("mean judge score, held-out questions")
    axes.set_ylim(0, 1)
    axes.grid(axis="y", alpha=0.3)
    axes.set_title(f"Score by round (judge: {judge}; bars: 95% bootstrap)", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def write_result(
    path: Path,
    *,
    held_out: HeldOut,
    rounds: int,
    setup_s: float,
    run_s: float,
    rollback: Mapping[str, Any],
    judge: str,
) -> None:
    """`.demo/result.json`, for programs."""
    gain = held_out.gain
    result = {
        "rounds": rounds,
        "setup_s": setup_s,
        "run_s": round(run_s, 1),
        "held_out": {
            "base": round(held_out.base.score.mean, 4),
            "champion": round(held_out.champion.score.mean, 4),
            "gain": round(gain.mean, 4),
            "gain_low": round(gain.low, 4),
            "gain_high": round(gain.high, 4),
            "n": held_out.questions,
        },
        "mean_tokens": {
            "base": round(held_out.base.tokens, 2),
            "champion": round(held_out.champion.tokens, 2),
        },
        "complete": {
            "base": round(held_out.base.complete, 3),
            "champion": round(held_out.champion.complete, 3),
        },
        "rollback": dict(rollback),
        "judge": judge,
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
