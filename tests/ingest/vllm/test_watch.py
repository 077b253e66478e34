"""What is measured, read and stated of vLLM, and which of them wins."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from ingest.errors import EngineDownError, SamplingError
from ingest.grouping.request import (
    UNKNOWN,
    EngineFacts,
    dump_facts,
    load_facts,
    merge,
    read_defaults,
)
from ingest.intake.loop import Intake
from ingest.vllm.watch import EngineWatch
from sidecar.settings import Serving, Settings
from sidecar.store.database import get_flag
from support.ingest_kit import Kit

PLAIN = EngineFacts(defaults=frozenset(), grammar="as_asked")


class ScriptedProbe:
    """Finds what the script holds, the last of it again and again."""

    def __init__(self, *script: EngineFacts | Exception) -> None:
        self.script = list(script)
        self.asked: list[tuple[str, str, str | None]] = []

    def __call__(self, url: str, model: str, key: str | None) -> EngineFacts:
        self.asked.append((url, model, key))
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, Exception):
            raise step
        return step


def watch_of(serving: Serving, *, ask: ScriptedProbe) -> EngineWatch:
    """A watch that polls at once, in the caller's thread."""
    return EngineWatch(serving, ask=ask, start=lambda work: work())


@pytest.fixture
def base(tmp_path: Path) -> Any:
    """Make a base model's folder out of what its files say."""

    def make(**files: Any) -> str:
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / f"{name}.json").write_text(text)
        return str(tmp_path)

    return make


@pytest.mark.parametrize(
    ("files", "defaults"),
    [
        ({}, set()),
        ({"generation_config": {"eos_token_id": 2, "use_cache": True}}, set()),
        (
            {"generation_config": {"temperature": 0.6, "top_p": 0.95, "top_k": 20}},
            {"temperature", "top_p", "top_k"},
        ),
        ({"generation_config": {"temperature": 1.0, "top_p": 1, "top_k": 0, "min_p": None}}, set()),
        ({"generation_config": {"presence_penalty": 1.5}}, {"presence_penalty"}),
        ({"generation_config": {"top_p": "0.9"}}, {"top_p"}),
        ({"config": {"model_type": "llama", "temperature": 0.7}}, {"temperature"}),
        ({"generation_config": {}, "config": {"temperature": 0.7}}, set()),
        ({"generation_config": "{"}, None),
        ({"generation_config": "[]"}, None),
        ({"generation_config": "[" * 100_000}, None),
        ({"generation_config": '{"top_p": NaN}'}, None),
    ],
)
def test_files_say_which_fields_vllm_fills(
    base: Any, files: dict[str, Any], defaults: set[str] | None
) -> None:
    assert read_defaults(base(**files)) == defaults


@pytest.mark.parametrize("path", ["", "nobody/has-this-model", "not a name", "/no/such/folder"])
def test_without_the_base_models_files_it_is_not_known_which_fields_vllm_fills(path: str) -> None:
    assert read_defaults(path) is None


def test_a_name_of_the_hub_is_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--some--base" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    (snapshot / "generation_config.json").write_text('{"top_k": 20}')
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    assert read_defaults("some/base") == frozenset({"top_k"})


@pytest.mark.parametrize(
    ("measured", "defaults"),
    [({"min_p"}, {"min_p", "presence_penalty"}), (None, {"temperature", "presence_penalty"})],
)
def test_what_is_measured_wins_over_the_files(
    base: Any, measured: set[str] | None, defaults: set[str]
) -> None:
    folder = base(generation_config={"temperature": 0.6, "presence_penalty": 1.5})
    fields = None if measured is None else frozenset(measured)
    probe = ScriptedProbe(EngineFacts(defaults=fields, grammar="with_tools"))
    watch = watch_of(Serving(base_model_path=folder), ask=probe)

    assert watch.poll(0.0)

    assert watch.facts == EngineFacts(defaults=frozenset(defaults), grammar="with_tools")


def test_a_vllm_that_starts_is_asked_each_second_and_one_that_fails_each_minute(base: Any) -> None:
    probe = ScriptedProbe(EngineDownError("refused"), SamplingError("hangs"), PLAIN)
    watch = watch_of(Serving(base_model_path=base()), ask=probe)

    assert [
        (now, watch.poll(now), len(probe.asked)) for now in (0.0, 0.9, 1.0, 60.9, 61.0, 361.0)
    ] == [
        (0.0, True, 1),  # what the files say
        (0.9, False, 1),
        (1.0, False, 2),
        (60.9, False, 2),
        (61.0, True, 3),
        (361.0, False, 4),
    ]
    assert watch.facts == PLAIN


def test_what_was_known_holds_while_vllm_is_away_and_over_a_restart(base: Any) -> None:
    watch = watch_of(Serving(), ask=ScriptedProbe(PLAIN, EngineDownError("refused")))
    watch.poll(0.0)
    assert not watch.poll(300.0)
    assert watch.facts == PLAIN

    again = watch_of(Serving(), ask=ScriptedProbe(EngineDownError("refused")))
    again.recall(load_facts(dump_facts(watch.facts)))
    again.poll(0.0)
    assert again.facts == PLAIN


def test_what_the_operator_states_wins_and_spares_the_questions() -> None:
    probe = ScriptedProbe(EngineFacts(defaults=frozenset({"top_k"}), grammar="always"))
    stated = Serving(sampling_defaults={}, grammar="with_tools")

    watch = watch_of(stated, ask=probe)
    watch.poll(0.0)

    assert watch.facts == EngineFacts(defaults=frozenset(), grammar="with_tools")
    assert probe.asked == []


def test_every_replica_is_asked_and_the_worst_counts() -> None:
    probe = ScriptedProbe(
        PLAIN,
        EngineDownError("refused"),
        EngineFacts(defaults=frozenset({"top_p"}), grammar="with_tools"),
    )
    serving = Serving(upstreams=("http://a", "http://b", "http://c"), model="m", api_key="k")
    watch = watch_of(serving, ask=probe)

    watch.poll(0.0)

    assert probe.asked == [(f"http://{name}", "m", "k") for name in "abc"]
    assert watch.facts == EngineFacts(defaults=frozenset({"top_p"}), grammar="with_tools")


def test_a_replica_of_which_something_is_not_known_makes_it_not_known_of_all() -> None:
    assert merge([PLAIN, UNKNOWN]) == UNKNOWN
    assert merge([UNKNOWN, EngineFacts(defaults=frozenset(), grammar="always")]).grammar == "always"


def test_a_flag_that_cannot_be_read_is_nothing_known() -> None:
    assert load_facts("{") == UNKNOWN
    assert load_facts('{"grammar": "of next year"}') == UNKNOWN


def test_ingest_decides_when_the_first_poll_has_ended_and_says_what_it_knows(kit: Kit) -> None:
    serving = Serving(model="smollm", upstreams=("http://a",))
    polls: list[Any] = []
    watch = EngineWatch(serving, ask=ScriptedProbe(PLAIN), start=polls.append)
    bus = kit.MemoryBus([])
    intake = Intake(bus, kit.database, Settings(serving=serving), now=lambda: 100.0, engine=watch)
    kit.store(kit.exchange("e1", request={"messages": [], "tools": [{"type": "function"}]}))

    intake.step()
    assert kit.counts("selection") == {}
    (end_poll,) = polls
    end_poll()
    intake.step()

    assert kit.counts("selection") == {"chosen": 1}
    assert kit.counts("served") == {"trainable": 1}
    with kit.database.read() as session:
        assert load_facts(get_flag(session, "engine_facts") or "") == PLAIN


def test_a_later_poll_holds_nothing_up(kit: Kit) -> None:
    serving = Serving(model="smollm")
    polls: list[Any] = []
    watch = EngineWatch(serving, ask=ScriptedProbe(PLAIN), start=polls.append)
    watch.recall(PLAIN)
    intake = Intake(
        kit.MemoryBus([]), kit.database, Settings(serving=serving), now=lambda: 100.0, engine=watch
    )
    kit.store(kit.exchange("e1"))

    intake.step()

    assert len(polls) == 1
    assert kit.counts("selection") == {"chosen": 1}


def test_a_poll_in_a_thread_ends_also_with_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    seen: list[object] = []

    def record(info: threading.ExceptHookArgs) -> None:
        seen.append(info)
        ended.set()

    monkeypatch.setattr(threading, "excepthook", record)
    watch = EngineWatch(Serving(), ask=ScriptedProbe(ZeroDivisionError("a defect")))

    watch.poll(0.0)
    assert ended.wait(10)
    watch.poll(1.0)

    assert len(seen) == 1
    assert watch.facts == UNKNOWN
    assert watch.ready
