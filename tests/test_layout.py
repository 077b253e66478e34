"""What an import must not pull in, and what CONTRIBUTING says of the tree."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from sidecar.processes import EXTRAS
from sidecar.store.database import Database
from sidecar.store.engines import MIGRATIONS

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("sidecar", "ingest", "learner", "deploy")


@pytest.mark.parametrize(
    ("imported", "forbidden"),
    [
        (
            "deploy.cli.app, deploy.admin.app, deploy.canary.controller, learner.runs.train, "
            "learner.schedule.loop, learner.runs.publish",
            {"torch"},
        ),
        (
            "ingest.score, ingest.sampling.worker, ingest.ruler.judge, ingest.ruler.judging, "
            "ingest.intake.loop, ingest.tokens, tokenizers, huggingface_hub",
            {"torch", "transformers", "litellm"},
        ),
        ("ingest.records", {"fastapi"}),
        ("sidecar.proxy", {"alembic", "sqlalchemy.orm"}),
    ],
)
def test_an_import_stays_light(imported: str, forbidden: set[str]) -> None:
    code = f"import sys, {imported}; sys.exit(', '.join({forbidden} & set(sys.modules)) or 0)"

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)

    assert done.returncode == 0, f"{imported} imports {forbidden}"


def test_a_proxy_and_the_command_line_load_no_package_of_an_extra() -> None:
    """An install without extras has none of them."""
    modules = "sidecar.__main__, sidecar.proxy, sidecar.forwarding.sender, deploy.cli.app"
    packages = {one for extra in EXTRAS.values() for one in extra}
    code = f"import sys, {modules}; print(sorted({packages} & set(sys.modules)))"

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert len(packages) > 10
    assert done.stdout == "[]\n"


OFFLINE_ROLLBACK = """
import sys
from deploy.cli.main import main
code = main(["--config", sys.argv[1], *sys.argv[2:]])
heavy = {"httpx", "alembic", "litellm", "fastapi", "starlette", "uvicorn", "opentelemetry",
         "structlog", "prometheus_client", "torch", "sqlalchemy.dialects.postgresql"}
settings = {"pydantic_settings", "sqlalchemy"}
print(code, sorted(heavy & set(sys.modules)), sorted(settings & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("rollback --offline --to base --reason x", "0 [] ['pydantic_settings', 'sqlalchemy']"),
        ("rollback --help", "0 [] []"),
        ("--help", "0 [] []"),
    ],
)
def test_a_rollback_without_control_imports_only_what_it_uses(
    tmp_path: Path, command: str, expected: str
) -> None:
    config = tmp_path / "sidecar.toml"
    url = f"sqlite:///{tmp_path}/store.db"
    config.write_text(f'[store]\nurl = "{url}"\n')
    database = Database(url)
    database.upgrade()
    database.close()

    done = subprocess.run(
        [sys.executable, "-c", OFFLINE_ROLLBACK, config, *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.splitlines()[-1] == expected


def test_migrations_are_one_chain_in_the_order_of_their_names() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))

    chain = list(ScriptDirectory.from_config(config).walk_revisions())[::-1]

    names = sorted(path.stem for path in (MIGRATIONS / "versions").glob("[0-9]*.py"))
    assert [Path(one.path).stem for one in chain] == names
    assert [one.revision for one in chain] == names


def modules(*folders: str) -> list[Path]:
    """Every module below these folders."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(found) > 200
    return found


def test_no_module_has_a_name_that_says_nothing() -> None:
    nothing = {"utils", "helpers", "common", "misc"}

    found = [path for path in modules(*ROOMS) if path.stem in nothing]

    assert found == []


def test_the_tests_of_the_data_plane_import_no_other_room() -> None:
    """What they share from tests/support counts as theirs."""
    unread = [*(ROOT / "tests" / "sidecar").rglob("*.py"), ROOT / "tests" / "conftest.py"]
    files, found = set(unread), []
    while unread:
        text = (path := unread.pop()).read_text()
        # `demo.ports` has the standard library alone.
        others = r"^ *(?:from|import) ((?:ingest|learner|deploy|demo(?!\.ports))\b.*)"
        found += [(path.name, name) for name in re.findall(others, text, re.MULTILINE)]
        shared = {
            ROOT / "tests" / "support" / f"{name}.py"
            for line in re.findall(r"^ *from support(?:\.(\w+))? import (.+)", text, re.MULTILINE)
            for name in re.findall(r"\w+", line[0] or line[1])
        }
        new = {one for one in shared if one.exists()} - files
        files |= new
        unread += new

    assert len(files) > 60
    assert ROOT / "tests" / "support" / "api_keys.py" in files
    assert found == []


QUESTIONS = re.findall(
    r"^\| ([^|]+\?) \| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE
)


@pytest.mark.parametrize(("question", "answer"), QUESTIONS)
def test_a_question_is_answered_by_three_files_at_most(question: str, answer: str) -> None:
    files = re.findall(r"`([\w/]+\.py)` \(`([\w.]+)`\)", answer)

    assert 1 <= len(files) <= 3
    assert [(path, name) for path, name in files if name not in defined_names(ROOT / path)] == []


def test_contributing_answers_questions() -> None:
    assert len(QUESTIONS) >= 10


def defined_names(path: Path) -> set[str]:
    """Names that a module defines, and `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body if hasattr(one, "name")}
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                names.add(target.id)
    return names


def test_every_module_of_the_product_belongs_to_one_block() -> None:
    lines = runpy.run_path(str(ROOT / "scripts" / "lines"))
    blocks = lines["blocks"]()

    owners = {
        module: [block.name for block in blocks if module.startswith(block.paths)]
        for module in lines["modules"](*ROOMS)
    }

    assert {module: names for module, names in owners.items() if len(names) != 1} == {}
    assert all(one in owners or one.endswith("/") for block in blocks for one in block.paths)
