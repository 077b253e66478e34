"""What the real vLLM does that no request says: values for unsaid fields, and grammars of its own.

One engine, with a `generation_config.json` that sets a temperature, a `top_p` and a `top_k`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from demo.ports import free_port
from demo.stack import ENGINE_PYTHON, MODEL, MODEL_FOLDER, engine_section
from ingest.grouping.request import (
    RAISED_BELOW,
    STRICT_TOOLS,
    EngineFacts,
    candidate_body,
    masking_fields,
)
from ingest.vllm.probe import ANSWER, LOW_IDS, PLAIN, TOOLS, probe
from tests.clients.servers import ENGINE_CORE, process, wait_until_ready

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(1200)]

FILLED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
FORBIDDEN = -9999.0
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of the engine."""
    if not ENGINE_PYTHON.exists() or not (MODEL_FOLDER / "config.json").exists():
        pytest.skip("no engine or no model here: `make test` sets both up")
    folder = tmp_path_factory.mktemp("unasked")
    base = folder / "base"
    base.mkdir()
    for file in MODEL_FOLDER.iterdir():
        (base / file.name).symlink_to(file)
    own = base / "generation_config.json"
    said = json.loads(own.read_text())
    own.unlink()
    own.write_text(json.dumps({**said, **FILLED}))
    port = free_port()
    engine = engine_section(port, lora=False)
    command = [str(base) if word == str(MODEL_FOLDER) else word for word in engine["command"]]
    with process(folder, "vllm", command, {**engine["env"], **ENGINE_CORE}) as running:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready([running], [f"{url}/health"], folder)
        yield url


class Engine:
    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._client.post(path, json=body)
        assert response.status_code == 200, response.text
        said: dict[str, Any] = response.json()
        return said

    def logprobs(self, body: dict[str, Any]) -> dict[str, float]:
        """Log-probabilities of the vocabulary's first ids as the first answered token."""
        asked = {
            **body,
            "model": MODEL,
            "max_completion_tokens": 1,
            "logprobs": True,
            "logprob_token_ids": list(range(LOW_IDS)),
            "return_tokens_as_token_ids": True,
        }
        (choice,) = self.post("/v1/chat/completions", asked)["choices"]
        (position,) = choice["logprobs"]["content"]
        of_ids = {f"token_id:{number}" for number in range(LOW_IDS)}
        return {
            one["token"]: one["logprob"]
            for one in position["top_logprobs"]
            if one["token"] in of_ids
        }

    def only_answer(self, **tools: Any) -> str:
        """The first token where `ANSWER`, made unlikely, is all that the request allows."""
        asked = {"model": MODEL, "prompt": ANSWER, "add_special_tokens": False}
        ids = self.post("/tokenize", asked)["tokens"]
        body = {
            **PLAIN,
            "model": MODEL,
            "structured_outputs": {"choice": [ANSWER]},
            "logit_bias": {str(number): -100 for number in ids},
            **tools,
        }
        (choice,) = self.post("/v1/chat/completions", body)["choices"]
        return str(choice["message"]["content"])

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def engine(vllm: str) -> Iterator[Engine]:
    with closing(Engine(vllm)) as engine:
        engine.logprobs(PLAIN)  # the first of its prompt differs from the next ones by rounding
        yield engine


def test_what_vllm_fills_by_itself_is_measured_field_by_field_and_plain_tools_stay_free(
    vllm: str,
) -> None:
    found = probe(vllm, MODEL, None, budget_s=PATIENCE_S)

    assert found == EngineFacts(defaults=frozenset(FILLED), grammar="as_asked")


def test_an_unsaid_request_is_sampled_otherwise_than_one_that_says_all(engine: Engine) -> None:
    unsaid = engine.logprobs({"messages": PLAIN["messages"]})
    said = engine.logprobs(PLAIN)
    filled = engine.logprobs({**PLAIN, **FILLED})

    assert FORBIDDEN not in said.values()
    assert list(unsaid.values()).count(FORBIDDEN) > LOW_IDS // 2
    assert unsaid == pytest.approx(filled, abs=0.3)


def test_a_candidate_that_leaves_everything_unsaid_is_sampled_at_its_temperature_alone(
    engine: Engine,
) -> None:
    agent = {"messages": PLAIN["messages"]}
    body = candidate_body(agent, upstream_model=MODEL, temperature=1.0, max_tokens=None)

    assert engine.logprobs(body) == pytest.approx(engine.logprobs(PLAIN), abs=0.3)


def test_vllm_samples_at_a_hundredth_where_less_is_asked_for(engine: Engine) -> None:
    asked, raised, other = (
        engine.logprobs({**PLAIN, "temperature": temperature})
        for temperature in (RAISED_BELOW / 10, RAISED_BELOW, 2 * RAISED_BELOW)
    )

    # At a hundredth, rounding of a quarter nat is 25; at two hundredths all is half as large.
    assert asked == pytest.approx(raised, rel=0.05)
    assert min(raised.values()) < 1.5 * min(other.values())


def test_a_strict_tool_is_a_grammar_and_a_plain_one_is_not(engine: Engine) -> None:
    (plain,) = TOOLS["tools"]
    strict = {**plain, "function": {**plain["function"], "strict": True}}
    strict_tools = {**TOOLS, "tools": [strict]}

    assert engine.only_answer() == ANSWER
    assert engine.only_answer(**TOOLS) == ANSWER
    # The call that the grammar allows is all that is left beside the unlikely answer.
    assert engine.only_answer(**strict_tools) != ANSWER
    assert list(masking_fields({"messages": [], **TOOLS})) == []
    assert next(masking_fields({"messages": [], **strict_tools})) == STRICT_TOOLS
