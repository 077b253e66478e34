"""Exchange ids: shape, order, uniqueness."""

from __future__ import annotations

import os

from sidecar.capture.exchange_id import ExchangeIds, exchange_id


def test_an_id_is_its_time_and_its_randomness() -> None:
    assert exchange_id(0.0, bytes(16)) == "ex_" + "0" * 26
    assert exchange_id(0.001, bytes(16)) == "ex_" + "0000000001" + "0" * 16
    assert exchange_id(0.0, b"\xff" * 16) == "ex_" + "0" * 10 + "Z" * 16


def test_ids_sort_by_time() -> None:
    ids = [exchange_id(at_s, b"\xff" * 16) for at_s in (1.0, 1.001, 2.0, 1_795_233_501.5)]

    assert ids == sorted(ids)
    assert {len(name) for name in ids} == {29}


def test_ids_made_in_blocks_are_the_same_and_never_twice() -> None:
    ids = ExchangeIds(lambda count: bytes(range(256)) * (count // 256 + 1))

    first = ids.new(1_795_233_501.5)

    assert first == exchange_id(1_795_233_501.5, bytes(range(16)))
    assert ids.new(1_795_233_501.5) == exchange_id(1_795_233_501.5, bytes(range(16, 32)))
    real = ExchangeIds(os.urandom)
    assert len({real.new(1.0) for _ in range(2_000)}) == 2_000
