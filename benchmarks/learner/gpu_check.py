"""`scripts/gpu_check`: what only a card can tell of the learner, in one command and one JSON.

Attention over segments against torch's own with a mask, values and gradients; the estimate of a
pack's memory against the peak; whether 8 answers to a prompt of 16,384 fit one card of 80 GB with
an 8B model; bf16 against fp32; then the benchmark on drawn weights, and which share of the card's
operations it uses. On a CPU the same path runs on small sizes, and the memory is what autograd
keeps between the passes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.learner import cells, run, sides
from benchmarks.learner.cells import Cell
from learner.policy.attention.check import (
    FORMS,
    HALF_TOLERANCE,
    TOLERANCE,
    WINDOW,
    difference,
)
from learner.policy.logprobs import Policy
from learner.policy.memory import pack_estimate, recompute_layers
from learner.policy.packing import Pack, pack_group
from learner.policy.self_test import BF16_TOLERANCE

LONGEST_S = 480.0
ABOUT = """\
Check the learner on a GPU, in one command and one JSON (gpu-check.json):
  - attention over segments against torch's own with a mask, values and gradients;
  - the estimate of a pack's memory against the peak, without and with checkpointing;
  - an 8B model with a prompt of 16,384 and 8 answers of 500 in 80 GB (left out on smaller cards);
  - packed bf16 against fp32 rows;
  - the benchmark of the learner, and on an H100 or H200 the share of the card's operations.
Weights are drawn: nothing is downloaded. It takes about 3 minutes on an H200 (estimated, not
measured), is to take less than 8 (a target), and needs 17 GB of disk for a while.
Exit code: 0 all targets hold, 1 one does not, 2 there is no such device."""
WIDTHS = (64, 128)
MEMORY_CELLS = (Cell(axis="memory", group=4, prompt=2_048, answer=256),)
SMALL_CELLS = (Cell(axis="memory", group=4, prompt=200, answer=40),)
OFF_BY = 2.0
"""Largest factor between a peak and its estimate."""
LONG_CELL = Cell(axis="long", group=8, prompt=16_384, answer=500)
CARD_GB = 80.0
QWEN3_8B = {
    "num_hidden_layers": 36, "hidden_size": 4_096, "intermediate_size": 12_288,
    "vocab_size": 151_936, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
"""Its config; the head is that of the embeddings here, which is 1.2 GB less than Qwen3-8B's."""
PEAK_TFLOPS = {"H200": 989.0, "H100 80GB HBM3": 989.0}
"""Dense bf16 operations a second of a card, 1e12, by a part of its name (NVIDIA's data sheets)."""
LEAST_MFU = 0.4
"""Share of them that a step on unique tokens takes, counting 4 operations for a frozen weight."""


def main(argv: Sequence[str]) -> int:
    """Write `gpu-check.json`. Returns: 1 when a target does not hold, 2 without the device."""
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
        help="folder for gpu-check.json (default benchmarks/results; with --device cpu .bench)",
    )
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device; --device cpu runs the same path small")
        return 2
    small = device.type == "cpu"
    started = time.monotonic()
    machine = {**results.machine(), **run.about(options.device, 1)}
    rows, found = check_kernels(device)
    with tempfile.TemporaryDirectory() as work:
        for check in (check_memory, check_long, check_half):
            more, targets = check(Path(work), device, small=small)
            rows, found = [*rows, *more], [*found, *targets]
            if not small:
                torch.cuda.empty_cache()
    bench = run.measure(options.device, small=small, repeats=1 if small else 2)
    rows += [{"check": "benchmark", **row} for row in bench]
    if not small:
        found += [*run.targets(bench, half=True), *check_use(bench, str(machine["device"]))]
    found.append(results.at_most("seconds of all", time.monotonic() - started, LONGEST_S))
    columns = ["check", "what", "value", "limit", "contender", "seconds", "tokens", "tflops"]
    print(results.table(rows, [*columns, "peak_mb", "why"]))
    print(f"\n{results.targets_table(found)}")
    folder = options.out or (Path(".bench") if small else results.FOLDER)
    print(results.write("gpu-check", rows, found, machine=machine, folder=folder))
    return results.exit_code(found)


Found = tuple[list[results.Row], list[results.Target]]


def check_kernels(device: torch.device) -> Found:
    """Compare the device's forms with a dense mask, for each width and type, with windows."""
    rows: list[results.Row] = []
    targets: list[results.Target] = []
    types = [torch.bfloat16, torch.float32]
    for form, dtype in [(form, dtype) for form in FORMS[device.type] for dtype in types]:
        if form == "varlen" and dtype == torch.float32:
            continue  # the kernel takes half precision alone: `paths` is for the rest
        limit = TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE
        for width in WIDTHS:
            for window in (None, WINDOW):
                what = f"{form}, {dtype}, width {width}, window {window}"
                try:
                    value: float | None = difference(form, device, dtype, width, window)
                    why = ""
                except (RuntimeError, TypeError, ImportError, ValueError, AttributeError) as error:
                    value, why = None, f"{type(error).__name__}: {error}"
                rows.append({"check": "kernel", "what": what, "value": value, "limit": limit})
                targets.append(results.at_most(f"{what}: difference to a mask", value, limit, why))
    return rows, targets


def check_memory(folder: Path, device: torch.device, *, small: bool) -> Found:
    """Compare what a pack takes with its estimate, without and with checkpointing."""
    shape = sides.ON_CPU if small else {**sides.ON_CUDA, "num_hidden_layers": 8}
    precision = "float32" if small else "bfloat16"
    policy = sides.make_policy(folder / "memory", shape, str(device), precision)
    rows: list[results.Row] = []
    targets: list[results.Target] = []
    (cell,) = SMALL_CELLS if small else MEMORY_CELLS
    (pack,) = pack_group(cells.drawn(cell, policy.vocabulary), max_tokens=run.LONGEST)
    estimates = pack_estimate(policy, len(pack.input_ids), _gathered(pack))
    for checkpointing, said in zip((False, True), estimates, strict=True):
        if checkpointing:
            recompute_layers(policy)
        taken = _taken(policy, pack)
        factor = max(taken / said, said / taken)
        what = f"{len(pack.input_ids)} tokens, checkpointing {'on' if checkpointing else 'off'}"
        rows.append(
            {"check": "memory", "what": what, "value": taken / 2**20, "limit": said / 2**20}
        )
        # On a CPU the head's allowance and the layer that is computed again are not kept.
        if not small:
            targets.append(results.at_most(f"{what}: factor to the estimate", factor, OFF_BY))
    return rows, targets


def check_long(folder: Path, device: torch.device, *, small: bool) -> Found:
    """Take a long prompt with an 8B model, its layers computed twice: all that the card holds."""
    total = 0 if small else torch.cuda.get_device_properties(device).total_memory
    if not small and total < 0.9 * CARD_GB * 1e9:
        why = f"the card has {total / 1e9:.0f} GB"
        return [{"check": "long", "what": "8B, prompt 16,384, 8 answers", "why": why}], []
    shape, precision = (sides.ON_CPU, "float32") if small else (QWEN3_8B, "bfloat16")
    policy = sides.make_policy(folder / "long", shape, str(device), precision)
    recompute_layers(policy)
    cell = SMALL_CELLS[0] if small else LONG_CELL
    (pack,) = pack_group(cells.drawn(cell, policy.vocabulary), max_tokens=run.LONGEST)
    weights = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    said = weights + pack_estimate(policy, len(pack.input_ids), _gathered(pack))[1]
    held = weights + _taken(policy, pack)
    what = f"{len(pack.input_ids)} tokens, {weights / 1e9:.3g} GB of weights"
    row = {"check": "long", "what": what, "value": held / 2**20, "limit": said / 2**20}
    return [row], [] if small else [results.at_most(f"{what}: GB in all", held / 1e9, CARD_GB)]


def check_use(rows: Sequence[Mapping[str, object]], card: str) -> list[results.Target]:
    """Return the share of the card's operations that the step of the target's cell uses; none for
    cards whose peak is not known here."""
    peak = next((value for name, value in PEAK_TFLOPS.items() if name in card), None)
    used = [
        float(str(row["tflops"]))
        for row in rows
        if row.get("axis") == "target" and row.get("contender") == "auto" and "tflops" in row
    ]
    if peak is None:
        return []
    value = max(used) / peak if used else None
    what = f"share of {peak:g} TFLOP/s on unique tokens, prompt 3,000 and 8 answers of 500"
    return [results.at_least(what, value, LEAST_MFU)]


def _gathered(pack: Pack) -> int:
    """Return how many keys the form `varlen` copies for a pack."""
    return sum(one.position + one.length for one in pack.segments)


def _taken(policy: Policy, pack: Pack) -> int:
    """Bytes of a forward and backward pass: the peak on a card, what autograd keeps on a CPU."""
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    cuda = policy.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(policy.device)
    before = torch.cuda.memory_allocated(policy.device) if cuda else 0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.logprobs(pack)[0].sum().backward()
    policy.model.zero_grad()
    return torch.cuda.max_memory_allocated(policy.device) - before if cuda else sum(kept.values())


def check_half(folder: Path, device: torch.device, *, small: bool) -> Found:
    """Compare packed bf16 log-probabilities with fp32 rows, on the same weights."""
    shape = sides.ON_CPU if small else {**sides.ON_CUDA, "num_hidden_layers": 8}
    cell = Cell(axis="half", group=4, prompt=64 if small else 512, answer=32)
    values: dict[str, torch.Tensor] = {}
    for precision in ("float32", "bfloat16"):
        policy = sides.make_policy(folder / "half", shape, str(device), precision)
        group = cells.drawn(cell, policy.vocabulary)
        exact = precision == "float32"
        packs = pack_group(group, max_tokens=run.LONGEST, alone=exact)
        policy = replace(policy, form="dense") if exact else policy
        with torch.no_grad():
            values[precision] = torch.cat([policy.logprobs(pack)[0] for pack in packs]).cpu()
        del policy
    drift = float((values["float32"] - values["bfloat16"]).abs().mean())
    what = "packed bf16 against fp32 rows, nats a token"
    row = {"check": "bf16", "what": what, "value": drift, "limit": BF16_TOLERANCE}
    return [row], [results.at_most(what, drift, BF16_TOLERANCE)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
