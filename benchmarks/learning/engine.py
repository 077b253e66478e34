"""A vLLM of the benchmark's own, and many answers at once from it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

from benchmarks.learning.tasks import Prompt
from demo.ports import free_port
from demo.stack import MODEL, engine_section
from deploy.engine.vllm_control import VllmControl
from ingest.errors import SamplingError
from ingest.vllm.sampler import SampledAnswer, SampleRequest, VllmSampler
from sidecar.parent_death import guarded_command

START_S: Final = 420.0
STOP_S: Final = 60.0
AT_ONCE: Final = 32
TRIES: Final = 3


@contextmanager
def vllm(folder: Path) -> Iterator[str]:
    """Start vLLM with the shipped model, its log in `folder`. Yields: its base URL.

    Raises: RuntimeError when it does not come up.
    """
    port = free_port()
    section = engine_section(port)
    url = f"http://127.0.0.1:{port}"
    with (folder / "engine.log").open("ab") as log:
        process = subprocess.Popen(
            [*guarded_command(), *section["command"]],
            cwd=folder,
            env=os.environ | section["env"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + START_S
        while not _is_up(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM did not come up; see {folder / 'engine.log'}")
            time.sleep(1.0)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False


def sample(
    url: str, prompts: Sequence[Prompt], *, adapter: str, answers: int, max_tokens: int
) -> list[list[SampledAnswer]]:
    """Sample `answers` answers to each prompt, at temperature 1. adapter: `base`, or its name.

    No seed is sent: vLLM 0.32 on the CPU ends when a seeded request's prompt comes in two batches.
    Raises: SamplingError when an answer fails `TRIES` times.
    """
    return asyncio.run(_sample(url, prompts, adapter, answers, max_tokens))


async def _sample(
    url: str, prompts: Sequence[Prompt], adapter: str, answers: int, max_tokens: int
) -> list[list[SampledAnswer]]:
    sampler, gate = VllmSampler(url, timeout_s=600.0), asyncio.Semaphore(AT_ONCE)
    model = MODEL if adapter == "base" else adapter

    async def one(prompt: Prompt) -> SampledAnswer:
        request = SampleRequest(
            upstream_model=model,
            chat=prompt.chat,
            temperature=1.0,
            max_tokens=max_tokens,
        )
        async with gate:
            for last in range(TRIES):
                try:
                    return await sampler.sample(request)
                except SamplingError:
                    if last == TRIES - 1:
                        raise
        raise AssertionError("unreachable")

    try:
        found = await asyncio.gather(*(one(prompt) for prompt in prompts for _ in range(answers)))
    finally:
        await sampler.aclose()
    return [list(found[at : at + answers]) for at in range(0, len(found), answers)]


def serve(url: str, name: str, path: Path) -> None:
    """Load an adapter. Raises: EngineError."""
    asyncio.run(_change(url, lambda control: control.load(name, str(path))))


def unload(url: str, name: str) -> None:
    """Unload an adapter. Raises: EngineError."""
    asyncio.run(_change(url, lambda control: control.unload(name)))


async def _change(url: str, change: Callable[[VllmControl], Awaitable[object]]) -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        await change(VllmControl(client))
