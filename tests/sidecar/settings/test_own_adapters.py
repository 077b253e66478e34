"""`serving.own_adapters`: which projects have a line of adapters of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.errors import SettingsError
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


@pytest.mark.parametrize(
    ("serving", "why"),
    [
        ('own_adapters = ["a", "a"]', "names one project twice"),
        ('own_adapters = ["default"]', "leave it out"),
        ('own_adapters = ["a b"]', "is no name that a project may have"),
        ('own_adapters = ["a@@b"]', "is no name that a project may have"),
        ('model = "m@@a"', "choose another name"),
        (f'model = "{"m" * 250}"\nown_adapters = ["a"]', "is too long"),
        ('own_adapter = ["a"]', "serving.own_adapters"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(serving: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        load(tmp_path, serving)

    assert why in str(error.value)


def test_lines_that_get_no_traffic_or_do_not_fit_are_warned_of(tmp_path: Path) -> None:
    few = load(tmp_path, 'own_adapters = ["a", "b"]')
    nobody = load(tmp_path, 'own_adapters = ["a"]\nmax_loras = 6', more="")

    [(key, why)] = advice(few)
    assert key == ("serving", "max_loras")
    assert "is 4, and 3 lines of adapters need 9" in why
    [(key, why)] = advice(nobody)
    assert key == ("serving", "own_adapters")
    assert 'set access.mode = "keys"' in why
