"""The recorded ids against the recorded text: the demo model's tokenizer, and planted faults."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from ingest.errors import NoTokenizerError, SamplingError
from ingest.intake.choose import choose_new
from ingest.tokens import TokenCheck, Vocabulary, check_exchange, find_tokenizer, load_vocabulary
from ingest.vllm.sampler import CheckedSampler, SampledAnswer, SampleRequest
from support.ingest_kit import Kit

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / ".models" / "smollm2-135m"
RECORDED = ROOT / "tests" / "sidecar" / "recorded"
END = 2
"""<|im_end|>, special."""


@pytest.fixture(scope="module")
def smollm() -> Vocabulary:
    if not (MODEL / "tokenizer.json").is_file():
        pytest.skip("the demo model is not there: `make setup` makes it")
    return load_vocabulary(str(MODEL))


def encode(smollm: Vocabulary, text: str) -> list[int]:
    assert isinstance(smollm.decoder, Tokenizer)
    return list(smollm.decoder.encode(text, add_special_tokens=False).ids)


def outcome(kit: Kit, smollm: Vocabulary, ids: Any, content: str | None, **changes: Any) -> str:
    """The check of one plain answer; `request` and message members may be added."""
    said = {"role": "assistant", "content": content, **changes.pop("message", {})}
    finish = changes.pop("finish_reason", "stop")
    message = json.dumps(said).encode()
    choice = kit.choice(message=message, token_ids=tuple(ids), finish_reason=finish)
    return check_exchange(kit.exchange(choices=(choice,), **changes), smollm)


def recorded_choice(name: str) -> Iterator[tuple[list[int], dict[str, Any], str]]:
    for choice in json.loads((RECORDED / name).read_bytes())["choices"]:
        yield choice["token_ids"], choice["message"], choice["finish_reason"]


@pytest.mark.parametrize("name", ["whole_reply_asked.json", "two_reply_asked.json"])
def test_what_the_real_vllm_said_agrees(kit: Kit, smollm: Vocabulary, name: str) -> None:
    for ids, message, finish in recorded_choice(name):
        assert outcome(kit, smollm, ids, message["content"], finish_reason=finish) == "agrees"


def test_every_planted_fault_in_a_real_reply_is_seen(kit: Kit, smollm: Vocabulary) -> None:
    ((ids, message, finish),) = recorded_choice("whole_reply_asked.json")
    content = message["content"]
    texts = len(ids) - (ids[-1] == END)
    assert texts > 5
    missed = []
    for place in range(texts):
        faults = {
            "changed": [*ids[:place], ids[place] + 1, *ids[place + 1 :]],
            "dropped": [*ids[:place], *ids[place + 1 :]],
            "doubled": [*ids[: place + 1], *ids[place:]],
            "cut": ids[:place],
        }
        for what, faulty in faults.items():
            if faulty and outcome(kit, smollm, faulty, content, finish_reason=finish) == "agrees":
                missed.append((what, place))

    assert missed == []


def test_a_stop_token_is_no_text_and_comes_once(kit: Kit, smollm: Vocabulary) -> None:
    ids = encode(smollm, "All is well.")

    assert outcome(kit, smollm, [*ids, END], "All is well.") == "agrees"
    assert outcome(kit, smollm, ids, "All is well.", finish_reason="length") == "agrees"
    assert outcome(kit, smollm, [*ids, END, END], "All is well.") == "ids_do_not_decode"


def test_an_ordinary_token_that_ends_the_answer_is_no_text(kit: Kit, smollm: Vocabulary) -> None:
    ids = encode(smollm, "One two three")
    request = {"messages": [], "stop_token_ids": [ids[-1]]}

    assert outcome(kit, smollm, ids, "One two", request=request) == "agrees"
    assert outcome(kit, smollm, ids, "One two") == "ids_do_not_decode"


def test_a_call_that_a_stream_kept_back_is_text(kit: Kit, smollm: Vocabulary) -> None:
    ids = encode(smollm, 'Let me. <tool_call>{"name": "get_')
    cut = {"finish_reason": "length", "message": {"withheld": ' <tool_call>{"name": "get_'}}
    other = {"finish_reason": "length", "message": {"withheld": ' <tool_call>{"name": "put_'}}

    assert outcome(kit, smollm, ids, "Let me.", **cut) == "agrees_in_parts"
    assert outcome(kit, smollm, ids, "Let me.", **other) == "ids_do_not_decode"
    assert outcome(kit, smollm, ids, "Let me.", finish_reason="length") == "ids_do_not_decode"


def test_special_tokens_are_text_when_they_are_shown(kit: Kit, smollm: Vocabulary) -> None:
    ids = [*encode(smollm, "Bye"), 1, END]
    shown = {"messages": [], "skip_special_tokens": False}

    assert outcome(kit, smollm, ids, "Bye<|im_start|>", request=shown) == "agrees"
    assert outcome(kit, smollm, ids, "Bye<|im_start|>") == "agrees"  # a tool parser had it shown
    assert outcome(kit, smollm, ids, "Bye") == "agrees"
    assert outcome(kit, smollm, ids, "Bye<|im_end|>") == "ids_do_not_decode"


def test_a_character_split_over_tokens_is_whole_or_not_shown(kit: Kit, smollm: Vocabulary) -> None:
    ids = encode(smollm, "ok 🎉")
    assert len(encode(smollm, "🎉")) == 3

    assert outcome(kit, smollm, [*ids, END], "ok 🎉") == "agrees"
    for cut in (1, 2):  # the token limit fell inside it: vLLM shows no part of it
        short = ids[:-cut]
        assert outcome(kit, smollm, short, "ok ", finish_reason="length") == "agrees"
    assert outcome(kit, smollm, ids[:-1], "ok 🎉", finish_reason="length") == "ids_do_not_decode"


@pytest.mark.parametrize(
    ("content", "request_stop", "expected"),
    [
        ("Yes", {"stop": "."}, "agrees"),
        ("Yes", {"stop": ["!", ". B"]}, "agrees"),
        ("Yes.", {"stop": ".", "include_stop_str_in_output": True}, "agrees"),
        ("Yes", {"stop": "!"}, "ids_do_not_decode"),
        ("Yes", {}, "ids_do_not_decode"),
        ("Ye", {"stop": "."}, "ids_do_not_decode"),
    ],
)
def test_a_stop_string_is_cut_and_nothing_else_is(
    kit: Kit, smollm: Vocabulary, content: str, request_stop: dict[str, Any], expected: str
) -> None:
    ids = encode(smollm, "Yes. B")

    assert outcome(kit, smollm, ids, content, request={"messages": [], **request_stop}) == expected


def test_an_empty_thinking_block_may_be_taken_away(kit: Kit, smollm: Vocabulary) -> None:
    ids = encode(smollm, "<think>\n\n</think>\n\nHello.")
    full = encode(smollm, "<think>\nhm\n</think>\n\nHello.")

    assert outcome(kit, smollm, ids, "Hello.") == "agrees"
    assert outcome(kit, smollm, ids, "\n\nHello.") == "agrees"
    assert outcome(kit, smollm, full, "Hello.") == "ids_do_not_decode"


def test_reasoning_and_content_must_be_there_in_this_order(kit: Kit, smollm: Vocabulary) -> None:
    ids = encode(smollm, "<think>\nThey ask for X.\n</think>\n\nX it is.")

    def check(content: str, reasoning: str) -> str:
        return outcome(kit, smollm, ids, content, message={"reasoning": reasoning})

    assert check("X it is.", "\nThey ask for X.\n") == "agrees_in_parts"
    assert check("X it was.", "They ask for X.") == "ids_do_not_decode"
    assert check("They ask for X.", "X it is.") == "ids_do_not_decode"


CALL = (
    '<tool_call>\n{"name": "find", "arguments": {"city":"Zoë\'s \\"inn\\"", "n": 12}}\n</tool_call>'
)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("find", '{"city": "Zoë\'s \\"inn\\"", "n": 12}', "agrees_in_parts"),  # written anew
        ("find", '{"city": "Zo\\u00eb\'s \\"inn\\"", "n": 12}', "agrees_in_parts"),
        ("find", '{"city": "Zoë\'s \\"inn', "agrees_in_parts"),  # cut, so not JSON
        ("find", '{"city": "Zoe', "ids_do_not_decode"),
        ("look", '{"city": "Zoë\'s \\"inn\\"", "n": 12}', "ids_do_not_decode"),
        ("find", '{"city": "Zoe", "n": 12}', "ids_do_not_decode"),
        ("find", '{"city": "Zoë\'s \\"inn\\"", "n": 13}', "ids_do_not_decode"),
        ("find", '{"town": "Zoë\'s \\"inn\\""}', "ids_do_not_decode"),
    ],
)
def test_each_piece_of_a_parsed_tool_call_must_be_in_the_text(
    kit: Kit, smollm: Vocabulary, name: str, arguments: str, expected: str
) -> None:
    ids = [*encode(smollm, f"Let me see.\n{CALL}"), END]
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}

    found = outcome(
        kit,
        smollm,
        ids,
        "Let me see.",
        message={"tool_calls": [call]},
        finish_reason="tool_calls",
    )

    assert found == expected


def test_what_has_no_ids_or_is_not_trained_on_is_not_checked(kit: Kit, smollm: Vocabulary) -> None:
    wrong = kit.choice(message=b'{"role":"assistant","content":"other"}')
    none = kit.choice(token_ids=())

    for changes in (
        {"choices": (none,)},
        {"choices": ()},
        {"choices": (wrong,), "untrainable_reason": "count_mismatch"},
        {"choices": (wrong,), "surface": "messages"},
    ):
        assert check_exchange(kit.exchange(**changes), smollm) == "not_checked"
    assert check_exchange(kit.exchange(choices=(wrong,)), smollm) == "ids_do_not_decode"


def test_of_several_choices_the_worst_counts(kit: Kit, smollm: Vocabulary) -> None:
    ids = tuple(encode(smollm, "Hi."))
    good = kit.choice("Hi.", token_ids=ids)
    bad = kit.choice("Ho.", index=1, token_ids=ids)

    assert check_exchange(kit.exchange(choices=(good,)), smollm) == "agrees"
    assert check_exchange(kit.exchange(choices=(good, bad)), smollm) == "ids_do_not_decode"


@pytest.mark.parametrize("ids", [(-1,), (2**40,), (2**31 - 1,)])
def test_what_cannot_be_an_id_disagrees(kit: Kit, smollm: Vocabulary, ids: tuple[int, ...]) -> None:
    assert outcome(kit, smollm, ids, "Hi.") == "ids_do_not_decode"


class SpacedWords:
    """As SentencePiece decodes: the space before the first word is not shown."""

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(f" w{number}" for number in ids).removeprefix(" ")


def test_the_first_token_s_space_may_hang_on_the_prompt(kit: Kit) -> None:
    words = Vocabulary(decoder=SpacedWords(), added=frozenset(), special=frozenset())

    assert outcome(kit, words, (5, 6), "w5 w6", prompt_token_ids=(1,)) == "agrees"
    assert outcome(kit, words, (5, 6), " w5 w6", prompt_token_ids=(1,)) == "agrees"
    assert outcome(kit, words, (5, 6), " w6 w5", prompt_token_ids=(1,)) == "ids_do_not_decode"


@settings(
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(text=st.text(min_size=1, max_size=30), data=st.data())
def test_any_text_agrees_with_its_ids_alone(
    kit: Kit, smollm: Vocabulary, text: str, data: Any
) -> None:
    ids = encode(smollm, text)
    # This vocabulary has no token for some bytes; vLLM could not have said those texts.
    assume("\ufffd" not in text and smollm.decoder.decode(ids) == text)
    assert outcome(kit, smollm, [*ids, END], text) == "agrees"

    place = data.draw(st.integers(0, len(ids) - 1))
    other = data.draw(st.integers(17, 49_151).filter(lambda number: number != ids[place]))
    changed = [*ids[:place], other, *ids[place + 1 :]]
    shown = smollm.decoder.decode(changed)
    if shown.rstrip("\ufffd") != text:  # else the other id says the same, or nothing yet
        assert outcome(kit, smollm, [*changed, END], text) == "ids_do_not_decode"


def test_an_exchange_whose_ids_disagree_is_never_chosen(kit: Kit, smollm: Vocabulary) -> None:
    good = kit.choice("Hi.", token_ids=(*encode(smollm, "Hi."), END))
    bad = kit.choice("Hi.", token_ids=(*encode(smollm, "Ho."), END))
    check = TokenCheck(str(MODEL))
    assert check.poll(1.0) is True
    assert check.state == "on"
    exchanges = [
        kit.exchange("good", choices=(good,)),
        kit.exchange("bad", choices=(bad,)),
        kit.exchange("cut", choices=(bad,), outcome="cut", untrainable_reason="cut"),
    ]

    kit.take(*exchanges, exchanges[1], now=2.0, check_tokens=check)
    choose_new(kit.database, kit.rules(), model="smollm", limit=9, now=3.0)

    assert kit.counts("token_check") == {"agrees": 1, "ids_do_not_decode": 1, "not_checked": 1}
    # The prompt of a client that left starts a group too, without the part that was recorded.
    assert kit.counts("selection") == {"chosen": 2, "untrainable:ids_do_not_decode": 1}
    stored = kit.stored("bad").exchange
    assert (stored.untrainable_reason, stored.choices) == ("ids_do_not_decode", (bad,))
    assert kit.stored("cut").exchange.untrainable_reason == "cut"


async def test_a_candidate_whose_ids_disagree_is_refused(kit: Kit, smollm: Vocabulary) -> None:
    check = TokenCheck(str(MODEL))
    good = replace(CANDIDATE, token_ids=(*encode(smollm, "Hi."), END))
    bad = replace(CANDIDATE, token_ids=(*encode(smollm, "Ho."), END))
    told: dict[str, Any] = {"upstream_model": "m", "temperature": 1.0, "max_tokens": 4}

    async def ask(answer: SampledAnswer, **request: Any) -> SampledAnswer:
        sampler = CheckedSampler(Gives(answer), check, now=lambda: 1.0)
        return await sampler.sample(SampleRequest(chat={"messages": [], **request}, **told))

    assert await ask(good, echo=True) is good
    with pytest.raises(SamplingError, match="ids_do_not_decode"):
        await ask(bad)
    off = CheckedSampler(Gives(bad), TokenCheck(""), now=lambda: 1.0)
    assert await off.sample(SampleRequest(chat={}, **told)) is bad


CANDIDATE = SampledAnswer(
    message=b'{"role":"assistant","content":"Hi."}',
    finish_reason="stop",
    token_ids=(),
    logprobs=(),
    prompt_token_ids=(1,),
    model="m",
)


class Gives:
    """A sampler with one answer."""

    def __init__(self, answer: SampledAnswer) -> None:
        self.answer = answer

    async def sample(self, _: SampleRequest) -> SampledAnswer:
        return self.answer


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "serving.base_model_path is empty"),
        ("{folder}", "has no tokenizer.json"),
        ("{folder}/not/there", "is neither a folder nor a Hugging Face Hub name"),
        ("nobody/has-this-model", "is not in this machine's hub cache"),
    ],
)
def test_a_tokenizer_that_is_not_there_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, why: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(NoTokenizerError, match=re.escape(why)):
        find_tokenizer(path.format(folder=tmp_path))


def test_a_tokenizer_that_cannot_be_read_is_explained(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")

    with pytest.raises(NoTokenizerError, match="cannot be read as a tokenizer"):
        load_vocabulary(str(tmp_path))


def test_without_a_tokenizer_it_is_off_and_looks_again(
    kit: Kit, tmp_path: Path, smollm: Vocabulary
) -> None:
    check = TokenCheck(str(tmp_path))

    with capture_logs() as logs:
        assert check.poll(100.0) is True
        assert check.poll(159.0) is False
        assert check.poll(160.0) is False
        assert check(kit.exchange()) == "off"
        (tmp_path / "tokenizer.json").symlink_to(MODEL / "tokenizer.json")
        assert check.poll(219.0) is False
        assert check.poll(220.0) is True

    assert check.state == "on"
    assert [line["event"] for line in logs] == ["token_check_off", "token_check_on"]
    assert "has no tokenizer.json" in logs[0]["why"]
    assert check(kit.exchange()) == "ids_do_not_decode"  # ids 5, 6, 2 are not "served"
