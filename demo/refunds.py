"""The tasks of `make demo-tasks`: refunds in three steps, where a polite opening spoils the end.

The agent is a few lines around the model: at each step the model writes its next line to the
customer, and the agent does with its tools what that line calls for.

1. The customer asks for a refund. A line that apologises or promises is taken as a promise, and the
   agent notes the case as goodwill (`note_goodwill`). After any other line it finds the order
   (`find_order`).
2. The customer is told what the tool did.
3. The agent pays (`pay_back`). The shop pays only for an order that was found: a case of goodwill
   is refused, whatever is said from then on.

So what looks best at step 1, to anybody who judges one line, makes step 3 fail.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

SYSTEM = "You are a shop's agent."
ASK = 'Write the agent\'s next line. It begins with "Sorry" or with "Order".'
STEPS = 3
COURTEOUS = re.compile(
    r"\b(?:sorry|apolog\w*|refund\w*|money back|pay\w* (?:you )?back|glad|happy|certainly"
    r"|of course|sure)\b",
    re.IGNORECASE,
)
"""An apology or a promise, in the words that the model uses."""

GOODS = (
    "boots", "lamp", "jacket", "kettle", "tent", "scarf", "bag", "clock", "radio", "gloves",
    "mirror", "chair", "camera", "blanket", "phone", "printer", "helmet", "pillow", "watch", "desk",
    "umbrella", "razor", "toaster", "bike", "guitar", "vase", "rug", "drill", "mixer", "keyboard",
    "ladder", "mattress", "stove", "sofa", "headset", "curtain",
)  # fmt: skip
WORDS = (
    "I want a refund for the {}, please.",
    "Please pay me back for the broken {}.",
    "I want my money back for the {}.",
)
HELD_OUT = 16
"""Goods of the exam, the last ones: no request of the traffic names them."""


@dataclass(frozen=True, slots=True)
class Case:
    """One task: what a customer asks for. Attempts at it are compared."""

    goods: str
    words: str

    @property
    def name(self) -> str:
        """For `x-sidecar-task`."""
        return f"refund-{self.goods}"

    @property
    def messages(self) -> list[dict[str, str]]:
        """With which an attempt begins."""
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Customer: {self.words}\n{ASK}"},
        ]


def cases(goods: Sequence[str]) -> tuple[Case, ...]:
    """Return a task for each of these goods."""
    return tuple(Case(one, WORDS[at % len(WORDS)].format(one)) for at, one in enumerate(goods))


TRAFFIC, EXAM = cases(GOODS[:-HELD_OUT]), cases(GOODS[-HELD_OUT:])


@dataclass(kw_only=True)
class Attempt:
    """One attempt at a case: its messages so far, and what the tools did."""

    messages: list[dict[str, str]]
    calls: list[str] = field(default_factory=list)
    """Tools in the order of their calls."""

    @property
    def over(self) -> bool:
        return len(self.calls) == STEPS

    @property
    def success(self) -> bool:
        """The customer got the money. Only of an attempt that is over."""
        return self.calls[-1] == "pay_back:paid"

    def take(self, line: str) -> None:
        """Take the model's line, and do what it calls for."""
        self.messages.append({"role": "assistant", "content": line})
        if not self.calls:
            found = not COURTEOUS.search(line)
            self.calls.append("find_order" if found else "note_goodwill")
            shown = "order found." if found else "noted as goodwill."
            said = "What is next?"
        elif len(self.calls) == 1:
            self.calls.append("tell_customer")
            shown, said = "told.", "When is it paid?"
        else:
            paid = "find_order" in self.calls
            self.calls.append("pay_back:paid" if paid else "pay_back:refused")
            return
        self.messages.append({"role": "user", "content": f"Tool: {shown}\nCustomer: {said}"})
