"""The pages name what the code has, and nothing that it has not.

Whether a page says the right thing of a name, a person must judge; that no name is missing, a
machine can.
"""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any, get_args, get_type_hints

from deploy.records import AdapterState, Phase
from ingest.sampling.round import Miss
from learner.grpo.checks import REASONS
from learner.runs.runs import EndStatus
from learner.runs.selection import DropReason
from learner.runs.source import FAILED_RUNS
from sidecar.records import Outcome
from sidecar.settings import Section, Settings
from sidecar.settings.kinds import Between
from sidecar.store.models import Base

ROOT = Path(__file__).resolve().parent.parent
DICTIONARY = ROOT / "docs" / "data-dictionary.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PRODUCT = ("sidecar", "ingest", "learner", "deploy", "demo", "benchmarks")


def section(page: Path, title: str) -> str:
    """The text under a heading, up to the next heading. Raises: AssertionError without it."""
    parts = re.split(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert title in bodies, f"{page.name} has no heading {title!r}"
    return bodies[title]


def test_the_reference_is_made_from_the_code_of_now() -> None:
    """Else run `.venv/bin/python scripts/reference`."""
    made: dict[Path, str] = runpy.run_path(str(ROOT / "scripts" / "reference"))["pages"]()

    assert [one.name for one, text in made.items() if one.read_text("utf-8") != text] == []


def test_the_dictionary_has_every_column_and_no_other() -> None:
    """A line of the list names one column, or several, before its colon."""
    for name, table in Base.metadata.tables.items():
        heads = re.findall(r"^- ([^:\n]+)", section(DICTIONARY, f"`{name}`"), re.MULTILINE)
        named = re.findall(r"`([^`]+)`", " ".join(heads))
        assert sorted(named) == sorted(column.name for column in table.columns), name


def test_the_dictionary_has_every_value_of_its_lists() -> None:
    lists: dict[str, tuple[str, ...]] = {
        "`adapter_version.state`": get_args(AdapterState),
        "`canary.state`": get_args(Phase),
        "`training_run.status`": ("running", *get_args(EndStatus)),
        "`answer_group.reason`": (*get_args(DropReason), *REASONS, FAILED_RUNS),
        "`counter`: stage and reason": get_args(Miss),
        "Small lists": get_args(Outcome),
    }
    for title, values in lists.items():
        text = section(DICTIONARY, title)
        assert [value for value in values if f"`{value}`" not in text] == [], title


def test_every_event_that_the_runbook_names_as_a_symptom_is_in_the_code() -> None:
    text = section(ROOT / "docs" / "incident.md", "Symptoms")
    symptoms = re.findall(r"^\| ([^|]+) \|", text, flags=re.MULTILINE)
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)", " ".join(symptoms)))
    sources = [file for room in PRODUCT for file in (ROOT / room).rglob("*.py")]
    code = "\n".join(file.read_text(encoding="utf-8") for file in sources)

    assert len(named) > 20
    quoted = {f'"{one.removeprefix("sidecar_")}"' for one in named}
    assert [one for one in sorted(quoted) if one not in code] == []


def betweens(kind: Any) -> list[Between]:  # Any: an annotation
    """The ranges in an annotated type."""
    inner = get_args(kind)
    return [
        one for part in inner for one in ([part] if isinstance(part, Between) else betweens(part))
    ]


def test_a_range_has_the_unit_that_the_name_of_its_key_ends_with() -> None:
    kinds = [field.annotation for field in Settings.model_fields.values()]
    sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    for one in sections:
        for key, kind in get_type_hints(one, include_extras=True).items():
            unit = "s" if key.endswith("_s") else ""
            assert {between.unit for between in betweens(kind)} <= {unit}, key


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        (page.name, link)
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if not link.startswith("http") and not leads(page, link)
    ]
    assert broken == []


def leads(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not target.exists() or not anchor:
        return target.exists()
    # Headings as GitHub names them: lower case, no punctuation, hyphens for spaces.
    titles = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return anchor in {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in titles}


def test_the_index_has_every_page() -> None:
    named = set(re.findall(r"\]\(([\w.-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))

    pages = {one.name for one in (ROOT / "docs").glob("*.md")} - {"README.md"}
    decisions = {one.name for one in (ROOT / "docs" / "decisions").glob("*.md")}
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert named == pages
    assert set(re.findall(r": docs/([\w.-]+\.md)$", navigation, re.M)) == pages
    assert set(re.findall(r": docs/decisions/([\w.-]+\.md)$", navigation, re.M)) == decisions


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_tree_names_every_package_and_no_folder_that_is_not_there() -> None:
    named = set()
    tree = section(ROOT / "CONTRIBUTING.md", "The tree")
    for row in re.findall(r"^\| (`.+)$", tree, flags=re.MULTILINE):
        first, *inner = (cell for cell in row.split("|") if cell.strip())
        for folder in re.findall(r"`([^`]+)/`", first):
            named.add(folder)
            named |= {f"{folder}/{one}" for one in re.findall(r"`([\w/]+)/`", " ".join(inner))}
    made = [one for room in PRODUCT for one in (ROOT / room).rglob("__init__.py")]
    packages = {str(one.parent.relative_to(ROOT)) for one in made if "migrations" not in one.parts}

    assert len(packages) > 40
    assert packages - named == set()
    assert [folder for folder in sorted(named) if not (ROOT / folder).is_dir()] == []
    assert [str(one) for one in made if not ast.get_docstring(ast.parse(one.read_text()))] == []


NOT_OURS = {"ingest.py", "json.py", "sitecustomize.py", "config.py"}
"""Files of the reader's own, which a page speaks of."""


def test_every_file_that_a_page_names_is_there() -> None:
    """Logs and decisions name files as they were called on the day."""
    dated = {one for one in PAGES if one.name == "log.md" or one.parent.name == "decisions"}
    tops = "|".join((*PRODUCT, "tests", "docs", "scripts", "constraints"))
    modules = {path.name for room in (*PRODUCT, "tests") for path in (ROOT / room).rglob("*.py")}
    modules |= {path.name for path in ROOT.glob("*.py")} | NOT_OURS
    missing = []
    for page in PAGES:
        text = "" if page in dated or page.name == "CHANGELOG.md" else page.read_text("utf-8")
        paths = re.findall(rf"`((?:{tops})/[\w./-]*)(?::\d+)?`", text)
        missing += [(page.name, path) for path in paths if not (ROOT / path).exists()]
        names = re.findall(r"`([\w-]+\.py)`", text)
        missing += [(page.name, name) for name in names if name not in modules]

    assert missing == []
