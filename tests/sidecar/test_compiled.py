"""The compiled relay is the one that the suite runs on, and the sources do the same.

`make test` runs everything on the compiled relay (scripts/python); here a part of it runs again on
the sources. `python -m pytest` runs everything on the sources, and this file tests the build.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compiled import CompilerMissingError, build, chosen_path, search_path, stamp
from sidecar.proxy import relay_is_compiled

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("recorded")
INTERPRETED = (
    "hardening/test_fair_turns",  # it runs on the sources only
    *("access/test_keys", "capture/test_exchange_id", "capture/test_sampling_rule"),
    *("relay/flight/test_relay", "relay/flight/test_relay_framing", "relay/flight/test_odd_bodies"),
    *("relay/http1/test_heads", "relay/http1/test_sse", "relay/payload/test_json_spans"),
    *(
        "relay/payload/test_reply_edit",
        "relay/payload/test_request_edit",
        "relay/payload/test_usage",
    ),
    *("relay/best_of/test_best_of_relay", "relay/surface/test_paths", "routing/test_session_key"),
)
"""The tests that run again on the sources when the suite runs on the compiled relay: some of each
part that is compiled."""
FILES = """
import importlib, json, sys
print(json.dumps([importlib.import_module(name).__file__ for name in sys.argv[1:]]))
"""
SLOW_STEPS = """
import json, pathlib, sys
from sidecar.relay import request_edit as json_spans
from sidecar.relay.reply_edit import Strip, strip_event, strip_reply
from sidecar.relay.request_edit import splice_request
from sidecar.relay.peek import peek_request

class Counting:  # in place of what only the ways member by member use
    def __init__(self, inner): self.inner, self.calls = inner, 0
    def decode(self, data): self.calls += 1; return self.inner.decode(data)
    def __call__(self, *args, **named): self.calls += 1; return self.inner(*args, **named)

slow = [Counting(json_spans._OBJECT), Counting(json_spans._ARRAY), Counting(json.loads)]
json_spans._OBJECT, json_spans._ARRAY, json.loads = slow
def steps(call, *args):
    before = sum(one.calls for one in slow)
    call(*args)
    return sum(one.calls for one in slow) - before

recorded = pathlib.Path(sys.argv[1])
strip = Strip(token_ids=True, logprobs=True)
events = (recorded / "whole_stream_asked.sse").read_bytes().split(b"\\n\\n")[:-1]
request = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
print({
    "events": [len(events) > 3, sum(steps(strip_event, one + b"\\n\\n", strip) for one in events)],
    "reply": steps(strip_reply, (recorded / "whole_reply_asked.json").read_bytes(), strip),
    "peek": steps(peek_request, request),
    "splice": steps(splice_request, request, b'"m"', b'"v1"', b""),
    "odd event": steps(strip_event, b'data: {"choices":[{"token_ids" :[1]}]}\\n\\n', strip) > 0,
    "odd request": steps(peek_request, request[:-1] + b',"x":NaN}') > 0,
})
"""
EXPECTED = {
    **{"events": [True, 0], "reply": 0, "peek": 0, "splice": 0},
    **{"odd event": True, "odd request": True},
}

pytestmark = pytest.mark.timeout(600)  # the first run compiles


def of_setup(name: str) -> tuple[str, ...]:
    """What setup.py says, without running it."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            value: tuple[str, ...] = ast.literal_eval(node.value)
            return value
    raise AssertionError(f"setup.py has no {name}")


def modules() -> list[str]:
    return [path.removesuffix(".py").replace("/", ".") for path in of_setup("COMPILED")]


@pytest.fixture(scope="module")
def compiled() -> Path:
    try:
        return build()
    except CompilerMissingError as error:
        pytest.skip(str(error))


def run_on(path: str, *words: str) -> str:
    """What `python` prints with this module search path. It must end well."""
    done = subprocess.run(
        [sys.executable, "-P", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_compiled(made: Path, *words: str) -> str:
    return run_on(search_path(made), *words)


def test_every_module_that_is_to_be_compiled_is_loaded_as_an_extension(compiled: Path) -> None:
    files = json.loads(run_compiled(compiled, "-c", FILES, *modules()))

    assert [path for path in files if not path.endswith(".so")] == []
    assert {Path(path).is_relative_to(compiled) for path in files} == {True}


@pytest.mark.skipif(not relay_is_compiled(), reason="this whole run is of the interpreted relay")
def test_the_relay_passes_its_tests_when_it_is_interpreted() -> None:
    paths = [str(ROOT / "tests" / "sidecar" / f"{name}.py") for name in INTERPRETED]

    told = run_on(str(ROOT), "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths)

    passed = re.search(r"(\d+) passed", told)
    assert passed is not None, told
    assert int(passed[1]) > 300


def test_the_demo_and_the_tests_run_on_the_compiled_relay(compiled: Path) -> None:
    recipes = (ROOT / "Makefile").read_text().splitlines()
    ask = "import sidecar; print(sidecar.__file__)"
    environment = {**os.environ, "SIDECAR_COMPILE": ""}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [ROOT / "scripts" / "python", "-c", ask],
        cwd=ROOT.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    started = [line.split()[0] for line in recipes if "-m demo" in line or "scripts/tests" in line]
    assert started == ["@scripts/python"] * 3
    assert Path(done.stdout.strip()) == compiled / "sidecar" / "__init__.py"


def test_ordinary_messages_take_the_fast_way_when_compiled(compiled: Path) -> None:
    told = run_compiled(compiled, "-c", SLOW_STEPS, str(RECORDED))

    assert ast.literal_eval(told) == EXPECTED


def test_a_working_tree_holds_no_extensions() -> None:
    assert list((ROOT / "sidecar").rglob("*.so")) == []


@pytest.mark.parametrize("path", of_setup("COMPILED"))
def test_what_msgspec_decodes_into_is_not_compiled(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text())

    found = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if (isinstance(node, ast.ClassDef) and "Struct" in " ".join(map(ast.unparse, node.bases)))
        or (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "msgspec.json.decode"
            and len(node.args) + len(node.keywords) > 1
        )
    ]

    assert found == []


def test_the_build_uses_what_the_tests_use() -> None:
    constraints = (ROOT / "constraints" / "sidecar.txt").read_text().lower().replace("_", "-")
    locked = {line.partition(";")[0].strip() for line in constraints.splitlines()}

    assert [pin for pin in of_setup("PINNED") if pin not in locked] == []


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "sidecar", tmp_path / "sidecar")
    return tmp_path


def test_without_a_compiler_the_tree_runs_on_its_sources_unless_compiled_is_asked_for(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    for asked in ("", "0"):
        monkeypatch.setenv("SIDECAR_COMPILE", asked)
        assert chosen_path(tmp_path / "made", sources) == str(sources)
    monkeypatch.setenv("SIDECAR_COMPILE", "1")

    with pytest.raises(CompilerMissingError) as told:
        chosen_path(tmp_path / "made", sources)

    assert str(told.value).startswith(
        "SIDECAR_COMPILE=1: the C compiler 'no-such-compiler' does not run ("
    )
    assert str(told.value).endswith(
        "apt-get install gcc libc6-dev), or install without SIDECAR_COMPILE"
    )
    assert list((tmp_path / "made").iterdir()) == []


def test_a_changed_source_is_compiled_anew(sources: Path) -> None:
    before = stamp(sources)

    with (sources / "sidecar" / "relay" / "reply_parser.py").open("a") as source:
        source.write("# changed\n")

    assert stamp(sources) != before == stamp(ROOT)


COMPILES = ["cmdclass", "distclass", "setup_requires"]


@pytest.mark.parametrize(
    ("asked", "compiler", "command", "expected"),
    [
        ("", "", "bdist_wheel", COMPILES),
        ("", "no-such-compiler", "bdist_wheel", []),
        ("0", "", "bdist_wheel", []),
        ("1", "", "bdist_wheel", COMPILES),
        ("", "", "editable_wheel", []),
        ("1", "", "editable_wheel", []),
    ],
)
def test_a_wheel_is_compiled_where_there_is_a_compiler_and_an_editable_install_never_is(
    asked: str, compiler: str, command: str, expected: list[str], compiled: Path
) -> None:
    code = "import json, setup; print(json.dumps(sorted(setup.options())))"
    chosen = {"CC": compiler} if compiler else {}
    done = subprocess.run(
        [sys.executable, "-c", code, command],
        cwd=ROOT,
        env={**os.environ, "SIDECAR_COMPILE": asked, **chosen},
        capture_output=True,
        text=True,
        check=True,
    )

    assert json.loads(done.stdout) == expected
    said = "the relay is not compiled: " in done.stderr
    assert said == (not expected and asked != "0")


def test_the_proxy_knows_whether_it_is_compiled_and_says_once_that_it_is_not(
    compiled: Path,
) -> None:
    say = (
        "from sidecar.__main__ import _log_if_interpreted as say; say();"
        "from sidecar.proxy import relay_is_compiled; print(relay_is_compiled())"
    )

    told = {made: run_on(made, "-c", say) for made in (search_path(compiled), str(ROOT))}

    assert [one.count("relay_interpreted") for one in told.values()] == [0, 1]
    assert [one.split()[-1] for one in told.values()] == ["True", "False"]
