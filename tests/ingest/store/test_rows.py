"""The rows of one session, read from the store."""

from __future__ import annotations

from typing import Any

import pytest

from ingest.sessions.messages import Place
from ingest.sessions.rows import RowLink
from ingest.store.exchanges import load_rows, save_exchange
from support.ingest_kit import Kit


def store(
    kit: Kit,
    name: str,
    parent: str | None,
    prompt: tuple[int, ...],
    answer: int,
    *,
    session_id: str = "s",
    held_out: bool = False,
    **changes: Any,
) -> None:
    place = Place(
        exchange_id=name, session=session_id, parent=parent, turn=0, branch=0, segment=0, how="root"
    )
    choices = (kit.choice(token_ids=(answer,), logprobs=(-0.5,)),)
    exchange = kit.exchange(name, prompt_token_ids=prompt, choices=choices, **changes)
    with kit.database.write() as session:
        assert save_exchange(session, exchange, held_out=held_out, now=1.0, place=place)


def trained(kit: Kit) -> list[tuple[list[int], list[str], RowLink | None]]:
    """Return the ids, the exchanges with trainable answers and the link of each row."""
    with kit.database.read() as session:
        found = load_rows(session, "s")
    return [
        (
            row.token_ids.tolist(),
            [one.exchange_id for one in row.answers if one.logprobs],
            row.link,
        )
        for row in found.rows
    ]


@pytest.mark.parametrize("page", [1, 2, 100])
def test_the_rows_of_a_session_are_read_parents_first_whatever_the_order_of_arrival(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr("ingest.store.exchanges.PAGE", page)
    store(kit, "c", "b", (1, 2, 3, 4, 5), 6)
    store(kit, "b", "a", (1, 2, 3), 4)
    store(kit, "other", None, (1,), 2, session_id="of another")
    store(kit, "a", None, (1,), 2)
    store(kit, "branch", "a", (1, 2, 7), 8)

    assert trained(kit) == [
        ([1, 2, 3, 4, 5, 6], ["a", "b", "c"], None),
        ([1, 2, 7, 8], ["branch"], RowLink(row=0, shared=2)),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"held_out": True},
        {"untrainable_reason": "ids_do_not_decode"},
        {"outcome": "cut"},
        {"status": 500},
    ],
)
def test_what_selection_would_refuse_is_context(kit: Kit, changes: dict[str, Any]) -> None:
    store(kit, "a", None, (1,), 2, **changes)
    store(kit, "b", "a", (1, 2, 3), 4)

    assert trained(kit) == [([1, 2, 3, 4], ["b"], None)]


def test_a_session_of_which_nothing_is_stored_has_no_rows(kit: Kit) -> None:
    assert trained(kit) == []
