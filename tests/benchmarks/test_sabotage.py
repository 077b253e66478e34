"""What the sabotage benchmark counts, and the relay that lets an adapter hang."""

from __future__ import annotations

import asyncio

import httpx

from benchmarks.sabotage.adapters import GOOD, HANGING, NOISE
from benchmarks.sabotage.play import Exposed, Outcome, Played
from benchmarks.sabotage.run import targets_of
from benchmarks.sabotage.stalling import stalling
from benchmarks.sabotage.visitors import Visit
from demo.ports import free_port
from support.adapter_endpoints import MODEL, vllm_in_thread


def played(case: str, state: str, **more: float) -> Played:
    values = {"decided_s": 9.0, "ramp_s": 0.0, "began_at": 1.0, "ended_at": 10.0, "groups": 20}
    return Played(case=case, adapter="a", state=state, reason="r", **{**values, **more})  # type: ignore[arg-type]


def told(*, failed: int, elsewhere: int, exposed: int = 0, good: str = "promoted") -> Outcome:
    return Outcome(
        played=[played(GOOD, good), played(NOISE, "rolled_back"), played(HANGING, "rolled_back")],
        exposed={
            GOOD: Exposed(sessions=9, failed=failed),
            NOISE: Exposed(sessions=exposed, failed=0),
            HANGING: Exposed(sessions=7, failed=6),
        },
        visits=[Visit("u", 1.0, 1.0, "base", "")] * 50,
        failed_elsewhere=elsewhere,
    )


def failing(one: Outcome) -> list[str]:
    return [target.what for target in targets_of("gated", one) if not target.holds]


def test_only_the_hanging_one_may_cost_requests() -> None:
    what = ["gated: failed requests that no sabotage explains"]

    assert failing(told(failed=0, elsewhere=0)) == []
    assert failing(told(failed=1, elsewhere=0)) == what
    assert failing(told(failed=0, elsewhere=1)) == what


def test_what_the_gate_must_see_meets_no_user_and_the_good_one_is_promoted() -> None:
    assert failing(told(failed=0, elsewhere=0, exposed=1)) == ["gated, noise: sessions exposed"]
    good = told(failed=0, elsewhere=0, good="inconclusive")
    assert failing(good) == ["gated, good: promoted"]


async def test_only_the_chats_of_a_stalled_adapter_hang() -> None:
    with vllm_in_thread() as (url, endpoints):
        endpoints.adapters["a"] = "/a"
        port = free_port()
        with stalling(port, int(url.rsplit(":", 1)[1])) as relay:
            relay.stalled = "a"
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", trust_env=False
            ) as client:
                base = await client.post("/v1/chat/completions", json={"model": MODEL})
                probe = await client.post("/v1/completions", json={"model": "a"})
                try:
                    async with asyncio.timeout(0.3):
                        await client.post("/v1/chat/completions", json={"model": "a"})
                    hung = False
                except TimeoutError:
                    hung = True
                relay.stalled = None
                free = await client.post("/v1/chat/completions", json={"model": "a"})

    assert [one.status_code for one in (base, probe, free)] == [200, 200, 200]
    assert hung
    assert relay.held == 1
