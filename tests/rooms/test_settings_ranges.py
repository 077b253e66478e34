"""Every setting has a range or a check: what would break a process is refused with the reason."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from deploy.cli.main import main
from deploy.line_loops import make_controller, make_gate
from ingest.best_of import BestOfJudge
from ingest.intake.bus import open_bus
from ingest.intake.loop import Intake
from ingest.ruler.judge import LiteLlmJudge
from ingest.ruler.judging import JudgingWorker
from ingest.sampling.worker import SamplingWorker
from ingest.vllm.watch import open_replicas
from learner.schedule.loop import POLL_S, InTurn, Schedule, start_clock
from sidecar.errors import SettingsError
from sidecar.proxy import Proxy
from sidecar.settings import Advanced, Settings, load_settings, shown_settings
from sidecar.settings.kinds import Between, base_url
from sidecar.store.database import Database
from sidecar.tracing.telemetry import configure_tracing

SECRET = "s3cret-value"


def numbers(kind: Any) -> bool:
    """Whether a value of this annotated kind is a number, or holds numbers."""
    if kind in (int, float):
        return True
    return any(numbers(inner) for inner in typing.get_args(kind) if inner is not Ellipsis)


def mapping_key(kind: Any) -> str | None:
    """A key that the mapping takes; None when the kind is no mapping."""
    if typing.get_origin(kind) in (dict, Mapping):
        names = typing.get_args(typing.get_args(kind)[0])
        return str(names[0]) if names else "chat"
    found = (mapping_key(inner) for inner in typing.get_args(kind) if inner is not Ellipsis)
    return next((name for name in found if name is not None), None)


SECTIONS: dict[str, type[BaseModel]] = {
    **{
        name: field.annotation
        for name, field in Settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    },
    "learner.advanced": Advanced,
}


def numeric_keys() -> Iterator[tuple[str, str, str]]:
    """Section, key, and how TOML writes a value of it: `{}` is the number."""
    for section, kind in SECTIONS.items():
        for key, inner in typing.get_type_hints(kind, include_extras=True).items():
            if key not in kind.model_fields or key == "params" or not numbers(inner):
                continue
            default = kind.model_fields[key].get_default(call_default_factory=True)
            written = "{}"
            if isinstance(default, tuple):
                written = "[{}]"
            elif (name := mapping_key(inner)) is not None:
                written = f"{{{{{name} = {{}}}}}}"
            yield section, key, written


NUMERIC = list(numeric_keys())


def write(folder: Path, text: str) -> Path:
    path = folder / "sidecar.toml"
    places = f'state_dir = "{folder}/state"\n'
    path.write_text(places + text)
    return path


def why_refused(path: Path) -> str | None:
    try:
        load_settings(path)
    except SettingsError as error:
        return str(error)
    return None


def build_all(settings: Settings, folder: Path) -> None:
    """What each process makes of its settings when it starts. Raises what a bad one would."""
    Proxy(settings)
    database = Database(f"sqlite:///{folder}/store.db")
    bus = open_bus(f"sqlite:///{folder}/outbox.db")
    Intake(bus, database, settings)
    judge = LiteLlmJudge(settings.judge)
    engine = open_replicas(settings.serving.upstreams, None, settings.groups)
    SamplingWorker(
        database, engine, engine, settings.groups, model="m", logprobs_mode="processed_logprobs"
    )
    JudgingWorker(database, judge, settings.judge)
    BestOfJudge(database, judge, settings)
    gate = make_gate(settings, database, engine, judge)
    make_controller(settings, database, {}, gate, lambda: None)

    class StandStill(Schedule):
        def observe(self) -> None:
            return None

    schedule = StandStill(settings, database, lambda _: pytest.fail("a run"), clock=lambda: 0.0)
    start_clock(POLL_S, InTurn([schedule]).poll).shutdown()
    configure_tracing(settings.telemetry, "test").shutdown()
    bus.close()
    database.close()
    asyncio.run(engine.aclose())


def test_every_process_can_be_built_at_either_limit_of_every_number(tmp_path: Path) -> None:
    assert len(NUMERIC) > 60
    assert ("canary", "steps", "[{}]") in NUMERIC
    assert ("capture", "projects", "{{chat = {}}}") in NUMERIC
    for end in range(2):
        values: dict[str, dict[str, Any]] = {}
        for section, key, written in NUMERIC:
            limit = ends(limits(SECTIONS[section], key))[end]
            values.setdefault(section, {})[key] = held(written, limit)
        values["learner"]["advanced"] = values.pop("learner.advanced")

        build_all(Settings(state_dir=tmp_path / "state", **values), tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("section", "key", "written"), NUMERIC, ids=[f"{s}.{k}" for s, k, _ in NUMERIC]
)
def test_a_number_is_taken_up_to_its_limits_and_what_is_beyond_is_refused_in_one_line(
    tmp_path: Path, section: str, key: str, written: str
) -> None:
    between = limits(SECTIONS[section], key)
    low, high = ends(between)
    beyond = [between.low - 1, between.high + 1, math.nan, math.inf, -math.inf, 1e300, 10**400]
    beyond += [True, *([between.low] if low != between.low else ())]
    beyond += [between.high] if high != between.high else []

    taken = [one for one in (low, high, *beyond) if takes(SECTIONS[section], key, written, one)]
    number = json.dumps(between.high + 1)
    message = why_refused(write(tmp_path, f"[{section}]\n{key} = {written.format(number)}\n"))

    assert taken == [low, high]
    assert message is not None
    assert f"{section}.{key}" in message
    assert between.why in message
    assert "\n" not in message
    assert len(message) < 400


def limits(kind: type[BaseModel], key: str) -> Between:
    """The limits that the setting's annotation names."""
    found = list(_betweens(typing.get_type_hints(kind, include_extras=True)[key]))
    assert found, f"{key} has no limits"
    return found[0]


def ends(between: Between) -> tuple[float, float]:
    """The smallest and the largest number within the limits."""
    low = math.nextafter(between.low, math.inf) if between.above_low else between.low
    return low, math.nextafter(between.high, -math.inf) if between.below_high else between.high


def held(written: str, value: float) -> Any:
    """The value as the setting holds it: alone, in a list or in a table."""
    if (match := re.fullmatch(r"\{\{(\w+) = \{\}\}\}", written)) is not None:
        return {match[1]: value}
    return (value,) if written == "[{}]" else value


def takes(kind: type[BaseModel], key: str, written: str, value: float) -> bool:
    """Whether the section alone takes the value."""
    try:
        kind.model_validate({key: held(written, value)})
    except ValidationError:
        return False
    return True


def _betweens(kind: Any) -> Iterator[Between]:
    for inner in typing.get_args(kind):
        if isinstance(inner, Between):
            yield inner
        elif not isinstance(inner, types.EllipsisType):
            yield from _betweens(inner)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[canary]\nsteps = []", "setting canary.steps is empty; give at least one weight"),
        ("[canary]\nsteps = [5000, 2000]", r"setting canary.steps is [5000, 2000]; a ramp goes up"),
        ("[canary]\nsteps = 2000", "setting canary.steps: must be a list; write it between"),
        ("[canary]\ngate_min_prompts = 41", "setting canary.gate_min_prompts is 41 and canary.gat"),
        ("[canary]\nstep_min_s = 100\nstep_max_s = 50", "setting canary.step_min_s is 100 and can"),
        ("[canary]\nturn_wait_s = 100\nstep_max_s = 150", "setting canary.turn_wait_s is 100; wit"),
        ("[learner]\nrank = 32", "setting learner.rank is 32 and serving.max_lora_rank is 16"),
        ("[learner]\nkl_coef = 11", "setting learner.advanced.kl_coef: 11 is out of range; give 0"),
        *(
            (f'[learner]\nschedule = "cron"\ncron = "{cron}"', f"setting learner.cron: {why}")
            for cron, why in (
                ("0 3 * *", "has 4 fields instead of 5; give five fields: minute, hour, day, mont"),
                ("61 3 * * *", "'61 3 * * *': Bad minute; give five"),
                ("* * * * nosuchday", "'* * * * nosuchday': Bad day-of-week; give five"),
                ("0 0 31 2 *", "'0 0 31 2 *': Bad day-of-month; give five"),
                ("0 0 */30 2 1#5", "names a day that never comes"),
            )
        ),
        ("[learner]\nmin_groups = 257", "setting learner.min_groups is 257 and learner.max_groups"),
        ('[learner]\ndevice = "cuda:x"', "setting learner.device: is no device of the learner"),
        ('[admin]\nhost = "[::1]"', "setting admin.host: write an IPv6 address without brackets"),
        ('[admin]\nhost = "http://x"', "setting admin.host: is no address and no host name"),
        ('[admin]\nhost = "127.0.0.999"', "setting admin.host: is no address and no host name"),
        ('[admin]\nhost = ""', "setting admin.host: is empty; 127.0.0.1 is this machine"),
        ("[admin]\nport = 8080", "setting admin.port is 8080, as proxy.port"),
        (
            '[proxy]\nhost = "::1"\n[admin]\nport = 8080\nhost = "0:0:0:0:0:0:0:1"',
            "setting admin.port is 8080, as proxy.port",
        ),
        ('[admin]\nport = 8080\nhost = "::ffff:127.0.0.1"', "setting admin.port is 8080, as proxy"),
        (
            '[proxy]\nhost = "0:0:0:0:0:0:0:0"\nallow_remote_without_keys = true\n'
            '[admin]\nport = 8080\nhost = "127.0.0.2"',
            "setting admin.port is 8080, as proxy.port",
        ),
        (
            '[serving]\nupstreams = ["http://[0:0::1]:8081"]',
            "names the sidecar's own admin.host",
        ),
        ('[learner]\nadapters_dir = " "', "setting learner.adapters_dir: is empty; give a folder"),
        (
            "[judge]\nparams = " + "{a = " * 33 + "1" + "}" * 33,
            "setting judge.params nests deeper than 32 levels",
        ),
        (
            f'[store]\nurl = "sqlite:////tmp/s.db?timeout={SECRET}"',
            "setting store.url: its parameter timeout is not what pysqlite takes",
        ),
        ('[store]\nurl = "sqlite:///file:/tmp/s.db?uri=true"', "names a URI, not a path"),
        (f'[admin]\ntokens = ["{SECRET}"]', "setting admin.tokens: is no SHA-256 digest"),
        ("[serving]\nupstreams = []", "setting serving.upstreams is empty; name at least one"),
        ('[serving]\nupstreams = ["http://a:1", "http://A:1/"]', "names one vLLM twice"),
        (
            '[groups]\nsampling_upstreams = ["http://a:1", "http://A:1/"]',
            "groups.sampling_upstreams names one vLLM twice",
        ),
        ('[serving]\nupstreams = ["http://a:1/v1"]', "setting serving.upstreams: http://a:1/v1 en"),
        ('[serving]\nupstreams = ["127.0.0.1:8000"]', "upstreams: 127.0.0.1:8000 is not http://ho"),
        ('[serving]\nupstreams = ["http://h:99999"]', "upstreams: http://h:99999 is no URL; give"),
        ('[serving]\nupstreams = ["dns+https://a:1"]', "is not dns+http://NAME:PORT"),
        ('[serving]\nupstreams = ["http://[::1"]', "upstreams: http://[::1 is no URL; give http"),
        (f'[serving]\nupstreams = ["http://u:{SECRET}@h"]', "holds a user name or a password"),
        ('[serving]\nupstreams = ["http://localhost:8080"]', "names the sidecar's own proxy.host"),
        (f'[serving]\napi_key = "{SECRET}\\n"', "setting serving.api_key: holds a space around"),
        ("serving = 5", "setting serving: must be a table; write [serving] above its keys"),
        ('[serving]\nmodel = ""', "setting serving.model: is empty; give a name"),
        ('[serving]\nmodel = "a\\nb"', "setting serving.model: must be one line"),
        ("[judge]\nparams = {temperature = nan}", "setting judge.params is sent as JSON and holds"),
        ("[judge]\nparams = {stream = true}", "setting judge.params holds stream"),
        ('[judge]\nrubric = " "', "setting judge.rubric: is empty"),
        ("[judge]\nprice = {input = 1}", "setting judge.price lacks output; give input and outp"),
        ('[[judge.fallbacks]]\nmodel = "openai/x"', "setting judge.fallbacks has judges and judge"),
        (
            '[judge]\nmodel = "openai/x"\n[[judge.fallbacks]]\nmodel = "openai/x"',
            "setting judge.fallbacks names one judge twice; name each once",
        ),
        (
            f'[judge]\nmodel = "x"\n[[judge.fallbacks]]\nmodel = "y"\napi_kye = "{SECRET}"',
            "unknown setting judge.fallbacks.api_kye; did you mean judge.fallbacks.api_key?",
        ),
        (
            '[judge]\nmodel = "x"\n[[judge.fallbacks]]\nmodel = "y"\nparams = {stream = true}',
            "setting judge.fallbacks.params holds stream",
        ),
        ('[engine]\ncommand = [""]', "setting engine.command begins with an empty word"),
        ('[engine]\ncommand = ["a\\u0000"]', "setting engine.command: holds a NUL byte"),
        ('[engine.env]\n"A=B" = "1"', "setting engine.env 'A=B' is no name of a variable"),
        (
            f'[admin]\nurl = "http://u:{SECRET}@h:1"',
            "setting admin.url: holds a user name or a pas",
        ),
        ('[admin]\nurl = "http://h:1?x=1"', "setting admin.url: holds `?` or `#`; give the base"),
        ('[bus]\nurl = "amqp://h/t"', "setting bus.url: is no bus that this release knows"),
        ('[bus]\nurl = "kafka://h:9092"', "setting bus.url: names no topic"),
        ('[bus]\nurl = "kafka://h:9092/a b"', "setting bus.url: names a topic that Kafka refuses"),
        ('[bus]\nurl = "kafka://h:99999/t"', "setting bus.url: has a port that is no number"),
        ('[bus]\nurl = "kafka://h,/t"', "setting bus.url: names a server without a host"),
        ('[bus]\nurl = "kafka://h:1/t?acks=0"', "setting bus.url: holds `?` or `#`; options"),
        (f'[bus]\nurl = "kafka://u:{SECRET}@h:1/t"', "setting bus.url: holds a user name or a pas"),
        (
            '[bus]\nurl = "kafka://h/t"\n[kafka]\nsecurity_protocol = "SASL_SSL"',
            "setting kafka.sasl_mechanism is empty",
        ),
        (
            '[bus]\nurl = "kafka://h/t"\n[kafka]\nsecurity_protocol = "SASL_SSL"\n'
            'sasl_mechanism = "PLAIN"\nsasl_username = "u"',
            "or kafka.sasl_password is empty and SASL needs both",
        ),
        (
            f'[bus]\nurl = "kafka://h/t"\n[kafka]\nsasl_password = "{SECRET}"',
            "setting kafka.security_protocol is PLAINTEXT, so the SASL settings would not be used",
        ),
        (
            '[bus]\nurl = "kafka://h/t"\n[kafka]\nsecurity_protocol = "SSL"\nssl_cafile = "/no"',
            "setting kafka.ssl_cafile names /no, which is no file",
        ),
        (f'[kafka]\nsasl_password = "{SECRET}\\n"', "kafka.sasl_password: holds a line's end"),
        ('[bus]\nurl = "sqlite:///:memory:"', "setting bus.url: memory is not shared"),
        ('[store]\nurl = "sqlite://"', "setting store.url names no file"),
        (f'[store]\nurl = "nonsense:{SECRET}"', "setting store.url is no database URL"),
        (f'[store]\nurl = "postgresql://u:{SECRET}@h:x/d"', "setting store.url is no database URL"),
        ('[bus]\nurl = "sqlite:///x.db"\n[store]\nurl = "sqlite:///x.db"', "name one file"),
        ('[store]\nurl = "sqlite:////tmp"', "setting store.url must name a file, and /tmp is a fo"),
        ('[telemetry]\nspans_file = "/tmp"', "setting telemetry.spans_file must name a file"),
        ('[telemetry]\notlp_endpoint = "x"', "setting telemetry.otlp_endpoint: x is not http"),
        ('"\\u001b[31m" = 1', "unknown setting \\x1b[31m; the sections are state_dir, "),
        ("a = [" + "[" * 3000, "is not readable as settings"),
        ("a = " + "1" * 5000, "is not readable as settings"),
    ],
)
def test_what_would_break_a_process_is_refused_with_what_why_and_what_to_do(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, text + "\n")

    code = main(["--config", str(path), "config", "check"])

    said = capsys.readouterr().err
    assert code == 2
    assert message in said
    assert said.count("\n") == 1
    assert SECRET not in said
    assert "Value error" not in said
    assert "\x1b" not in said


def test_a_state_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    path = tmp_path / "sidecar.toml"
    path.write_text(f'state_dir = "{file}/below"\n')
    with pytest.raises(SettingsError, match=f"state_dir must be a folder, and {file} is a file"):
        load_settings(path)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SIDECAR_ADMIN__PORT", "99999", "setting SIDECAR_ADMIN__PORT: 99999 is out of range"),
        ("SIDECAR_CANARY__STEPS", "[]", "setting SIDECAR_CANARY__STEPS is empty"),
        ("SIDECAR_CANARY", '{"gate_answers": 0}', "setting SIDECAR_CANARY: 0 is out of range"),
        ("SIDECAR_SERVING__API_KEY", f"{SECRET}\n", "setting SIDECAR_SERVING__API_KEY: holds a sp"),
        ("SIDECAR_PROXY__PORT", "eighty", "setting SIDECAR_PROXY__PORT: must be a whole number"),
        ("SIDECAR_STATE_DIR", "", "setting SIDECAR_STATE_DIR: is empty; give a folder"),
        (
            "SIDECAR_JUDGE__PARAMS__TEMPERATURE",
            SECRET,
            "environment variable SIDECAR_JUDGE__PARAMS__TEMPERATURE goes into the table "
            "judge.params, which is one JSON value in the environment; give "
            "SIDECAR_JUDGE__PARAMS='{\"TEMPERATURE\": ...}'",
        ),
        ("SIDECAR_LEARNER__RANK__X", "3", "did you mean SIDECAR_LEARNER__RANK?"),
        ("SIDECAR_STATE_DIR__X", "3", "unknown environment variable SIDECAR_STATE_DIR__X; "),
        ("sidecar_lerner__rank", SECRET, "variable sidecar_lerner__rank; did you mean learner?"),
        ("sidecar_admin_token", SECRET, "sidecar_admin_token; did you mean SIDECAR_ADMIN_TOKEN?"),
        ("SIDECAR_JUDGE__PARAMS", "[" * 100_000, "environment variable SIDECAR_JUDGE__PARAMS: lis"),
        ("SIDECAR_JUDGE__PARAMS", '{"a":' * 900 + "1" + "}" * 900, "SIDECAR_JUDGE__PARAMS"),
    ],
)
def test_the_environment_goes_through_the_same_checks_and_is_named_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)

    with pytest.raises(SettingsError) as caught:
        load_settings(write(tmp_path, ""))

    assert message in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_in_the_environment_keeps_its_names_and_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDECAR_JUDGE__PARAMS", '{"temperature": 0.2, "seed": 7}')
    monkeypatch.setenv("sidecar_engine__env", '{"CUDA_VISIBLE_DEVICES": "0"}')
    monkeypatch.setenv("SIDECAR_JUDGE__API_KEY", "")

    settings = load_settings(write(tmp_path, "[judge.params]\nmax_tokens = 9\n"))

    assert settings.judge.params == {"temperature": 0.2, "seed": 7, "max_tokens": 9}
    assert settings.engine.env == {"CUDA_VISIBLE_DEVICES": "0"}
    assert settings.judge.api_key is None, "an empty key is none"


def test_one_setting_in_two_variables_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDECAR_LEARNER__RANK", "3")
    monkeypatch.setenv("sidecar_learner__rank", "4")

    with pytest.raises(SettingsError, match="are one setting; unset one of them"):
        load_settings(write(tmp_path, ""))


def test_two_listeners_with_addresses_of_their_own_may_have_one_port(tmp_path: Path) -> None:
    for one, other in (("127.0.0.1", "127.0.0.2"), ("127.0.0.1", "::1")):
        path = write(tmp_path, f'[proxy]\nhost = "{one}"\n[admin]\nhost = "{other}"\nport = 8080\n')
        assert load_settings(path).admin.port == 8080


def test_a_name_and_the_address_that_it_stands_for_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    path = write(
        tmp_path,
        '[proxy]\nhost = "my.host"\nallow_remote_without_keys = true\n'
        f'[admin]\nport = 8080\nhost = "10.0.0.7"\ntokens = ["{"0" * 64}"]\n',
    )

    why = why_refused(path)

    assert why is not None
    assert why.startswith("setting admin.port is 8080, as proxy.port")


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ('[judge]\nmodel = "hosted_vllm/own"\nbudget = 5.0', "hosted_vllm/own"),
        (
            '[judge]\nmodel = "openai/gpt-4o-mini"\nbudget = 5.0\n'
            '[[judge.fallbacks]]\nmodel = "hosted_vllm/other"',
            "hosted_vllm/other",
        ),
        (
            '[judge]\nmodel = "openai/gpt-4o-mini"\nbudget = 5.0\n'
            '[gate_judge]\nmodel = "hosted_vllm/gate"',
            "hosted_vllm/gate",
        ),
        ('[judge]\nmodel = "hosted_vllm/own"\nprice = {input = 1, output = 2}\nbudget = 5.0', ""),
        ('[judge]\nmodel = "hosted_vllm/own"\nbudget_tokens = 5000', ""),
    ],
)
def test_a_budget_in_dollars_that_nobody_can_keep_is_refused(
    tmp_path: Path, text: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, text + "\n")

    code = main(["--config", str(path), "config", "check"])

    told = capsys.readouterr().err
    assert (code != 0) == bool(model), told
    said = f"sidecar: setting judge.budget cannot be kept: nobody knows the price of {model}"
    assert said in told or not model


def test_a_fallback_hides_its_secrets_and_is_read_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallback = {"model": "openai/y", "api_key": SECRET, "params": {"extra_key": SECRET}}
    monkeypatch.setenv("SIDECAR_JUDGE__FALLBACKS", json.dumps([fallback]))
    monkeypatch.setenv("SIDECAR_JUDGE__PRICE", '{"input": 1, "output": 2}')

    settings = load_settings(write(tmp_path, '[judge]\nmodel = "openai/x"\n'))

    assert settings.judge.fallbacks[0].api_key is not None
    assert settings.judge.price == {"input": 1.0, "output": 2.0}
    assert SECRET not in json.dumps(shown_settings(settings))


def test_a_file_from_another_editor_is_read_or_says_why_not(tmp_path: Path) -> None:
    path = tmp_path / "sidecar.toml"
    path.write_bytes(b'\xef\xbb\xbf[serving]\nmodel = "m"\n')
    marked = load_settings(path)
    path.write_bytes('[serving]\nmodel = "m"\n'.encode("utf-16"))
    with pytest.raises(SettingsError, match="is not UTF-8; save it as that"):
        load_settings(path)

    assert marked.serving.model == "m"


def test_what_is_asked_for_often_is_taken(tmp_path: Path) -> None:
    settings = load_settings(
        write(
            tmp_path,
            '[serving]\nupstreams = ["http://[::1]:8000", "https://gpu_1.lan/vllm/"]\n'
            '[admin]\nhost = "::1"\n[canary]\nsteps = [100, 500, 10000]\nstep_min_s = 0\n'
            "margin = 0.01\n[proxy]\nport = 0\ndrain_timeout_s = 0\n"
            f'[judge.params]\ntemperature = 0\n[store]\nurl = "sqlite:///{tmp_path}/a b.db"\n',
        )
    )

    assert settings.canary.steps == (100, 500, 10_000)
    assert settings.canary.ramp == (100, 500, 9_000)
    assert json.loads(settings.model_dump_json())["admin"]["host"] == "::1"


def test_a_listener_is_reached_at_a_url_that_can_be_asked() -> None:
    urls = [base_url(host, 1) for host in ("127.0.0.1", "::1", "0.0.0.0", "::", "my.host")]

    assert urls == [
        "http://127.0.0.1:1",
        "http://[::1]:1",
        "http://127.0.0.1:1",
        "http://[::1]:1",
        "http://my.host:1",
    ]
