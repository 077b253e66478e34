"""A record and its row: each field has a column, and none is lost on the way."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sidecar.records import Choice, Exchange, Sampling, Timings
from sidecar.store.database import compress
from sidecar.store.mapping import RowMapping
from sidecar.store.models import ChoiceRow, ExchangeRow
from support.exchanges import make_plain_exchange

PLACE = {"session_id", "parent_id", "turn", "branch", "segment", "placed_by", "shares_opening"}
FILLED_BY_INGEST = {
    "seq",
    "stored_at",
    "started_at",
    "held_out",
    "prompt_key",
    "selection",
    "task_group_id",
    *PLACE,
}
"""Columns of `exchange` that hold what ingest knows or decides, or a copy to search by."""
DELTAS = {"request": "request_body", "prompt_token_ids": "prompt_token_ids"}
"""Fields of `Exchange` that are stored as differences from the exchange of `base_id`."""
ELSEWHERE = {"choices", "prompt_ids", *DELTAS}
"""Fields of `Exchange` that the mapping leaves out; each choice is a row of the table `choice`."""


class WiderExchange(Exchange, frozen=True, kw_only=True):
    """What `Exchange` is before its new field has a column."""

    new_field: str = ""


@dataclass(frozen=True)
class Named:
    """A record whose only field is a column of `choice`."""

    finish_reason: str


def test_each_field_of_an_exchange_has_a_column_and_each_column_a_source() -> None:
    mapping = RowMapping(Exchange, ExchangeRow, other_tables=ELSEWHERE)

    assert {one.field for one in mapping.fields} == set(Exchange.__struct_fields__) - ELSEWHERE
    columns = [one.column for one in mapping.fields]
    assert len(columns) == len(set(columns))
    assert set(ExchangeRow.__table__.columns.keys()) == {
        *(*columns, *FILLED_BY_INGEST, *DELTAS.values(), "base_id")
    }


def test_a_field_without_a_column_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"^ExchangeRow has no column for WiderExchange.new_field$"):
        RowMapping(WiderExchange, ExchangeRow, other_tables=ELSEWHERE)


def test_a_value_is_encoded_by_the_type_of_its_field() -> None:
    choice = Choice(index=3, message=b"{}", token_ids=(1, 256), logprobs=(-0.5,))

    row = RowMapping(Choice, ChoiceRow).to_row(choice)

    assert row == {
        "index": 3,
        "message_body": compress(b"{}"),
        "finish_reason": None,
        "token_ids": b"\x01\x00\x00\x00\x00\x01\x00\x00",
        "logprobs": b"\x00\x00\x00\xbf",
    }
    assert RowMapping(Choice, ChoiceRow).to_record(ChoiceRow(**row)) == choice


def test_a_struct_is_stored_as_a_json_object() -> None:
    mapping = RowMapping(Exchange, ExchangeRow, other_tables=ELSEWHERE)
    exchange = make_plain_exchange("e", sampling=Sampling(seed=7), timings=Timings(started_at=1.5))

    row = mapping.to_row(exchange)

    assert isinstance(row["sampling"], dict)
    assert row["sampling"] == {"seed": 7}  # what is null is left out
    elsewhere = {"choices": (), "request": b"{}", "prompt_token_ids": ()}
    assert mapping.to_record(ExchangeRow(**row), **elsewhere) == exchange


def test_a_value_that_its_field_does_not_allow_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Expected `str`, got `int` - at `\$.finish_reason`"):
        RowMapping(Named, ChoiceRow).to_record(ChoiceRow(finish_reason=7))
