"""While a canary runs, a caller without a scope cannot tell which arm answered."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sidecar.relay.reply_edit import renamed
from sidecar.routing.session_key import hash_of_address
from sidecar.routing.table import RoutingTable
from support import api_keys
from support.fake_vllm import FakeVllm
from support.migrated_store import open_migrated
from support.proxy_kit import StartProxy, Wire

MODEL = "smollm2-135m"
CHAMPION, CANARY = f"{MODEL}--v9-0123456789ab", f"{MODEL}--v10-ba9876543210"
TABLE = RoutingTable(
    model=MODEL,
    champion=CHAMPION,
    canary=CANARY,
    canary_weight_bp=5_000,
    salt="one",
    generation=1,
)
SESSIONS = 12
FIELDS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "responses": {"input": "Hi"},
    "messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def names_its_model(wire: Wire, request: Any) -> Sequence[Any]:
    """A reply that is the same but for the name of the model that was asked for: in chunks, and
    compressed if that may be."""
    asked = json.loads(request.body)
    text = f'I am not "model":"{asked["model"]}"'
    said = {"role": "assistant", "content": text.replace(asked["model"], "it")}
    one = {"id": "x", "model": asked["model"], "choices": [{"index": 0, "message": said}]}
    if not asked.get("stream"):
        whole = json.dumps(one, separators=(",", ":")).encode()
        head = wire.STREAM_HEAD.replace(b"text/event-stream; charset=utf-8", b"application/json")
        if "accept-encoding" in request.headers:
            head = head.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
            whole = gzip.compress(whole, mtime=0)
        return [head, wire.chunk(whole), wire.LAST_CHUNK]
    inner = {"type": "message_start", "message": one}
    events = [b"data: %b\n\n" % json.dumps(event).encode() for event in (one, inner)]
    whole = b"".join([*events, b"data: [DONE]\n\n"])
    # cut in the middle of names, too
    pieces = [whole[at : at + 31] for at in range(0, len(whole), 31)]
    return [wire.STREAM_HEAD, *(wire.chunk(piece) for piece in pieces), wire.LAST_CHUNK]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("surface", "capture"), [("chat", 1.0), ("chat", 0.0), ("responses", 0.0), ("messages", 1.0)]
)
async def test_the_replies_of_both_arms_are_equal_for_a_caller_without_a_scope(
    surface: str,
    streams: bool,
    capture: float,
    state_dir: Path,
    start_proxy: StartProxy,
    fake_vllm: FakeVllm,
    wire: Wire,
) -> None:
    database = open_migrated(state_dir / "store.db")
    infer, operate = (
        api_keys.create(database, project="p", scopes=frozenset(scopes))[1]
        for scopes in (("infer",), ("infer", "operate"))
    )
    database.close()
    fake_vllm.models = [MODEL, CHAMPION, CANARY]
    fake_vllm.script = lambda request: names_its_model(wire, request)
    running = await start_proxy(access={"mode": "keys"}, capture={"sample_rate": capture})
    running.proxy.routing.table = TABLE

    async def replies(key: str) -> tuple[set[tuple[Any, ...]], set[str]]:
        found, adapters = set[tuple[Any, ...]](), set[str]()
        for number in range(SESSIONS):
            asked = {"model": MODEL, "stream": streams, **FIELDS[surface]}
            sent = wire.post(
                json.dumps(asked).encode(),
                path=PATHS[surface],
                headers=f"Authorization: Bearer {key}\r\nx-sidecar-session: s{number}\r\n"
                "Accept-Encoding: gzip\r\n",
            )
            line, headers, body = wire.split(await running.send(sent))
            adapters.add(headers.pop("x-sidecar-adapter", ""))
            headers.pop("x-sidecar-exchange-id")
            found.add((line, tuple(sorted(headers.items())), body))
        return found, adapters

    alike, told = await replies(infer)
    assert len(alike) == 1
    assert told == {""}
    [(line, _, body)] = alike
    assert line == "HTTP/1.1 200 OK"
    assert CHAMPION.encode() in body
    assert CANARY.encode() not in body
    models = {json.loads(request.body)["model"] for request in fake_vllm.requests}
    assert models == {CHAMPION, CANARY}
    if capture and surface == "chat":
        recorded = await running.captured(SESSIONS)
        assert {one.adapter for one in recorded} == {CHAMPION, CANARY}
        assert "model_mismatch" not in {one.untrainable_reason for one in recorded}

    different, told = await replies(operate)
    assert len(different) == 2
    assert told == {CHAMPION, CANARY}


async def test_without_a_canary_everybody_is_told_who_answered(
    start_proxy: StartProxy, wire: Wire, fake_vllm: FakeVllm
) -> None:
    running = await start_proxy(access={"mode": "upstream"})
    body = json.dumps({"model": MODEL, **FIELDS["chat"]}).encode()

    _, before, _ = wire.split(await running.send(wire.post(body)))
    running.proxy.routing.table = TABLE
    _, during, _ = wire.split(await running.send(wire.post(body)))

    assert before["x-sidecar-adapter"] == "base"
    assert "x-sidecar-adapter" not in during


@pytest.mark.parametrize("mode", ["open", "upstream"])
async def test_only_while_a_canary_runs_an_address_is_recorded_and_as_a_hash_of_its_canary(
    mode: str, start_proxy: StartProxy, wire: Wire, fake_vllm: FakeVllm
) -> None:
    running = await start_proxy(access={"mode": mode})
    body = json.dumps({"model": MODEL, **FIELDS["chat"]}).encode()

    await running.send(wire.post(body))
    running.proxy.routing.table = TABLE
    await running.send(wire.post(body))

    assert [one.address_hash for one in await running.captured(2)] == [
        "",
        hash_of_address("127.0.0.1", "one"),
    ]


def test_an_address_is_one_of_65536_values_that_another_canary_does_not_share() -> None:
    assert hash_of_address("10.0.0.1", "one") == "1c99"
    assert hash_of_address("10.0.0.1", "two") != hash_of_address("10.0.0.1", "one")
    assert hash_of_address("", "one") == ""


def test_a_name_inside_a_text_stays() -> None:
    names = (b'"m--v2"', b'"m--v1"')
    said = b'{"model": "m--v2","a":"\\"model\\":\\"m--v2\\"","b":"m--v2","model":"m--v20"}'

    assert renamed(said, names) == said.replace(b'"model": "m--v2"', b'"model": "m--v1"')
