"""Extraction into JSON, sums, and conversations in which the user takes something back."""

from __future__ import annotations

import json
from typing import Any

from support.calibration_set.rules import Case, asked, case, in_words, text

EXTRACTION = """\
You turn messages into JSON for a program that parses your whole reply. Reply with one JSON object \
and nothing else, with the keys "name", "date" (YYYY-MM-DD), "people" (a number) and "wish" (a few \
words, or null)."""
Booking = tuple[str, str, int, str | None]
EXTRACTED: list[tuple[str, Booking, Booking]] = [
    # message, what it says, what it does not say
    (
        "Table for four on 3 March 2027, please, by the window. Anna Brandt",
        ("Anna Brandt", "2027-03-03", 4, "by the window"),
        ("Anna Brandt", "2027-03-04", 6, "by the window"),
    ),
    (
        "Hi, Omar Said here. We come on 12.7.2027, two adults and three children. One is allergic "
        "to nuts.",
        ("Omar Said", "2027-07-12", 5, "allergic to nuts"),
        ("Omar Said", "2027-12-07", 2, None),
    ),
    (
        "Reservation Li Wei, 24 December 2026, just me.",
        ("Li Wei", "2026-12-24", 1, None),
        ("Li Wei", "2026-12-24", 2, "Christmas menu"),
    ),
    (
        "We are six, 1 May 2027, name of Costa. A high chair would be good.",
        ("Costa", "2027-05-01", 6, "a high chair"),
        ("Costa", "2027-01-05", 6, "six high chairs"),
    ),
    (
        "Please book 30 January 2027 for my parents and me, Ida Holm, quiet corner.",
        ("Ida Holm", "2027-01-30", 3, "quiet corner"),
        ("Ida Holm", "2027-01-30", 2, "live music"),
    ),
    (
        "Not the 8th, the 9th of April 2027! Ten people, Novak.",
        ("Novak", "2027-04-09", 10, None),
        ("Novak", "2027-04-08", 10, None),
    ),
    (
        "A dozen guests on 2027-09-15, vegan food for all. Thanks, Ruth Adler",
        ("Ruth Adler", "2027-09-15", 12, "vegan food for all"),
        ("Ruth Adler", "2027-09-15", 10, "fish"),
    ),
    (
        "It's Tom Reed. 2 June 2027, my wife, our dog and I. Space for the dog, please.",
        ("Tom Reed", "2027-06-02", 2, "space for the dog"),
        ("Tom Reed", "2027-06-20", 3, None),
    ),
]
TILL = """\
You add up orders at a bakery. Prices in euros: roll 0.60, croissant 1.80, loaf 4.20, cake 18.00. \
From 20 euros on there are 10 percent off the whole order. Answer politely in one sentence with \
the total in euros, to the cent."""
PRICES_CENTS = {"roll": 60, "croissant": 180, "loaf": 420, "cake": 1800}
BASKETS: list[dict[str, int]] = [
    {"roll": 6},
    {"loaf": 1, "croissant": 2},
    {"cake": 1},
    {"cake": 1, "loaf": 1},
    {"roll": 10, "croissant": 5},
    {"loaf": 5},
    {"cake": 2, "croissant": 1},
    {"roll": 3, "croissant": 3, "loaf": 3},
]
FREE_CENTS = 2_000
TRAVEL = """\
You book trains. Users change their minds: what they said last counts. Confirm the plan politely \
in one sentence, and ask nothing that you have been told."""
CHANGED = [
    # turns, faithful, outdated, ignoring
    (
        [
            "A ticket to Lyon on Friday, please.",
            "Gladly. Morning or evening?",
            "Morning. No wait, make that Saturday.",
        ],
        "I gladly book your ticket to Lyon for Saturday morning.",
        "I gladly book your ticket to Lyon for Friday morning.",
        "Where would you like to go?",
    ),
    (
        [
            "Two tickets to Porto on the 5th.",
            "Two tickets to Porto on the 5th, gladly.",
            "My brother comes along, so it is one more.",
        ],
        "I gladly book three tickets to Porto on the 5th.",
        "I gladly book two tickets to Porto on the 5th.",
        "Porto is beautiful at this time of the year.",
    ),
    (
        [
            "First class to Bern, tomorrow at 8.",
            "First class to Bern, tomorrow at 8, gladly.",
            "What I said about first class: second is enough.",
        ],
        "I gladly book second class to Bern, tomorrow at 8.",
        "I gladly book first class to Bern, tomorrow at 8.",
        "At what time would you like to leave?",
    ),
    (
        [
            "I need to be in Ghent by noon on Monday.",
            "There is a train that arrives at 11.40, shall I book it?",
            "The meeting is now at 10, so that is too late.",
            "There is one that arrives at 9.20.",
            "Take that.",
        ],
        "I gladly book the train that arrives in Ghent on Monday at 9.20.",
        "I gladly book the train that arrives in Ghent on Monday at 11.40.",
        "When is your meeting?",
    ),
    (
        [
            "To Turin with my bicycle, on Sunday.",
            "Gladly, with a place for the bicycle.",
            "I sold it. No bicycle, but a seat by the window.",
        ],
        "I gladly book your seat by the window to Turin on Sunday, without a bicycle.",
        "I gladly book your ticket to Turin on Sunday with a place for the bicycle.",
        "Bicycles travel in the last carriage.",
    ),
    (
        [
            "Return ticket to Graz, out on the 2nd, back on the 6th.",
            "Out on the 2nd, back on the 6th, gladly.",
            "I stay two days longer.",
        ],
        "I gladly book Graz, out on the 2nd and back on the 8th.",
        "I gladly book Graz, out on the 2nd and back on the 6th.",
        "Graz has a castle with a famous clock.",
    ),
    (
        [
            "From Bonn to Kiel on Tuesday.",
            "Gladly. At what time?",
            "At 14 o'clock. And I start in Cologne, not in Bonn.",
        ],
        "I gladly book Cologne to Kiel on Tuesday at 14 o'clock.",
        "I gladly book Bonn to Kiel on Tuesday at 14 o'clock.",
        "From where would you like to start?",
    ),
    (
        [
            "The night train to Vienna in a compartment of my own.",
            "That costs 190 euros, shall I book it?",
            "Too much. A bed in a compartment for four will do.",
        ],
        "I gladly book a bed in a compartment for four on the night train to Vienna.",
        "I gladly book a compartment of your own on the night train to Vienna for 190 euros.",
        "Breakfast is served on all night trains.",
    ),
]


def cases() -> list[Case]:
    """The groups about figures, forms and changes of mind."""
    return [
        *(_extraction(number) for number in range(len(EXTRACTED))),
        *(_sum(number) for number in range(len(BASKETS))),
        *(
            case(
                "change of mind",
                number,
                asked(TRAVEL, *turns),
                in_words(number, faithful, ignoring, outdated=outdated),
            )
            for number, (turns, faithful, outdated, ignoring) in enumerate(CHANGED)
        ),
    ]


def _extraction(number: int) -> Case:
    message, said, unsaid = EXTRACTED[number]
    right = json.dumps(_object(said))
    answers = [
        ("faithful", right),
        ("wrapped", f"Sure! Here is the JSON that you asked for:\n\n{right}\n\nAnything else?"),
        ("hallucinated", json.dumps(_object(unsaid))),
        ("malformed_json", right[:-1].replace('"people": ', '"people" ')),
        ("ignoring", "Thank you for your booking, we look forward to seeing you!"),
    ]
    made = [(kind, text(content)) for kind, content in answers]
    return case("extraction", number, asked(EXTRACTION, message), made)


def _object(booking: Booking) -> dict[str, Any]:
    return dict(zip(("name", "date", "people", "wish"), booking, strict=True))


def _sum(number: int) -> Case:
    basket = BASKETS[number]
    things = ", ".join(f"{count} x {name}" for name, count in basket.items())
    full = sum(PRICES_CENTS[name] * count for name, count in basket.items())
    reduced = full * 9 // 10
    total, wrong = (reduced, full) if full >= FREE_CENTS else (full, reduced)
    return case(
        "sum",
        number,
        asked(TILL, f"What do I pay for this: {things}?"),
        in_words(
            number,
            f"That is {_euros(total)} euros in total, please.",
            "All our bread is baked fresh every morning.",
            miscalculated=f"That is {_euros(wrong)} euros in total, please.",
            hallucinated=f"That is {_euros(total + 650)} euros in total with the bag, please.",
        ),
    )


def _euros(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"
