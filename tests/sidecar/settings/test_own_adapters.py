"""`serving.own_adapters`: which projects have a line of adapters of their own."""

from __future__ import annotations

from pathlib import Path

from sidecar.settings import Settings, load_settings
from sidecar.settings.checks import advice

KEYS = '[access]\nmode = "keys"\n'


def load(folder: Path, serving: str, more: str = KEYS) -> Settings:
    path = folder / "sidecar.toml"
    path.write_text(f'state_dir = "{folder}/state"\n{more}[serving]\n{serving}\n')
    return load_settings(path)


def test_without_the_setting_there_is_one_line_named_as_the_model(tmp_path: Path) -> None:
    settings = load(tmp_path, 'model = "m"')

    assert [line.name for line in settings.lines] == ["m"]
    assert settings.line == settings.lines[0]


def test_settings_of_a_line_differ_in_the_line_alone(tmp_path: Path) -> None:
    settings = load(tmp_path, 'model = "m"\nown_adapters = ["shop", "support"]\nmax_loras = 9')
    default, shop, support = settings.lines

    assert (default.name, shop.name, support.name) == ("m", "m@@shop", "m@@support")
    assert settings.of_line(shop).line == shop
    assert settings.of_line(shop).serving == settings.serving
    assert settings.of_line(shop).of_line(default).line == settings.line == default
    assert list(advice(settings)) == []


def test_lines_that_get_no_traffic_or_do_not_fit_are_warned_of(tmp_path: Path) -> None:
    few = load(tmp_path, 'own_adapters = ["a", "b"]')
    nobody = load(tmp_path, 'own_adapters = ["a"]\nmax_loras = 6', more="")

    [(key, why)] = advice(few)
    assert key == ("serving", "max_loras")
    assert "is 4, and 3 lines of adapters need 9" in why
    [(key, why)] = advice(nobody)
    assert key == ("serving", "own_adapters")
    assert 'set access.mode = "keys"' in why
