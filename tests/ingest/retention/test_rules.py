"""Which exchanges go, by age and size."""

from __future__ import annotations

from ingest.retention.deletion import Ages, Held, chunks, too_much, too_old

DAY_S = 86_400.0


def held(seq: int, *, day: float, size: int = 10, group: str | None = None) -> Held:
    return Held(
        seq=seq,
        exchange_id=f"e{seq}",
        stored_at=day * DAY_S,
        stored_bytes=size,
        group_status=group,
    )


def names(chosen: list[Held]) -> list[str]:
    return [one.exchange_id for one in chosen]


def test_an_exchange_goes_by_its_own_age_and_one_with_a_group_by_the_age_of_groups() -> None:
    rows = [held(1, day=0), held(2, day=0, group="trained"), held(3, day=5), held(4, day=9)]
    ages = Ages(exchanges_s=3 * DAY_S, groups_s=20 * DAY_S)

    assert names(too_old(rows, ages, now=10 * DAY_S)) == ["e1", "e3"]


def test_while_the_store_is_too_large_the_oldest_go_whatever_their_age() -> None:
    rows = [held(1, day=9), held(2, day=9, group="scored"), held(3, day=9)]

    assert names(too_much(rows, excess_bytes=15)) == ["e1", "e2"]
    assert names(too_much(rows, excess_bytes=31)) == ["e1", "e2", "e3"]
    assert too_much(rows, excess_bytes=0) == []


def test_what_a_training_run_has_now_stays() -> None:
    rows = [held(1, day=0, group="claimed"), held(2, day=0)]
    ages = Ages(exchanges_s=DAY_S, groups_s=DAY_S)

    assert names(too_old(rows, ages, now=10 * DAY_S)) == ["e2"]
    assert names(too_much(rows, excess_bytes=100)) == ["e2"]


def test_a_transaction_has_at_most_so_many_rows_and_bytes_but_one_row() -> None:
    rows = [held(n, day=0, size=size) for n, size in enumerate((40, 40, 40, 500, 1, 1, 1, 1))]

    assert chunks(rows, rows=3, limit_bytes=100) == [
        ["e0", "e1"],
        ["e2"],
        ["e3"],
        ["e4", "e5", "e6"],
        ["e7"],
    ]
