"""Build the compiled relay of the working tree: `python -m benchmarks.compiled [FOLDER]`.

An install compiles the relay (setup.py); a working tree holds sources only. The demo, the tests and
the benchmarks run what a user gets from a folder of its own: a copy of the package `sidecar` with
its extensions, made by the same setup.py. The folder's name is a hash of the sources, so a build is
never used after its sources have changed.

`python -m benchmarks.compiled --search-path` prints the PYTHONPATH to run with (`scripts/python`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
PACKAGE = "sidecar"
SWITCH = "SIDECAR_COMPILE"
PATH_FLAG = "--search-path"
KEPT_S = 86_400.0
"""A build that was not used for so long is taken away; a younger one may be in use."""
LAST_WORDS = 20
"""Lines of a failed build that are shown."""


class CompileError(Exception):
    """The relay cannot be compiled here; the message says why and what to do."""


class CompilerMissingError(CompileError):
    """There is no C compiler, or Python's headers are missing."""


def build(folder: Path = CACHE, root: Path = ROOT) -> Path:
    """Compile the relay of `root`, unless that was done since its sources changed.

    Returns: the folder to put in front of the module search path, in `folder`.
    Raises: CompileError, CompilerMissingError.
    """
    made = folder / f"compiled-{stamp(root)}"
    if made.is_dir():
        os.utime(made)
        return made
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="compiling-", dir=folder))
    try:
        shutil.copytree(
            root / PACKAGE, work / PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
        _compile(work, root)
        shutil.rmtree(work / "build", ignore_errors=True)
        _forget_old(folder)
        work.rename(made)
    except OSError:
        if not made.is_dir():  # else another build of the same sources was faster
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return made


def stamp(root: Path) -> str:
    """Changes when what comes out of the build may change."""
    digest = hashlib.sha256(f"{sys.version}{_mypy()}".encode())
    for path in sorted(
        [root / "setup.py", root / "pyproject.toml", *(root / PACKAGE).rglob("*.py")]
    ):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def search_path(made: Path, root: Path = ROOT) -> str:
    """PYTHONPATH for a process that runs the compiled relay; start it with `-P`, which keeps the
    current folder (perhaps a tree with a `sidecar` of its own) from going first."""
    return os.pathsep.join((str(made), str(root)))


def chosen_path(folder: Path = CACHE, root: Path = ROOT) -> str:
    """PYTHONPATH of the build that SIDECAR_COMPILE asks for, as setup.py understands it.

    Empty: compiled where that works, the sources otherwise, which is said on stderr; the tests fail
    when there is a compiler and the build does not work.
    Raises: CompileError.
    """
    asked = os.environ.get(SWITCH, "")
    if asked == "0":
        return str(root)
    try:
        return search_path(build(folder, root), root)
    except CompileError as error:
        if asked == "1":
            raise
        print(f"the relay runs interpreted: {error}", file=sys.stderr)
        return str(root)


def _forget_old(folder: Path) -> None:
    for path in (*folder.glob("compiled-*"), *folder.glob("compiling-*")):
        if time.time() - path.stat().st_mtime > KEPT_S:
            shutil.rmtree(path, ignore_errors=True)


def _mypy() -> str:
    try:
        return version("mypy")
    except PackageNotFoundError as error:
        raise CompileError("mypy is not installed; run `make setup`") from error


def _compile(work: Path, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(root / "setup.py"), "build_ext", "--inplace"],
        cwd=work,
        env={**os.environ, SWITCH: "1", "PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stdout.strip().splitlines()[-LAST_WORDS:]
        if lines and lines[-1].startswith(f"{SWITCH}=1:"):
            raise CompilerMissingError(lines[-1])
        raise CompileError("\n".join(("the relay was not compiled:", *lines)))


def main(argv: list[str]) -> int:
    if len(argv) > 1 or any(word.startswith("-") for word in argv if word != PATH_FLAG):
        print(f"usage: python -m benchmarks.compiled [FOLDER | {PATH_FLAG}]", file=sys.stderr)
        return 2
    try:
        if argv == [PATH_FLAG]:
            print(chosen_path())
        else:
            print(build(Path(argv[0]) if argv else CACHE))
    except CompileError as error:
        print(f"compile: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
