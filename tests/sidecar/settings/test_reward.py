"""The section of the reward: what it takes, and what it refuses by the name that a person wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.errors import SettingsError
from sidecar.settings import load_settings, shown_settings
from sidecar.settings.judge import HttpVerifier, LengthVerifier


def write(folder: Path, text: str) -> Path:
    path = folder / "sidecar.toml"
    path.write_text(f'state_dir = "{folder}/state"\n{text}\n')
    return path


def test_verifiers_are_tables_by_name(tmp_path: Path) -> None:
    settings = load_settings(
        write(
            tmp_path,
            '[reward.verifiers.short]\nkind = "length"\n'
            "max_tokens = 300\ngate = true\n[reward.verifiers.calls]\nkind = 'tool_calls'\n",
        )
    )

    short = settings.reward.verifiers["short"]
    assert isinstance(short, LengthVerifier)
    assert (short.max_tokens, short.gate, short.timeout_s) == (300, True, 2.0)
    assert list(settings.reward.verifiers) == ["short", "calls"]


def test_a_token_comes_from_the_environment_and_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDECAR_REWARD__VERIFIERS", '{"shop": {"token": "tok-12345"}}')
    path = write(
        tmp_path, '[reward.verifiers.shop]\nkind = "http"\nurl = "http://u:pw@127.0.0.1:9/x"'
    )

    settings = load_settings(path)

    shop = settings.reward.verifiers["shop"]
    assert isinstance(shop, HttpVerifier)
    assert shop.token is not None
    assert shop.token.get_secret_value() == "tok-12345"
    shown = str(shown_settings(settings)["reward"])
    assert "tok-12345" not in shown
    assert "pw" not in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "length"', "setting reward.verifiers.v: has no limit; give min_ or max_"),
        (
            'kind = "length"\nmax_tokens = 1\nmin_tokens = 2',
            "setting reward.verifiers.v: has min_tokens over max_tokens",
        ),
        (
            'kind = "length"\nmax_token = 3',
            "unknown setting reward.verifiers.v.max_token; did you mean "
            "reward.verifiers.v.max_tokens?",
        ),
        (
            'kind = "lenght"',
            "setting reward.verifiers.v: kind lenght is unknown; there are tool_calls, ",
        ),
        (
            "weight = 1",
            "setting reward.verifiers.v: has no kind; give one of tool_calls, json_schema, ",
        ),
        (
            'kind = "tool_calls"\ntimeout_s = 0',
            "setting reward.verifiers.v.timeout_s: 0 is out of range; give 0.01 to 300 s",
        ),
        (
            'kind = "length"\nmin_tokens = 3\nfade = 0.5',
            "setting reward.verifiers.v.fade is 0.5 and there is no maximum to fade beyond",
        ),
        (
            'kind = "tool_calls"\npass_at = 0.5',
            "setting reward.verifiers.v.pass_at is 0.5 and gate is false, so it would not be used",
        ),
        ('kind = "exact"', "has texts and metadata, or neither; give one of them"),
        (
            'kind = "regex"\npattern = "(a)\\\\1"',
            "setting reward.verifiers.v.pattern: the pattern is refused",
        ),
        (
            'kind = "http"\nurl = "127.0.0.1:9"',
            "setting reward.verifiers.v.url: 127.0.0.1:9 is not http://host:port",
        ),
        (
            'kind = "entry_point"\nentry_point = "a b"',
            "setting reward.verifiers.v.entry_point: is no name of an entry point",
        ),
        (
            'kind = "entry_point"\nentry_point = "a"\nparams = {when = 2020-01-01}',
            "setting reward.verifiers.v.params is sent as JSON and holds what JSON cannot",
        ),
        (
            'kind = "json_schema"\njson_schema = {maximum = nan}',
            "setting reward.verifiers.v.json_schema is sent as JSON and holds what JSON cannot",
        ),
    ],
)
def test_what_would_not_work_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(write(tmp_path, f"[reward.verifiers.v]\n{text}"))

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_no_counter_could_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is no name of a verifier"):
        load_settings(write(tmp_path, '[reward.verifiers."My Check"]\nkind = "tool_calls"'))


def test_there_are_only_so_many_verifiers(tmp_path: Path) -> None:
    tables = "\n".join(f'[reward.verifiers.v{n}]\nkind = "tool_calls"' for n in range(17))

    with pytest.raises(SettingsError, match="there are over 16 verifiers"):
        load_settings(write(tmp_path, tables))
