"""Names of a path that must not lead anywhere but to the path itself. vLLM serves its levers on the
port that answers users, so a path that it would read as another one than the relay did would be a
way past the list of allowed paths."""

from __future__ import annotations

from support.proxy_kit import StartProxy
from support.strict_peers import Connect, StrictVllm, post

TARGETS = [
    b"http://evil/v1/chat/completions",
    b"http://127.0.0.1:8000/v1/load_lora_adapter",
    b"//v1/chat/completions",
    b"/v1//chat/completions",
    b"/v1/chat/completions/",
    b"/v1/chat/completions/..",
    b"/v1/chat/completions/../../load_lora_adapter",
    b"/v1/./chat/completions",
    b"/v1/%2e%2e/v1/chat/completions",
    b"/v1%2fchat%2fcompletions",
    b"/v1/ch%61t/completions",
    b"/v1/chat/completions%3fa=b",
    b"/v1/chat/completions%00",
    b"/v1/chat/completions%0d%0aX:%20y",
    b"/v1/chat/completions;a=b",
    b"/v1/chat/completions#a",
    b"/V1/chat/completions",
    b"/v1\\chat\\completions",
    b"v1/chat/completions",
    b"*",
    b"/",
    b"/v1/load_lora_adapter?/v1/chat/completions",
    b"/health",
    b"/v1/chat/completions\xff",
    b"/v1/chat/completions\x00",
    b"/v1/chat/completions\x7f",
]


async def test_a_path_is_matched_byte_for_byte(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    running = await start_proxy()
    statuses = {}
    for target in TARGETS:
        client = await dial(running)
        client.say(post(path=target))
        reply = await client.hear()
        statuses[target] = reply.status
        client.hang_up()

    assert statuses.pop(b"/v1/chat/completions/") == 307  # to the same path without the slash
    assert statuses.pop(b"/health") == 405  # of the application, for a POST
    assert {key: value for key, value in statuses.items() if value not in (400, 404)} == {}
    assert fake_vllm.requests == []


METHODS = {
    b"CONNECT 127.0.0.1:8000 HTTP/1.1": 400,
    b"OPTIONS * HTTP/1.1": 404,
    b"TRACE / HTTP/1.1": 404,
    b"GET /v1/load_lora_adapter HTTP/1.1": 404,
    b"PURGE / HTTP/1.1": 404,
    b"WHATEVER /v1/chat/completions HTTP/1.1": 400,
}


async def test_other_methods_open_no_other_way(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    running = await start_proxy()
    for line, status in METHODS.items():
        client = await dial(running)

        client.say(line + b"\r\nHost: x\r\n\r\n")

        assert (await client.hear(line.partition(b" ")[0])).status == status, line
    assert fake_vllm.requests == []


QUERIES = (b"", b"?", b"?a=b&c=d", b"?x=/../../v1/load_lora_adapter", b"?a=%0d%0aX-Y:%20z", b"??")


async def test_a_query_goes_with_its_path(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    client = await dial(await start_proxy())

    for query in QUERIES:
        client.say(post(path=b"/v1/chat/completions" + query))
        assert (await client.hear()).status == 200, query

    assert [seen.target.partition(b"?") for seen in fake_vllm.requests] == [
        (b"/v1/chat/completions", *query.partition(b"?")[1:]) for query in QUERIES
    ]


async def test_a_query_that_is_not_of_the_grammar_is_refused(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """What a server makes of such a byte is not known; uvicorn cuts at `#`."""
    running = await start_proxy()
    statuses = {}
    for query in (b"?a b", b"?a\x00", b"?a\xff", b"?a\x7f", b"?a\tb", b"?a#b"):
        client = await dial(running)
        client.say(post(path=b"/v1/chat/completions" + query))
        statuses[query] = (await client.hear()).status

    assert set(statuses.values()) == {400}, statuses
    assert fake_vllm.requests == []
