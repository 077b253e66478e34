"""`sidecar config init`, and values of options that do not exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from deploy.preflight.settings import documented, first_settings
from sidecar.settings import Advanced, Settings, load_settings
from support.disk_limits import full_disk, other_group
from tests.deploy.cli.conftest import Command


def test_the_first_settings_are_written_and_sound(sidecar: Command, config: Path) -> None:
    config.unlink()

    assert sidecar("config", "init") == 0
    said = sidecar.out
    assert sidecar("config", "check") == 0

    assert config.read_text() == first_settings()
    assert said.startswith(f"wrote {config}: set serving.upstreams, serving.model and, to learn, ")
    assert "serving.base_model_path; ask `sidecar config check --online`" in said


@pytest.mark.parametrize("size", [3, 4, 8, 9, 16, 17])
def test_a_group_size_outside_4_to_8_is_warned_of_and_one_over_16_refused(
    sidecar: Command, size: int, config: Path
) -> None:
    config.write_text(f"[groups]\nsize = {size}\n")

    assert sidecar("config", "check") == (0 if size <= 16 else 2)

    told = sidecar.err
    assert ("warning: groups.size is" in told) is (size in (3, 9, 16))
    assert ("give 2 to 16" in told) is (size == 17)


def test_a_file_that_exists_is_never_overwritten(sidecar: Command, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("# mine\n")

    code = sidecar("config", "init", str(path))

    assert code == 1
    assert path.read_text() == "# mine\n"
    assert "exists already and is left as it is" in sidecar.err


def test_force_overwrites_and_others_cannot_read_it(sidecar: Command, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("# mine\n")
    path.chmod(0o644)

    assert sidecar("config", "init", str(path), "--force") == 0

    assert path.read_text() == first_settings()
    assert path.stat().st_mode & 0o777 == 0o640


def test_force_on_a_full_disk_leaves_the_old_settings(sidecar: Command, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("# mine\n")

    with full_disk():
        code = sidecar("config", "init", str(path), "--force")

    assert code == 1
    assert path.read_text() == "# mine\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["mine.toml", "sidecar.toml"]
    assert "nothing was changed" in sidecar.err


def test_force_follows_a_link_and_keeps_the_group(sidecar: Command, tmp_path: Path) -> None:
    path, link = tmp_path / "mine.toml", tmp_path / "link.toml"
    path.write_text("# mine\n")
    path.chmod(0o640)
    group = other_group(path)
    link.symlink_to(path)

    assert sidecar("config", "init", str(link), "--force") == 0

    assert link.is_symlink()
    assert path.read_text() == first_settings()
    assert (path.stat().st_mode & 0o777, path.stat().st_gid) == (0o640, group)


@pytest.mark.parametrize(
    ("section", "name", "values"),
    [
        ("serving", "logprobs_mode", ("processed_logprobs", "raw_logprobs")),
        ("serving", "grammar", ("find_out", "as_asked", "with_tools", "always")),
        ("access", "mode", ("open", "keys", "upstream")),
        ("kafka", "sasl_mechanism", ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")),
    ],
)
def test_the_file_says_what_a_setting_may_be(
    section: str, name: str, values: tuple[str, ...]
) -> None:
    block = first_settings().split(f"\n[{section}]\n")[1].split("\n[")[0]
    before = re.split(rf"^(?:# |#: )?{name}(?: =|:)", block, flags=re.MULTILINE)[0]
    explained = re.split(r"^(?:# )?\w+ = .*$", before, flags=re.MULTILINE)[-1]

    assert all(value in explained for value in values), explained


def test_the_file_names_and_explains_every_setting() -> None:
    text = first_settings()
    fields = Settings.model_fields
    sections: dict[str, type[BaseModel]] = {
        name: kind
        for name, field in fields.items()
        if isinstance(kind := field.annotation, type) and issubclass(kind, BaseModel)
    }
    inner = {"learner": ["advanced"]}
    sections["learner.advanced"] = Advanced

    missing = [
        f"{name}.{key}"
        for name, kind in sections.items()
        for key in kind.model_fields
        if key not in documented(kind)
    ]
    assert missing == []
    for name, kind in sections.items():
        block = re.split(r"^\[", text.split(f"\n[{name}]\n")[1], flags=re.MULTILINE)[0]
        named = re.findall(r"^(?:# )?(\w+) = |^#: (\w+): not set", block, flags=re.MULTILINE)
        keys = [key for key in kind.model_fields if key not in inner.get(name, ())]
        assert [one or other for one, other in named] == keys


def test_a_folder_that_is_not_there_is_one_line(sidecar: Command, tmp_path: Path) -> None:
    code = sidecar("config", "init", str(tmp_path / "none" / "sidecar.toml"))

    assert code == 1
    assert sidecar.err.count("\n") == 1
    assert "cannot be written (No such file or directory)" in sidecar.err


def test_each_setting_that_the_file_shows_has_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("sidecar.toml")
    shown = re.sub(r"^# ", "", first_settings(), flags=re.MULTILINE)
    path.write_text(shown)

    assert len(list(_keys(tomllib.loads(shown)))) > 25
    assert load_settings(path) == Settings()


def _keys(table: dict[str, object]) -> list[str]:
    return [
        name
        for key, value in table.items()
        for name in (_keys(value) if isinstance(value, dict) else [key])
    ]


@pytest.mark.parametrize(
    ("words", "known"),
    [
        ("groups ls --status skored", "sampling, sampled, scored, claimed, trained, set_aside"),
        ("adapters ls --state chmpion", "registered, gating, ramping, champion, retired"),
        ("audit -o yaml", "text, json"),
    ],
)
def test_an_unknown_value_is_refused_with_the_known_ones(
    sidecar: Command, words: str, known: str
) -> None:
    code = sidecar(*words.split())

    error = " ".join(sidecar.err.split())
    assert code == 2
    assert f"no such value: {words.split()[-1]}; known: {known}" in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[judge]\nmodel = 'm'\ncontext_tokens = 10",
            "setting judge.context_tokens: 10 holds not even 8 answers of one word",
        ),
        (
            "[judge]\nmodel = 'm'\nparams = {num_ctx = 2048}",
            "setting judge.params.num_ctx: 2048 holds not even 8 answers",
        ),
        (
            "[gate_judge]\nmodel = 'm'\nparams = {num_ctx = 10}",
            "setting gate_judge.params.num_ctx: 10 holds not even 4 answers",
        ),
        (
            "[reward.verifiers.v]\nkind = 'json_schema'\njson_schema = {type = 'objekt'}",
            "setting reward.verifiers.v.json_schema: is no JSON schema",
        ),
        (
            "[reward.verifiers.v]\nkind = 'entry_point'\nentry_point = 'refund_polcy'",
            "setting reward.verifiers.v.entry_point: no installed package has the entry point "
            "refund_polcy in learning_sidecar.verifiers (known: none)",
        ),
    ],
)
def test_what_could_judge_or_check_nothing_is_refused(
    sidecar: Command, config: Path, text: str, message: str
) -> None:
    config.write_text(f"{text}\n")

    assert sidecar("config", "check") == 2

    assert message in sidecar.err


def test_the_next_three_times_of_a_cron_line_are_shown(sidecar: Command, config: Path) -> None:
    config.write_text(
        '[learner]\nschedule = "cron"\ncron = "0 3 * * 7"\ntimezone = "Europe/Berlin"\n'
    )

    assert sidecar("config", "check") == 0

    told = sidecar.err
    sunday = r"Sun \d{4}-\d\d-\d\d 03:00"
    assert re.search(
        rf"to know: learner\.cron runs next {sunday}, {sunday}, {sunday} \(Europe/Berlin\)\n", told
    )
