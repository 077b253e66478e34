"""Groups of answers whose worth is known to the scripted judge alone. Pure.

Each answer says its case, a made-up word (`case-bakomitu`) that stands for its content: both sides
send it to the judge whatever else they escape, and the judge looks up by it what the answer is
worth. Nothing else in an answer tells that. Equal answers have one case.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]  # Any: JSON
SMALLEST, LARGEST = 4, 8
LEAST, MOST = 0.15, 0.85
"""Range of the true worth: noise and bias seldom leave 0..1 and are cut off."""
LEVELS = (0.2, 0.5, 0.8)
"""Worth of answers in groups with ties."""
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
SYLLABLES = 4
SYSTEM = (
    "You are the support agent of a shop for outdoor gear. Be exact, and follow the shop's policy."
)
QUESTION = "My order has not come, and the page says that it was delivered. What can I do now?"
SENTENCES = (
    "I am sorry that your parcel has not reached you.",
    "The carrier marks a parcel as delivered when it reaches the depot, so please wait until noon.",
    "Please look with your neighbours and in the parcel box of your house first.",
    "If it is not there, I can open a search with the carrier, which takes three working days.",
    "A refund goes to the card that you paid with once the search has ended.",
    "You can follow the search under Orders, where each step has a date.",
    "For a tent or a stove we can send a replacement at once, while the stock lasts.",
    "Tell me the number of your order and I will look at the record of the delivery.",
)
CHINESE = (
    "很抱歉，您的包裹还没有送到。",
    "请先问一问邻居，再看看楼下的包裹柜。",
    "如果仍然找不到，我可以请承运人查找，需要三个工作日。",
    "查找结束后，退款会退回到您付款的银行卡。",
    "您可以在订单页面看到每一步的日期。",
    "请告诉我订单号，我来查看送货记录。",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeGroup:
    """Answers to one prompt, and what they are worth."""

    context: tuple[Message, ...]
    tools: tuple[Message, ...]
    answers: tuple[Message, ...]
    """[G] assistant messages."""
    cases: tuple[str, ...]
    """[G] the case that each answer says."""
    truth: tuple[float, ...]
    """[G] worth, unitless, 0..1."""


def groups(kind: str, count: int, seed: str) -> list[MadeGroup]:
    """Make groups of a kind of `KINDS`; the same for the same arguments."""
    rng = random.Random(f"{seed} {kind}")
    words = case_words(rng)
    return [KINDS[kind](rng, words) for _ in range(count)]


def case_words(rng: random.Random) -> Iterator[str]:
    """Yield made-up words, each once."""
    seen = set[str]()
    while True:
        word = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(SYLLABLES))
        if word not in seen:
            seen.add(word)
            yield f"case-{word}"


def _text(rng: random.Random, words: Iterator[str]) -> MadeGroup:
    return _group(rng, words, lambda case: _says(_prose(rng, case)))


def _ties(rng: random.Random, words: Iterator[str]) -> MadeGroup:
    made = _text(rng, words)
    truth = [rng.choice(LEVELS) for _ in made.answers]
    truth[0], truth[1] = LEVELS[0], LEVELS[-1]  # else a group may have no order at all
    return MadeGroup(
        context=made.context,
        tools=(),
        answers=made.answers,
        cases=made.cases,
        truth=tuple(rng.sample(truth, len(truth))),
    )


def _alike(rng: random.Random, words: Iterator[str]) -> MadeGroup:
    """Two answers or more say the same."""
    made = _text(rng, words)
    twins = rng.randrange(2, max(3, len(made.answers) - 1))
    places = [*range(len(made.answers) - twins + 1), *[0] * (twins - 1)]
    rng.shuffle(places)
    return MadeGroup(
        context=made.context,
        tools=(),
        answers=tuple(made.answers[place] for place in places),
        cases=tuple(made.cases[place] for place in places),
        truth=tuple(made.truth[place] for place in places),
    )


def _chinese(rng: random.Random, words: Iterator[str]) -> MadeGroup:
    return _group(
        rng, words, lambda case: _says(f"{case} {''.join(rng.choice(CHINESE) for _ in range(12))}")
    )


def _long(rng: random.Random, words: Iterator[str]) -> MadeGroup:
    """Forty turns came before, some 25 kB."""
    made = _text(rng, words)
    before = [
        {"role": ("user", "assistant")[turn % 2], "content": _paragraph(rng, 7)}
        for turn in range(40)
    ]
    context = (made.context[0], *before, *made.context[1:])
    return MadeGroup(
        context=context, tools=(), answers=made.answers, cases=made.cases, truth=made.truth
    )


def _code(rng: random.Random, words: Iterator[str]) -> MadeGroup:
    made = _group(rng, words, lambda case: _says(_cpp(rng, case)))
    return _asked(made, "Write a cache of the last results in C++, with a test.")


def _html(rng: random.Random, words: Iterator[str]) -> MadeGroup:
    made = _group(rng, words, lambda case: _says(_page(rng, case)))
    return _asked(made, "Write the page that lists the open orders, as HTML.")


def _tool_calls(rng: random.Random, words: Iterator[str]) -> MadeGroup:
    made = _group(rng, words, lambda case: _calls(rng, case))
    return MadeGroup(
        context=made.context,
        tools=TOOLS,
        answers=made.answers,
        cases=made.cases,
        truth=made.truth,
    )


def _group(rng: random.Random, words: Iterator[str], write: Callable[[str], Message]) -> MadeGroup:
    size = rng.randint(SMALLEST, LARGEST)
    cases = tuple(next(words) for _ in range(size))
    return MadeGroup(
        context=_asks(QUESTION),
        tools=(),
        answers=tuple(write(case) for case in cases),
        cases=cases,
        truth=tuple(round(rng.uniform(LEAST, MOST), 4) for _ in cases),
    )


def _asks(question: str) -> tuple[Message, ...]:
    return ({"role": "system", "content": SYSTEM}, {"role": "user", "content": question})


def _asked(made: MadeGroup, question: str) -> MadeGroup:
    return MadeGroup(
        context=_asks(question),
        tools=made.tools,
        answers=made.answers,
        cases=made.cases,
        truth=made.truth,
    )


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _prose(rng: random.Random, case: str) -> str:
    return f"{_paragraph(rng, 3)} I have noted it as {case}. {_paragraph(rng, 2)}"


def _paragraph(rng: random.Random, sentences: int) -> str:
    return " ".join(rng.choice(SENTENCES) for _ in range(sentences))


def _cpp(rng: random.Random, case: str) -> str:
    keys = ("std::string", "int", "std::pair<int, int>", "std::vector<std::string>")
    key, value = rng.choice(keys), rng.choice(keys)
    return f"""Here it is ({case}), with the test below:

```cpp
#include <list>
#include <map>
#include <optional>
#include <vector>

template <typename Key = {key}, typename Value = {value}>
class LastResults {{
 public:
  explicit LastResults(std::size_t most) : most_(most) {{}}

  std::optional<Value> find(const Key& key) {{
    auto found = places_.find(key);
    if (found == places_.end()) return std::nullopt;
    order_.splice(order_.begin(), order_, found->second);
    return found->second->second;
  }}

  void store(const Key& key, Value value) {{
    order_.emplace_front(key, std::move(value));
    places_[key] = order_.begin();
    if (places_.size() > most_ && !order_.empty()) {{
      places_.erase(order_.back().first);
      order_.pop_back();
    }}
  }}

 private:
  std::size_t most_;
  std::list<std::pair<Key, Value>> order_;
  std::map<Key, typename std::list<std::pair<Key, Value>>::iterator> places_;
}};

int main() {{
  LastResults<int, std::vector<int>> results({rng.randint(2, 99)});
  for (int i = 0; i < {rng.randint(100, 999)}; ++i) results.store(i % 7, {{i, i << 1}});
  return results.find({rng.randint(0, 6)}).has_value() && results.find(8) == std::nullopt ? 0 : 1;
}}
```
{_paragraph(rng, 1)}"""


def _page(rng: random.Random, case: str) -> str:
    rows = "\n".join(
        f'    <tr class="{rng.choice(("odd", "even"))}"><td>{rng.randint(1000, 9999)}</td>'
        f'<td><a href="/orders/{rng.randint(1000, 9999)}">{rng.choice(("Tent", "Stove"))}</a></td>'
        f"<td><b>{rng.randint(10, 500)}</b>&nbsp;EUR</td></tr>"
        for _ in range(6)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>Open orders, {case}</title></head>
<body>
<h1>Open orders</h1>
<p>{rng.choice(SENTENCES)}</p>
<table>
  <thead><tr><th>Number</th><th>Article</th><th>Price</th></tr></thead>
  <tbody>
{rows}
  </tbody>
</table>
<form method="post" action="/search"><input name="q" type="text"><button>Search</button></form>
<ul><li>One</li><li>Two</li><li><em>{rng.choice(SENTENCES)}</em></li></ul>
</body>
</html>"""


def _tool(name: str, says: str, **fields: str) -> Message:
    parameters = {
        "type": "object",
        "properties": {field: {"type": kind} for field, kind in fields.items()},
        "required": list(fields),
    }
    function = {"name": name, "description": says, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = (
    _tool("find_order", "Look an order up by its number.", number="string", note="string"),
    _tool(
        "open_search", "Ask the carrier to search.", number="string", days="integer", note="string"
    ),
    _tool("refund", "Pay money back.", number="string", amount="number", note="string"),
    _tool("send_again", "Send the articles again.", number="string", note="string"),
    _tool("ask_human", "Hand over to a person.", note="string"),
)


def _calls(rng: random.Random, case: str) -> Message:
    function = rng.choice(TOOLS)["function"]
    made = {"string": f"R-{rng.randint(1000, 9999)}", "integer": 3, "number": 49.5}
    fields = {name: made[one["type"]] for name, one in function["parameters"]["properties"].items()}
    fields["note"] = f"{case}: {rng.choice(SENTENCES)}"
    call = {
        "id": f"call_{rng.getrandbits(64):016x}",
        "type": "function",
        "function": {"name": function["name"], "arguments": json.dumps(fields)},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


KINDS: dict[str, Callable[[random.Random, Iterator[str]], MadeGroup]] = {
    "text": _text,
    "ties": _ties,
    "alike": _alike,
    "long": _long,
    "code": _code,
    "html": _html,
    "tool calls": _tool_calls,
    "chinese": _chinese,
}
"""Kind -> what makes one group of it."""
