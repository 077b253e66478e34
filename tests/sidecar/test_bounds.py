from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from sqlalchemy import String
from sqlalchemy.sql.elements import KeyedColumnElement

from sidecar import bounds
from sidecar.bounds import bound
from sidecar.errors import UnstorableError
from sidecar.records import Choice, Exchange, Sampling, Timings
from sidecar.store.models import ChoiceRow, ExchangeRow
from support.exchanges import make_plain_exchange

PLAIN = make_plain_exchange("e1", choices=(Choice(index=0, message=b"{}", finish_reason="stop"),))


def length(column: KeyedColumnElement[Any]) -> int | None:
    assert isinstance(column.type, String)
    return column.type.length


def changed(**changes: object) -> Exchange:
    return msgspec.structs.replace(PLAIN, **changes)


def test_an_ordinary_exchange_is_returned_itself() -> None:
    found, reasons = bound(PLAIN)

    assert found is PLAIN
    assert reasons == ()


def test_the_limits_are_those_of_the_columns() -> None:
    columns = ExchangeRow.__table__.columns
    for name, longest in {**bounds.REFUSED, **bounds.SHORTENED}.items():
        room = len("untrainable:") + 4 if name == "untrainable_reason" else 0
        assert length(columns[name]) == longest + room, name
    finish = ChoiceRow.__table__.columns["finish_reason"]
    assert length(finish) == bounds.LONGEST_FINISH_REASON
    # Every text of a record has a column, and every such column a limit here.
    texts = {
        name
        for name, kind in Exchange.__annotations__.items()
        if kind in ("str", "str | None") and name in columns
    }
    assert texts == {*bounds.REFUSED, *bounds.SHORTENED}
    integers = {
        name for name, kind in Exchange.__annotations__.items() if kind in ("int", "int | None")
    }
    assert integers == set(bounds.INTEGERS)


@pytest.mark.parametrize("name", bounds.REFUSED)
def test_a_name_that_is_too_long_or_not_clean_is_refused(name: str) -> None:
    longest = bounds.REFUSED[name]

    assert bound(changed(**{name: "é" * longest}))[1] == ()
    with pytest.raises(UnstorableError, match=f"{name} has {longest + 1} characters; the store"):
        bound(changed(**{name: "x" * (longest + 1)}))
    for text in ("a\0b", "a\ud800", "a\ufffd"):
        with pytest.raises(UnstorableError, match=f"{name} holds a NUL character, half"):
            bound(changed(**{name: text}))


def test_a_long_text_is_shortened_with_a_digest_that_keeps_two_apart() -> None:
    one, reasons = bound(changed(session_key="h:" + "x" * 300 + "1", user="u" * 255))
    two, _ = bound(changed(session_key="h:" + "x" * 300 + "2"))

    assert reasons == ("session_key_shortened",)
    assert len(one.session_key) == len(two.session_key) == 255
    assert one.session_key[:238] == two.session_key[:238] == "h:" + "x" * 236
    assert one.session_key != two.session_key
    assert bound(one) == (one, ())


def test_nul_and_halves_of_surrogate_pairs_are_replaced() -> None:
    found, reasons = bound(changed(user="a\0b\ud83dc\udc00", choices=(Choice(
        index=0, message=b"{}", finish_reason="st\0op"),)))  # fmt: skip

    assert found.user == "a\ufffdb\ufffdc\ufffd"
    assert found.choices[0].finish_reason == "st\ufffdop"
    assert reasons == ("user_cleaned", "finish_reason_cleaned")


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_sampling_parameter_that_is_not_finite_is_gone_and_nothing_is_learned(
    number: float,
) -> None:
    found, reasons = bound(changed(sampling=Sampling(temperature=number, top_p=0.5)))

    assert found.sampling == Sampling(top_p=0.5)
    assert found.untrainable_reason == "unreadable_sampling"
    assert reasons == ("temperature_not_finite",)
    kept, _ = bound(changed(sampling=Sampling(top_p=number), untrainable_reason="cut"))
    assert kept.untrainable_reason == "cut"


def test_durations_that_are_not_finite_are_gone_and_a_time_that_is_not_is_refused() -> None:
    timings = Timings(started_at=1.0, queue_s=math.inf, total_s=math.nan)

    found, reasons = bound(changed(timings=timings))

    assert found.timings == Timings(started_at=1.0, queue_s=None, total_s=0.0)
    assert found.untrainable_reason is None
    assert reasons == ("queue_s_not_finite", "total_s_not_finite")
    for bad in ({"propensity": math.nan}, {"timings": Timings(started_at=math.inf)}):
        with pytest.raises(UnstorableError, match="it must be a finite number"):
            bound(changed(**bad))


@pytest.mark.parametrize(("name", "bits"), bounds.INTEGERS.items())
def test_an_integer_outside_its_column_is_refused(name: str, bits: int) -> None:
    most = 2 ** (bits - 1) - 1

    assert bound(changed(**{name: most}))[1] == ()
    with pytest.raises(UnstorableError, match=f"{name} is {most + 1}; the store holds {bits} bits"):
        bound(changed(**{name: most + 1}))
