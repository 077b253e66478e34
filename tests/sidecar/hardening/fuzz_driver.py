"""`python fuzz_driver.py SECONDS TARGET...`: look for bytes on which a target does not hold.
`python fuzz_driver.py TARGET=HEX...`: try these bytes.

Each target runs in a process of its own, forked from one that has imported the relay. When it has
ended, a line of standard output is a JSON object: `target`, its exit `code`, 0 for none found, and
`said`, its last words. By coverage with atheris (libFuzzer) where it is installed; else by mutation
of the seeds alone, which finds less.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import ModuleType

HERE = Path(__file__).parent
MAX_LENGTH = 1024
SEED = 1


def load_targets() -> ModuleType:
    """With counters in the relay's code where atheris is installed."""
    if importlib.util.find_spec("atheris") is None:
        return _load()
    import atheris

    with atheris.instrument_imports(include=["sidecar.relay"]):
        return _load()


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_targets", HERE / "fuzz_targets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_targets"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def by_coverage(targets: ModuleType, name: str, seconds: float) -> None:
    """Ends the process."""
    import atheris

    target = targets.TARGETS[name]
    with TemporaryDirectory(prefix="fuzz-") as folder:
        for number, seed in enumerate(targets.SEEDS.get(name, ())):
            (Path(folder) / f"seed-{number}").write_bytes(seed)
        flags = [f"-max_total_time={max(1, round(seconds))}", f"-max_len={MAX_LENGTH}"]
        flags += [f"-seed={SEED}", "-print_final_stats=1", f"-artifact_prefix={folder}/"]
        atheris.Setup([sys.argv[0], *flags, folder], atheris_target(target))
        atheris.Fuzz()


def atheris_target(target: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Say the input with the failure: libFuzzer's own file of it goes away with its folder."""

    def run(data: bytes) -> None:
        try:
            target(data)
        except BaseException:
            sys.stderr.write(f"input: {data!r}\n")
            sys.stderr.flush()
            raise

    return run


def by_mutation(targets: ModuleType, name: str, seconds: float) -> int:
    target, seeds = targets.TARGETS[name], targets.SEEDS.get(name, (b"",))
    chance = random.Random(SEED)
    ends, tried = time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        data = mutated(chance, bytearray(chance.choice(seeds)))
        tried += 1
        try:
            target(data)
        except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
            traceback.print_exc()
            sys.stderr.write(f"input: {data!r}\n")
            return 1
    sys.stderr.write(f"tried {tried} inputs by mutation: atheris is not installed\n")
    return 0


def mutated(chance: random.Random, data: bytearray) -> bytes:
    if chance.random() < 0.3:
        return chance.randbytes(chance.randrange(200))
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0:
                data[at:at] = chance.randbytes(chance.randrange(1, 4))
            case 1:
                del data[at : at + chance.randrange(1, 8)]
            case 2:
                data[at : at + 1] = chance.choice((b"\r", b"\n", b":", b" ", b"\0", b"0", b","))
            case _:
                end = at + chance.randrange(1, 20)
                data[end:end] = data[at:end]
    return bytes(data[:MAX_LENGTH])


def told(name: str, run: Callable[[], int | None]) -> None:
    """Run this in a process of its own, and print how it ended.

    Linux hands the highest resident memory of a process over `exec`, so that libFuzzer, started
    by a pytest that once held 2.5 GB, took that for its own and ended at its limit of 2 GB. A
    fork begins a new count.
    """
    with TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 2)
            code = 1
            try:
                code = run() or 0
            except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        words = said.read()[-4000:].decode(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    sys.stdout.write(json.dumps({"target": name, "code": code, "said": words}) + "\n")
    sys.stdout.flush()


def main(asked: list[str]) -> None:
    targets = load_targets()
    gc.freeze()
    if "=" in asked[0]:
        for one in asked:
            name, _, data = one.partition("=")
            told(name, partial(targets.TARGETS[name], bytes.fromhex(data)))
        return
    look = by_mutation if importlib.util.find_spec("atheris") is None else by_coverage
    for name in asked[1:]:
        told(name, partial(look, targets, name, float(asked[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
