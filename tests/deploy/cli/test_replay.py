"""Which adapters a replay has vLLM load, and which it leaves there."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.canary.replay import Replay
from deploy.cli.replay import FOLDER_NAME, _loaded, _play
from deploy.engine.vllm_control import VllmControl
from deploy.errors import InvalidAdapterError
from deploy.records import trial_of
from ingest.vllm import watch
from ingest.vllm.watch import ReplicaSampler
from sidecar.records import BASE
from sidecar.settings import Groups, Settings
from sidecar.store.database import Database
from support.adapter_endpoints import MODEL, AdapterEndpoints, vllm_in_thread
from tests.deploy.conftest import MakeFolder

CHAMPION, OLD = f"{MODEL}--v1-000000000001", f"{MODEL}--v2-000000000002"
OURS, KILLED = f"{FOLDER_NAME}aaaaaaaaaaaa", f"{FOLDER_NAME}bbbbbbbbbbbb"


def settings_of(folder: Path, *urls: str, **more: Any) -> Settings:
    return Settings(state_dir=folder, serving={"upstreams": urls, "model": MODEL}, **more)


async def test_both_are_loaded_and_only_what_was_there_stays(
    database: Database, adapter_folder: MakeFolder, tmp_path: Path
) -> None:
    """A replay that was killed left its folder; one vLLM of two is away."""
    endpoints = AdapterEndpoints()
    endpoints.adapters = {CHAMPION: "/1", KILLED: "/x", OURS: "/y"}
    made = {name: adapter_folder(name) for name in (OURS, OLD, CHAMPION)}
    folders = {name: (str(path), digest) for name, (path, digest) in made.items()}
    with vllm_in_thread(endpoints) as (url, _):
        settings = settings_of(tmp_path, "http://127.0.0.1:9", url)
        async with _loaded(settings, database, folders) as load:
            assert set(endpoints.adapters) == {CHAMPION, OLD, OURS}
            del endpoints.adapters[OLD]  # vLLM restarted
            await load()
            assert set(endpoints.adapters) == {CHAMPION, OLD, OURS}
        assert set(endpoints.adapters) == {CHAMPION}


async def test_an_interrupt_while_it_unloads_loses_no_report(
    database: Database, adapter_folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, digest = adapter_folder(OURS)
    unload, before = VllmControl.unload, signal.getsignal(signal.SIGINT)

    async def interrupted(self: VllmControl, name: str) -> None:
        signal.raise_signal(signal.SIGINT)
        await unload(self, name)

    monkeypatch.setattr(VllmControl, "unload", interrupted)
    with vllm_in_thread() as (url, endpoints):
        settings = settings_of(tmp_path, url)
        async with _loaded(settings, database, {OURS: (str(path), digest)}):
            assert set(endpoints.adapters) == {OURS}
        assert endpoints.adapters == {}
    assert signal.getsignal(signal.SIGINT) is before


async def test_a_load_that_is_interrupted_is_undone_when_it_ends(
    database: Database, adapter_folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, digest = adapter_folder(OURS)
    load, begun, ends = VllmControl.load, asyncio.Event(), asyncio.Event()

    async def slow(self: VllmControl, name: str, path: str) -> None:
        begun.set()
        await ends.wait()
        await load(self, name, path)

    monkeypatch.setattr(VllmControl, "load", slow)
    with vllm_in_thread() as (url, endpoints):

        async def loads() -> None:
            async with _loaded(settings_of(tmp_path, url), database, {OURS: (str(path), digest)}):
                raise AssertionError("unreachable")

        loading = asyncio.create_task(loads())
        await begun.wait()
        loading.cancel()
        asyncio.get_running_loop().call_later(0.05, ends.set)
        await asyncio.gather(loading, return_exceptions=True)
        assert loading.cancelled()
        assert (endpoints.loads, endpoints.adapters) == ([OURS], {})


async def test_a_folder_that_was_changed_is_not_loaded(
    database: Database, adapter_folder: MakeFolder, tmp_path: Path
) -> None:
    path, _ = adapter_folder("changed")
    with vllm_in_thread() as (url, endpoints), pytest.raises(InvalidAdapterError):
        async with _loaded(settings_of(tmp_path, url), database, {OURS: (str(path), "0" * 64)}):
            pass
    assert endpoints.adapters == {}


async def test_it_slows_users_no_more_than_candidates_may(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    opened = watch.open_replicas

    def noted(urls: Sequence[str], api_key: str | None, groups: Groups) -> ReplicaSampler:
        limits.append(groups.max_slowdown)
        return opened(urls, api_key, groups)

    monkeypatch.setattr(watch, "open_replicas", noted)
    settings = settings_of(
        tmp_path,
        "http://127.0.0.1:9",
        groups={"max_slowdown": 0.125},
        judge={"model": "openai/scripted"},
    )
    trial = trial_of(MODEL, CHAMPION, BASE, "salt")
    _, interrupted = await _play(settings, database, trial, [], {})

    assert (limits, interrupted) == ([0.125], False)


async def test_an_interrupted_replay_says_so_and_keeps_what_it_found(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(Replay, "run", cancelled)
    settings = settings_of(tmp_path, "http://127.0.0.1:9", judge={"model": "openai/scripted"})
    trial = trial_of(MODEL, CHAMPION, BASE, "salt")

    made, interrupted = await _play(settings, database, trial, [], {})

    assert (made.report(since=0.0).prompts, interrupted) == (0, True)
