"""What is concluded from single tokens. The real vLLM: `tests/clients/test_vllm_unasked.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ingest.errors import EngineDownError, RequestRefusedError, SamplingError
from ingest.grouping.request import EngineFacts, Grammar
from ingest.vllm.probe import TOKENIZE_PATH, find_out, probe
from ingest.vllm.sampler import CHAT_PATH

LOGITS = [math.sin(7.0 * number) * 20.0 for number in range(200)]
PROMPT_IDS = [3, 150, 3, 7]


class ArithmeticVllm:
    """Answers with the log-probabilities that the vLLM of these flags would have."""

    def __init__(
        self,
        *,
        defaults: Mapping[str, float] | None = None,
        calls_held: bool = False,
        forbids: Callable[[Mapping[str, Any]], bool] = lambda _: False,
        raw: bool = False,
        noise: float = 0.0,
        takes_tools: bool = True,
        obeys: bool = True,
    ) -> None:
        self.defaults = dict(defaults or {})
        self.calls_held, self.forbids, self.raw = calls_held, forbids, raw
        self.noise, self.takes_tools, self.obeys = noise, takes_tools, obeys
        self.asked: list[dict[str, Any]] = []

    def __call__(self, path: str, body: Mapping[str, Any]) -> Any:
        if path == TOKENIZE_PATH:
            return {"tokens": [5]}
        assert path == CHAT_PATH
        self.asked.append(dict(body))
        if "tools" in body and not self.takes_tools:
            raise RequestRefusedError("no tool parser")
        value = {**self.defaults, **body}
        temperature = value.get("temperature", 1.0)
        if temperature == 0 and body.get("n", 1) > 1:
            raise RequestRefusedError("n must be 1")
        content = "x"
        if "structured_outputs" in body and self.obeys:
            held = "tools" in body and self.calls_held
            content = "<" if held else "A"
        logits = [
            logit - (self.noise if len(self.asked) % 2 else 0.0) * (number % 2)
            for number, logit in enumerate(LOGITS)
        ]
        if not self.raw:
            penalty = value.get("repetition_penalty", 1.0)
            for number in set(PROMPT_IDS):
                logits[number] *= 1 / penalty if logits[number] > 0 else penalty
            logits = [logit / (temperature or 1.0) for logit in logits]
        kept = set(range(len(logits)))
        order = sorted(kept, key=lambda number: -logits[number])
        if not self.raw:
            if value.get("top_k", -1) > 0:
                kept &= set(order[: int(value["top_k"])])
            best = math.exp(max(logits))
            total = sum(map(math.exp, logits))
            kept = {n for n in kept if math.exp(logits[n]) >= value.get("min_p", 0.0) * best}
            mass, cut = 0.0, set()
            for number in order:
                if mass >= value.get("top_p", 1.0):
                    cut.add(number)
                mass += math.exp(logits[number]) / total
            kept -= cut if value.get("top_p", 1.0) < 1 else set()
        if self.forbids(body):
            kept -= {0, 1, 2}
        norm = math.log(sum(math.exp(logits[number]) for number in kept))
        tokens = [
            {
                "token": f"token_id:{number}",
                "logprob": logits[number] - norm if number in kept else -9999.0,
            }
            for number in body.get("logprob_token_ids", ())
        ]
        choice = {
            "message": {"content": content},
            "logprobs": {"content": [{"top_logprobs": tokens}]},
        }
        return {"choices": [choice], "prompt_token_ids": PROMPT_IDS}


@pytest.mark.parametrize(
    "defaults",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.1},
        {"temperature": 0},
        {"top_p": 0.95},
        {"top_k": 50},
        {"min_p": 0.05},
        {"repetition_penalty": 1.1},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_fields_that_vllm_fills_are_found(defaults: dict[str, float], noise: float) -> None:
    vllm = ArithmeticVllm(defaults=defaults, noise=noise)

    assert find_out(vllm, "smollm").defaults == defaults.keys()
    assert {body["model"] for body in vllm.asked} == {"smollm"}
    assert {body["max_completion_tokens"] for body in vllm.asked} == {1}


@pytest.mark.parametrize(
    ("vllm", "grammar"),
    [
        pytest.param(ArithmeticVllm(), "as_asked", id="plain"),
        pytest.param(ArithmeticVllm(calls_held=True), "with_tools", id="strict-level"),
        pytest.param(ArithmeticVllm(forbids=lambda _: True), "always", id="always-a-grammar"),
        (ArithmeticVllm(forbids=lambda body: "tools" in body), "with_tools"),
        pytest.param(ArithmeticVllm(takes_tools=False), "as_asked", id="no-tool-parser"),
        pytest.param(ArithmeticVllm(obeys=False), None, id="nothing-can-be-concluded"),
    ],
)
def test_a_grammar_of_its_own_is_found(vllm: ArithmeticVllm, grammar: Grammar | None) -> None:
    assert find_out(vllm, "smollm") == EngineFacts(defaults=frozenset(), grammar=grammar)


def test_raw_log_probabilities_say_nothing_of_defaults_and_much_of_grammars() -> None:
    vllm = ArithmeticVllm(raw=True, defaults={"top_k": 20}, calls_held=True)

    assert find_out(vllm, "smollm") == EngineFacts(defaults=None, grammar="with_tools")


@pytest.mark.parametrize(
    "reply",
    [None, [], {}, {"choices": []}, {"choices": [{"message": None}]}, {"choices": "many"}],
)
def test_what_is_no_chat_reply_is_refused(reply: Any) -> None:
    with pytest.raises(SamplingError, match="not a chat reply"):
        find_out(lambda path, body: reply, "smollm")


def test_a_vllm_that_cannot_be_reached_is_told_apart() -> None:
    with pytest.raises(EngineDownError, match="cannot connect"):
        probe("http://127.0.0.1:9", "smollm", None, budget_s=5.0)
