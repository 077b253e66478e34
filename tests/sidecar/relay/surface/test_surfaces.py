"""Every surface with the bytes of a real vLLM: what the client gets, what vLLM is asked, what is
recorded. See `Recording` for where the bytes come from."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sidecar.routing.table import RoutingTable
from support.fake_vllm import FakeVllm
from support.proxy_kit import Running, StartProxy, Wire

PAIRED = {
    "chat": "The capital of France is Paris",
    "chat_stream": "The capital of France is Paris",
    "chat_stop_stream": "The capital of France is Paris.",
    "chat_usage_stream": "The capital of France is Paris",
    "completions": " Paris.\n\nThe",
    "completions_stream": " Paris.\n\nThe",
    "completions_emoji_stream": "😏😐😑😒",
    "completions_usage_stream": "😏",
}
"""Those of which both questions are recorded, the client's and the sidecar's -> the answer."""
TEXT_ONLY = {
    "responses": (8, "stop"),
    "responses_stream": (8, "stop"),
    "responses_tools": (36, "tool_calls"),
    "responses_tools_stream": (36, "tool_calls"),
    "messages": (8, "stop"),
    "messages_stream": (8, "stop"),
    "messages_tools": (60, "length"),
    "messages_tools_stream": (60, "length"),
}
"""Tokens and finish reason of each."""
NOT_RECORDED = ["count_tokens", "embeddings"]
FOUR = ["chat", "completions", "responses", "messages"]
ADAPTER = "smollm2-135m--v3-0123456789ab"


def adapted() -> RoutingTable:
    return RoutingTable(model="smollm2-135m", champion=ADAPTER, generation=1)


async def ask(running: Running, wire: Wire, item: Any, body: bytes | None = None) -> Any:
    """Send what the recording's client sent. Returns status line, headers, body."""
    sent = wire.post(item.request if body is None else body, path=item.path)
    return wire.split(await running.send(sent))


@pytest.mark.parametrize("name", [*PAIRED, *TEXT_ONLY, *NOT_RECORDED, "completions_echo"])
async def test_with_capture_off_the_client_gets_vllms_bytes(
    name: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    item = wire.recording(f"{name}.plain")
    fake_vllm.script = lambda _: [item.reply]
    running = await start_proxy(capture={"sample_rate": 0.0})

    line, headers, body = await ask(running, wire, item)

    told = wire.split(item.reply)
    assert (line, body) == (told[0], item.body)
    assert {**told[1], **headers} == headers
    assert set(headers) - set(told[1]) == {
        "x-sidecar-exchange-id",
        "x-sidecar-adapter",
        "connection",
    }
    assert (fake_vllm.requests[0].line, fake_vllm.requests[0].body) == (
        f"POST {item.path} HTTP/1.1",
        item.request,
    )


@pytest.mark.parametrize("name", PAIRED)
async def test_with_capture_on_the_client_gets_its_own_reply_and_exact_ids_are_recorded(
    name: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    plain, asked = wire.recording(f"{name}.plain"), wire.recording(f"{name}.asked")
    fake_vllm.script = lambda _: [asked.reply]
    running = await start_proxy()

    line, headers, body = await ask(running, wire, plain)

    assert (line, body) == ("HTTP/1.1 200 OK", plain.body)
    assert asked.body != plain.body
    assert set(wire.split(plain.reply)[1]) <= set(headers)
    # The question is the recorded one: what was asked besides stands in front instead of behind.
    sent = json.loads(fake_vllm.requests[0].body)
    assert sent == json.loads(asked.request)
    assert fake_vllm.requests[0].body.endswith(plain.request[1:])
    exchange = (await running.captured(1))[0]
    assert headers["x-sidecar-exchange-id"] == exchange.exchange_id
    assert (exchange.surface, exchange.stream) == (name.split("_")[0], "stream" in name)
    assert (exchange.outcome, exchange.untrainable_reason) == ("ok", None)
    assert exchange.request == plain.request
    [choice] = exchange.choices
    assert json.loads(choice.message)["content"] == PAIRED[name]
    assert len(choice.token_ids) == len(choice.logprobs) > 0
    assert len(exchange.prompt_token_ids) == {"chat": 36, "completions": 5}.get(
        exchange.surface, 0
    ) or PAIRED[name].startswith("😏")
    assert exchange.reply_bytes == len(asked.body)


@pytest.mark.parametrize("name", TEXT_ONLY)
async def test_an_exchange_of_a_text_surface_is_recorded_and_kept_from_learning(
    name: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    tokens, finish_reason = TEXT_ONLY[name]
    item = wire.recording(f"{name}.plain")
    fake_vllm.script = lambda _: [item.reply]
    running = await start_proxy()

    line, _, body = await ask(running, wire, item)

    assert (line, body) == (wire.split(item.reply)[0], item.body)
    assert fake_vllm.requests[0].body == item.request
    exchange = (await running.captured(1))[0]
    assert (exchange.surface, exchange.stream) == (name.split("_")[0], name.endswith("stream"))
    assert (exchange.outcome, exchange.untrainable_reason) == ("ok", "text_only")
    assert (exchange.completion_tokens, exchange.choices[0].finish_reason) == (
        tokens,
        finish_reason,
    )
    message = json.loads(exchange.choices[0].message)
    if "tool_calls" in message:
        [call] = message["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert call["function"]["arguments"].startswith("{")
    elif finish_reason == "stop":
        assert message["content"] == "The capital of France is Paris."
    else:  # cut in the middle of the call: vLLM gives the text
        assert message["content"].startswith("<tool_call>")


@pytest.mark.parametrize(
    ("surface", "said", "sent"),
    [
        ("chat", b'"logprobs":null', b'"logprobs":true'),
        ("chat", b'"logprobs":false', b'"logprobs":true'),
        ("chat", b'"logprobs":true', b'"logprobs":true'),
        ("completions", b'"logprobs":null', b'"logprobs":0'),
        ("completions", b'"logprobs":false', b'"logprobs":false'),
        ("completions", b'"logprobs":0', b'"logprobs":0'),
        ("completions", b'"logprobs":3', b'"logprobs":3'),
    ],
)
async def test_what_the_client_says_of_logprobs_is_taken_as_that_surface_takes_it(
    surface: str, said: bytes, sent: bytes, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    """In completions `logprobs` is a number, and even `false` asks (0)."""
    item = wire.recording(f"{surface}.plain")
    running = await start_proxy()

    await ask(running, wire, item, item.request[:-1] + b"," + said + b"}")

    got = fake_vllm.requests[0].body
    assert got == b'{"return_token_ids":true,' + item.request[1:-1] + b"," + sent + b"}"


async def test_log_probabilities_that_the_client_asked_for_stay_and_only_the_ids_are_taken_out(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    """A client that asked for `logprobs: 0` gets what vLLM gives for that, and no ids."""
    theirs, asked = (
        wire.recording("completions_logprobs.plain"),
        wire.recording("completions.asked"),
    )
    fake_vllm.script = lambda _: [asked.reply]
    running = await start_proxy()

    _, _, body = await ask(running, wire, theirs)

    assert body == theirs.body
    assert json.loads(body)["choices"][0]["logprobs"]["token_logprobs"][0] < 0


@pytest.mark.parametrize("surface", FOUR)
async def test_the_routed_adapter_is_written_into_the_request_of_every_surface_that_samples(
    surface: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    item = wire.recording(f"{surface}.plain")
    fake_vllm.script = lambda _: [item.reply]
    running = await start_proxy(capture={"sample_rate": 0.0})
    running.proxy.routing.table = adapted()

    _, headers, body = await ask(running, wire, item)

    changed = item.request.replace(b'"smollm2-135m"', f'"{ADAPTER}"'.encode(), 1)
    assert fake_vllm.requests[0].body == changed
    assert (headers["x-sidecar-adapter"], body) == (ADAPTER, item.body)


@pytest.mark.parametrize("surface", NOT_RECORDED)
async def test_the_base_answers_what_no_adapter_can_and_it_is_not_recorded(
    surface: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    item = wire.recording(f"{surface}.plain")
    fake_vllm.script = lambda _: [item.reply]
    running = await start_proxy()
    running.proxy.routing.table = adapted()

    line, headers, body = await ask(running, wire, item)

    assert (line, body) == (wire.split(item.reply)[0], item.body)
    assert fake_vllm.requests[0].body == item.request
    assert headers["x-sidecar-adapter"] == "base"
    assert running.metric("sidecar_captures_skipped_total", reason="surface") == 1
    assert running.sink.exchanges == []


@pytest.mark.parametrize("said", [b"", b'"model": null, ', b'"model": "", '])
@pytest.mark.parametrize("surface", ["chat", "completions", "responses"])
async def test_where_model_may_be_left_out_the_adapter_answers_too(
    surface: str, said: bytes, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    item = wire.recording(f"{surface}.plain")
    running = await start_proxy(capture={"sample_rate": 0.0})
    running.proxy.routing.table = adapted()

    line, _, _ = await ask(
        running, wire, item, item.request.replace(b'"model": "smollm2-135m", ', said, 1)
    )

    sent = json.loads(fake_vllm.requests[0].body)
    assert (line, sent) == ("HTTP/1.1 200 OK", {**json.loads(item.request), "model": ADAPTER})


@pytest.mark.parametrize("surface", ["messages", "count_tokens"])
async def test_where_vllm_refuses_a_request_without_model_it_gets_it_as_it_came(
    surface: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    refusal = wire.recording("messages_no_model.plain")
    fake_vllm.script = lambda _: [refusal.reply]
    running = await start_proxy()
    running.proxy.routing.table = adapted()
    path = wire.recording(f"{surface}.plain").path

    reply = await running.send(wire.post(refusal.request, path=path))

    line, _, body = wire.split(reply)
    assert (line, body) == ("HTTP/1.1 400 Bad Request", refusal.body)
    assert fake_vllm.requests[0].body == refusal.request
    assert running.sink.exchanges == []


@pytest.mark.parametrize("surface", [*FOUR, "count_tokens"])
async def test_an_unknown_model_is_refused_in_the_words_of_that_surface(
    surface: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    theirs = wire.recording(f"{surface}_unknown_model.plain")
    running = await start_proxy()

    line, headers, body = await ask(running, wire, theirs)

    assert (line, headers["content-type"]) == ("HTTP/1.1 404 Not Found", "application/json")
    ours, real = json.loads(body), json.loads(theirs.body)
    assert (list(ours), list(ours["error"])) == (list(real), list(real["error"]))
    assert ours["error"]["message"].startswith("The model `nope` does not exist.")
    assert {**ours["error"], "message": ""} == {**real["error"], "message": ""}
    assert running.metric("sidecar_models_unknown_total") == 1
    assert fake_vllm.requests == []
