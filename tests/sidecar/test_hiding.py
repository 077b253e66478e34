"""Secrets are hidden in what people see: by their name, their place, or for want of knowledge."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest
import structlog
from pydantic import ValidationError

from sidecar.hiding import (
    HIDDEN,
    beginning,
    hide_in_command,
    hide_in_params,
    hide_in_text,
    hide_in_url,
    hide_values,
    is_secret_name,
)
from sidecar.logs import configure_logging
from sidecar.settings import Settings, Telemetry, shown_settings

S = "s3cr3t"
DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "name",
    [
        "apiKey", "API-KEY", "x-api-key", "HF_TOKEN", "hfToken", "client_secret", "DB_PASSWD",
        "Authorization", "vertex_credentials", "key", "sig", "X-Amz-Signature", "Cookie", "auth",
        "--api-key", "sslpassword", "pat", "accountkey",
    ],
)  # fmt: skip
def test_a_name_that_a_secret_goes_by_is_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens", "max_completion_tokens", "tokens_per_day", "--tokenizer", "--ssl-keyfile",
        "temperature", "model", "author", "path", "host", "reasoning_effort", "keyboard",
    ],
)  # fmt: skip
def test_an_ordinary_name_is_not_taken_for_one(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"postgresql://joe:{S}@db/x", "postgresql://**********@db/x"),
        (f"postgresql://joe:a/{S}@b@db/x", "postgresql://**********@db/x"),
        (f"https://{S}@host/v1?a=1", "https://**********@host/v1?a=1"),
        (f"https://h/?a=1&api_key={S}&b=2", "https://h/?a=1&api_key=**********&b=2"),
        (f"https://h/?%61pi_key={S}", "https://h/?%61pi_key=**********"),
        (f"https://h/#access_token={S}", "https://h/#access_token=**********"),
        (f"Authorization: Bearer {S}", "Authorization: Bearer **********"),
        ("sent sk-abcdefghijklmnop to it", "sent ********** to it"),
        ("http://127.0.0.1:8000/v1?x=1", "http://127.0.0.1:8000/v1?x=1"),
        ("sqlite:///.sidecar/store.db", "sqlite:///.sidecar/store.db"),
    ],
)
def test_urls_and_well_known_keys(text: str, shown: str) -> None:
    assert hide_in_url(text) == shown


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["vllm", "serve", "--api-key", S, "--port", "8000"], "vllm serve --api-key * --port 8000"),
        (["vllm", f"--api-key={S}", "--max-model-len=9"], "vllm --api-key=* --max-model-len=9"),
        (["vllm", "--api-key", S, S, "--port", "1"], "vllm --api-key * * --port 1"),
        (["vllm", "--api-key", f"-{S}", "--port", "1"], "vllm --api-key * --port 1"),
        (["env", f"HF_TOKEN={S}", "vllm"], "env HF_TOKEN=* vllm"),
        (["curl", "-u", f"joe:{S}", "http://h"], "curl -u joe:* http://h"),
        (["docker", "run", "-u", "1000:1000", "x"], None),
        (["sh", "-c", "vllm serve m --port 1 --dtype auto; echo token id 5"], None),
        (["vllm", "--tokenizer", "x", "--ssl-keyfile", "k.pem"], None),
        (["vllm", "--max-num-batched-tokens", "2048"], None),
    ],
)
def test_key_like_options_of_a_command(command: list[str], shown: str | None) -> None:
    expected = " ".join(command) if shown is None else shown.replace("*", HIDDEN)

    assert " ".join(hide_in_command(command)) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"VLLM_API_KEY={S} exec vllm serve --api-key {S} --port 8000",
        f'vllm --hf-overrides \'{{"token":"{S}"}}\'',
        f'vllm serve --api-key "a" {S} --port 1',
        f"vllm serve --api-key \\\n  {S} \\\n {S} --port 1",
        f"vllm serve --api-key $'{S} {S}' --port 1",
        f"curl -H 'Authorization: Token {S}' http://h",
        f"curl --user='user:{S}' http://h",
        f"PW={S} DB_PW={S} x --pw {S}",
        f"curl 'https://h/v1?k={S}&x=1' 'https://h/f?code={S}'",
        f'vllm --x \'{{"headers":{{"X-Auth":"{S}"}}}}\'',
        f"curl -H 'x-api-key: {S}' -H 'Authorization: Bearer {S}' http://u:{S}@h/?sig={S}",
    ],
)
def test_a_shell_command_in_one_argument_hides_them_as_well(text: str) -> None:
    assert S not in hide_in_text(text)
    assert S not in " ".join(hide_in_command(["sh", "-c", text]))


def test_parameters_show_numbers_and_the_texts_that_are_known_to_be_harmless() -> None:
    params: dict[str, Any] = {
        "temperature": 0.0,
        "reasoning_effort": "low",
        "api_base": f"https://u:{S}@host/v1",
        "api_key": S,
        "aws_secret_access_key": 12345,
        "vertex_credentials": {"private_key": S, "project": S},
        "extra_headers": {"X-Team": S, "Authorization": f"Bearer {S}"},
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "fallbacks": [{"model": "x", "key": S}],
        "seed": None,
    }

    shown = hide_in_params(params)

    assert S not in json.dumps(shown)
    assert shown["aws_secret_access_key"] == HIDDEN
    assert (shown["temperature"], shown["reasoning_effort"], shown["seed"]) == (0.0, "low", None)
    assert shown["extra_body"] == params["extra_body"]
    assert shown["thinking"] == params["thinking"]


@pytest.mark.parametrize(
    ("params", "is_shown"),
    [
        ({"type": "json_object"}, True),
        ({"type": S}, False),
        ({"type": "AbCdEfGh"}, False),
        ({"type": "a" * 33}, False),
        ({"api_version": "2024-10-21"}, True),
        ({"api_version": "2025-01-01-preview"}, True),
        ({"api_version": S}, False),
        ({"stop": ["\n\n", "</s>"]}, True),
        ({"stop": ["4f9d2c81aa0b7e66"]}, False),
    ],
)
def test_a_harmless_parameter_is_shown_only_in_the_form_that_its_name_promises(
    params: dict[str, Any], is_shown: bool
) -> None:
    assert (hide_in_params(params) == params) == is_shown


def test_settings_are_shown_without_any_secret() -> None:
    settings = Settings.model_validate(
        {
            "serving": {"api_key": S},
            "engine": {"command": ["vllm", "--api-key", S], "env": {"X": S}},
            "store": {"url": f"postgresql://joe:{S}@db/x?sslpassword={S}"},
            "bus": {"url": f"sqlite:///x?key={S}"},
            "judge": {
                "api_key": S,
                "api_base": f"https://h/v1?code=1&token={S}",
                "params": {"api_key": S, "extra_headers": {"x": S}, "temperature": 0.5},
            },
            "gate_judge": {"model": "m", "api_key": S, "params": {"a": S}},
            "telemetry": {
                "otlp_endpoint": f"https://{S}@h/v1/traces?dataset={S}#{S}",
                "otlp_metrics_endpoint": f"https://u:{S}@h/v1/metrics?{S}",
            },
            "admin": {"tokens": [DIGEST, "f" * 64]},
        }
    )

    shown = shown_settings(settings)

    assert S not in json.dumps(shown)
    assert DIGEST[:8] not in json.dumps(shown), "it may be a token that was mistaken for a digest"
    assert shown["admin"]["tokens"] == ["(set)", "(set)"]
    assert shown["engine"] == {"command": ["vllm", "--api-key", HIDDEN], "env": {"X": "(set)"}}
    assert shown["judge"]["params"]["temperature"] == 0.5
    assert shown["telemetry"]["otlp_endpoint"] == f"https://{HIDDEN}@h/v1/traces?{HIDDEN}#{HIDDEN}"
    assert shown["proxy"]["port"] == 8080


def test_what_a_library_logs_about_a_telemetry_url_holds_no_part_that_may_be_a_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """urllib3 logs the path with the query when a collector cannot be reached."""
    monkeypatch.setattr(logging.root, "handlers", [])
    level = logging.root.level
    telemetry = Telemetry(otlp_endpoint=f"https://joe:{S}@h/v1/traces?dataset={S}#{S}")
    try:
        configure_logging(telemetry, "proxy")
        logging.getLogger("urllib3").warning("Retrying: %s", f"/v1/traces?dataset={S}")
        try:
            raise ConnectionError(f"https://joe:{S}@h/v1/traces")
        except ConnectionError:
            logging.getLogger("opentelemetry").exception("not exported")
    finally:
        logging.root.setLevel(level)
        structlog.reset_defaults()

    told = capsys.readouterr().err
    assert "Retrying: /v1/traces?" in told
    assert "not exported" in told
    assert S not in told


def test_a_setting_that_is_refused_does_not_echo_what_stood_there() -> None:
    with pytest.raises(ValidationError) as refused:
        Settings.model_validate(
            {"serving": {"api_key": [S], "upstreams": S}, "judge": {"params": S}, "groups": S}
        )

    assert S not in str(refused.value)
    assert S not in repr(refused.value)


REPEATED = [
    "a", "://", "a.", "token ", "token:", 'api_key="', "'\"", "-u ", "--key ", "Bearer ", "?a",
    "sk-", "authorization ", "missing ", "api_key ", "a=\\\n", "basic\t", " ",
]  # fmt: skip


@pytest.mark.parametrize("function", ["hide_in_text", "hide_in_url"])
def test_a_text_of_any_kind_is_searched_in_linear_time(function: str) -> None:
    """Quadratic search took 50 s and more for each of the first three texts."""
    searched = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json, sys; from sidecar import hiding\n"
            "for part in json.load(sys.stdin):\n"
            f"    hiding.{function}((part * 100_000)[:100_000] + '?')",
        ],
        input=json.dumps(REPEATED),
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )

    assert searched.returncode == 0, searched.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ftp://a://b:c@d://e@f g", f"ftp://{HIDDEN}@f g"),
        ("see http://host/path and x@y", "see http://host/path and x@y"),
        (f"9api_key={S}", f"9api_key={HIDDEN}"),
        (f"-api_key={S}", f"-api_key={HIDDEN}"),
        (f"é_token: {S}", f"é_token: {HIDDEN}"),
    ],
)
def test_where_a_name_or_a_place_begins(text: str, shown: str) -> None:
    assert hide_in_text(text) == shown


def test_a_message_is_cut_where_a_word_ends() -> None:
    assert beginning("short", 5) == "short"
    assert beginning("two words", 8) == "two"
    assert beginning("two words", 3) == ""
    assert beginning("a" * 20_000) == ""
    assert beginning("no " * 100_000).endswith("no")
    assert len(beginning("no " * 100_000)) <= 16_000


@pytest.mark.parametrize("key", ["a", "e ", "x1", "\n\t"])
def test_a_key_that_occurs_in_every_text_is_left(key: str) -> None:
    text = "An answer: take the next exit, 1 x."

    assert hide_values(text, [key, "sk-secret"]) == text
    assert hide_values(f"{text} sk-secret", [key, "sk-secret"]) == f"{text} {HIDDEN}"
