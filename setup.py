"""Build the package, and compile the relay with mypyc where a C compiler is found.

    pip install .                      # compiled with a C compiler, interpreted without one
    SIDECAR_COMPILE=1 pip install .    # compiled, or an error that says what to install
    SIDECAR_COMPILE=0 pip install .    # interpreted

The compiled modules are extensions beside their sources, and the same code: they differ in CPU time
only (docs/decisions/0011-compiled-relay.md). Everything else is in pyproject.toml.

An editable install is never compiled: an extension would hide every later change of its source.
`scripts/python` runs a working tree on a compiled copy of its relay.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext

SWITCH = "SIDECAR_COMPILE"
PINNED = (
    "mypy==2.4.1",
    "msgspec==0.22.0",
    "prometheus-client==0.26.0",
    "pydantic==2.14.3",
    "pydantic-settings==2.16.3",
    "structlog==26.1.0",
    "xxhash==4.1.0",
)
"""What compiles, and what the compiled modules take types from. Pinned, as in constraints/: types
decide what code comes out, and where one is not known mypyc's guess may be wrong."""
COMPILED = (
    "sidecar/access/admission.py",
    "sidecar/capture/exchange_id.py",
    "sidecar/capture/reply_buffer.py",
    "sidecar/capture/sampling_rule.py",
    "sidecar/metrics/hot.py",
    "sidecar/relay/attempt.py",
    "sidecar/relay/client.py",
    "sidecar/relay/context.py",
    "sidecar/relay/ending.py",
    "sidecar/relay/flight.py",
    "sidecar/relay/heads.py",
    "sidecar/relay/peek.py",
    "sidecar/relay/plan.py",
    "sidecar/relay/refusals.py",
    "sidecar/relay/replicas.py",
    "sidecar/relay/reply.py",
    "sidecar/relay/reply_edit.py",
    "sidecar/relay/reply_parser.py",
    "sidecar/relay/request_edit.py",
    "sidecar/relay/request_parser.py",
    "sidecar/relay/template.py",
    "sidecar/relay/upstream.py",
    "sidecar/relay/usage.py",
    "sidecar/routing/assignment.py",
    "sidecar/routing/breaker.py",
    "sidecar/routing/breaker_rule.py",
    "sidecar/routing/session_key.py",
)
"""What runs for every request and every event, and what that cannot do without: a class that is
compiled has no interpreted children.

A module with a class that msgspec decodes into (a Struct, or a dataclass as the routing table's)
must not be among them: compiled classes lose the annotations that msgspec reads. Structs then take
any JSON without an error, dataclasses refuse theirs."""
MYPY_OPTIONS = (
    f"--config-file={Path(__file__).resolve().with_name('pyproject.toml')}",
    # What is not compiled was checked elsewhere, and some of what it imports is not there now.
    "--follow-imports=silent",
)


class CompileRelay(build_ext):
    """Makes the extensions when they are built, not when the package is only described."""

    def finalize_options(self) -> None:
        if not {"dist_info", "egg_info"} & set(sys.argv):
            from mypyc.build import mypycify

            extensions = mypycify([*MYPY_OPTIONS, *COMPILED], opt_level="3", debug_level="0")
            self.distribution.ext_modules = extensions
        super().finalize_options()

    def run(self) -> None:
        super().run()
        built = {Path(path).resolve() for path in self.get_outputs()}
        for path in Path(self.build_lib).rglob("*.so"):
            if path.resolve() not in built:  # of a build before: it would go into the wheel
                path.unlink()


class CompiledDistribution(Distribution):
    """Known to hold extensions before they are made, so that its wheel is named for a platform."""

    def has_ext_modules(self) -> bool:
        return True


def missing_compiler() -> str:
    """Return why C cannot be compiled here, and what to install; empty if it can."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    include = Path(sysconfig.get_path("include"), "Python.h")
    try:
        subprocess.run([*compiler, "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return (
            f"the C compiler {compiler[0]!r} does not run ({error}): install one "
            "(Debian: apt-get install gcc libc6-dev)"
        )
    if not include.exists():
        return (
            f"Python's headers are missing ({include}): install them "
            "(Debian: apt-get install python3-dev)"
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        source.write_text("#include <Python.h>\n#include <stdlib.h>\n")
        command = [*compiler, f"-I{include.parent}", "-c", str(source), "-o", f"{source}.o"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return (
            f"the C compiler {compiler[0]!r} fails ({' '.join(done.stderr.split())[:300]}): "
            "install the C library's headers (Debian: apt-get install libc6-dev)"
        )
    return ""


def options() -> dict[str, Any]:
    """The arguments of `setup` beyond pyproject.toml. Raises: SystemExit, with one line."""
    asked = os.environ.get(SWITCH, "")
    if asked not in ("", "0", "1"):
        sys.exit(f"{SWITCH} is {asked!r}: 1 compiles the relay, 0 does not, empty where possible")
    if asked == "0" or "sdist" in sys.argv:  # an sdist compiles nothing
        return {}
    if "editable_wheel" in sys.argv:
        sys.stderr.write("the relay is not compiled: an editable install runs the sources\n")
        return {}
    if missing := missing_compiler():
        if asked == "1":
            sys.exit(f"{SWITCH}=1: {missing}, or install without {SWITCH}")
        sys.stderr.write(f"the relay is not compiled: {missing}\n")
        return {}
    return {
        "setup_requires": list(PINNED),
        "cmdclass": {"build_ext": CompileRelay},
        "distclass": CompiledDistribution,
    }


if __name__ == "__main__":
    setup(**options())
