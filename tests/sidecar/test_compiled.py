"""The compiled relay does what the interpreted one does: the relay's tests, run against it."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compiled import CompileError, build, search_path, stamp
from sidecar.proxy import relay_is_compiled

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("recorded")
TESTS = (
    *("test_access", "test_best_of_flight", "test_best_of_relay"),
    *("test_exchange_id", "test_heads"),
    *("test_hot_metrics", "test_json_spans", "test_keys", "test_known_head", "test_lost_streams"),
    *("test_long_body", "test_odd_bodies", "test_paths", "test_reply_shortcuts"),
    *("test_usage", "test_usual_shape"),
    *("test_relay", "test_relay_failures", "test_relay_framing", "test_replicas"),
    *("test_reply_edit", "test_reply_surfaces", "test_request_edit", "test_routing"),
    *("test_sampling_rule", "test_session_key", "test_sse", "test_surfaces"),
)
FILES = """
import importlib, json, sys
print(json.dumps([importlib.import_module(name).__file__ for name in sys.argv[1:]]))
"""
SLOW_STEPS = """
import json, pathlib, sys
from sidecar.relay.payload import spans as json_spans
from sidecar.relay.payload.reply_edit import Strip, strip_event, strip_reply
from sidecar.relay.payload.request_edit import splice_request
from sidecar.relay.payload.peek import peek_request

class Counting:  # in place of what only the ways member by member use
    def __init__(self, inner): self.inner, self.calls = inner, 0
    def decode(self, data): self.calls += 1; return self.inner.decode(data)
    def __call__(self, *args): self.calls += 1; return self.inner(*args)

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
    except CompileError as error:
        if "needs a C compiler" not in str(error) and "needs Python's headers" not in str(error):
            raise
        pytest.skip(str(error))


def run_compiled(made: Path, *words: str) -> str:
    """What `python` prints of the compiled relay. It must end well."""
    done = subprocess.run(
        [sys.executable, "-P", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": search_path(made)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_module_that_is_to_be_compiled_is_loaded_as_an_extension(compiled: Path) -> None:
    files = json.loads(run_compiled(compiled, "-c", FILES, *modules()))

    assert [path for path in files if not path.endswith(".so")] == []
    assert {Path(path).is_relative_to(compiled) for path in files} == {True}


def test_the_tests_of_the_relay_pass_when_it_is_compiled(compiled: Path) -> None:
    paths = [str(path) for name in TESTS for path in (ROOT / "tests/sidecar").rglob(f"{name}.py")]

    told = run_compiled(compiled, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths)

    passed = re.search(r"(\d+) passed", told)
    assert passed is not None, told
    assert int(passed[1]) > 400


def test_ordinary_messages_take_the_fast_way_when_compiled(compiled: Path) -> None:
    told = run_compiled(compiled, "-c", SLOW_STEPS, str(RECORDED))

    assert ast.literal_eval(told) == EXPECTED


def test_the_proxy_knows_whether_it_is_compiled(compiled: Path) -> None:
    ask = "from sidecar.proxy import relay_is_compiled; print(relay_is_compiled())"

    assert run_compiled(compiled, "-c", ask).strip() == "True"


@pytest.mark.skipif(relay_is_compiled(), reason="this run is of the compiled relay")
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


def test_without_a_compiler_it_says_what_to_install(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")

    with pytest.raises(CompileError) as told:
        build(tmp_path / "made", sources)

    last = str(told.value).splitlines()[-1]
    assert last.startswith("SIDECAR_COMPILE=1 needs a C compiler and 'no-such-compiler' does not")
    assert last.endswith("apt-get install gcc libc6-dev), or install without SIDECAR_COMPILE")
    assert list((tmp_path / "made").iterdir()) == []


def test_a_changed_source_is_compiled_anew(sources: Path) -> None:
    before = stamp(sources)

    with (sources / "sidecar" / "relay" / "sse.py").open("a") as source:
        source.write("# changed\n")

    assert stamp(sources) != before == stamp(ROOT)


@pytest.mark.parametrize(
    ("asked", "words", "expected"),
    [
        ("", ["bdist_wheel"], []),
        ("0", ["bdist_wheel"], []),
        ("1", ["bdist_wheel"], ["cmdclass", "distclass", "setup_requires"]),
        ("1", ["editable_wheel"], []),
    ],
)
def test_only_who_asks_gets_a_compiled_install_and_no_working_tree_does(
    asked: str, words: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import json, setup; print(json.dumps(sorted(setup.options())))"
    monkeypatch.setenv("SIDECAR_COMPILE", asked)
    done: Any = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert json.loads(done.stdout) == expected
