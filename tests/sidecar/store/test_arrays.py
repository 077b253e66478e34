"""Token ids and log-probabilities come back from their packed arrays."""

from __future__ import annotations

import struct

from hypothesis import given, strategies as st

from sidecar.store.codec import pack_floats, pack_ids, unpack_floats, unpack_ids


@given(st.lists(st.integers(min_value=0, max_value=2**31 - 1)))
def test_token_ids_come_back_from_their_packing(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == tuple(ids)
    assert len(pack_ids(ids)) == 4 * len(ids)


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_log_probabilities_come_back_from_their_packing(values: list[float]) -> None:
    assert unpack_floats(pack_floats(values)) == tuple(values)


def test_the_packing_is_little_endian_everywhere() -> None:
    assert pack_ids([1, 256]) == b"\x01\x00\x00\x00\x00\x01\x00\x00"
    assert pack_floats([-0.5]) == struct.pack("<f", -0.5)
