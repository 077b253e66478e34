"""Train on a server of the Tinker API: many GPUs, mixtures of experts, no engine of ours.

The server has the base, the LoRA and Adam. All else is as in `learner.grpo.trainer`: the checks of
the groups, the loss, what a step takes, and its rate.

Every loss goes through one of the API's. The server gives the log-probabilities of a step's tokens,
`learner.grpo.losses` the slope of the step's loss at each; `importance_sampling` around the same
log-probabilities, with minus the slope as the advantage, has that gradient, since its ratio is 1.
So it is the local trainer's, whatever losses a server knows. It takes a second forward pass.

Servers divide differently: some add up tokens, others take means over the positions of a sequence,
then over sequences. So the sequences of a step are filled up to one length: the gradients then
differ by a factor, which Adam cancels where its epsilon is far smaller.

Left out: a server computes at temperature 1, so that answers of another one count as not recorded;
no divergence from the base is measured; there is no `probe.json`; a killed run begins anew; where
the server says no norm of the gradient the step's is 0, as that of the update always is.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import torch

from learner import ranks
from learner.adapter_folder import CONFIG, LINEAGE, MAX_FILE_BYTES, WEIGHTS, read_plain
from learner.errors import (
    FaultyGroupsError,
    LearnerError,
    NonFiniteError,
    ParentError,
    TinkerServerError,
)
from learner.explain import one_line
from learner.grpo import chance, checks, optimizer, trainer
from learner.grpo.answers import Judged
from learner.grpo.checkpoint import Snapshot, draw_curves
from learner.grpo.losses import Objective, objective, tokens_of
from learner.patience import in_thread
from learner.policy.adapter_io import ADAPTER, SEED, load_shapes, take_adapter
from learner.policy.packing import pack_rows
from learner.records import (
    Fault,
    Parent,
    StepMetrics,
    TrainableRow,
    TrainingGroup,
    TrainingJob,
    TrainingOutcome,
)
from sidecar.records import BASE

T = TypeVar("T")
Datum = Mapping[str, list[Any]]  # Any: int or float
"""`tokens`, `target_tokens`, `logprobs` and `advantages`, [T] each: at each token the next one, its
log-probability in nats, and minus the slope of the step's loss; 0 at what is not in the loss."""

STATE = "tinker_state"
"""Member of a lineage's `algorithm`: what the server goes on from."""
EPSILON = 1e-12
"""Of Adam: the API's default. A mean over 64 sequences of 2,000 tokens divides gradients by 1e5."""
NO_KEY = "tml-none"
"""The client takes no other form; servers of one's own ask for no key."""
NO_TINKER = (
    "it is \"tinker\", and the client is not installed; run `pip install '.[tinker]'` in the "
    "folder that the sidecar was installed from"
)
POLL_S = 0.5


class Lora(Protocol):
    """An adapter on a server."""

    def forward(self, data: Sequence[Datum]) -> list[list[float]]:
        """Return [T] log-probabilities of the targets of each datum, nats."""

    def step(self, data: Sequence[Datum], rate: float) -> Mapping[str, float]:
        """Take one optimiser step. Returns: what the server says of it."""

    def save(self, folder: Path) -> str:
        """Write the server's PEFT folder. Returns: its name of the state that it keeps."""


Open = Callable[[Parent], Lora]
"""Gives a new adapter with a version's weights. Raises: ParentError when the server has none."""


class TinkerTrainer:
    """Implements `Trainer`."""

    def __init__(self, connect: Callable[[TrainingJob], Open] | None = None) -> None:
        self._connect = connect or (lambda job: TinkerServer(job).open)

    def train(self, job: TrainingJob) -> TrainingOutcome:
        """As `GrpoTrainer.train`. Raises: what that raises, and TinkerServerError."""
        job.report("")
        shapes = load_shapes(job.base_model_path, job.parent, job.settings)
        rate = trainer.rate_of(job.settings, int(shapes.config.get_text_config().hidden_size))
        opened = self._connect(job)
        job = replace(job, groups=tuple(map(_at_one, job.groups)))
        lora = opened(job.parent)
        kept = _checked(opened, lora, job)
        found: float | None = None
        while True:
            groups = kept.checked.groups
            job.watch.plan(trainer.stages(job, groups, ["training"]))
            job.watch.begin_steps(())
            metrics = _steps(lora, job, kept, rate)
            if job.signals is None or not any(one.sessions for one in groups):
                break
            found, by_chance = trainer.shuffle_gate(metrics, groups, job.signals)
            if not by_chance:
                break
            checks.log_faults(by_chance)
            kept, lora = kept.without(by_chance), opened(job.parent)
        adapter = shapes.peft_config[ADAPTER]
        algorithm: dict[str, object] = {
            "loss": job.settings.loss,
            "advantage": job.settings.advantage,
            "optimizer": "AdamW of a Tinker server, rate by the groups' signals",
            "betas": optimizer.BETAS,
            "rank": adapter.r,
            "alpha": adapter.lora_alpha,
            "quiet_groups": trainer.quiet_groups(job, kept),
        }
        if metrics:
            job.watch.phase("saving")
            with tempfile.TemporaryDirectory(prefix="tinker-", dir=job.folder.parent) as given:
                algorithm[STATE] = lora.save(Path(given))
                take_adapter(shapes, Path(given), job.folder)
        outcome = TrainingOutcome(
            metrics=metrics,
            drift=kept.checked.drift,
            algorithm=algorithm,
            faults=kept.faults,
            answers=kept.checked.answers,
            signal=found,
        )
        if metrics:
            draw_curves(outcome, job.folder)
        return outcome


def _at_one(group: TrainingGroup) -> TrainingGroup:
    """Take a group at temperature 1: other log-probabilities are not the server's."""
    rows = [
        replace(row, temperature=1.0, recorded=row.recorded and row.temperature == 1.0)
        for row in group.rows
    ]
    return replace(group, rows=tuple(rows))


def _trainable(group: TrainingGroup) -> list[TrainableRow]:
    return [row for row in group.rows if row.trainable]


def _checked(opened: Open, lora: Lora, job: TrainingJob) -> Snapshot:
    job.watch.plan(trainer.stages(job, job.groups, ["checking", "training"]))
    found: dict[str, Judged | Fault] = {}
    for name in dict.fromkeys(group.adapter for group in job.groups):
        members = [one for one in job.groups if one.adapter == name]
        gave = {BASE: Parent(name=BASE), **job.samplers}.get(name)
        try:
            of_sampler = lora if name == job.parent.name else opened(gave or Parent(name=name))
        except ParentError as error:
            gone = Fault(checks.UNCHECKED, one_line(error))
            found |= {one.group_id: gone for one in members}
            continue
        for group, values in zip(members, logprobs(of_sampler, job, members), strict=True):
            places = [place for place, row in enumerate(group.rows) if row.trainable]
            of_rows = dict(zip(places, values, strict=True))
            found[group.group_id] = checks.decide(group, of_rows, job)
    checked = checks.gathered(found, job)
    groups = []
    for group, values in zip(checked.groups, logprobs(lora, job, checked.groups), strict=True):
        rest = iter(values)
        rows = [replace(one, start=(*next(rest),)) if one.trainable else one for one in group.rows]
        groups.append(replace(group, rows=tuple(rows)))
    checked = replace(checked, groups=tuple(groups))
    uses_start = objective(job.settings).uses_start
    asked = [group for group in groups if uses_start or checks.moved(group, job)]
    checked, far = checks.from_start(None, checked, job, asked)
    faults = {**checked.faults, **far}
    checks.refuse_most(faults, len(job.groups))
    return Snapshot(checked=checked, faults=faults)


def logprobs(
    lora: Lora, job: TrainingJob, groups: Sequence[TrainingGroup]
) -> list[list[list[float]]]:
    """Return [S] log-probabilities of each trainable row of each group; as many groups at once as a
    step has."""
    found: list[list[list[float]]] = []
    size = job.settings.groups_per_step
    for part in (groups[at : at + size] for at in range(0, len(groups), size)):
        job.check_stop()
        data = [datum(one, row) for one in part for row in _trainable(one)]
        values = iter(lora.forward(filled(data)))
        for one in part:
            job.watch.done(one.group_id)
            first = len(one.prompt_token_ids) - 1
            rows = zip(_trainable(one), values, strict=False)
            found.append([of[first : first + len(row.token_ids)] for row, of in rows])
    return found


def datum(
    group: TrainingGroup,
    row: TrainableRow,
    logprobs_S: Sequence[float] = (),
    advantages_S: Sequence[float] = (),
) -> Datum:
    """Lay an answer behind its prompt."""
    whole = (*group.prompt_token_ids, *row.token_ids)
    before = (0.0,) * (len(group.prompt_token_ids) - 1)
    return {
        "tokens": [*whole[:-1]],
        "target_tokens": [*whole[1:]],
        "logprobs": [*before, *logprobs_S],
        "advantages": [*before, *advantages_S],
    }


def filled(data: Sequence[Datum]) -> list[Datum]:
    """Return the data of a step with one length."""
    size = max(len(one["tokens"]) for one in data)
    return [{name: [*of, *[0] * (size - len(of))] for name, of in one.items()} for one in data]


def _steps(lora: Lora, job: TrainingJob, kept: Snapshot, rate: float) -> tuple[StepMetrics, ...]:
    """Take every step. rate: of a step whose groups all tell enough. Raises: NonFiniteError."""
    aim, groups = objective(job.settings), kept.checked.groups
    done: list[StepMetrics] = []
    for number, dealt in enumerate(chance.deal(groups, job.settings.groups_per_step), 1):
        job.check_stop()
        started, first = time.monotonic(), number == 1
        at_start = [[row.start for row in _trainable(group)] for group in dealt]
        sums, data = pushes(dealt, at_start if first else logprobs(lora, job, dealt), aim, first)
        full = sum(optimizer.rate_share(group, job) for group in dealt)
        quiet = trainer.quiet_groups(job, kept) * len(dealt) / len(groups)
        of_step = rate * full / (len(dealt) + quiet)
        said = lora.step(data, of_step)
        norm = next((value for name, value in said.items() if name.endswith("grad_norm")), 0.0)
        update = optimizer.Update(grad_norm=norm, update_norm=0.0, rate=of_step)
        one = trainer.step_metrics(number, dealt, sums, update, time.monotonic() - started)
        without = trainer.left_out(dealt, job, kept.checked, kept.faults, sums)
        done.append(replace(one, left_out=without))
        job.watch.step(done[-1])
    return tuple(done)


def pushes(
    groups: Sequence[TrainingGroup],
    logprobs: Sequence[Sequence[Sequence[float]]],
    aim: Objective,
    first: bool,
) -> tuple[trainer.StepSums, list[Datum]]:
    """Return the sums of a step, and what the server gets of it.

    logprobs: [S] nats of each trainable row of each group, before the step. first: as of
    `accumulate`. In the place of the entropy stands -log p. Raises: NonFiniteError.
    """
    packs = [pack_rows(group, _trainable(group)) for group in groups]
    tokens = sum(len(pack.targets) for pack in packs)
    sums = trainer.StepSums(tokens=tokens, denominator=aim.denominator(packs))
    data: list[Datum] = []
    for group, pack, values in zip(groups, packs, logprobs, strict=True):
        rows = list(zip(_trainable(group), values, strict=True))
        logprobs_N = torch.tensor([one for row, of in rows for one in row.of_kept(of)])
        tokens_N = tokens_of(pack, logprobs_N.requires_grad_())
        found = aim.sums(tokens_N)
        (slopes_N,) = torch.autograd.grad(found.loss / sums.denominator, logprobs_N)
        if not bool(torch.isfinite(slopes_N.sum() + found.loss)):
            fault = Fault(checks.NON_FINITE, f"group {group.group_id} has no finite gradient")
            raise NonFiniteError(fault.text, {group.group_id: fault})
        sums.add(found, -float(logprobs_N.detach().sum()), pack)
        if group.sessions and not first:
            t, v = chance.of_group(group, tokens_N.since_start)
            sums.alignment += t
            sums.alignment_variance += v
        pushed = iter((-slopes_N).tolist())
        for row, of in rows:
            kept = [next(pushed) if keep else 0.0 for keep in row.kept or (True,) * len(of)]
            data.append(datum(group, row, of, kept))
    data = filled(data)
    sums.computed_tokens = sum(len(one["tokens"]) for one in data)
    return sums, data


class TinkerServer:
    """A connection by the package `tinker`. A call that is left goes on in a thread, which keeps no
    process alive."""

    def __init__(self, job: TrainingJob) -> None:
        """Raises: TinkerServerError."""
        self._job, self._url = job, job.settings.tinker_url
        try:
            self.sdk: Any = importlib.import_module("tinker")  # Any: an optional package
        except ImportError as error:
            raise TinkerServerError(f"learner.tinker_url: {NO_TINKER} ({error})") from error
        known = any(map(os.environ.get, ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD")))
        address = {"base_url": self._url, "api_key": None if known else NO_KEY}
        self.service = self.call("connecting", lambda: self.sdk.ServiceClient(**address))

    def open(self, start: Parent) -> Lora:
        """As `Open`."""
        settings, service = self._job.settings, self.service
        if start.name != BASE:
            state, load = state_of(start), service.create_training_client_from_state
            doing = f"loading {start.name} from {state}"
            return TinkerLora(self, self.call(doing, lambda: load(state), refused=ParentError))
        asked: dict[str, Any] = {
            "base_model": self._job.base_model_path,
            "rank": settings.rank,
            "seed": SEED,
            "train_unembed": False,
        }
        create = service.create_lora_training_client
        return TinkerLora(self, self.call("making an adapter", lambda: create(**asked)))

    def call(
        self, doing: str, work: Callable[[], T], refused: type[LearnerError] = TinkerServerError
    ) -> T:
        """Do a call of the client until the run is stopped, or for `ranks.TIMEOUT_S`.

        refused: what to raise where the server says no to this very request.
        """
        future, limit_s, began = in_thread(work), ranks.TIMEOUT_S, time.monotonic()
        what = f"the Tinker server at {self._url} failed at {doing}"
        while not wait([future], POLL_S).done:
            self._job.check_stop()
            if time.monotonic() - began > limit_s:
                raise TinkerServerError(f"{what}: no answer in {limit_s:g} s; is it up?")
        error = future.exception()
        if error is None:
            return future.result()
        status = getattr(error, "status_code", 0)
        no = isinstance(error, self.sdk.RequestFailedError) or status in (400, 404, 409, 422)
        kind = refused if no else TinkerServerError
        raise kind(f"{what}: {type(error).__name__}: {one_line(error)}; see its log") from error


def state_of(version: Parent) -> str:
    """Return the state that a server keeps of a version. Raises: ParentError when there is none."""
    try:
        lineage = json.loads(read_plain((version.path or Path()) / LINEAGE))
        return str(lineage["algorithm"][STATE])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ParentError(
            f"{version.name} was not trained on a Tinker server, and those go on only from what "
            "they saved themselves; roll back to the base, or leave learner.tinker_url out"
        ) from error


class TinkerLora:
    """Implements `Lora`. client: a `TrainingClient` of the package."""

    def __init__(self, server: TinkerServer, client: Any) -> None:  # Any: an optional package
        self._server, self._client, self._types = server, client, server.sdk.types

    def forward(self, data: Sequence[Datum]) -> list[list[float]]:
        sent, ask = self._sent(data), self._client.forward

        def whole() -> list[list[float]]:
            found = ask(sent, "importance_sampling").result().loss_fn_outputs
            values = [[float(nats) for nats in one["logprobs"].data] for one in found]
            if [*map(len, values)] != [len(one["tokens"]) for one in data]:
                raise ValueError("it has other log-probabilities than were asked for")
            if not all(math.isfinite(nats) for of in values for nats in of):
                raise ValueError(
                    "a log-probability is no finite number; lower learner.learning_rate"
                )
            return values

        return self._server.call("a forward pass", whole, FaultyGroupsError)

    def step(self, data: Sequence[Datum], rate: float) -> Mapping[str, float]:
        sent, (beta1, beta2) = self._sent(data), optimizer.BETAS
        adam = self._types.AdamParams(
            learning_rate=rate,
            beta1=beta1,
            beta2=beta2,
            eps=EPSILON,
            grad_clip_norm=optimizer.MAX_GRAD_NORM,
        )

        def both() -> dict[str, float]:
            gradient = self._client.forward_backward(sent, "importance_sampling")
            stepped = self._client.optim_step(adam)
            gradient.result()
            metrics = stepped.result().metrics or {}
            return {name: float(value) for name, value in metrics.items()}

        return self._server.call("a step", both, FaultyGroupsError)

    def save(self, folder: Path) -> str:
        name, client = uuid.uuid4().hex, self._client
        self._server.call("saving the adapter", lambda: self._download(name, folder))
        state = self._server.call("saving", lambda: client.save_state(f"{name}s").result().path)
        return str(state)

    def _download(self, name: str, folder: Path) -> None:
        path = self._client.save_weights_for_sampler(name).result().path
        run, _, checkpoint = path.removeprefix("tinker://").partition("/")
        rest = self._server.service.create_rest_client()
        url = rest.get_checkpoint_archive_url(run, checkpoint).result().url
        with tempfile.TemporaryFile(dir=folder) as file:
            with httpx.stream("GET", url, timeout=60.0) as reply:
                for part in reply.raise_for_status().iter_bytes():
                    if file.write(part) and file.tell() > 2 * MAX_FILE_BYTES:
                        raise ValueError(f"the archive has more than {2 * MAX_FILE_BYTES} bytes")
            file.seek(0)
            with tarfile.open(fileobj=file) as archive:
                unpack(archive, folder)

    def _sent(self, data: Sequence[Datum]) -> list[Any]:  # Any: an optional package
        made, kinds = self._types, {"target_tokens": "int64"}
        kinds |= dict.fromkeys(("logprobs", "advantages"), "float32")
        return [
            made.Datum(
                model_input=made.ModelInput.from_ints(one["tokens"]),
                loss_fn_inputs={
                    name: made.TensorData(data=one[name], dtype=kind)
                    for name, kind in kinds.items()
                },
            )
            for one in data
        ]


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Write the two files of an adapter, and nothing else. Raises: ValueError for a huge one."""
    for member in archive:
        name = Path(member.name).name
        source = archive.extractfile(member) if member.isfile() else None
        if name in (CONFIG, WEIGHTS) and source is not None:
            if member.size > MAX_FILE_BYTES:
                raise ValueError(f"{name} has more than {MAX_FILE_BYTES} bytes")
            with (folder / name).open("wb") as file:
                shutil.copyfileobj(source, file)
