"""The rooms keep to themselves: what an import must not pull in, and a README that lists it all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("sidecar", "ingest", "learner", "deploy")


@pytest.mark.parametrize(
    ("imported", "forbidden"),
    [
        ("deploy.cli, deploy.admin, deploy.controller, deploy.supervisor", "torch"),
        ("learner.train, learner.schedule, learner.publish", "torch"),
        ("ingest.scoring, ingest.sampling, ingest.judging", "torch"),
        ("ingest.intake, ingest.base_tokenizer, tokenizers, huggingface_hub", "torch"),
        ("ingest.intake, ingest.base_tokenizer, tokenizers, huggingface_hub", "transformers"),
        ("ingest.judge, ingest.scoring", "litellm"),
        ("ingest.records", "fastapi"),
        ("sidecar.proxy", "alembic"),
    ],
)
def test_an_import_stays_light(imported: str, forbidden: str) -> None:
    code = f"import sys, {imported}; sys.exit({forbidden!r} in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)

    assert done.returncode == 0, f"{imported} imports {forbidden}"


def test_imports_point_left() -> None:
    command = Path(sys.executable).with_name("lint-imports")

    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout


def test_no_module_has_a_name_that_says_nothing() -> None:
    nothing = {"utils", "helpers", "common", "misc"}

    found = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if path.stem in nothing]

    assert found == []


def test_no_module_is_too_long_to_read() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for room in (*ROOMS, "demo", "benchmarks")
        for path in (ROOT / room).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 400 and "migrations" not in path.parts
    }

    assert long == {}


def test_the_readme_lists_every_module() -> None:
    readme = (ROOT / "README.md").read_text()

    missing = [
        str(path.relative_to(ROOT))
        for room in (*ROOMS, "demo", "benchmarks")
        for path in sorted((ROOT / room).rglob("*.py"))
        if path.name != "__init__.py"
        and "migrations" not in path.parts
        and f"`{path.name}`" not in readme
    ]

    assert missing == []
