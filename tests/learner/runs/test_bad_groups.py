"""Bad groups beside seven others: they are dropped for their reasons, and the others trained on.

The weights are compared bit by bit with those of a run that never had the bad group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import select

from ingest.intake.choose import count_pending
from ingest.records import Answer
from learner.errors import DriftError, OutOfMemoryError
from learner.grpo.trainer import GrpoTrainer
from learner.policy.adapter_io import load_policy
from learner.policy.logprobs import Policy
from learner.policy.packing import Pack
from learner.policy.self_test import SELF_TEST
from learner.records import Candidate, Parent
from learner.runs.train import Run
from sidecar.settings import Learner, Settings
from sidecar.store.database import Database
from sidecar.store.models import GroupRow, RunRow
from support.clock import Clock
from tests.learner.conftest import (
    PutGroup,
    counters,
    group_outcomes,
    logprobs_of,
    make_answer,
    make_scored_group,
)

Answers = list[Answer]
PROMPT = (1, 2, 3)
GROUPS = 8
BAD = str(GROUPS - 1)
MARK = 47
"""A token id that only the bad group has, for tests that break the computation itself."""
FEW = GROUPS // 2 - 1
"""Sound groups where the bad ones are just more than half, which is what ends a run."""


@pytest.fixture
def settings(settings: Settings) -> Settings:
    # At a rate of 0.02 the first step moves every ratio past the clip, and the others do nothing.
    learner = settings.learner.model_copy(
        update={"min_groups": GROUPS - 1, "groups_per_step": 4, "learning_rate": 0.001}
    )
    return settings.model_copy(update={"learner": learner})


@pytest.fixture(scope="module")
def base(tiny_base: Path) -> Policy:
    learner = Learner(rank=4, precision="float32", threads=1)
    return load_policy(str(tiny_base), Parent(name="base"), learner)


@pytest.fixture(scope="module")
def computed() -> dict[int, list[tuple[float, ...]]]:
    """Log-probabilities that `exact` has computed already, by the number."""
    return {}


@pytest.fixture
def exact(base: Policy, computed: dict[int, list[tuple[float, ...]]]) -> Callable[..., Answers]:
    """exact(number): two answers with the log-probabilities of the base."""

    def make(number: int) -> Answers:
        last = MARK if number == GROUPS - 1 else 12
        answers = ((10 + number % 3, 11, last), (20, 21))
        if number not in computed:
            computed[number] = logprobs_of(base, PROMPT, answers)
        return [
            make_answer(place, token_ids=ids, logprobs=values)
            for place, (ids, values) in enumerate(zip(answers, computed[number], strict=True))
        ]

    return make


Put = Callable[..., None]


@pytest.fixture
def put(put_group: PutGroup, exact: Callable[..., Answers]) -> Put:
    """put(numbers, change=, prefix=, **fields): groups that the base sampled."""

    def put_all(
        numbers: Any,
        change: Callable[[Answers], Answers] = lambda answers: answers,
        *,
        prefix: str = "",
        **fields: Any,
    ) -> None:
        for number in numbers:
            put_group(
                make_scored_group(
                    [1.0, 0.0],
                    answers=change(exact(number)),
                    group_id=f"{prefix}{number}",
                    **{"prompt_token_ids": PROMPT, **fields},
                )
            )

    return put_all


Train = Callable[..., Candidate]
AsWithoutBad = Callable[[Candidate], bool]


@pytest.fixture
def train(settings: Settings, database: Database, clock: Clock) -> Train:
    """train(run_id, **learner settings): one real run, each step of which has a gradient."""

    def start(run_id: str = "r1", **changes: Any) -> Candidate:
        clock.now += 100
        learner = settings.learner.model_copy(update=changes)
        changed = settings.model_copy(update={"learner": learner})
        candidate = Run(changed, database, GrpoTrainer, run_id=run_id, clock=clock).start()
        with database.read() as session:
            metrics = session.scalars(select(RunRow).where(RunRow.run_id == run_id)).one().metrics
        norms = [step["grad_norm"] for step in metrics]
        assert norms
        assert all(norms), f"a step compares nothing: gradient norms {norms}"
        return candidate

    return start


@pytest.fixture(scope="module")
def digest_without_bad() -> list[str]:
    """The digest that `as_without_bad` keeps."""
    return []


@pytest.fixture
def as_without_bad(put: Put, train: Train, digest_without_bad: list[str]) -> AsWithoutBad:
    """as_without_bad(candidate): its digest is that of a run that never had the bad group.

    That run is trained once for all tests.
    """

    def same(candidate: Candidate) -> bool:
        if not digest_without_bad:
            put(range(GROUPS - 1), prefix="again")
            digest_without_bad.append(train("r2").digest)
        return candidate.digest == digest_without_bad[0]

    return same


def row_of(database: Database, group_id: str) -> GroupRow:
    with database.read() as session:
        return session.scalars(select(GroupRow).where(GroupRow.group_id == group_id)).one()


def shifted(by: float) -> Callable[[Answers], Answers]:
    return lambda answers: [
        replace(a, logprobs=tuple(value + by for value in a.logprobs)) for a in answers
    ]


def second(**changes: Any) -> Callable[[Answers], Answers]:
    return lambda answers: [answers[0], replace(answers[1], **changes)]


WRONG_ANSWERS: dict[str, tuple[Callable[[Answers], Answers], str]] = {
    "a token id past the vocabulary": (second(token_ids=(20, 48)), "token_out_of_vocabulary"),
    "a token id below zero": (second(token_ids=(-3, 21)), "token_out_of_vocabulary"),
    "lengths that disagree": (second(logprobs=(-1.0,)), "too_few_trainable"),
    "a log-probability that is NaN": (second(logprobs=(math.nan, -1.0)), "too_few_trainable"),
    "an infinite log-probability": (second(logprobs=(-math.inf, -1.0)), "too_few_trainable"),
    "log-probabilities of -9999": (second(logprobs=(-9999.0, -9999.0)), "drift"),
    "an empty answer": (second(token_ids=(), logprobs=()), "too_few_trainable"),
    "a temperature of infinity": (second(temperature=math.inf), "too_few_trainable"),
    "a tiny temperature": (second(temperature=1e-40), "too_few_trainable"),
    "sampled at another temperature": (shifted(0.437), "drift"),
}


@pytest.mark.parametrize("half", [0, 1])
def test_bad_groups_cost_themselves_and_the_others_train_as_if_they_had_never_been(
    half: int, train: Train, put: Put, database: Database, as_without_bad: AsWithoutBad
) -> None:
    """Five kinds in a run: they are the smaller part of its groups."""
    kinds = dict(list(WRONG_ANSWERS.items())[half::2])
    put(range(GROUPS - 1))
    for kind, (change, _) in kinds.items():
        put([GROUPS - 1], change, prefix=f"{kind} ")

    candidate = train()

    outcome = group_outcomes(database)
    bad = {kind: outcome.pop(f"{kind} {BAD}") for kind in kinds}
    assert bad == {kind: ("dropped", reason) for kind, (_, reason) in kinds.items()}
    assert set(outcome.values()) == {("trained", None)}
    reasons = Counter(reason for _, reason in kinds.values())
    assert counters(database) == {"trained": GROUPS - 1, **reasons}
    assert as_without_bad(candidate)  # the digest names the weights: the same to the bit


def breaking(monkeypatch: pytest.MonkeyPatch, error: Exception, *, with_gradient: bool) -> None:
    """Break the computation of the group that holds MARK."""
    real = Policy.logprobs

    def logprobs(self: Policy, pack: Pack) -> Any:
        values, entropy = real(self, pack)
        is_groups = pack.group_id != SELF_TEST
        if is_groups and MARK in pack.targets and torch.is_grad_enabled() == with_gradient:
            raise error
        return values, entropy

    monkeypatch.setattr(Policy, "logprobs", logprobs)


@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_group_that_cannot_be_computed_costs_only_itself(
    train: Train,
    put: Put,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    with_gradient: bool,
    as_without_bad: AsWithoutBad,
) -> None:
    put(range(GROUPS))
    error = IndexError("index out of range in self")
    with monkeypatch.context() as patch:
        breaking(patch, error, with_gradient=with_gradient)
        candidate = train()

    assert group_outcomes(database).pop(BAD) == ("dropped", "computation_failed")
    assert str(error) in (row_of(database, BAD).detail or "")
    assert as_without_bad(candidate)


OUT_OF_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"
    ),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_a_group_that_does_not_fit_into_memory_is_left_out_once_and_dropped_the_second_time(
    train: Train,
    put: Put,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    put(range(GROUPS))
    breaking(monkeypatch, error, with_gradient=True)

    train()

    assert group_outcomes(database)[BAD] == ("scored", None)
    assert row_of(database, BAD).learn_attempts == 1
    put(range(GROUPS - 1), prefix="more")
    train("r2")
    assert group_outcomes(database)[BAD] == ("dropped", "out_of_memory")
    assert counters(database) == {"trained": 2 * (GROUPS - 1), "out_of_memory": 1}


def test_groups_that_fit_train_though_most_do_not_and_those_are_dropped_in_a_few_runs(
    train: Train,
    put: Put,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(range(FEW))
    for number in range(GROUPS - FEW):
        put([GROUPS - 1], prefix=f"large-{number}-")
    breaking(monkeypatch, OUT_OF_MEMORY[1], with_gradient=True)

    train()

    outcome = group_outcomes(database)
    assert {outcome.pop(str(number)) for number in range(FEW)} == {("trained", None)}
    assert set(outcome.values()) == {("scored", None)}
    assert {row_of(database, name).learn_attempts for name in outcome} == {1}
    with database.read() as session:
        assert count_pending(session, {"base"}) == 0
    runs = 1
    while ("scored", None) in group_outcomes(database).values():
        runs += 1
        put(range(FEW), prefix=f"new-{runs}-")
        train(f"r{runs}", min_groups=1)
    assert counters(database) == {"trained": FEW * runs, "out_of_memory": GROUPS - FEW}
    assert runs <= 5, "several are tried in one run: one in each would take more"


def test_memory_that_somebody_else_uses_for_a_while_costs_no_group(
    train: Train,
    put: Put,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(range(GROUPS))
    real = Policy.logprobs

    def logprobs(policy: Policy, pack: Pack) -> Any:
        if pack.group_id == SELF_TEST:
            return real(policy, pack)
        raise OUT_OF_MEMORY[1]

    named = rf"{GROUPS} of {GROUPS} groups do not fit into memory.*lower learner\.pack_tokens"
    with monkeypatch.context() as patch:
        patch.setattr(Policy, "logprobs", logprobs)
        with pytest.raises(OutOfMemoryError, match=named):
            train()
        assert set(group_outcomes(database).values()) == {("scored", None)}
        assert {row_of(database, str(n)).learn_attempts for n in range(GROUPS)} == {1}
        with pytest.raises(OutOfMemoryError):
            train("r2", min_groups=1)
        assert set(group_outcomes(database).values()) == {("scored", None)}
    runs = 2
    while ("scored", None) in group_outcomes(database).values() and runs < 12:
        runs += 1
        train(f"r{runs}", min_groups=1)

    assert counters(database) == {"trained": GROUPS}


def test_most_groups_that_drift_end_the_run_and_none_is_dropped(
    train: Train, put: Put, database: Database
) -> None:
    put(range(FEW))
    put(range(FEW, GROUPS), shifted(0.437))

    with pytest.raises(DriftError, match=r"5 of 8 groups fail.*differ by 0\.43.*base_model_path"):
        train()

    assert set(group_outcomes(database).values()) == {("scored", None)}
    attempts = [row_of(database, str(n)).learn_attempts for n in range(GROUPS)]
    assert attempts == [0] * FEW + [1] * (GROUPS - FEW)
    # The others do not wait for them: the next run takes those that never failed.
    train("r2", min_groups=GROUPS // 2)
    assert counters(database)["trained"] == FEW
