"""The conditions under which both sides are compared: what is judged, how the judge errs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.ruler.scripted import Traits

HTML, CODE = "html", "code"
LONG, BEYOND = "long-contexts", "beyond-the-judges-context"
CONTEXT_TOKENS = 5_000
"""What the judge of `BEYOND` takes: the candidates fit many times, the conversation does not."""


PLAIN = Traits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One row of the table for each side."""

    kind: str
    """The kind of the groups, a key of `benchmarks.ruler.material.KINDS`."""
    traits: Traits = PLAIN
    limit: int | None = None
    """Most tokens of prompt and reply that the judge takes; `judge.context_tokens` of ours."""


CONDITIONS: dict[str, Condition] = {
    "plain": Condition(kind="text"),
    "best-first": Condition(kind="text", traits=Traits(best_first=True)),
    "position-bias": Condition(kind="text", traits=Traits(slope=0.3, noise=0.03)),
    "noise": Condition(kind="text", traits=Traits(noise=0.15)),
    "position-bias-and-noise": Condition(kind="text", traits=Traits(slope=0.3, noise=0.1)),
    "ties": Condition(kind="ties", traits=Traits(noise=0.1, step=0.1)),
    "equal-answers": Condition(kind="alike", traits=Traits(slope=0.3, noise=0.1)),
    "out-of-range": Condition(kind="text", traits=Traits(defects=("ten_scale", "negative"))),
    "nan": Condition(kind="text", traits=Traits(defects=("nan", "nan_text"))),
    "missing-ids": Condition(kind="text", traits=Traits(defects=("missing",))),
    "doubled-ids": Condition(kind="text", traits=Traits(defects=("doubled", "one_more"))),
    "fenced-json": Condition(kind="text", traits=Traits(wrap="fence")),
    "words-around-json": Condition(kind="text", traits=Traits(wrap="prose")),
    LONG: Condition(kind="long"),
    BEYOND: Condition(kind="long", limit=CONTEXT_TOKENS),
    CODE: Condition(kind="code"),
    HTML: Condition(kind="html"),
    "tool-calls": Condition(kind="tool calls"),
    "chinese": Condition(kind="chinese"),
}
"""Name -> condition; a name is also that of the judge's model."""
FOOLED: dict[str, Condition] = {
    "injected-read-by-tags": Condition(kind="text", traits=Traits(noise=0.0, reads="tags")),
    "injected-read-decoded": Condition(kind="text", traits=Traits(noise=0.0, reads="decoded")),
}
"""Judges that hostile text can fool."""
OBEYS = "injected-obeyed"
"""A judge that does what an answer asks for itself: no form of a prompt can prevent that."""
OBEYING = Condition(kind="text", traits=Traits(noise=0.0, reads="obeys"))


def condition_of(model: str) -> Condition:
    """Return the condition that a model stands for: its name up to `--`. Raises: KeyError."""
    name = model.partition("--")[0]
    return {**CONDITIONS, **FOOLED, OBEYS: OBEYING}[name]
