"""Which 404 of vLLM means that it does not know the adapter. The first ones are vLLM 0.32's own."""

from __future__ import annotations

import pytest

from sidecar.relay.refusals import names_unknown_model

SAID = b"The model `m--v9-x` does not exist. Valid aliases: m."
TYPED = b'{"error":{"message":"%b","type":"NotFoundError","param":"model","code":404}}' % SAID


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(TYPED, id="chat, completions, responses, tokenize, detokenize"),
        pytest.param(
            b'{"type":"error","error":{"type":"NotFoundError","message":"%b"}}' % SAID,
            id="messages, count_tokens",
        ),
        pytest.param(
            b'{"object":"error","message":"%b","type":"NotFoundError","param":null,"code":404}'
            % SAID,
            id="an older vLLM",
        ),
        pytest.param(
            b'{"error":{"message":"%b","type":"not_found_error","param":"model"}}' % SAID,
            id="another type",
        ),
        pytest.param(b'{"error":{"message":"no","param":null}}', id="no type"),
        pytest.param(b'{"error":"model not found"}', id="a text"),
        pytest.param(b"<html>404</html>", id="a gateway's page"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff", id="no text"),
        pytest.param(b"[]", id="no object"),
    ],
)
def test_a_404_may_mean_that_nobody_knows_the_adapter(body: bytes) -> None:
    assert names_unknown_model(body)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            b'{"error":{"message":"Response with id \'resp_nope\' not found.",'
            b'"type":"invalid_request_error","param":"response_id","code":404}}',
            id="responses: an unknown id",
        ),
        pytest.param(b'{"detail":"Not Found"}', id="a path that this vLLM lacks"),
        pytest.param(b'{"error":{"type":"NotFoundError","param":"tool"}}', id="another param"),
    ],
)
def test_a_404_of_something_else_is_passed_on(body: bytes) -> None:
    assert not names_unknown_model(body)
