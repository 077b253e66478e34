"""`make bench BENCH=learner`: ours in packs and in rows, what the cost model takes; TRL's, ART's.

All compute the same loss and gradient of the same drawn group on the same model and adapter, in
turn (A B C A B C); each figure is the least of its repeats, and a target is a ratio of two. On a
CPU seconds are those of its one thread, because other work on a machine stretches the clock's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.learner import art, cells, sides
from benchmarks.learner.cells import Cell
from benchmarks.learner.plot import draw
from learner.policy.costs import sizes
from learner.policy.logprobs import Policy, packs_of
from learner.policy.packing import Pack, pack_group, pairs
from learner.records import TrainingGroup

NEVER_SLOWER, OVER_TRL = 0.95, 3.0
SMALL_FOLDER = Path(".bench")
"""Results of tiny cells are no figures: they lie where git does not see them."""
SAME_LOSS, SAME_LOSS_HALF = 1e-5, 0.02
"""Largest difference of two contenders' losses, in fp32 and in bf16."""
LONGEST = 10_000_000


def main(argv: Sequence[str]) -> int:
    """Print tables, write the results and a plot. Returns: 1 when a target does not hold."""
    parser = argparse.ArgumentParser(prog="benchmarks learner")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--small",
        action="store_true",
        help="tiny cells, for a test of the path: no target of speed; writes learner-small",
    )
    parser.add_argument("--longest", type=int, help="of the cells, those with no longer prompt")
    parser.add_argument(
        "--repeats",
        type=int,
        default=2,
        help="times that each step is measured, of which the least counts (default 2; the longest "
        "prompts once)",
    )
    parser.add_argument("--threads", type=int, default=1, help="on a CPU (default 1)")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the JSON and the plot (default benchmarks/results; with --small .bench)",
    )
    options = parser.parse_args(argv)
    machine = {**results.machine(), **about(options.device, options.threads)}
    longest = options.longest or LONGEST
    rows = measure(options.device, small=options.small, repeats=options.repeats, longest=longest)
    columns = ["axis", "group", "prompt", "answer", "turns", "contender", "seconds", "tokens"]
    columns += ["tokens_per_s", "tflops", "peak_mb", "why"]
    print(results.table(rows, columns))
    found = targets(rows, half=options.device != "cpu", speed=not options.small)
    print(f"\n{results.targets_table(found)}")
    name = "learner" if options.device == "cpu" else f"learner-{options.device}"
    name += "-small" if options.small else "-part" if options.longest else ""
    folder = options.out or (SMALL_FOLDER if options.small else results.FOLDER)
    print(results.write(name, rows, found, machine=machine, folder=folder))
    draw(rows, folder / f"{name}.png")
    return results.exit_code(found)


def about(device: str, threads: int) -> dict[str, object]:
    """Set the threads; return what else decides the figures."""
    import peft
    import transformers

    if device == "cpu":
        torch.set_num_threads(threads)
    card = torch.cuda.get_device_name() if device != "cpu" else None
    return {
        "device": card or "cpu",
        "threads": threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


def measure(device: str, *, small: bool, repeats: int, longest: int = LONGEST) -> list[results.Row]:
    """Return a row for each cell and contender. longest: prompt, in tokens."""
    chosen = cells.SMALL if small else cells.ON_CPU if device == "cpu" else cells.ON_CUDA
    shape = sides.ON_CPU if device == "cpu" or small else sides.ON_CUDA
    with tempfile.TemporaryDirectory() as folder:
        precision = "float32" if device == "cpu" else "bfloat16"
        policy = sides.make_policy(Path(folder) / "model", shape, device, precision)
        found: list[results.Row] = []
        for cell in [one for one in chosen if one.prompt <= longest]:
            peers = peers_of(policy, cell, Path(folder) / "trl")
            found += measure_cell(policy, cell, peers, 1 if cell.once else repeats)
            print(results.table(found[-5:], ["axis", "contender", "seconds", "tokens"]), flush=True)
    return found


Peer = Callable[[Policy, TrainingGroup], float]


def peers_of(policy: Policy, cell: Cell, folder: Path) -> dict[str, Peer | str]:
    """Return the step of TRL and of ART, or why it is not measured."""
    found: dict[str, Peer | str] = {
        "trl": f"{cell.padded_tokens} padded tokens at once",
        "art": "a mask of all pairs of tokens",
    }
    for name, wanted in (("trl", cell.trl), ("art", cell.art)):
        try:
            if wanted:
                made = sides.Trl(policy, folder, cell.answer) if name == "trl" else art.load()
                found[name] = made.step
        except ImportError as error:
            found[name] = f"{name} cannot be imported: {error}"
    return found


def measure_cell(
    policy: Policy, cell: Cell, peers: Mapping[str, Peer | str], repeats: int
) -> list[results.Row]:
    """Measure the contenders in turn. A row without seconds says why."""
    group = cells.drawn(cell, policy.vocabulary)
    packs = {
        "auto": packs_of(policy, group, LONGEST),
        "packed": pack_group(group, max_tokens=LONGEST),
        "rows": pack_group(group, max_tokens=LONGEST, alone=True),
    }
    same = next((name for name in ("packed", "rows") if packs[name] == packs["auto"]), None)
    steps: dict[str, Callable[[], float]] = {
        name: lambda of=of: sides.ours(policy, of)  # type: ignore[misc]
        for name, of in packs.items()
        if not (same and name == "auto")
    }
    for name, peer in peers.items():
        if not isinstance(peer, str):
            steps[name] = lambda of=peer: of(policy, group)  # type: ignore[misc]
    timed: dict[str, tuple[float, float, float]] = {}
    for _ in range(repeats):
        for name, step in steps.items():
            seconds, loss, peak = timed_step(policy.device, step)
            if name not in timed or seconds < timed[name][0]:
                timed[name] = seconds, loss, peak
    if same:
        timed["auto"] = timed[same]  # the same packs: not measured twice
    tokens = {name: sum(len(pack.input_ids) for pack in of) for name, of in packs.items()}
    tokens |= {"trl": cell.padded_tokens, "art": art.length(group)}
    shown: list[results.Row] = [
        _row(cell, name, timed[name], tokens[name], policy, packs.get(name))
        for name in tokens
        if name in timed
    ]
    for name, why in peers.items():
        if isinstance(why, str):
            shown.append({**_place(cell), "contender": name, "why": why})
    return shown


def timed_step(device: torch.device, step: Callable[[], float]) -> tuple[float, float, float]:
    """Return seconds, the loss, and on a GPU the peak in bytes."""
    if device.type == "cpu":
        started = time.process_time()
        loss = step()
        return time.process_time() - started, loss, 0.0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    loss = step()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started, loss, float(torch.cuda.max_memory_allocated(device))


def _place(cell: Cell) -> dict[str, object]:
    names = ("axis", "group", "prompt", "answer", "turns")
    return {name: getattr(cell, name) for name in names}


def _row(
    cell: Cell,
    name: str,
    timed: tuple[float, float, float],
    tokens: int,
    policy: Policy,
    packs: Sequence[Pack] | None,
) -> results.Row:
    seconds, loss, peak = timed
    return {
        **_place(cell),
        "contender": name,
        "seconds": round(seconds, 4),
        "loss": loss,
        "tokens": tokens,
        "packs": len(packs) if packs else 1,
        "tokens_per_s": round(tokens / seconds),
        "tflops": round(flops(policy, packs) / seconds / 1e12, 4) if packs else None,
        "peak_mb": round(peak / 2**20) if peak else None,
    }


def flops(policy: Policy, packs: Sequence[Pack]) -> float:
    """Operations of the frozen base, forwards and backwards (4 for a weight and token), attention's
    (14 for a pair and number of a query), and the head's. LoRA's own are left out."""
    config: Any = policy.model.get_base_model().config
    of = sizes(config)
    total = 0.0
    for pack in packs:
        total += 4.0 * of.layers * of.linear_weights * len(pack.input_ids)
        total += 14.0 * of.layers * of.queries * pairs(pack.segments)
        total += 4.0 * of.hidden * policy.vocabulary * len(pack.targets)
    return total


def targets(rows: Sequence[results.Row], *, half: bool, speed: bool = True) -> list[results.Target]:
    """Return what must hold. half: of bf16. speed: False for cells too small to tell of it."""
    least = min(ratios(rows, "rows").values(), default=None)
    at_target = [one for key, one in ratios(rows, "trl").items() if key[0] == "target"]
    by_cell: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        if "loss" in row:
            by_cell.setdefault(key_of(row), []).append(float(str(row["loss"])))
    apart = max((max(losses) - min(losses) for losses in by_cell.values()), default=None)
    of_speed = [
        results.at_least("rows' seconds over auto's, the least of all cells", least, NEVER_SLOWER),
        results.at_least(
            "TRL's seconds over auto's, prompt 3,000 and 8 answers of 500",
            min(at_target, default=None),
            OVER_TRL,
            "" if at_target else "TRL was not measured",
        ),
    ]
    return [
        *(of_speed if speed else ()),
        results.at_most(
            "difference of the contenders' losses, the largest of all cells",
            apart,
            SAME_LOSS_HALF if half else SAME_LOSS,
        ),
    ]


def key_of(row: results.Row) -> tuple[object, ...]:
    return tuple(row[name] for name in ("axis", "group", "prompt", "answer", "turns"))


def ratios(rows: Sequence[results.Row], contender: str) -> dict[tuple[object, ...], float]:
    """Return a contender's seconds over those of `auto`, by cell."""
    seconds = {
        (key_of(row), row["contender"]): float(str(row["seconds"]))
        for row in rows
        if "seconds" in row
    }
    return {
        key: value / seconds[key, "auto"]
        for (key, name), value in seconds.items()
        if name == contender
    }
