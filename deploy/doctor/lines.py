"""Say where the records of a line of adapters stop: at its learner, or before it serves. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from deploy.doctor.facts import Diagnosis, LineFacts
from deploy.registry.canary_rule import NOT_LOADED, SLOWEST
from deploy.registry.pace import DAY_S, steps_days
from sidecar.lines import line_of_adapter
from sidecar.settings import Canary as CanarySettings


def of_lines(
    lines: Sequence[LineFacts], loads_refused: Mapping[str, str], rules: CanarySettings
) -> Iterator[Diagnosis]:
    """Yield what stops the records of each line. The text names a line that is not the default one.

    loads_refused: adapter -> why a vLLM refuses to load it; one whose name is of no line counts as
        the first line's.
    """
    names = {one.line.name for one in lines}
    for at, facts in enumerate(lines):
        refused = {
            adapter: why
            for adapter, why in loads_refused.items()
            if line_of_adapter(adapter) == facts.line.name
            or (at == 0 and line_of_adapter(adapter) not in names)
        }
        yield from _learner(facts)
        yield from _serving(facts, refused)
        yield from _slow(facts, rules)


def _learner(facts: LineFacts) -> Iterator[Diagnosis]:
    run, project = facts.run, facts.line.project
    of, option = _words(project)
    if run is not None and run.status == "failed":
        yield Diagnosis(
            stage="learning",
            cause="run_failed",
            text=f"the newest training run{of} failed: {run.reason}",
            to_do="see the error's class among the symptoms in docs/runbook.md; its groups wait",
            project=project,
        )
    if run is not None and run.status == "held":
        yield Diagnosis(
            stage="learning",
            cause="held",
            text=f"the reward watch holds the learner{of}: {run.reason}",
            to_do="see `held` among the symptoms in docs/runbook.md: roll back, mend the judge's "
            f"rubric, or `sidecar learner override{option} --reason TEXT`; its groups wait",
            project=project,
        )
    if facts.learner_paused:
        query = "" if project is None else f"?project={project}"
        yield Diagnosis(
            stage="learning",
            cause="paused",
            text=f"an operator paused the learner{of}, so no run starts",
            to_do=f"resume it: POST /admin/v1/learner/resume{query}",
            project=project,
        )


def _not_loaded(facts: LineFacts) -> Iterator[tuple[str, str]]:
    """Yield the newest adapter, and why, when some vLLM cannot load it: its canary waits for that
    vLLM, or has ended inconclusive."""
    if facts.adapter is None:
        return
    name, state, reason = facts.adapter
    if state == "retired" and reason.startswith(NOT_LOADED):
        yield name, reason
    elif any(said in facts.canary for said in ("vLLM refused", "failed to load")):
        yield name, facts.canary


def _serving(facts: LineFacts, refused: Mapping[str, str]) -> Iterator[Diagnosis]:
    project = facts.line.project
    found = dict(refused)
    if facts.adapter is not None and facts.adapter[1] == "rejected":
        found.setdefault(facts.adapter[0], facts.adapter[2])
    not_loaded = dict(_not_loaded(facts))
    found = not_loaded | found
    _, option = _words(project)
    for name, reason in found.items():
        rank = "rank" in reason
        yield Diagnosis(
            stage="serving",
            cause="rank_too_high" if rank else "adapter_refused",
            text=f"{name} is not served: {reason}",
            to_do=_to_serve(name, option, rank=rank, not_loaded=name in not_loaded),
            project=project,
        )


def _slow(facts: LineFacts, rules: CanarySettings) -> Iterator[Diagnosis]:
    """Yield that a canary takes days, when one runs or the newest adapter had one in vain."""
    tried = bool(facts.canary) or (facts.adapter is not None and facts.adapter[1] == "retired")
    a_day, of = facts.sessions_a_day, _words(facts.line.project)[0]
    days = steps_days(rules.ramp, rules, a_day)
    limit = rules.step_max_s / DAY_S
    if not tried or a_day <= 0.0 or max(days) <= limit:
        return
    never = max(days) > SLOWEST * limit
    steps = ", ".join(f"{one / 100:g}%" for one in rules.ramp)
    yield Diagnosis(
        stage="serving",
        cause="little_traffic",
        text=f"a canary{of} wants {rules.step_min_sessions} sessions in each step ({steps}): about "
        f"{sum(days):.0f} days at today's {a_day:.0f} sessions a day"
        + (f", and a step ends after {SLOWEST * limit:g} at the latest" if never else ""),
        to_do="lower canary.step_min_sessions or raise canary.steps"
        + ("" if never else ", or wait: `sidecar status` says how long"),
        project=facts.line.project,
    )


def _to_serve(name: str, option: str, *, rank: bool, not_loaded: bool) -> str:
    if rank:
        return (
            "start vLLM with a --max-lora-rank of at least learner.rank and state it in "
            "serving.max_lora_rank, or lower learner.rank"
        )
    if not_loaded:
        return (
            "mend that vLLM (memory, --enable-lora, learner.adapters_dir at the same path), "
            f"then `sidecar canary start{option} {name}` where its canary has ended"
        )
    return (
        f"`sidecar adapters show{option}` and `sidecar canary get{option}` have the evidence; the "
        "next run starts from the champion"
    )


def _words(project: str | None) -> tuple[str, str]:
    """Return whose line it is in words, and the option of commands; empty for the default line."""
    return ("", "") if project is None else (f" of {project}", f" --project {project}")
