"""The reference pages name what the code has, and nothing that it has not.

Whether a page says the right thing of a name, a person must judge; that no name is missing, a
machine can.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from pydantic import BaseModel

from deploy.admin.metrics import StoreCollector
from deploy.cli.app import app
from deploy.engine.reconcile import EngineView
from deploy.records import AdapterState, Phase
from ingest.sampling.round import Miss
from learner.grpo.checks import REASONS
from learner.runs.runs import EndStatus
from learner.runs.selection import DropReason
from learner.runs.source import FAILED_RUNS
from sidecar.metrics.proxy import Metrics
from sidecar.records import Outcome
from sidecar.settings import DEFAULT_RUBRIC, Settings
from sidecar.settings.kinds import Between
from sidecar.store.database import Database
from sidecar.store.models import Base

ROOT = Path(__file__).resolve().parent.parent
DICTIONARY = ROOT / "docs" / "data-dictionary.md"
RUNBOOK = ROOT / "docs" / "runbook.md"
SETTINGS = ROOT / "docs" / "settings.md"
PACKAGES = ("sidecar", "ingest", "learner", "deploy")
TOP_LEVEL = "Top level"
SECTIONS: dict[str, Any] = {name: field.annotation for name, field in Settings.model_fields.items()}
RUBRIC = "see [below](#the-default-rubric)"
"""Too long for a cell."""


def section(page: Path, title: str) -> str:
    """The text under a heading, up to the next heading. Raises: AssertionError without it."""
    parts = re.split(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert title in bodies, f"{page.name} has no heading {title!r}"
    return bodies[title]


def first_cells(text: str) -> list[str]:
    """The names in the first column of a section's table."""
    return re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)


def counter_suffix(kind: str) -> str:
    """What Prometheus adds to a counter's name when it is scraped."""
    return "_total" if kind == "counter" else ""


def leaf_commands(command: Any, path: str) -> Iterator[str]:  # Any: typer carries its own click
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaf_commands(inner, f"{path} {name}")
    if not hasattr(command, "commands"):
        yield path


def keys_of(name: str) -> dict[str, str]:
    """Key -> default as the page must show it, of a section or of the keys outside sections."""
    if name == TOP_LEVEL:
        plain = [key for key, kind in SECTIONS.items() if not is_section(kind)]
        return {key: shown(Settings.model_fields[key].default) for key in plain}
    model: type[BaseModel] = SECTIONS[name]
    return {key: shown(value) for key, value in model()}


def is_section(kind: Any) -> bool:  # Any: an annotation
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def shown(value: object) -> str:
    """A default as TOML writes it."""
    if value is None:
        return "*not set*"
    if value == DEFAULT_RUBRIC:
        return RUBRIC
    return f"`{json.dumps(str(value) if isinstance(value, Path) else value)}`"


@pytest.mark.parametrize("table", sorted(Base.metadata.tables))
def test_the_dictionary_has_every_column_of_the_table_and_no_other(table: str) -> None:
    documented = first_cells(section(DICTIONARY, f"`{table}`"))

    assert documented == [column.name for column in Base.metadata.tables[table].columns]


def test_the_dictionary_has_every_metric_of_the_proxy_and_no_other() -> None:
    documented = first_cells(section(DICTIONARY, "Metrics of the proxy"))

    families = Metrics().registry.collect()
    assert sorted(documented) == sorted(one.name + counter_suffix(one.type) for one in families)


def test_the_dictionary_has_every_metric_of_control_and_no_other(tmp_path: Path) -> None:
    documented = first_cells(section(DICTIONARY, "Metrics of control"))

    database = Database(f"sqlite:///{tmp_path}/store.db")
    database.upgrade()
    families = list(StoreCollector(database, "any", EngineView).collect())
    database.close()
    assert sorted(documented) == sorted(one.name + counter_suffix(one.type) for one in families)


@pytest.mark.parametrize(
    ("title", "values"),
    [
        ("`adapter_version.state`", get_args(AdapterState)),
        ("`canary.state`", get_args(Phase)),
        ("`training_run.status`", ("running", *get_args(EndStatus))),
        ("`answer_group.reason`", get_args(DropReason)),
        ("`answer_group.reason`", (*REASONS, FAILED_RUNS)),
        ("`counter`: stage and reason", get_args(Miss)),
        ("Small lists", get_args(Outcome)),
    ],
)
def test_the_dictionary_has_every_value_of_the_list(title: str, values: tuple[str, ...]) -> None:
    text = section(DICTIONARY, title)

    assert [value for value in values if f"`{value}`" not in text] == []


@pytest.mark.parametrize("command", list(leaf_commands(typer.main.get_command(app), "sidecar")))
def test_the_runbook_lists_every_command(command: str) -> None:
    assert re.search(rf"^\| `{command}`", section(RUNBOOK, "Commands"), flags=re.MULTILINE), (
        f"`{command}` is not in the table of commands"
    )


def test_every_event_that_the_runbook_names_as_a_symptom_is_in_the_code() -> None:
    symptoms = re.findall(r"^\| ([^|]+) \|", section(RUNBOOK, "Symptoms"), flags=re.MULTILINE)
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)", " ".join(symptoms)))

    sources = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    code = "\n".join(file.read_text(encoding="utf-8") for file in sources)
    assert len(named) > 20
    assert [event for event in sorted(named) if f'"{event}"' not in code] == []


@pytest.mark.parametrize(
    "name", [TOP_LEVEL, *(n for n, kind in SECTIONS.items() if is_section(kind))]
)
def test_the_settings_page_has_every_key_with_its_default_and_no_other(name: str) -> None:
    title = name if name == TOP_LEVEL else f"`[{name}]`"
    rows = re.findall(r"^\| `([^`]+)` \| (.+?) \|", section(SETTINGS, title), flags=re.MULTILINE)

    assert dict(rows) == keys_of(name)


@pytest.mark.parametrize("name", [n for n, kind in SECTIONS.items() if is_section(kind)])
def test_the_settings_page_tells_the_range_of_every_number(name: str) -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", section(SETTINGS, f"`[{name}]`"), re.MULTILINE)
    kinds = get_type_hints(SECTIONS[name], include_extras=True)
    untold = [
        key
        for key, row in rows
        for between in betweens(kinds[key])
        if between.words not in row.replace(" (1 %)", "").replace(" (every session)", "")
    ]

    assert untold == []


def betweens(kind: Any) -> list[Between]:
    """The ranges in an annotated type."""
    inner = get_args(kind)
    return [one for one in inner if isinstance(one, Between)] + [
        found for one in inner if not isinstance(one, Between) for found in betweens(one)
    ]


def test_the_settings_page_has_a_heading_for_each_section_and_no_other() -> None:
    headings = re.findall(r"^## `\[(.+)\]`$", SETTINGS.read_text(encoding="utf-8"), re.MULTILINE)

    assert headings == [name for name, kind in SECTIONS.items() if is_section(kind)]


@pytest.mark.parametrize("name", [n for n, kind in SECTIONS.items() if is_section(kind)])
def test_a_range_has_the_unit_that_the_name_of_its_key_ends_with(name: str) -> None:
    kinds = get_type_hints(SECTIONS[name], include_extras=True)
    units = {key: "s" if key.endswith("_s") else "" for key in kinds}

    wrong = [key for key in kinds for between in betweens(kinds[key]) if between.unit != units[key]]

    assert wrong == []


def test_the_settings_page_quotes_the_default_rubric() -> None:
    assert DEFAULT_RUBRIC in section(SETTINGS, "The default rubric")


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    broken = [link for link in links if not link.startswith("http") and not leads(page, link)]

    assert broken == []


def leads(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not target.exists():
        return False
    return not anchor or anchor in anchors(target)


def anchors(page: Path) -> set[str]:
    """Headings as GitHub names them: lower case, no punctuation, hyphens for spaces."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_table_has_two_rows_of_one_name(page: Path) -> None:
    assert repeated_first_cells(page.read_text(encoding="utf-8")) == []


def test_two_rows_of_one_name_are_found_within_a_table_and_within_one_folder_of_it() -> None:
    table = "| a | 1 |\n|---|---|\n| b | 2 |\n"
    continued = "| **x** | |\n| b | 1 |\n| | 2 |\n| | 3 |\n| b | 4 |\n"

    assert repeated_first_cells(f"{table}\n{table}") == []
    assert repeated_first_cells(table + continued) == ["b"]


def repeated_first_cells(text: str) -> list[str]:
    """The first cells that a table has twice. A row in bold begins a folder, and so a new table;
    an empty cell continues the row above."""
    repeated: list[str] = []
    seen: set[str] = set()
    for line in text.splitlines():
        cell = line.split("|")[1].strip() if line.startswith("|") else "**"
        if cell.startswith("**"):
            seen.clear()
        elif cell in seen:
            repeated.append(cell)
        elif cell:
            seen.add(cell)
    return repeated


README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PRODUCT = ("sidecar", "ingest", "learner", "deploy", "demo", "benchmarks")


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_tree_names_every_package_and_no_folder_that_is_not_there() -> None:
    named = set()
    for row in re.findall(r"^\| (`.+)$", section(CONTRIBUTING, "The tree"), flags=re.MULTILINE):
        first, *inner = (cell for cell in row.split("|") if cell.strip())
        for folder in re.findall(r"`([^`]+)/`", first):
            named.add(folder)
            named |= {f"{folder}/{one}" for one in re.findall(r"`([\w/]+)/`", " ".join(inner))}
    packages = {
        str(made.parent.relative_to(ROOT))
        for room in PRODUCT
        for made in (ROOT / room).rglob("__init__.py")
        if "migrations" not in made.parts
    }

    assert len(packages) > 40
    assert packages - named == set()
    assert [folder for folder in sorted(named) if not (ROOT / folder).is_dir()] == []


def test_every_package_says_what_lives_there() -> None:
    packages = [made for room in PRODUCT for made in (ROOT / room).rglob("__init__.py")]

    assert len(packages) > 40
    silent = [str(one) for one in packages if not ast.get_docstring(ast.parse(one.read_text()))]
    assert silent == []


def of_a_date(page: Path) -> bool:
    """Logs and decisions name files as they were called on the day."""
    return page.name in ("log.md", "CHANGELOG.md") or page.parent.name == "decisions"


NOT_OURS = {"ingest.py", "json.py", "sitecustomize.py", "config.py"}
"""Files of the reader's own, which a page speaks of."""


@pytest.mark.parametrize(
    "page", [page for page in PAGES if not of_a_date(page)], ids=lambda page: page.name
)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    assert missing_files(page.read_text(encoding="utf-8")) == []


def test_a_file_that_is_not_there_is_found_by_its_path_and_by_its_name() -> None:
    text = "`sidecar/gone.py`, `gone.py`, `sidecar/app.py`, `app.py`, `docs/`, `adapters/<digest>`"

    assert missing_files(text) == ["sidecar/gone.py", "gone.py"]


def missing_files(text: str) -> list[str]:
    """The names in backticks that look like files of the repository, and are none."""
    tops = "|".join((*PRODUCT, "tests", "docs", "scripts", "constraints"))
    modules = {path.name for room in (*PRODUCT, "tests") for path in (ROOT / room).rglob("*.py")}
    modules |= {path.name for path in ROOT.glob("*.py")} | NOT_OURS
    paths = re.findall(rf"`((?:{tops})/[\w./-]*)(?::\d+)?`", text)
    return [path for path in paths if not (ROOT / path).exists()] + [
        name for name in re.findall(r"`([\w-]+\.py)`", text) if name not in modules
    ]
