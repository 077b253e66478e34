"""Secrets that stand in files, as containers mount them."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from pydantic import BaseModel, SecretStr

from deploy.admin.client import TOKEN_VARIABLE, AdminClient
from deploy.outside.http import OutsideError, secret_of
from sidecar.errors import SettingsError
from sidecar.settings import Admin, Settings, load_settings
from sidecar.settings.kinds import MAX_SECRET_BYTES, from_file


def secrets_of(model: type[BaseModel], place: str = "") -> list[str]:
    """The settings, by section and key, that hold a secret."""
    found = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += secrets_of(field.annotation, f"{place}{name}__")
        elif "SecretStr" in str(field.annotation):
            found.append(f"{place}{name}")
    return found


SECRETS = secrets_of(Settings)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"\xef\xbb\xbfs3cret\r\n")  # with the mark that editors begin a file with
    return path


def test_all_secrets_are_found() -> None:
    assert {"judge__api_key", "kafka__sasl_password", "store__encryption_keys"} <= set(SECRETS)


@pytest.mark.parametrize("name", SECRETS)
def test_every_secret_may_stand_in_a_file(
    name: str, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "s3cret"
    if name == "store__encryption_keys":
        text = f"k:{base64.b64encode(bytes(32)).decode()}"
        secret.write_text(text)
    monkeypatch.setenv(f"SIDECAR_{name.upper()}", f"file:{secret}")
    if name == "gate_judge__api_key":
        monkeypatch.setenv("SIDECAR_GATE_JUDGE__MODEL", "openai/x")
    if name == "kafka__sasl_password":
        monkeypatch.setenv("SIDECAR_KAFKA__SECURITY_PROTOCOL", "SASL_SSL")
        monkeypatch.setenv("SIDECAR_KAFKA__SASL_MECHANISM", "PLAIN")
        monkeypatch.setenv("SIDECAR_KAFKA__SASL_USERNAME", "u")

    found: object = load_settings()
    for part in name.split("__"):
        found = getattr(found, part)

    assert isinstance(found, SecretStr)
    assert found.get_secret_value() == text
    assert text not in repr(found)


def test_urls_that_hold_passwords_may_stand_in_files(tmp_path: Path) -> None:
    store, bus = tmp_path / "store", tmp_path / "bus"
    store.write_text("postgresql+psycopg://u:pw@db/sidecar\n")
    bus.write_text("kafka://a:9092/topic\n")
    config = tmp_path / "sidecar.toml"
    config.write_text(f'[store]\nurl = "file:{store}"\n[bus]\nurl = "file:{bus}"\n')

    settings = load_settings(config)

    assert settings.store.url == "postgresql+psycopg://u:pw@db/sidecar"
    assert settings.bus.url == "kafka://a:9092/topic"


@pytest.mark.parametrize(
    ("content", "value", "why"),
    [
        (None, "file:{path}", "cannot be read (No such file or directory)"),
        (b"", "file:{path}", "is empty"),
        (b"\xff\xfe", "file:{path}", "is not UTF-8"),
        (b"x" * (MAX_SECRET_BYTES + 1), "file:{path}", f"over {MAX_SECRET_BYTES} bytes"),
        (b"key", "file:secret", "by a relative path"),
        (b"top\nsecret", "file:{path}", "a line's end"),
        (None, "file:/dev/zero", "plain file"),
        (None, "file:{path.parent}/pipe", "plain file"),
        (None, "file:{path.parent}", "plain file"),
    ],
)
def test_a_file_without_a_usable_secret_is_refused_and_not_quoted(
    content: bytes | None, value: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("SIDECAR_JUDGE__API_KEY", value.format(path=path))

    with pytest.raises(SettingsError) as refused:
        load_settings()

    text = str(refused.value)
    assert "judge.api_key" in text.lower().replace("sidecar_", "").replace("__", ".")
    assert why in text
    assert "\n" not in text
    assert "top" not in text


def test_a_folder_in_place_of_a_secret_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ValueError, match="plain file"):
            from_file(f"file:{tmp_path}")

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_path_with_a_nul_byte_is_refused_by_its_setting(tmp_path: Path) -> None:
    config = tmp_path / "sidecar.toml"
    config.write_text('[judge]\napi_key = "file:/run/secrets/a\\u0000b"\n')

    with pytest.raises(SettingsError, match=r"judge\.api_key.*NUL byte; give the path without it"):
        load_settings(config)
    with pytest.raises(OutsideError, match="TOKEN names a file by a path with a NUL byte"):
        secret_of("TOKEN", {"TOKEN": "file:/a\0b"})


def test_tokens_of_variables_may_stand_in_files(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert secret_of("TOKEN", {"TOKEN": f"file:{secret}"}) == "s3cret"
    with pytest.raises(OutsideError, match="TOKEN names a file that cannot be read"):
        secret_of("TOKEN", {"TOKEN": "file:/nowhere/at/all"})

    monkeypatch.setenv(TOKEN_VARIABLE, f"file:{secret}")
    settings = Settings(admin=Admin(url="https://sidecar.example/ops/"))
    client = AdminClient(settings)
    assert client._headers == {"authorization": "Bearer s3cret"}
    assert client._url == "https://sidecar.example/ops/admin/v1"
    monkeypatch.setenv(TOKEN_VARIABLE, "file:/nowhere/at/all")
    with pytest.raises(SettingsError, match=f"{TOKEN_VARIABLE} names a file"):
        AdminClient(settings)
