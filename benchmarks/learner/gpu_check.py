"""`scripts/gpu_check`: what only a card can tell of the learner, in the minutes that it is lent.

A list of measures, the targets first. Each gives a row, which is in a file before the next begins:
a machine that is taken away loses one row. An error, memory that does not suffice among them, is a
row as well. After an error that spoils the card for its process, or ends it, the script runs the
rest in a new one. A measure that the minutes left do not hold is left out, and its row says so.
Weights are drawn on the card, in the product's own loader; nothing is downloaded. On a CPU the same
path runs small.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.learner import cells, run, sides
from benchmarks.learner.cells import Cell
from learner.explain import one_line
from learner.grpo.trainer import GrpoTrainer
from learner.policy.attention import FORMS, HALF_TOLERANCE, TOLERANCE, WINDOW, difference
from learner.policy.logprobs import Policy, joint_pack, packs_of
from learner.policy.memory import Checkpointing, is_out_of_memory, pack_estimate, prepare
from learner.policy.packing import keys_of, pack_group
from learner.policy.self_test import BF16_TOLERANCE, TOLERANCE as FP32_TOLERANCE
from learner.records import Parent, Phase, Silent, Stage, StepMetrics, TrainingGroup, TrainingJob
from sidecar.settings import Learner

ABOUT = """\
Measure the learner on a GPU. Rows go to gpu-check.jsonl one by one, and at the end with the targets
to gpu-check.json. In this order:
  - a whole run of the trainer at 1.7B (prompt 3,000, 8 answers of 500), with a profile of a step;
  - small groups, 8B, prompts of 16,000, the drift of bf16, TRL's step;
  - the card's own speed, attention and gradients against references, passes alone.
Weights are drawn on the card: nothing is downloaded.
Exit code: 0 all targets hold, 1 one does not, 2 there is no such device, 3 an error has spoiled the
card for this process."""
WIDTHS = (64, 128)
TIMES = (1, 31)
"""Lengths of the drawn segments, in those of the learner's own check: all stay odd."""
PEAK_TFLOPS = {"H200": 989.0, "H100 80GB HBM3": 989.0}
"""Dense bf16 operations a second of a card, 1e12, by a part of its name (NVIDIA's data sheets)."""
LEAST_MFU = 0.4
"""Share of them that a step on unique tokens takes, counting 4 operations for a frozen weight."""
SAME, SAME_HALF = 1e-3, 0.1
"""Largest |difference| of a gradient to the CPU's in fp32, over the CPU's, in fp32 and in bf16. In
bf16 each product rounds by 2^-9, and the residual stream of 30 layers adds them up."""
CARD_GIB = 79.1
"""What a card sold with 80 GB has: 79.18 GiB, 85.0 GB, as torch says of an H100 80GB HBM3."""
TARGET = Cell(axis="target", group=8, prompt=3_000, answer=500)
SMALL = Cell(axis="small", group=8, prompt=512, answer=128)
LONG = Cell(axis="long", group=8, prompt=16_000, answer=1_000)
SHORT = Cell(axis="arithmetic", group=8, prompt=201, answer=61)
TINY = Cell(axis="tiny", group=3, prompt=32, answer=8)
"""In place of all of them on a CPU."""
PACK_TOKENS = 32_768
KERNELS, HOST = 25, 15
"""Entries of a profile that a row keeps."""
KINDS = {
    "attention": ("flash", "fmha"),
    "products": ("nvjet", "gemm", "cutlass", "splitK"),
    "copies and casts": ("copy_kernel", "Memcpy", "Memset", "CatArray"),
    "reductions": ("reduce_kernel",),
}
"""Kind of a kernel -> parts of its name; the first that fits counts."""
SHAPES = {"135M": sides.SMOLLM2_135M, "1.7B": sides.ON_CUDA, "8B": sides.QWEN3_8B}


class Watched(Silent):
    """Times the phases of a run, and profiles its last step."""

    def __init__(self, profile: torch.profiler.profile | None, steps: int) -> None:
        self.profile = profile
        self.steps: list[StepMetrics] = []
        self.seconds: dict[str, float] = {}
        self._last, self._at, self._of = "loading", time.perf_counter(), steps

    def phase(self, name: Phase | str) -> None:
        now = time.perf_counter()
        self.seconds[self._last] = round(self.seconds.get(self._last, 0) + now - self._at, 3)
        self._last, self._at = name, now

    def plan(self, stages: Sequence[Stage]) -> None:
        self.phase(stages[0].name)

    def step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)
        if self.profile is not None and len(self.steps) == self._of - 1:
            self.profile.start()
        elif self.profile is not None and len(self.steps) == self._of:
            self.profile.stop()


@dataclass(slots=True)
class Bench:
    """The measures on one device. Each returns a row."""

    device: torch.device
    folder: Path
    _policy: tuple[tuple[object, ...], Policy] | None = None
    _expected: tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]] | None = None
    """Of the arithmetic: the loss, the gradients and the adapter's weights of the CPU."""
    _halves: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """By precision: log-probabilities by way, and the adapter's weights."""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def shape(self, size: str) -> dict[str, int]:
        return SHAPES[size] if self.cuda else sides.ON_CPU

    def policy(self, size: str, *key: object) -> Policy:
        """Return a policy; one of another key is given up first. key: what was changed in it."""
        if self._policy is None or self._policy[0] != (size, *key):
            self.release()
            precision = "bfloat16" if self.cuda else "float32"
            made = sides.make_policy(self.folder, self.shape(size), str(self.device), precision)
            self._policy = ((size, *key), made)
        return self._policy[1]

    def release(self) -> None:
        self._policy = None
        gc.collect()
        torch.cuda.empty_cache()

    def ceilings(self) -> results.Row:
        """What the card reaches in a copy (read and written) and a product of bf16."""
        numbers = 2**30 if self.cuda else 2**20
        of = torch.randn(numbers, device=self.device, dtype=torch.bfloat16)
        to = torch.empty_like(of)
        copy = min(self._time(lambda: to.copy_(of)) for _ in range(5))
        side = 8_192 if self.cuda else 256
        left = of[: side**2].view(side, side)
        product = min(self._time(lambda: left @ left) for _ in range(5))
        return {"copy_tb_s": 4 * numbers / copy / 1e12, "tflops": 2 * side**3 / product / 1e12}

    def product(self) -> results.Row:
        """The head's product of bf16 into fp32, at odd sizes, against fp64."""
        rows, width, out = (499, 2_049, 4_001) if self.cuda else (49, 65, 33)
        left, right = (
            torch.randn(shape, device=self.device, dtype=torch.bfloat16)
            for shape in ((rows, width), (width, out))
        )
        exact = left.double() @ right.double()
        found = (
            torch.mm(left, right, out_dtype=torch.float32)
            if self.cuda
            else left.float() @ right.float()
        )
        return {"value": float((found - exact).norm() / exact.norm()), "limit": 1e-5}

    def kernel(self, form: Any, dtype: torch.dtype, times: int) -> results.Row:
        """The largest difference to a dense mask, for each width, with and without a window."""
        found = [
            difference(form, self.device, dtype, width, window, times)
            for width in WIDTHS
            for window in (None, WINDOW)
        ]
        limit = TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE
        # The gradient of a value is a sum over its queries, and its rounding grows as their root.
        return {"value": max(found), "limit": limit * times**0.5}

    def arithmetic(self, precision: str, *, alone: bool) -> results.Row:
        """Loss and gradients against fp32 rows on the CPU, on the same weights."""
        if self._expected is None:
            self._expected = self._gradients("cpu", "float32", alone=True)
        loss, expected, weights = self._expected
        found_loss, found, _ = self._gradients(
            str(self.device), precision, alone=alone, weights=weights
        )
        apart = sum(float((found[name] - one).square().sum()) for name, one in expected.items())
        whole = sum(float(one.square().sum()) for one in expected.values())
        return {
            "value": (apart / whole) ** 0.5,
            "limit": SAME if precision == "float32" else SAME_HALF,
            "loss_differs": found_loss - loss,
            "gradient_norm": whole**0.5,
        }

    def _gradients(
        self,
        device: str,
        precision: str,
        *,
        alone: bool,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """weights: of the adapter; peft draws those of a bf16 base in bf16."""
        self.release()
        shape = self.shape("135M")
        policy = sides.make_policy(self.folder, shape, device, precision, drawn_on="cpu")
        group = cells.drawn(SHORT if self.cuda else TINY, policy.vocabulary)
        of = {name: one for name, one in policy.model.named_parameters() if one.requires_grad}
        with torch.no_grad():
            for name, one in (weights or {}).items():
                of[name].copy_(one)
        loss = sides.gradients(policy, pack_group(group, max_tokens=PACK_TOKENS, alone=alone))
        gradients = {n: one.grad.double().cpu() for n, one in of.items() if one.grad is not None}
        return loss, gradients, {name: one.detach().cpu() for name, one in of.items()}

    def profiler(self) -> torch.profiler.profile:
        kinds = torch.profiler.ProfilerActivity
        return torch.profiler.profile(activities=[kinds.CPU, *[kinds.CUDA] * self.cuda])

    def train(
        self, size: str, cell: Cell, groups: int, per_step: int, *, profiled: bool = False
    ) -> results.Row:
        """A whole run of the trainer; figures of the steps between the first, which warms up, and
        the last, which may be profiled."""
        self.release()
        settings = Learner.model_validate(
            {
                "device": str(self.device),
                "precision": "bfloat16" if self.cuda else "float32",
                "groups_per_step": per_step,
                "pack_tokens": PACK_TOKENS,
            }
        )
        shape = self.shape(size)
        profile = self.profiler() if profiled else None
        watch = Watched(profile, round(groups / per_step))
        with tempfile.TemporaryDirectory(dir=self.folder) as base:
            adapter = Path(base) / "adapter"
            adapter.mkdir()
            job = TrainingJob(
                base_model_path=base,
                parent=Parent(name="base"),
                groups=tuple(_unrecorded(cell, shape["vocab_size"], n) for n in range(groups)),
                settings=settings,
                folder=adapter,
                check_stop=lambda: None,
                watch=watch,
            )
            with sides.drawn_base(Path(base), shape, str(self.device)):
                outcome = GrpoTrainer().train(job)
        watch.phase("")
        timed = watch.steps[1:-1]
        seconds = sum(one.seconds for one in timed)
        tokens = sum(one.computed_tokens for one in timed)
        policy = self.policy(size)
        packs = packs_of(policy, cells.drawn(cell, policy.vocabulary), PACK_TOKENS)
        operations = run.flops(policy, packs) * sum(one.groups for one in timed)
        return {
            "seconds": seconds,
            "step_seconds": [one.seconds for one in watch.steps],
            "groups": [one.groups for one in watch.steps],
            "tokens": tokens,
            **self._speed(tokens, operations, seconds),
            "peak_mb": watch.steps[-1].peak_memory_bytes // 2**20,
            "recompute": outcome.algorithm["checkpointing"],
            "phases": watch.seconds,
            **({"profile": _profile(profile, watch.steps[-1].seconds)} if profile else {}),
        }

    def passes(
        self,
        size: str,
        cell: Cell,
        *,
        checkpointing: Checkpointing = "auto",
        alone: bool = False,
        groups: int = 1,
        together: bool = False,
        profiled: bool = False,
        repeats: int = 3,
    ) -> results.Row:
        """Forward and backward passes of groups one by one: the least of some repeats.

        alone: a row for each answer. together: in one pack, which gives the sum of their gradients
        alone.
        """
        policy = self.policy(size, checkpointing, alone)
        group = cells.drawn(cell, policy.vocabulary)
        once = (
            pack_group(group, max_tokens=run.LONGEST, alone=True)
            if alone
            else packs_of(policy, group, run.LONGEST)
        )
        # Of other lengths, and so of other tokens: equal ones would be computed once.
        others = (replace(cell, prompt=cell.prompt + number) for number in range(groups))
        whole = joint_pack([cells.drawn(one, policy.vocabulary) for one in others])
        packs = [whole] if together else once * groups
        longest, gathered = max(len(one.input_ids) for one in packs), max(map(keys_of, packs))
        weights = sum(one.numel() * one.element_size() for one in policy.model.parameters())
        said = pack_estimate(policy, longest, gathered)
        prepared = prepare(policy, checkpointing, longest=longest, gathered=gathered)
        again = prepared.checkpointing
        part = (said[0] - said[1]) / policy.model.config.get_text_config().num_hidden_layers
        timed = [
            run.timed_step(self.device, lambda: sides.ours(policy, packs))
            for _ in range(repeats + 1)
        ]
        seconds = min(one[0] for one in timed[1:])
        tokens = sum(len(pack.input_ids) for pack in packs)
        profile: dict[str, object] = {}
        if profiled:
            with self.profiler() as found:
                wall, *_ = run.timed_step(self.device, lambda: sides.ours(policy, packs))
            profile = {"profile": _profile(found, wall)}
        return {
            **profile,
            "seconds": seconds,
            "first_seconds": timed[0][0],
            "tokens": tokens,
            "packs": len(packs),
            **self._speed(tokens, run.flops(policy, packs), seconds),
            "peak_mb": round(timed[-1][2] / 2**20),
            "estimate_mb": round((weights + said[0] - part * again) / 2**20),
            "recompute": again,
            "form": policy.form,
            "loss": timed[0][1],
        }

    def trl(self, *, checkpointing: Checkpointing) -> results.Row:
        """TRL's step on the tokens of the target, its padded batch at once."""
        policy = self.policy("1.7B", "trl", checkpointing)
        cell = TARGET if self.cuda else TINY
        prepare(policy, checkpointing, longest=cell.padded_tokens)
        step = sides.Trl(policy, self.folder, cell.answer).step
        group = cells.drawn(cell, policy.vocabulary)
        timed = [run.timed_step(self.device, lambda: step(policy, group)) for _ in range(3)]
        seconds = min(one[0] for one in timed[1:])
        useful = run.flops(policy, packs_of(policy, group, run.LONGEST))
        return {
            "seconds": seconds,
            "tokens": cell.padded_tokens,
            **self._speed(cell.padded_tokens, useful, seconds),
            "peak_mb": round(timed[-1][2] / 2**20),
            "loss": timed[0][1],
        }

    def half(self, one: tuple[str, str], other: tuple[str, str]) -> results.Row:
        """|difference| of the log-probabilities, on the same weights, nats a token.

        one, other: precision, and a way of `_ways`.
        """
        for precision in (one[0], other[0]):
            if precision not in self._halves:
                self._halves[precision] = self._ways(precision)
        expected = self._halves[other[0]][other[1]]
        apart = self._halves[one[0]][one[1]] - expected
        limit = BF16_TOLERANCE if "bfloat16" in (one[0], other[0]) else FP32_TOLERANCE
        return {
            "value": float(apart.abs().mean()),
            "limit": limit,
            "largest": float(apart.abs().max()),
            "signed": float(apart.mean()),
            "spread": float(expected.std()),
            "tokens": len(apart),
        }

    def _ways(self, precision: str) -> dict[str, torch.Tensor]:
        """Log-probabilities of a group: packed; each answer a row of its own behind a dense mask;
        rows by transformers' own forward pass (plain)."""
        self.release()
        shape = {**self.shape("1.7B"), "num_hidden_layers": 8 if self.cuda else 2}
        cell = Cell(axis="half", group=4, prompt=512, answer=32) if self.cuda else TINY
        policy = sides.make_policy(self.folder, shape, str(self.device), precision)
        adapter = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        group = cells.drawn(cell, policy.vocabulary)
        found: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for weights in self._halves.values():  # of a bf16 base they are rounded
                for name, parameter in adapter.items():
                    parameter.copy_(weights[name])
            for way, alone in (("packed", False), ("rows", True)):
                packs = pack_group(group, max_tokens=run.LONGEST, alone=alone)
                by = replace(policy, form="dense") if alone else policy
                found[way] = torch.cat([by.logprobs(pack)[0] for pack in packs]).cpu()
            base = policy.model.get_base_model()
            base.set_attn_implementation("sdpa")
            found["plain"] = _plain(policy, group)
        return {**found, **{name: one.detach().cpu() for name, one in adapter.items()}}

    def _time(self, work: Callable[[], object]) -> float:
        return run.timed_step(self.device, lambda: (work(), 0.0)[1])[0] or 1e-9

    def _speed(self, tokens: int, operations: float, seconds: float) -> dict[str, object]:
        tflops = operations / seconds / 1e12
        peak = peak_tflops(torch.cuda.get_device_name(self.device) if self.cuda else "")
        mfu = {"mfu": tflops / peak} if peak else {}
        return {"tokens_per_s": round(tokens / seconds), "tflops": tflops, **mfu}


def peak_tflops(card: str) -> float | None:
    """Return the peak of a card; None where it is not known here."""
    return next((value for name, value in PEAK_TFLOPS.items() if name in card), None)


def _unrecorded(cell: Cell, vocabulary: int, number: int) -> TrainingGroup:
    """A group whose log-probabilities the check before the first step fills in."""
    group = cells.drawn(replace(cell, prompt=cell.prompt + number), vocabulary)
    rows = tuple(replace(row, recorded=False) for row in group.rows)
    return replace(group, group_id=f"drawn {number}", rows=rows)


def _plain(policy: Policy, group: TrainingGroup) -> torch.Tensor:
    """[N] nats of the answers' tokens, row by row, by the model's own forward pass."""
    values = []
    for row in group.rows:
        ids = torch.tensor([[*group.prompt_token_ids, *row.token_ids]], device=policy.device)
        with policy.precision():
            logits = policy.model(input_ids=ids, use_cache=False).logits[0].float()
        told = torch.log_softmax(logits[-len(row.token_ids) - 1 : -1], dim=-1)
        values.append(told.gather(-1, ids[0, -len(row.token_ids) :, None])[:, 0])
    return torch.cat(values).cpu()


def _profile(profile: Any, wall_s: float) -> results.Row:  # Any: torch's profiler is not typed
    """Return where a step's time went: on the card by kernel, on the host by operation."""
    entries = profile.key_averages()
    card = [
        one
        for one in entries
        if one.device_type.name == "CUDA" and not getattr(one, "is_user_annotation", False)
    ]
    host = [one for one in entries if one.device_type.name != "CUDA"]

    def most(found: list[Any], time_us: str, number: int) -> list[str]:
        found = sorted(found, key=lambda one: -getattr(one, time_us))[:number]
        return [f"{getattr(one, time_us) / 1e3:.2f} ms in {one.count}: {one.key}" for one in found]

    kinds: dict[str, float] = {}
    for one in card:
        fits = (kind for kind, parts in KINDS.items() if any(part in one.key for part in parts))
        kind = next(fits, "others, number by number")
        kinds[kind] = kinds.get(kind, 0) + one.self_device_time_total / 1e3
    return {
        "wall_ms": round(wall_s * 1e3, 1),
        "card_busy_ms": round(sum(one.self_device_time_total for one in card) / 1e3, 1),
        "kernels": sum(one.count for one in card),
        "ms_by_kind": {kind: round(ms, 1) for kind, ms in sorted(kinds.items())},
        "by_kernel": most(card, "self_device_time_total", KERNELS),
        "by_host": most(host, "self_cpu_time_total", HOST),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One row to come."""

    check: str
    what: str
    work: Callable[[], results.Row]
    minutes: float = 0.1
    """What it may take: what it took on an H100, and about half as much again."""

    @property
    def name(self) -> str:
        return f"{self.check}: {self.what}"


COMPUTED: Mapping[str, Checkpointing] = {"twice": "on", "once": "off"}
"""How often layers are computed -> what `prepare` is told."""


def measures(at: Bench) -> list[Measure]:
    """Return what is measured, the most wanted first."""
    target, small, long = (TARGET, SMALL, LONG) if at.cuda else (TINY, TINY, TINY)
    some, many = (16, 24) if at.cuda else (2, 4)
    forms = FORMS[at.device.type]
    # The kernel of `varlen` takes half precision alone.
    types = [(f, d) for f in forms for d in (torch.bfloat16, torch.float32)]
    kernels = [(f, d) for f, d in types if not (f == "varlen" and d == torch.float32)]
    return [
        Measure(
            check="step",
            what="1.7B, 3,000 + 8 x 500: whole run of 4 groups in 4 steps",
            work=partial(at.train, "1.7B", target, 4, 1, profiled=True),
            minutes=0.7,
        ),
        Measure(
            check="small",
            what="1.7B, 24 groups of 512 + 8 x 128: whole run in 3 steps",
            work=partial(at.train, "1.7B", small, many, many // 3),
            minutes=0.6,
        ),
        Measure(
            check="small",
            what="1.7B, 16 groups of 512 + 8 x 128, one by one: passes",
            work=partial(at.passes, "1.7B", small, groups=some),
            minutes=0.5,
        ),
        Measure(
            check="small",
            what="1.7B, 16 groups of 512 + 8 x 128 in one pack: pass",
            work=partial(at.passes, "1.7B", small, groups=some, together=True, profiled=True),
            minutes=0.4,
        ),
        *(
            Measure(
                check="8B",
                what=f"8B, 3,000 + 8 x 500: {name}",
                work=partial(at.passes, "8B", target, repeats=2, **how),
                minutes=0.3,
            )
            for name, how in PASSES_8B.items()
        ),
        *(
            Measure(
                check="long",
                what=f"{size}, 16,000 + 8 x 1,000: as the learner decides",
                work=partial(at.passes, size, long, repeats=1),
                minutes=0.4,
            )
            for size in ("1.7B", "8B")
        ),
        *(
            Measure(
                check="bf16",
                what=f"{name}, nats a token",
                work=partial(at.half, one, other),
            )
            for name, one, other in HALVES
        ),
        *(
            Measure(
                check="trl",
                what=f"1.7B, 3,000 + 8 x 500: TRL's step, layers computed {times}",
                work=partial(at.trl, checkpointing=how),
                minutes=0.3,
            )
            for times, how in COMPUTED.items()
        ),
        Measure(check="device", what="copy and product", work=at.ceilings),
        Measure(check="product", what="bf16 into fp32 against fp64", work=at.product),
        *(
            Measure(
                check="kernel",
                what=f"{form}, {dtype}, segments x {times}: largest difference to a mask",
                work=partial(at.kernel, form, dtype, times),
                minutes=0.3,
            )
            for form, dtype in kernels
            for times in (TIMES if at.cuda else (1, 3))
        ),
        *(
            Measure(
                check="arithmetic",
                what=f"135M, {precision} {'rows' if alone else 'packed'}: gradient against fp32 "
                "rows on the CPU",
                work=partial(at.arithmetic, precision, alone=alone),
                minutes=0.4,
            )
            for precision, alone in (("bfloat16", False), ("float32", False), ("bfloat16", True))
        ),
        *(
            Measure(
                check="pass",
                what=f"1.7B, 3,000 + 8 x 500: {name}",
                work=partial(at.passes, "1.7B", target, **how),
                minutes=0.2,
            )
            for name, how in PASSES.items()
        ),
    ]


HALVES = (
    ("packed bf16 against fp32 rows", ("bfloat16", "packed"), ("float32", "rows")),
    ("bf16 rows against fp32 rows", ("bfloat16", "rows"), ("float32", "rows")),
    ("packed bf16 against bf16 rows", ("bfloat16", "packed"), ("bfloat16", "rows")),
    ("plain transformers, bf16 against fp32", ("bfloat16", "plain"), ("float32", "plain")),
    ("packed bf16 against plain transformers", ("bfloat16", "packed"), ("bfloat16", "plain")),
    ("packed fp32 against plain transformers", ("float32", "packed"), ("float32", "plain")),
)
PASSES: Mapping[str, dict[str, Any]] = {
    "packed": {},
    "rows": {"alone": True},
}
PASSES_8B: Mapping[str, dict[str, Any]] = {
    "as the learner decides": {},
    "layers computed once": {"checkpointing": "off"},
}


@dataclass(slots=True)
class Sheet:
    """Rows in a file, each of them before the next is measured."""

    path: Path
    facts: Mapping[str, object]
    rows: list[results.Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.rows = [json.loads(line) for line in self.path.read_text().splitlines()]

    def has(self, one: Measure) -> bool:
        return any((row["check"], row["what"]) == (one.check, one.what) for row in self.rows)

    def add(self, one: Measure, found: results.Row) -> None:
        row = {"check": one.check, "what": one.what, **found, **self.facts}
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        short = {key: value for key, value in found.items() if not isinstance(value, (dict, list))}
        print(f"{one.check:11}{one.what}: {short}", flush=True)


def attempt(one: Measure) -> tuple[results.Row, bool]:
    """Measure; any error is a row. Returns: the row, and whether the process can go on."""
    started = time.perf_counter()
    usable = True
    try:
        found = one.work()
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the row's result
        full = is_out_of_memory(error) or is_out_of_memory(error.__cause__ or error)
        usable = full or not isinstance(error, torch.AcceleratorError)
        found = {
            "why": f"{'out of memory: ' if full else ''}{type(error).__name__}: {one_line(error)}"
        }
    # Outside of the handler, because the error's frames keep the tensors alive.
    if usable:
        gc.collect()
        torch.cuda.empty_cache()
    return {**found, "took_s": round(time.perf_counter() - started, 2)}, usable


def targets(rows: Sequence[results.Row]) -> list[results.Target]:
    """Return what must hold of the rows that were measured. Pure."""
    found: list[results.Target] = []
    for row in rows:
        what, why = f"{row['check']}: {row['what']}", str(row.get("why", ""))
        if "limit" in row:
            value = float(str(row["value"]))
            found.append(results.at_most(what, value, float(str(row["limit"]))))
        elif "mfu" in row and (row["check"] in ("step", "8B") or what.endswith(": packed")):
            share = float(str(row["mfu"]))
            found.append(results.at_least(f"{what}: share of the card", share, LEAST_MFU))
        elif why and row["check"] in ("product", "kernel", "arithmetic", "step", "bf16"):
            found.append(results.at_most(what, None, 0, why))
        if row.get("peak_mb") and row["check"] in ("8B", "long"):
            held = float(str(row["peak_mb"])) / 2**10
            found.append(results.at_most(f"{what}: GiB", held, CARD_GIB))
    return found


def facts(device: torch.device, commit: str) -> dict[str, object]:
    """Return what each row carries."""
    driver = None
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    about = run.about(str(device), 1)  # on a CPU all is tiny: a second thread only waits
    return {
        "card": about["device"],
        "driver": driver,
        "torch": about["torch"],
        "transformers": about["transformers"],
        "peft": about["peft"],
        "commit": commit,
    }


def _commit() -> str:
    """Return this checkout's commit; "unknown" where git does not know it."""
    ask = ["git", "describe", "--always", "--dirty"]
    told = subprocess.run(ask, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def main(argv: Sequence[str]) -> int:
    """Write both files. Returns: the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        default="cuda",
        help="cuda (default), or cpu: the same path on small sizes, in about a minute",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the two files (default benchmarks/results; with --device cpu .bench); "
        "what gpu-check.jsonl has there is not measured again",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="a measure that would end later is left out, the last of the list first (default 10)",
    )
    parser.add_argument("--only", nargs="+", help="names of checks, such as step, 8B, long")
    parser.add_argument("--commit", help="of the code, where there is no git")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device; --device cpu runs the same path small")
        return 2
    # Where a process ends in a measure, scripts/gpu_check goes on in a new one.
    started = float(os.environ.get("GPU_CHECK_STARTED", time.time()))
    folder = options.out or (results.FOLDER if device.type == "cuda" else Path(".bench"))
    folder.mkdir(parents=True, exist_ok=True)
    told = facts(device, options.commit or _commit())
    sheet = Sheet(folder / "gpu-check.jsonl", told)
    with tempfile.TemporaryDirectory() as work:
        begun = Path(os.environ.get("GPU_CHECK_BEGUN", f"{work}/begun"))
        for one in measures(Bench(device, Path(work))):
            if sheet.has(one) or (options.only and one.check not in options.only):
                continue
            if one.name == os.environ.get("GPU_CHECK_ENDED_IN"):
                sheet.add(one, {"why": "its process ended: killed, or no memory even to say why"})
                continue
            left = options.minutes - (time.time() - started) / 60
            if one.minutes > left:
                sheet.add(one, {"why": f"left out: {left:.1f} minutes are left"})
                continue
            begun.write_text(one.name)
            row, usable = attempt(one)
            sheet.add(one, row)
            if not usable:
                return 3
            begun.write_text("")
    found = targets(sheet.rows)
    print(f"\n{results.targets_table(found)}")
    machine = {**results.machine(), **told}
    print(results.write("gpu-check", sheet.rows, found, machine=machine, folder=folder))
    return results.exit_code(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
