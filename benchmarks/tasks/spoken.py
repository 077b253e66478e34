"""Sessions of the simulated site as conversations, token for token as vLLM would see them.

Each action is an answer of its own words and length. Prompts are rendered by the demo's chat
template; a small tokenizer is trained on what is said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from demo.make_model import CHAT_TEMPLATE
from ingest.sessions.rows import SampledAnswer, TokenTurn

CASES: Final = ("plain", "tool calls", "other tokens", "rewritten")
"""`tool calls`: every second answer is one. `other tokens`: the third answer was sampled character
by character. `rewritten`: from the fourth request on the client leaves out the first answer."""
WORDS: Final = ("look", "ask the user again", "refund it at once", "tell me the number first")
"""What the four actions say; the second one twice, and so on."""
END: Final = "<|im_end|>"
Json = dict[str, Any]
Logprobs = Callable[[Sequence[int], Sequence[int]], Sequence[float]]
"""Of sampled tokens behind a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An exchange: what was sent and answered as JSON, and its tokens."""

    messages: list[Json]
    answer: Json
    tokens: TokenTurn


def make_tokenizer() -> Any:
    """Train a tokenizer of 400 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=["<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    template = CHAT_TEMPLATE.read_text()
    made.train_from_iterator(
        [*(_text(0, a, c) for a in range(4) for c in (0, 1)), template], trainer
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)
    tokenizer.chat_template = template
    return tokenizer


def turns(
    tokenizer: Any, actions: Sequence[int], case: str, logprobs: Logprobs, *, task: int, name: str
) -> list[Turn]:
    """Return the exchanges of a session. name: its exchanges' ids begin with it."""
    messages: list[Json] = [{"role": "user", "content": f"Task {task}."}]
    found: list[Turn] = []
    for step, action in enumerate(actions):
        if case == "rewritten" and step == 3:
            messages = messages[2:]
        call = case == "tool calls" and step % 2
        text = _text(step, action, call)
        parts = list(text) if case == "other tokens" and step == 2 else [text]
        sampled = [
            *(one for part in parts for one in tokenizer.encode(part)),
            tokenizer.eos_token_id,
        ]
        prompt = _rendered(tokenizer, messages)
        answer: Json = {"role": "assistant", "content": "" if call else text}
        reply: Json = {"role": "user", "content": f"Done {step}, go on."}
        if call:
            function = {"name": "act", "arguments": json.dumps({"what": WORDS[action]})}
            answer["tool_calls"] = [{"id": f"c{step}", "function": function, "type": "function"}]
            reply = {"role": "tool", "tool_call_id": f"c{step}", "content": f"done {step}"}
        own = SampledAnswer(index=0, token_ids=sampled, logprobs=logprobs(prompt, sampled))
        tokens = TokenTurn(
            exchange_id=f"{name}-{step}",
            parent=f"{name}-{step - 1}" if step else None,
            prompt_token_ids=prompt,
            answers=(own,),
        )
        found.append(Turn(messages=messages, answer=answer, tokens=tokens))
        messages = [*messages, answer, reply]
    return found


def _text(step: int, action: int, call: int) -> str:
    if call:
        made = json.dumps({"name": "act", "arguments": {"what": WORDS[action]}})
        return f"<tool_call>{made}</tool_call>"
    return f"Step {step}: " + ", ".join([WORDS[action]] * (1 + action)) + "."


def _rendered(tokenizer: Any, messages: Sequence[Json]) -> list[int]:
    """As vLLM renders a request: it reads the arguments of calls first."""
    read = json.loads(json.dumps(messages))
    for call in (call for one in read for call in one.get("tool_calls", ())):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return list(tokenizer.apply_chat_template(read, add_generation_prompt=True, return_dict=False))
