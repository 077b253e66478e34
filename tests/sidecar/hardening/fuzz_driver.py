"""`python fuzz_driver.py TARGET SECONDS`: look for bytes on which a target does not hold.
`python fuzz_driver.py TARGET HEX`: try these bytes.

By coverage with atheris (libFuzzer) where it is installed; else by mutation of the seeds alone,
which finds less. Exit code 0: none found; the last line says how many inputs were tried.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

HERE = Path(__file__).parent
MAX_LENGTH = 1024
SEED = 1


def load_targets() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_targets", HERE / "fuzz_targets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_targets"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def by_coverage(name: str, seconds: float) -> None:
    """Ends the process."""
    import atheris

    with atheris.instrument_imports(include=["sidecar.relay"]):
        targets = load_targets()
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


def by_mutation(name: str, seconds: float) -> int:
    targets = load_targets()
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


def one(name: str, data: bytes) -> int:
    load_targets().TARGETS[name](data)
    return 0


def without_the_parents_peak() -> None:
    """Go on in a child process, and exit with its status.

    Linux hands the highest resident memory of a process over `exec`, so that libFuzzer, started
    by a pytest that once held 2.5 GB, took that for its own and ended at its limit of 2 GB. A
    fork begins a new count.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    without_the_parents_peak()
    if "." not in sys.argv[2]:
        sys.exit(one(sys.argv[1], bytes.fromhex(sys.argv[2])))
    if importlib.util.find_spec("atheris") is not None:
        by_coverage(sys.argv[1], float(sys.argv[2]))
    else:
        sys.exit(by_mutation(sys.argv[1], float(sys.argv[2])))
