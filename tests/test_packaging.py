"""pyproject.toml: every dependency has an upper bound, and the tested set is inside the ranges."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution, packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sidecar.processes
from sidecar.processes import PACKAGE

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    extra: [one for one in requirements if not one.startswith(f"{PACKAGE}[")]
    for extra, requirements in PROJECT["optional-dependencies"].items()
}
"""Extra -> what it requires itself, without the extras that it includes."""
PROCESSES = ("control", "judge", "learner")
ALL = [Requirement(one) for one in chain(PROJECT["dependencies"], *EXTRAS.values())]


def pinned(name: str) -> dict[str, str]:
    """Package -> version of a file in constraints/."""
    lines = (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if re.match(r"[A-Za-z0-9]", line)]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("requirement", ALL, ids=str)
def test_every_dependency_has_an_upper_bound(requirement: Requirement) -> None:
    assert {"<", "=="} & {one.operator for one in requirement.specifier}


@pytest.mark.parametrize(
    ("constraints", "extras"),
    [("sidecar", (*PROCESSES, "dev")), ("engine-cpu", ("engine-cpu",))],
)
def test_the_tested_set_is_inside_the_ranges(constraints: str, extras: tuple[str, ...]) -> None:
    own = PROJECT["dependencies"] if "learner" in extras else []
    versions = pinned(constraints)
    requirements = [Requirement(one) for one in chain(own, *(EXTRAS[extra] for extra in extras))]

    outside = [
        str(one)
        for one in requirements
        if not one.specifier.contains(versions[canonicalize_name(one.name)])
    ]

    assert len(requirements) >= 2
    assert outside == []


def test_the_learner_is_tested_with_the_low_ends_together_and_with_newer_ones() -> None:
    allowed = {one.name: one.specifier for one in map(Requirement, EXTRAS["learner"])}
    low, new = pinned("learner-low"), pinned("learner-new")

    assert low.keys() == new.keys() == {"torch", "transformers", "peft"}
    for name, version in low.items():
        assert allowed[name].contains(version)
        assert f">={'.'.join(version.split('.')[:2])}" in {str(one) for one in allowed[name]}
        assert allowed[name].contains(new[name])


@pytest.mark.parametrize(
    ("name", "release"),
    [("litellm", "1.82.7"), ("litellm", "1.82.8"), ("litellm", "1.83.6"), ("starlette", "1.3.0")],
)
def test_releases_that_were_compromised_or_exploited_are_refused(name: str, release: str) -> None:
    (found,) = (one for one in ALL if one.name == name)

    assert not found.specifier.contains(release)


def installed_closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Name -> distribution, of requirements and all that they require, as installed here."""
    found: dict[str, Distribution] = {}
    unread = [(Requirement(one), "") for one in requirements]
    while unread:
        wanted, extra = unread.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(wanted.name)
        if name not in found or wanted.extras:
            found[name] = distribution(name)
            for extra in wanted.extras or {""}:
                unread += ((Requirement(one), extra) for one in found[name].requires or [])
    return found


def test_nothing_that_is_required_is_under_the_gpl_or_the_lgpl() -> None:
    """What `kafka` and `postgres` bring is under the LGPL, so nothing requires these two."""
    extras = (EXTRAS[extra] for extra in (*PROCESSES, "tinker"))
    required = chain(PROJECT["dependencies"], *extras)
    licences = {
        name: " ".join(
            line.strip().split("\n")[0]  # some give the whole text
            for key in ("License-Expression", "License", "Classifier")
            for line in one.metadata.get_all(key, [])
        )
        for name, one in installed_closure(required).items()
    }

    copyleft = re.compile("GPL|GNU (Lesser |Affero )?General Public")
    assert {"fastapi", "torch", "certifi"} <= licences.keys()
    assert [name for name, words in licences.items() if copyleft.search(words)] == []


def test_a_process_names_what_its_extra_installs() -> None:
    installs = packages_distributions()
    named = {
        extra: {canonicalize_name(installs[package][0]) for package in packages}
        for extra, packages in sidecar.processes.EXTRAS.items()
    }
    required = {extra: {Requirement(one).name for one in EXTRAS[extra]} for extra in PROCESSES}

    required["learner"].remove("matplotlib")  # runs go on without curves
    assert named == required
    assert PROJECT["name"] == PACKAGE


def test_the_learners_libraries_are_ranges() -> None:
    operators = {
        one.name: {part.operator for part in one.specifier}
        for one in map(Requirement, EXTRAS["learner"])
    }

    assert set(operators) == {"torch", "transformers", "peft", "safetensors", "matplotlib"}
    assert set(map(frozenset, operators.values())) == {frozenset({">=", "<"})}
    (drawn,) = (one for one in EXTRAS["learner"] if one.startswith("matplotlib"))
    assert drawn in EXTRAS["dev"], "the tests draw too"


def shell_function(name: str) -> str:
    """A function of scripts/setup."""
    setup = (ROOT / "scripts" / "setup").read_text()
    return setup[setup.index(f"{name}() {{") :].split("\n}\n", 1)[0] + "\n}\n"


def installed_torch(folder: Path, index_has: str) -> tuple[list[str], str]:
    """What `install_torch` of scripts/setup asks pip for, and what it says."""
    python = folder / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text(
        f'#!/bin/sh\nfor last; do :; done\necho "$*" >> {folder}/asked\n[ "$last" = {index_has} ]\n'
    )
    python.chmod(0o755)
    function = shell_function("install_torch")
    setup = (ROOT / "scripts" / "setup").read_text()
    (version,) = re.findall(r"^TORCH=(\S+)", setup, re.MULTILINE)
    run = f'set -eu; TORCH={version}; say() {{ echo "$*"; }}; {function} install_torch {folder}'
    done = subprocess.run(["bash", "-c", f"{run} 3>&1"], check=True, capture_output=True, text=True)
    return (folder / "asked").read_text().splitlines(), done.stdout


@pytest.mark.parametrize(("uv", "asked"), [(None, "pip"), ("false", "pip"), ("true", "uv")])
def test_the_setup_goes_on_with_pip_where_there_is_no_uv_or_uv_fails(
    tmp_path: Path, uv: str | None, asked: str
) -> None:
    for name, code in (("env/bin/python", "true"), *([(".cache/uv/bin/uv", uv)] if uv else ())):
        command = tmp_path / name
        command.parent.mkdir(parents=True)
        command.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/{command.name}.asked\n{code}\n')
        command.chmod(0o755)
    run = f"set -eu; {shell_function('install_locked')} install_locked env lock.txt"

    subprocess.run(["bash", "-c", run], check=True, cwd=tmp_path)

    said = {one.name: one.read_text().strip() for one in tmp_path.glob("*.asked")}
    assert ("uv.asked" in said) == (uv is not None)
    assert said.get("python.asked") == (
        "-m pip install -q --no-compile --no-deps -r lock.txt" if asked == "pip" else None
    )


def test_the_setup_asks_the_ordinary_index_alone(tmp_path: Path) -> None:
    """First the CPU build, then the plain one with a line that says what it costs."""
    for script in (ROOT / "scripts").iterdir():
        assert not re.search(
            r"https?://(?!127\.0\.0\.1)|--(extra-)?index-url", script.read_text()
        ), script.name

    version = f"torch=={pinned('sidecar')['torch']}"
    asked, told = installed_torch(tmp_path, version)
    assert (asked, told) == ([f"-m pip install -q --no-compile --no-deps {version}"], "")

    (tmp_path / "asked").unlink()
    plain = version.removesuffix("+cpu")
    asked, told = installed_torch(tmp_path, plain)
    assert asked == [
        f"-m pip install -q --no-compile --no-deps {version}",
        f"-m pip install -q --no-compile {plain}",
    ]
    assert "may be large" in told
