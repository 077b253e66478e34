"""Settings that do nothing are warned of: what, why, what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.settings import load_settings
from sidecar.settings.checks import advice

JUDGE = '[judge]\nmodel = "hosted_vllm/m"\n'
REGEX = '[reward.verifiers.v]\nkind = "regex"\n'


def advised(folder: Path, text: str) -> dict[str, str]:
    path = folder / "sidecar.toml"
    path.write_text(f'state_dir = "{folder}/state"\n{text}\n')
    return {".".join(key): what for key, what in advice(load_settings(path))}


def test_the_defaults_with_a_judge_are_sound(tmp_path: Path) -> None:
    assert advised(tmp_path, "") == {}
    assert advised(tmp_path, JUDGE) == {}


@pytest.mark.parametrize(
    ("text", "key", "why"),
    [
        ("[groups]\nsize = 12", "groups.size", "so many confuse a judge; 4 to 8"),
        (f"{JUDGE}[groups]\nrate = 0", "groups.rate", "nothing is sampled, judged or learned"),
        (f"{JUDGE}[groups]\nheld_out_rate = 0", "groups.held_out_rate", "waits for ever"),
        ("[canary]\nsteps = [500, 9500, 10000]", "canary.steps", "played as [500, 9000]"),
        (
            '[groups]\nsampling_upstreams = ["http://127.0.0.1:8000"]',
            "groups.sampling_upstreams",
            "which sample without it",
        ),
        ('[judge]\nrubric = "Be kind."', "judge.model", "so judge.rubric would not be used"),
        (f"{JUDGE}timeout_s = 0.2", "judge.timeout_s", "end without a score; give 60 s"),
        (f"{JUDGE}params = {{max_tokens = 100}}", "judge.params", "about 480 tokens"),
        (
            f'{JUDGE}[gate_judge]\nmodel = "m"\nparams = {{max_completion_tokens = 100}}',
            "gate_judge.params",
            "scores of 4 answers take about 240 tokens",
        ),
        (
            f"{JUDGE}budget = 5\nprice = {{input = 0, output = 0}}",
            "judge.price",
            "a budget in dollars is never spent",
        ),
        (
            f'{REGEX}pattern = "a"\nweight = 0',
            "reward.verifiers.v.weight",
            "counts for nothing",
        ),
        (
            f'{REGEX}pattern = "a"\nweight = 3\ngate = true',
            "reward.verifiers.v.weight",
            "is no part of the ranking",
        ),
        (
            f'{REGEX}pattern = "a"\nprojects = ["shop"]',
            "reward.verifiers.v.projects",
            'all traffic is of that project, so it would check nothing; add "default"',
        ),
        ("[learner]\npack_tokens = 10", "learner.pack_tokens", "left out (too_long)"),
        (f'{REGEX}pattern = ""', "reward.verifiers.v.pattern", "every answer is right"),
        (
            f'{REGEX}pattern = "x*"\nmust = "not_match"',
            "reward.verifiers.v.pattern",
            "every answer is wrong",
        ),
        ("[learner]\ninterval_s = 3600", "learner.interval_s", 'learner.schedule is "groups"'),
        (
            '[learner]\nschedule = "interval"\ncron = "0 3 * * *"',
            "learner.cron",
            'so it would not be used; set that to "cron"',
        ),
        ("[learner]\nshard_base = true", "learner.shard_base", "learner.processes is 1"),
        ("[best_of]\nenabled = true", "best_of.enabled", "each user gets the first; name a judge"),
        ("[best_of]\ntimeout_s = 2", "best_of.timeout_s", "best_of.enabled is false"),
        (
            "[serving]\nsampling_defaults = {temperature = 0}",
            "serving.sampling_defaults",
            "is greedy and is not learned from",
        ),
        (
            '[serving]\nlogprobs_mode = "raw_logprobs"\nsampling_defaults = {temperature = 0.7}',
            "serving.sampling_defaults",
            "only answers at temperature 1 are exact",
        ),
    ],
)
def test_a_setting_that_does_nothing_is_warned_of(
    tmp_path: Path, text: str, key: str, why: str
) -> None:
    found = advised(tmp_path, text)

    assert list(found) == [key]
    assert why in found[key]


@pytest.mark.parametrize(
    "text",
    [
        'schedule = "interval"\ninterval_s = 60',
        'schedule = "cron"\ncron = "0 3 * * *"',
        "idle_below = 5",
        "processes = 2\nshard_base = true",
        'tinker_url = "http://trainer:8000"',
        'schedule = "manual"\nshard_base = true',  # torchrun starts the processes
        "shard_base = false",
        "steps = 256",
    ],
)
def test_a_learner_setting_that_is_read_is_not_warned_of(tmp_path: Path, text: str) -> None:
    assert advised(tmp_path, f"[learner]\n{text}") == {}


@pytest.mark.parametrize(
    "pattern", ["^[^a]*$", "^$", r"\\d", "^.{0,200}$", r"^[ -~\\n]*$", r"\\A.*\\z"]
)
def test_a_pattern_that_tells_texts_apart_is_not_warned_of(tmp_path: Path, pattern: str) -> None:
    assert advised(tmp_path, f'{REGEX}pattern = "{pattern}"') == {}
