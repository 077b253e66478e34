"""Tools: which one to call with what, and what to say of its result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from support.calibration_set.rules import (
    Case,
    Message,
    asked,
    call,
    case,
    in_words,
    malformed,
    text,
)

SYSTEM = """\
You are the order desk of a garden shop. Use the tools to look things up and to act; never state \
what you have not looked up, and never say that something is done before the tool has done it. Be \
polite, and use one sentence at most."""


def _tool(name: str, does: str, **required: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in required.items()}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    function = {"name": name, "description": does, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = (
    _tool("find_order", "Look up an order by its number.", order="string"),
    _tool("cancel_order", "Cancel an order.", order="string", reason="string"),
    _tool("change_address", "Send an order elsewhere.", order="string", address="string"),
    _tool("search_plants", "Find plants for a place.", light="string", height_cm="integer"),
    _tool("check_stock", "How many pieces are in stock.", article="string", store="string"),
    _tool("book_advice", "Book an hour with a gardener.", day="string", hour="integer"),
)
Arguments = Mapping[str, Any]
CALLED: list[tuple[str, tuple[str, Arguments], tuple[str, Arguments], Arguments, str]] = [
    # user, right call, call of the wrong tool, arguments that are wrong, what is only claimed
    (
        "Where is my order G-1042?",
        ("find_order", {"order": "G-1042"}),
        ("cancel_order", {"order": "G-1042", "reason": "asked where it is"}),
        {"order": "G-1024"},
        "Your order G-1042 left our store yesterday and arrives tomorrow.",
    ),
    (
        "Please cancel G-2210, I bought the mower elsewhere.",
        ("cancel_order", {"order": "G-2210", "reason": "bought elsewhere"}),
        ("change_address", {"order": "G-2210", "address": "cancelled"}),
        {"order": "G-2201", "reason": "bought elsewhere"},
        "Your order G-2210 is cancelled and the money is on its way.",
    ),
    (
        "Send G-3377 to 8 Mill Lane, Ashford, instead, please.",
        ("change_address", {"order": "G-3377", "address": "8 Mill Lane, Ashford"}),
        ("find_order", {"order": "8 Mill Lane, Ashford"}),
        {"order": "G-3377", "address": "8 Hill Lane, Ashford"},
        "I have changed the address of G-3377 to 8 Mill Lane, Ashford.",
    ),
    (
        "Which plants for deep shade stay below 40 cm?",
        ("search_plants", {"light": "shade", "height_cm": 40}),
        ("check_stock", {"article": "shade", "store": "40"}),
        {"light": "full sun", "height_cm": 40},
        "In deep shade ferns, hostas and ivy all stay below 40 cm.",
    ),
    (
        "Does your shop in Dover have the red watering can?",
        ("check_stock", {"article": "red watering can", "store": "Dover"}),
        ("search_plants", {"light": "red", "height_cm": 30}),
        {"article": "red watering can", "store": "Deal"},
        "Yes, our shop in Dover has eleven red watering cans.",
    ),
    (
        "I would like an hour with a gardener on Friday at 15 o'clock.",
        ("book_advice", {"day": "Friday", "hour": 15}),
        ("check_stock", {"article": "gardener", "store": "Friday"}),
        {"day": "Friday", "hour": 5},
        "Your hour with a gardener is booked for Friday at 15 o'clock.",
    ),
    (
        "Cancel the first of my orders, G-5001, not G-5002. It was a mistake.",
        ("cancel_order", {"order": "G-5001", "reason": "ordered by mistake"}),
        ("find_order", {"order": "G-5002"}),
        {"order": "G-5002", "reason": "ordered by mistake"},
        "I have cancelled G-5001 and kept G-5002 as you asked.",
    ),
    (
        "I need something for full sun, up to 2 metres.",
        ("search_plants", {"light": "full sun", "height_cm": 200}),
        ("book_advice", {"day": "today", "hour": 12}),
        {"light": "full sun", "height_cm": 2},
        "For full sun I have found sunflowers, lavender and roses of up to 2 metres.",
    ),
]
TOLD: list[tuple[str, tuple[str, Arguments], Arguments, str, str, str]] = [
    # user, call, result, faithful, hallucinated, ignoring
    (
        "When does G-1042 arrive?",
        ("find_order", {"order": "G-1042"}),
        {"order": "G-1042", "state": "packed", "arrives": "Thursday"},
        "Your order G-1042 is packed and arrives on Thursday.",
        "Your order G-1042 was handed to the neighbour this morning.",
        "Please tell me the number of your order.",
    ),
    (
        "How many clay pots of 30 cm are there in Dover?",
        ("check_stock", {"article": "clay pot 30 cm", "store": "Dover"}),
        {"article": "clay pot 30 cm", "store": "Dover", "pieces": 4},
        "Our shop in Dover has 4 clay pots of 30 cm.",
        "Our shop in Dover has 14 clay pots of 30 cm, and 20 more come on Monday.",
        "Clay pots let the roots breathe.",
    ),
    (
        "Cancel G-7110, please.",
        ("cancel_order", {"order": "G-7110", "reason": "customer's wish"}),
        {"error": "the order has been dispatched and cannot be cancelled"},
        "I am sorry, G-7110 has been dispatched and can no longer be cancelled.",
        "G-7110 is cancelled, and you get the money back within three days.",
        "Thank you for your order.",
    ),
    (
        "What grows in half shade up to 60 cm?",
        ("search_plants", {"light": "half shade", "height_cm": 60}),
        {"plants": ["cranesbill", "coral bells"]},
        "For half shade up to 60 cm we have cranesbill and coral bells.",
        "For half shade up to 60 cm we have foxglove, tulips and dwarf roses.",
        "Half shade means three to five hours of sun a day.",
    ),
    (
        "Book me a gardener on Tuesday at 9.",
        ("book_advice", {"day": "Tuesday", "hour": 9}),
        {"booked": False, "free": ["Tuesday 11", "Wednesday 9"]},
        "I am sorry, Tuesday at 9 is taken; Tuesday at 11 and Wednesday at 9 are free.",
        "A gardener is booked for you on Tuesday at 9.",
        "Our gardeners have many years of experience.",
    ),
    (
        "Has my new address for G-3377 been taken?",
        ("find_order", {"order": "G-3377"}),
        {"order": "G-3377", "state": "open", "address": "8 Mill Lane, Ashford"},
        "Yes, G-3377 goes to 8 Mill Lane, Ashford.",
        "No, G-3377 still goes to your old address at 2 Park Road.",
        "You can change your address at any time before the dispatch.",
    ),
    (
        "Is there any mulch left in Deal?",
        ("check_stock", {"article": "mulch", "store": "Deal"}),
        {"article": "mulch", "store": "Deal", "pieces": 0},
        "I am sorry, there is no mulch left in our shop in Deal.",
        "Yes, there are a few bags of mulch left in our shop in Deal.",
        "Mulch keeps the soil moist and the weeds away.",
    ),
    (
        "What did I order under G-8080?",
        ("find_order", {"order": "G-8080"}),
        {"error": "no order has this number"},
        "I am sorry, no order has the number G-8080.",
        "Under G-8080 you ordered two rose bushes and a spade.",
        "You can order on our page or in any of our shops.",
    ),
]


def cases() -> list[Case]:
    """The groups with tools."""
    return [_to_call(number) for number in range(len(CALLED))] + [
        _to_tell(number) for number in range(len(TOLD))
    ]


def _to_call(number: int) -> Case:
    user, (name, right), (wrong_name, other), wrong, claimed = CALLED[number]
    answers: list[tuple[str, Message]] = [
        ("faithful", call(name, json.dumps(right))),
        ("wrong_tool", call(wrong_name, json.dumps(other))),
        ("wrong_argument", call(name, json.dumps(wrong))),
        ("malformed_call", call(name, malformed(number, right))),
        ("claimed", text(claimed)),
    ]
    return case("tool call", number, asked(SYSTEM, user), answers, TOOLS)


def _to_tell(number: int) -> Case:
    user, (name, arguments), result, faithful, hallucinated, ignoring = TOLD[number]
    asks = call(name, json.dumps(arguments))
    told = {"role": "tool", "tool_call_id": "call_1", "content": json.dumps(result)}
    answers = in_words(number, faithful, ignoring, hallucinated=hallucinated)
    answers.append(("repeated_call", asks))
    return case("tool result", number, [*asked(SYSTEM, user), asks, told], answers, TOOLS)
