"""install/Containerfile and compose.yaml, as far as no container is needed."""

from __future__ import annotations

import re

import pytest

from sidecar.settings.load import load_settings
from support.install_tools import COMPOSE, ROOT, SECRETS, compose_config, output, tool

CONTAINERFILE = ROOT / "install" / "Containerfile"
OURS = {"proxy-1", "proxy-2", "ingest", "score", "control", "learner"}


def test_hadolint_finds_no_fault() -> None:
    assert output(tool("hadolint"), CONTAINERFILE) == (0, "")


def test_every_path_that_is_copied_is_in_the_context() -> None:
    """.dockerignore leaves all but these out."""
    allowed = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), flags=re.M))
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", CONTAINERFILE.read_text(), flags=re.M)

    assert {path for line in copied for path in line.split()} == allowed
    assert [one for one in allowed if not (ROOT / one).exists()] == []


def test_a_user_without_rights_runs_the_images() -> None:
    text = CONTAINERFILE.read_text()

    assert "\nUSER 65532:65532\n" in text
    assert re.findall(r"^FROM runtime AS (\w+)$", text, flags=re.M) == [
        "proxy",
        "control",
        "learner",
    ]


def test_the_compose_file_is_whole() -> None:
    made = compose_config(**dict.fromkeys(SECRETS, "/x"))

    assert (made["code"], made["said"]) == (0, "")
    services = made["made"]["services"]
    assert set(services) == OURS | {"vllm", "postgres", "kafka", "prometheus"}
    for name in OURS:
        one = services[name]
        assert one["read_only"] is True
        assert one["cap_drop"] == ["ALL"]
        assert one["security_opt"] == ["no-new-privileges:true"]
    published = [port for one in services.values() for port in one.get("ports", ())]
    assert [port for port in published if not port.startswith("127.0.0.1:")] == []
    assert "ports" not in services["vllm"]
    assert [name for name, one in services.items() if "depends_on" in one] == []
    volumes = {name for one in services.values() for name in one.get("volumes", ())}
    named = {one.split(":")[0] for one in volumes if not one.startswith((".", "/"))}
    assert named == set(made["made"]["volumes"])


@pytest.mark.parametrize("missing", SECRETS)
def test_a_secret_that_is_missing_is_named(missing: str) -> None:
    made = compose_config(**{one: "/x" for one in SECRETS if one != missing})

    assert made["code"] != 0
    assert missing in made["said"]


def test_its_settings_are_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compose_config(**{**dict.fromkeys(SECRETS, "/x"), "ADMIN_TOKEN_SHA256": "0" * 64})[
        "made"
    ]
    for name, value in made["services"]["control"]["environment"].items():
        monkeypatch.setenv(name, value)

    settings = load_settings(COMPOSE / "sidecar.toml")

    assert str(settings.learner.adapters_dir) == "/adapters"
    assert made["services"]["learner"]["volumes"][2] == "adapters:/adapters"
    assert made["services"]["vllm"]["volumes"][1] == "adapters:/adapters:ro"


def test_prometheus_takes_its_scrape_jobs() -> None:
    command = (tool("promtool"), "check", "config", "--syntax-only", COMPOSE / "prometheus.yaml")
    code, said = output(*command)

    assert code == 0, said
