"""One value of the store: compressed alone, against a base, and damaged."""

from __future__ import annotations

import random
import struct
import zlib

import pytest
import zstandard
from hypothesis import given, strategies as st

from sidecar.store.codec import (
    HEAD_BYTES,
    MAX_VALUE_BYTES,
    compress,
    content_bytes,
    decoded_bytes,
    decoded_ids,
    decompress,
    decompress_array,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)

LONG = random.Random(1).randbytes(3_000_000)


@given(st.binary(max_size=500), st.binary(max_size=500))
def test_a_value_comes_back_with_the_base_that_it_was_stored_with(
    value: bytes, base: bytes
) -> None:
    assert decompress(compress(value, base), base) == value


def test_what_the_base_has_takes_no_room() -> None:
    base = LONG[:20_000]

    assert len(compress(base + b"new", base)) < 60
    assert len(compress(base + b"new")) > 20_000


def test_a_base_is_used_from_its_first_byte_to_its_last() -> None:
    stored = compress(LONG + b"new", LONG)

    assert len(stored) < 1_000
    assert decompress(stored, LONG) == LONG + b"new"


def test_another_base_is_noticed() -> None:
    base = LONG[:20_000]
    stored = compress(base[:10_000] + b"new" + base[10_000:], base)
    other = base[:5_000] + b"!" + base[5_001:]

    for wrong in (other, b"", base[1:]):
        with pytest.raises(ValueError, match="its base is not"):
            decompress(stored, wrong)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_byte_is_noticed(place: int, change: int) -> None:
    value = LONG[:3_000] * 2
    stored = bytearray(compress(value))
    stored[place % len(stored)] ^= change

    try:
        assert decompress(bytes(stored)) == value  # a bit of the head that means nothing
    except (ValueError, zlib.error):
        return


def test_a_zlib_stream_of_an_older_version_is_read() -> None:
    assert decompress(zlib.compress(b"older", 1)) == b"older"
    assert decompress(zlib.compress(b"older", 1), limit=100) == b"older"
    for damaged in (zlib.compress(b"older")[:-3], b"", b"\x00" * 9, b"no zlib"):
        for limit in (100, 2**20):
            with pytest.raises(zlib.error):
                decompress(damaged, limit=limit)


def test_what_claims_to_be_long_takes_no_memory() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(MAX_VALUE_BYTES // 4))
    assert len(bomb) < MAX_VALUE_BYTES / 4_000

    with pytest.raises(ValueError, match="over the limit of 1000000"):
        decompress(bomb, limit=1_000_000)
    with pytest.raises(ValueError, match="longer than 1000000 bytes"):
        decompress(zlib.compress(bytes(2_000_000)), limit=1_000_000)
    with pytest.raises(ValueError, match="longer than 0 bytes"):  # zlib takes 0 for no limit
        decompress(zlib.compress(bytes(10_000)), limit=0)
    with pytest.raises(ValueError, match="does not say how long"):
        decompress(zstandard.ZstdCompressor(write_content_size=False).compress(b"a" * 99))


def test_an_array_is_stored_as_it_is_or_as_a_frame() -> None:
    ids = pack_ids(range(1_000))

    assert decompress_array(ids) == ids
    assert decompress_array(compress(ids, ids), ids) == ids
    assert decompress_array(b"") == b""


def test_the_length_of_a_value_is_known_from_its_head() -> None:
    for length in (0, 1, 255, 256, 65_791, 65_792, 3_000_000):
        stored = compress(LONG[:length])
        head = stored[:HEAD_BYTES]
        assert content_bytes(head) == length
        assert decoded_bytes(head, len(stored)) == decoded_ids(head, len(stored)) == length
    assert decoded_ids(pack_ids(range(9)), 36) == 36
    assert decoded_bytes(zlib.compress(b"x" * 9)[:HEAD_BYTES], 17) == 170


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
