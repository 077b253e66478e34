"""`sidecar config check --online`: each fault is named with its setting, and nothing is changed."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import make_url

from deploy.cli.main import main
from deploy.preflight.settings import checked_settings, preflight, runs_already
from learner.policy import memory
from sidecar.errors import SettingsError, StoreError
from sidecar.processes import only_one
from sidecar.settings import Settings, load_settings
from sidecar.store.database import Database
from support.adapter_endpoints import MODEL, AdapterEndpoints, sound_vllm
from support.fake_vllm import CLOSE, SeenRequest, Step
from support.postgres import OVERRIDE, Databases
from tests.ingest.conftest import ScriptedServer


@pytest.fixture
def vllm() -> Iterator[tuple[str, AdapterEndpoints]]:
    """A vLLM with all that the sidecar needs."""
    with sound_vllm() as served:
        yield served


Checked = Callable[..., list[tuple[str, str, str]]]


def settings_with(folder: Path, url: str, **sections: dict[str, Any]) -> Settings:
    """Settings without a judge and a learner, on free ports."""
    base: dict[str, Any] = {
        "state_dir": folder / "state",
        "serving": {"upstreams": [url], "model": MODEL, "base_model_path": "/weights"},
        "proxy": {"port": 0},
        "admin": {"port": 0},
        "store": {"url": f"sqlite:///{folder}/state/store.db"},
        "bus": {"url": f"sqlite:///{folder}/state/outbox.db"},
        "learner": {"schedule": "manual", "adapters_dir": folder / "adapters"},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Settings(**base)


def check(settings: Settings, *, running: bool = False) -> list[tuple[str, str, str]]:
    found = asyncio.run(preflight(settings, running=running))
    return [(one.level, one.setting, one.text) for one in found]


@pytest.fixture
def checked(tmp_path: Path, vllm: tuple[str, AdapterEndpoints]) -> Checked:
    """checked(**sections): what is found of settings with them."""
    return lambda **sections: check(settings_with(tmp_path, vllm[0], **sections))


def test_a_sound_set_up_lacks_only_the_judge(
    checked: Checked, tmp_path: Path, vllm: tuple[str, AdapterEndpoints]
) -> None:
    (found,) = checked()

    assert found[:2] == ("warning", "judge.model")
    assert list(tmp_path.iterdir()) == []
    assert vllm[1].loads == []


@pytest.mark.parametrize(
    ("path", "reply", "setting", "words"),
    [
        ("/v1/models", (401, b""), "serving.api_key", "refuses the key"),
        ("/v1/models", (404, b"<html>"), "serving.upstreams", "without a list of models"),
        ("/v1/models", (200, b'{"data": [{"id": "x"}]}'), "serving.model", "'m' but x"),
        (
            "/v1/load_lora_adapter",
            (404, b""),
            "serving.upstreams",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        ),
        ("/metrics", (200, b"# HELP other\n"), "serving.upstreams", "--enable-lora"),
        (
            "/v1/chat/completions",
            (200, b'{"choices": [{}]}'),
            "serving.upstreams",
            "ignores return_token_ids",
        ),
        ("/v1/chat/completions", (500, b"broken"), "serving.upstreams", "with 500: broken"),
    ],
)
def test_what_vllm_lacks_is_an_error(
    checked: Checked,
    vllm: tuple[str, AdapterEndpoints],
    path: str,
    reply: tuple[int, bytes],
    setting: str,
    words: str,
) -> None:
    vllm[1].overrides[path] = reply

    error, judge = checked()

    assert error[:2] == ("error", setting)
    assert words in error[2]
    assert judge[1] == "judge.model"


def test_what_was_found_before_a_vllm_breaks_off_is_told(
    checked: Checked, vllm: tuple[str, AdapterEndpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm[1].overrides["/v1/load_lora_adapter"] = (404, b"")
    answer = AdapterEndpoints.__call__

    def break_off(self: AdapterEndpoints, request: SeenRequest) -> Sequence[Step]:
        return [CLOSE] if "/metrics" in request.line else answer(self, request)

    monkeypatch.setattr(AdapterEndpoints, "__call__", break_off)

    words = [one[2] for one in checked() if one[1] == "serving.upstreams"]

    assert ["VLLM_ALLOW_RUNTIME_LORA_UPDATING" in words[0], "does not answer" in words[1]] == [
        True,
        True,
    ]


def test_a_vllm_that_is_not_there_is_an_error_unless_up_starts_it(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, "http://127.0.0.1:9")
    ours = settings_with(tmp_path, "http://127.0.0.1:9", engine={"command": ["sh"]})

    assert check(settings)[0][:2] == ("error", "serving.upstreams")
    assert check(ours)[0][:2] == ("warning", "serving.upstreams")


@pytest.mark.parametrize(
    ("path", "reply", "words"),
    [
        ("/v1/models", (200, b'{"data": []}'), "serves no 'm'"),
        ("/metrics", (404, b""), "/metrics answers 404"),
    ],
)
def test_what_a_vllm_that_only_samples_lacks_is_an_error(
    checked: Checked, path: str, reply: Any, words: str
) -> None:
    with sound_vllm() as (sampling, endpoints):
        groups = {"sampling_upstreams": [sampling]}
        assert [one[1] for one in checked(groups=groups)] == ["judge.model"]
        endpoints.overrides[path] = reply

        error, judge = checked(groups=groups)
    away, _ = checked(groups={"sampling_upstreams": ["http://127.0.0.1:9"]})

    assert away[:2] == ("error", "groups.sampling_upstreams")
    assert error[:2] == ("error", "groups.sampling_upstreams")
    assert words in error[2]
    assert judge[1] == "judge.model"


def test_folders_and_programs_that_cannot_be_used_are_named(
    checked: Checked, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()

    found = checked(
        learner={"adapters_dir": tmp_path / "file" / "adapters"},
        engine={"command": ["no-such-program"]},
    )

    assert [one[1] for one in found] == ["learner.adapters_dir", "engine.command", "judge.model"]
    assert "is no folder" in found[0][2]


def test_a_port_that_is_taken_is_an_error_unless_the_sidecar_runs(
    tmp_path: Path, vllm: tuple[str, AdapterEndpoints]
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        settings = settings_with(tmp_path, vllm[0], admin={"port": taken.getsockname()[1]})

        assert check(settings)[0][:2] == ("error", "admin.port")
        assert [one[1] for one in check(settings, running=True)] == ["judge.model"]


def test_a_running_sidecar_is_told_by_its_lock(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, "http://127.0.0.1:9")

    assert not runs_already(settings)
    assert not settings.state_dir.exists()
    with only_one(settings.state_dir, "up"):
        assert runs_already(settings)
    assert not runs_already(settings)


@pytest.mark.parametrize(
    ("judge", "setting", "words"),
    [
        (
            {"model": "openai/x", "api_base": "http://127.0.0.1:9/v1", "api_key": "k"},
            "judge.api_base",
            "; start the judge, correct judge.api_base",
        ),
        ({"model": "openai/x"}, "judge.api_key", "OPENAI_API_KEY"),
        ({"model": "nonsense"}, "judge.model", "LLM Provider NOT provided"),
    ],
    ids=["away", "no key", "unknown"],
)
def test_a_judge_that_cannot_be_asked_is_an_error(
    checked: Checked,
    monkeypatch: pytest.MonkeyPatch,
    judge: dict[str, Any],
    setting: str,
    words: str,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    error, exam = checked(judge=judge)

    assert error[:2] == ("error", setting)
    assert words in error[2]
    assert "SSLContext" not in error[2]
    assert exam[:2] == ("warning", "gate_judge.model")


@pytest.mark.parametrize(
    ("reply", "setting", "words"),
    [
        (
            (429, {"error": {"message": "slow"}}, ("retry-after", "90")),
            "judge.requests_per_minute",
            ("a rate limit of the provider, no wrong setting; it asks to wait 90 s, until ",
             "; wait for the end of the limit"),
        ),
        (
            (429, {"error": {"message": "no money", "code": "insufficient_quota"}}),
            "judge.api_key",
            ("; pay or raise the limit of the provider's account",),
        ),
        (
            (200, b"<html>Welcome</html>"),
            "judge.api_base",
            ("; correct judge.api_base: what answers there is no model's API",),
        ),
    ],
    ids=["rate limit", "no credit", "web page"],
)  # fmt: skip
def test_the_remedy_of_a_judge_that_gives_no_scores_is_that_of_its_fault(
    checked: Checked, reply: tuple[Any, ...], setting: str, words: tuple[str, ...]
) -> None:
    with closing(ScriptedServer(reply)) as server:
        judge = {"model": "openai/x", "api_base": server.url, "api_key": "k"}
        error, _ = checked(judge=judge)

    assert error[:2] == ("error", setting)
    assert all(one in error[2] for one in words), error[2]


def test_a_verifier_that_cannot_be_used_is_an_error(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    verifiers = {
        "calls": {"kind": "tool_calls"},
        "code": {"kind": "entry_point", "entry_point": "nothing_such", "on_error": "hold"},
        "policy": {"kind": "http", "url": "http://127.0.0.1:9/check"},
    }

    found = checked(
        judge={"model": "openai/x"}, groups={"rate": 0.0}, reward={"verifiers": verifiers}
    )

    told = {setting: text for level, setting, text in found if level == "error"}
    assert list(told) == ["reward.verifiers.code.entry_point", "reward.verifiers.policy.url"]
    code, policy = told.values()
    assert "(not_loaded: no installed package has the entry point nothing_such" in code
    assert "so groups wait for it" in code
    assert policy == (
        "the verifier gives no finding (unreachable: ConnectError), so groups are judged without "
        "it; start the service, or correct url, token or timeout_s"
    )


def test_every_judge_that_the_settings_name_is_asked(checked: Checked) -> None:
    nobody = {"api_base": "http://127.0.0.1:9/v1", "api_key": "sk-x"}
    judge = {
        "model": "hosted_vllm/first",
        "fallbacks": [{"model": "hosted_vllm/second", **nobody}],
        **nobody,
    }
    gate = {"model": "hosted_vllm/third", **nobody}

    found = checked(judge=judge, gate_judge=gate)

    assert [(level, setting) for level, setting, _ in found] == [
        ("error", "judge.api_base"),
        ("error", "gate_judge.api_base"),
        ("warning", "judge.fallbacks[0].api_base"),
    ]
    assert found[2][2].startswith("the fallback hosted_vllm/second would not help: ")


def test_a_gate_whose_judge_gives_the_reward_is_a_warning(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    reward = {"model": "hosted_vllm/scripted", "api_base": "http://127.0.0.1:9/v1"}
    learning_off = {"groups": {"rate": 0.0}}  # the reward's judge is not asked then

    (same,) = checked(judge=reward, **learning_off)
    (own,) = checked(judge=reward, gate_judge={"model": "openai/x"}, **learning_off)

    assert same[:2] == ("warning", "gate_judge.model")
    assert "gives the reward and decides the gate, by one rubric" in same[2]
    assert own[:2] == ("error", "gate_judge.api_key"), "its own judge is asked"


@pytest.mark.parametrize(
    ("base", "device", "setting", "words"),
    [
        ("", "cpu", "serving.base_model_path", "it is empty"),
        ("/no/such/folder", "cpu", "serving.base_model_path", "is no folder"),
        ("nobody/nothing", "cpu", "serving.base_model_path", "hf download nobody/nothing"),
        ("{empty}", "cpu", "serving.base_model_path", "no config.json"),
        ("{weightless}", "cpu", "serving.base_model_path", "no *.safetensors"),
        ("{quantised}", "cpu", "serving.base_model_path", "is quantised (awq)"),
        ("{broken}", "cpu", "serving.base_model_path", "cannot be read"),
        ("{sound}", "cuda:7", "learner.device", "cannot be used"),
    ],
)
def test_what_the_learner_lacks_is_an_error(
    checked: Checked, tmp_path: Path, base: str, device: str, setting: str, words: str
) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    for name, text in {
        "weightless": json.dumps(config),
        "quantised": json.dumps({**config, "quantization_config": {"quant_method": "awq"}}),
        "broken": "[]",
        "sound": json.dumps(config),
        "empty": None,
    }.items():
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "config.json").write_text(text)
        if name not in ("weightless", "empty"):
            (tmp_path / name / "model.safetensors").touch()
    path = str(tmp_path / base[1:-1]) if base.startswith("{") else base

    error, judge = checked(
        serving={"base_model_path": path}, learner={"schedule": "groups", "device": device}
    )

    assert error[:2] == ("error", setting)
    assert words in error[2]
    assert judge[1] == "judge.model"


def test_a_learner_by_hand_without_base_weights_is_a_warning(checked: Checked) -> None:
    _, found = checked(serving={"base_model_path": ""})

    assert found[:2] == ("warning", "serving.base_model_path")
    assert "`sidecar learn --once` cannot run" in found[2]


def test_a_base_that_is_not_there_is_told_without_loading_torch(tmp_path: Path) -> None:
    """It takes 11 s on a small machine."""
    program = (
        "import sys; from learner.ready import why_not_ready; from sidecar.settings import *\n"
        "for path in sys.argv[1:]:\n"
        "    (told,) = why_not_ready(Settings(serving=Serving(base_model_path=path)))\n"
        "    assert told[0] == 'serving.base_model_path'\n"
        "print({'torch', 'peft'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program, "", "/no/such/folder", str(tmp_path)]

    done = subprocess.run(command, check=True, capture_output=True, text=True)

    assert done.stdout == "set()\n"


def test_the_command_prints_each_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], vllm: tuple[str, AdapterEndpoints]
) -> None:
    file = tmp_path / "sidecar.toml"
    file.write_text(
        f'state_dir = "{tmp_path}/state"\n[serving]\nupstreams = ["{vllm[0]}"]\nmodel = "other"\n'
        '[proxy]\nport = 0\n[admin]\nport = 0\n[learner]\nschedule = "manual"\n'
        f'adapters_dir = "{tmp_path}/adapters"\n'
    )
    load_settings(file)

    code = main(["--config", str(file), "config", "check", "--online"])

    printed = capsys.readouterr()
    assert code == 1
    assert printed.out.startswith("error: serving.model: ")
    assert "\nwarning: judge.model: " in printed.out
    assert "which may take a minute\n" in printed.err
    assert printed.err.endswith("sidecar: these settings cannot run here\n")

    assert main(["--config", str(file), "config", "check", "--online", "-o", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["sound"], found["online"]) == (False, True)
    told = {(one["level"], one["setting"]) for one in found["findings"]}
    assert told >= {("error", "serving.model"), ("warning", "judge.model")}

    file.write_text(file.read_text().replace('"other"', f'"{MODEL}"'))
    assert main(["--config", str(file), "config", "check", "--online"]) == 0
    assert capsys.readouterr().out.endswith("settings are sound, and can run here\n")


def test_a_job_that_learns_elsewhere_may_look_at_the_learner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No vLLM and no judge is asked: none is there."""
    file = tmp_path / "sidecar.toml"
    file.write_text(
        f'state_dir = "{tmp_path}/state"\n[serving]\nmodel = "m"\n'
        'base_model_path = "/no/such/folder"\n[learner]\nschedule = "manual"\n'
    )
    words = ["--config", str(file), "config", "check"]

    assert main([*words, "--learner"]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("error: serving.base_model_path: /no/such/folder is no folder")
    assert printed.out.count("\n") == 1
    assert main([*words, "--learner", "-o", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["setting"] for one in found["findings"]] == ["serving.base_model_path"]
    assert main(words) == 0


def test_a_run_that_does_not_fit_into_its_share_is_an_error(
    checked: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(
        memory,
        "_measured",
        lambda _, rules, device: (10**9, memory.room_of(device, rules.memory_fraction)),
    )
    error, judge = checked(
        serving={"base_model_path": str(tmp_path)},
        learner={"schedule": "cron", "device": "cpu", "memory_fraction": 0.0001},
    )

    assert error[:2] == ("error", "learner.memory_fraction")
    assert "a run needs about 1.0 GB on cpu" in error[2]
    assert judge[1] == "judge.model"


def test_a_postgres_that_is_away_or_of_another_encoding_or_shut_is_an_error(
    checked: Checked, postgres: Databases
) -> None:
    def found(url: str) -> list[tuple[str, str, str]]:
        return [one for one in checked(store={"url": url}) if one[1] == "store.url"]

    sound = postgres.new(migrated=False)
    latin = postgres.new(migrated=False, encoding="LATIN1")

    assert found(sound) == []
    ((level, _, why),) = found("postgresql://joe:s3cret@127.0.0.1:1/x")
    assert level == "error"
    assert "refused" in why
    assert "s3cret" not in why
    ((_, _, why),) = found(latin)
    assert "the encoding of the database is LATIN1" in why
    with closing(Database(latin)) as database, pytest.raises(StoreError, match="is LATIN1, which"):
        database.upgrade()
    if OVERRIDE in os.environ:
        return  # no role is made on somebody's server
    with closing(Database(sound)) as database, database.write() as session:
        for statement in (
            "CREATE ROLE guest LOGIN",
            "REVOKE CREATE ON SCHEMA public FROM PUBLIC",
        ):
            session.execute(sqlalchemy.text(statement))
    guest = make_url(sound).set(username="guest").render_as_string(hide_password=False)
    ((_, _, why),) = found(guest)
    assert "its user may not make tables there" in why
    with closing(Database(sound)) as database, database.write() as session:
        session.execute(sqlalchemy.text("DROP ROLE guest"))
    for url in (sound, latin):
        postgres.drop(url)


def test_a_vllm_with_less_room_than_the_settings_is_an_error_that_names_the_flag(
    checked: Checked, vllm: tuple[str, AdapterEndpoints]
) -> None:
    told = b'vllm:lora_requests_info{max_lora="3",running_lora_adapters=""} 1.5\n'
    vllm[1].overrides["/metrics"] = (200, told)

    error, _ = checked()

    assert error[:2] == ("error", "serving.max_loras")
    assert "--max-loras 3; start it with --max-loras 4" in error[2]


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ('model = "openai/unheard-of"', "set judge.price ("),
        (
            'model = "openai/gpt-4.1-mini"\n[gate_judge]\nmodel = "openai/unheard-of"',
            "set gate_judge.price (",
        ),
        (
            'model = "openai/gpt-4.1-mini"\n[[judge.fallbacks]]\nmodel = "openai/unheard-of"',
            "set price in judge.fallbacks (",
        ),
    ],
)
def test_a_missing_price_is_named_where_it_goes(tmp_path: Path, text: str, setting: str) -> None:
    file = tmp_path / "sidecar.toml"
    file.write_text(f'state_dir = "{tmp_path}/state"\n[judge]\nbudget = 5\n{text}\n')

    with pytest.raises(SettingsError, match="openai/unheard-of") as refused:
        checked_settings(file)

    assert setting in str(refused.value)
