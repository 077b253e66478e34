"""What is said of values that no setting may have, and of names that there are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.errors import SettingsError
from sidecar.settings import load_settings

TINKER = '[learner]\ntinker_url = "http://trainer:8000"\n'
GATE = "[gate_judge]\n"
VERIFIER = "[reward.verifiers.v]\n"
REFUSED = [
    ("[groups]\nsise = 4", "unknown setting groups.sise; did you mean groups.size?"),
    ("[judge]\ntemperature = 1", "unknown setting judge.temperature; [judge] has no such key"),
    ("[learner]\nbeta = 0.1", "unknown setting learner.beta; the weight of the divergence fro"),
    ("[learner]\nlr = 1e-5", "unknown setting learner.lr; did you mean learner.learning_rate?"),
    ("[rewards]\nbatch = 4", "unknown setting rewards; did you mean reward?"),
    ("[cluster]\nbatch = 4", "unknown setting cluster; the sections are state_dir, "),
    (
        '[reward.verifiers.v]\nkind = "http"\nurl = "http://127.0.0.1:9"\nretries = 3',
        "unknown setting reward.verifiers.v.retries; a verifier of kind http has weight, ",
    ),
    ('[reward.verifiers.v]\nkind = "lenght"', "exact, length, entry_point, http; did you mean"),
    ("[proxy]\nport = 80.5", "setting proxy.port: must be a whole number, without a fraction"),
    ("[learner]\npack_tokens = 'big'", 'pack_tokens: must be a whole number, or "auto"'),
    ("[learner]\nlearning_rate = 'low'", 'learning_rate: must be a number, or "auto"'),
    (f"[learner]\npack_tokens = {10**400}", "pack_tokens: 1000000000"),
    ("[best_of]\nenabled = 'maybe'", "setting best_of.enabled: must be true or false"),
    ("[access]\nmode = 'none'", "setting access.mode: must be 'open', 'keys' or 'upstream'"),
    ("[[judge.fallbacks]]\nprice = {}", "setting judge.fallbacks.model: is missing"),
    ('[judge]\nmodl = "x"', "unknown setting judge.modl; did you mean judge.model?"),
    ("[groups]\nsize = 17", "setting groups.size: 17 is out of range; give 2 to 16: one answer ha"),
    (TINKER + "alpha = 16", "which has this alpha for every adapter; give 32"),
    (TINKER + "processes = 2", "which has its own processes; give 1"),
    (TINKER + "shard_base = true", "is true and learner.tinker_url"),
    (TINKER + "[learner.advanced]\nkl_coef = 0.5", "no divergence from the base"),
    ("[learner]\n" + 'tinker_url = "trainer:8000"', "is not a URL such as http://trainer:8000"),
    ("[learner]\n" + 'tinker_url = "http://me:secret@t"', "without a user or password"),
    (GATE + "api_base = 'http://127.0.0.1:9/v1'", "gate_judge.api_base is set without"),
    (GATE + "api_key = 'k'", "gate_judge.api_key is set without"),
    (GATE + "params = {temperature = 1}", "gate_judge.params is set without"),
    (GATE + "model = 'x/y'\nparams = {stream = true}", "gate_judge.params holds stream"),
    (GATE + "rubric = 'file:gone.txt'", "gone.txt cannot be read"),
    ("[judge]\nmodel = 'x/y'\n[judge.projects.shop]\n", "judge.projects.shop has no rubric"),
    (
        "[judge]\nmodel = 'x/y'\n[judge.projects.shop]\nrubric = '  '",
        "judge.projects.shop has no rubric",
    ),
    (
        "[judge]\nmodel = 'x/y'\n[judge.projects.shop]\nrubric_file = 'gone.txt'",
        "judge.projects.shop.rubric: /",
    ),
    (
        "[judge]\nmodel = 'x/y'\n[judge.projects.shop]\nrubrc = 'a'",
        "judge.projects.shop.rubrc; did you mean",
    ),
    (
        "[judge]\nmodel = 'x/y'\n[judge.projects.'a shop']\nrubric = 'a'",
        "judge.projects.a shop: is no name that a project may have",
    ),
    (VERIFIER + 'kind = "length"', "setting reward.verifiers.v: has no limit; give min_ or max_"),
    (
        VERIFIER + 'kind = "length"\nmax_tokens = 1\nmin_tokens = 2',
        "setting reward.verifiers.v: has min_",
    ),
    (VERIFIER + 'kind = "length"\nmax_token = 3', "unknown setting reward.verifiers.v.max_token;"),
    (VERIFIER + 'kind = "lenght"', "setting reward.verifiers.v: kind lenght is unknown; there are"),
    (VERIFIER + "weight = 1", "setting reward.verifiers.v: has no kind; give one of tool_calls, j"),
    (
        VERIFIER + 'kind = "length"\nmin_tokens = 3\nfade = 0.5',
        "setting reward.verifiers.v.fade is 0.5 a",
    ),
    (VERIFIER + 'kind = "tool_calls"\npass_at = 0.5', "setting reward.verifiers.v.pass_at is 0.5"),
    (VERIFIER + 'kind = "exact"', "has texts and metadata, or neither; give one of them"),
    (VERIFIER + 'kind = "regex"\npattern = "(a)\\\\1"', "setting reward.verifiers.v.pattern: the"),
    (VERIFIER + 'kind = "entry_point"\nentry_point = "a b"', "setting reward.verifiers.v.entry_po"),
    (
        VERIFIER + 'kind = "entry_point"\nentry_point = "a"\nparams = {when = 2020-01-01}',
        "setting reward.verifiers.v.params is sent as JSON and holds what JSON cannot",
    ),
    (
        VERIFIER + 'kind = "json_schema"\njson_schema = {maximum = nan}',
        "v.json_schema is sent as JSON",
    ),
    ('[serving]\nown_adapters = ["a", "a"]', "names one project twice"),
    ('[serving]\nown_adapters = ["default"]', "leave it out"),
    ('[serving]\nown_adapters = ["a b"]', "is no name that a project may have"),
    ('[serving]\nmodel = "m@@a"', "choose another name"),
    (f'[serving]\nmodel = "{"m" * 250}"\nown_adapters = ["a"]', "is too long"),
    ('[reward.verifiers."My Check"]\nkind = "tool_calls"', "is no name of a verifier"),
]
"""Settings, and a part of what is said of them."""


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_it_is_refused_in_one_line_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "sidecar.toml"
    path.write_text(f"{text}\n")

    with pytest.raises(SettingsError) as caught:
        load_settings(path)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_there_are_only_so_many_verifiers(tmp_path: Path) -> None:
    tables = "\n".join(f'[reward.verifiers.v{n}]\nkind = "tool_calls"' for n in range(17))
    path = tmp_path / "sidecar.toml"
    path.write_text(tables)

    with pytest.raises(SettingsError, match="there are over 16 verifiers"):
        load_settings(path)
