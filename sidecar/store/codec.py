"""Encode values of the store: compressed, as differences, or as packed arrays. Pure.

A value is one zstd frame with the size of its content and a checksum. With a base, the base is the
frame's dictionary (`zstd --patch-from` does the same): a request that repeats the conversation of
the one before it takes the bytes of what is new. The frame does not name its base; with a wrong or
damaged one the checksum fails. Values of older versions are zlib streams.

A value that is encrypted (`keyring`) says its size in a head of its own.

The size is read from the frame and compared with a limit before memory is taken for it.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import zlib
from array import array
from collections.abc import Collection, Mapping, Sequence
from operator import is_not
from typing import Any

import zstandard

from sidecar.store.keyring import is_sealed, sealed_size

# Token ids and log-probabilities as packed little-endian arrays. Pure.

ID_BYTES = 4
"""Bytes of one packed id."""
FLOAT_BYTES = 4
"""Bytes of one packed float."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack [S] ids, each under 2**31, into 4 S bytes. Raises: OverflowError."""
    return _to_bytes(array("i", ids))


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """Undo `pack_ids`. Raises: ValueError when the length is not a multiple of 4."""
    return tuple(_from_bytes("i", data))


def pack_floats(values: Sequence[float]) -> bytes:
    """Pack [S] floats into 4 S bytes."""
    return _to_bytes(array("f", values))


def unpack_floats(data: bytes) -> tuple[float, ...]:
    """Undo `pack_floats`, up to float32 rounding. Raises: ValueError, as `unpack_ids`."""
    return tuple(_from_bytes("f", data))


def _to_bytes(values: array) -> bytes:  # type: ignore[type-arg]  # int or float by type code
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _from_bytes(code: str, data: bytes) -> array:  # type: ignore[type-arg]  # as above
    values = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


MAGIC = zstandard.FRAME_HEADER
"""The first bytes of a frame. No zlib stream begins so, and no packed array of token ids: as an
int32 it is negative."""
HEAD_BYTES = 18
"""The longest head of a frame, which `content_bytes` reads."""
MAX_VALUE_BYTES = 256 * 2**20
"""A longer value is neither written nor read. By default `proxy.max_body_bytes` is an eighth."""
LEVEL = 1
"""Levels 1 and 3 make as much of a request with a base (314 and 303 bytes of 8,500 on average), and
of its prompt ids; level 1 takes 20% less time."""
_MAX_WINDOW_LOG = 30
_MAX_HASH_LOG = 24
"""A table of 64 MB at most; it is let go after each value."""
_ORDINARY_BYTES = 32 * 1024
"""Up to here zstd's own choice of parameters finds what value and base share, and is faster."""
_MOST_INFLATED = 1_032
"""Bytes that a byte of a zlib stream becomes at most, by zlib's documentation."""
_PIECE_BYTES = 1024 * 1024
"""Bytes of a value that `exact_bytes` holds at once."""
_UNKNOWN = zstandard.CONTENTSIZE_UNKNOWN


class _Compressors(threading.local):
    """A compressor serves one thread at a time, and takes longer to make than a short value to
    compress."""

    def __init__(self) -> None:
        self.alone = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)


_compressors = _Compressors()


def compress(value: bytes, base: bytes = b"") -> bytes:
    """Compress a value; base: bytes that it repeats, which `decompress` must be given again.

    Raises: ValueError when it is longer than `MAX_VALUE_BYTES`.
    """
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"has {len(value)} bytes, over the limit of {MAX_VALUE_BYTES}")
    if not base:
        return _compressors.alone.compress(value)
    if len(value) + len(base) <= _ORDINARY_BYTES:
        compressor = zstandard.ZstdCompressor(
            level=LEVEL, write_checksum=True, dict_data=_dictionary(base)
        )
        return compressor.compress(value)
    # The window reaches to the beginning of the base. The table has room for all of the base: by
    # default zstd would find only what stands in the last 30 kB or so.
    parameters = zstandard.ZstdCompressionParameters.from_level(
        LEVEL,
        source_size=len(value),
        dict_size=len(base),
        window_log=min((len(value) + len(base)).bit_length(), _MAX_WINDOW_LOG),
        hash_log=min(max(len(base).bit_length(), 13), _MAX_HASH_LOG),
        write_checksum=True,
    )
    return zstandard.ZstdCompressor(
        compression_params=parameters, dict_data=_dictionary(base)
    ).compress(value)


def decompress(stored: bytes, base: bytes = b"", *, limit: int = MAX_VALUE_BYTES) -> bytes:
    """Undo `compress`, or zlib.

    limit: of the value's bytes. Raises: ValueError, TypeError or zlib.error when the bytes are
    damaged, or the base is not the one that they were compressed with.
    """
    if stored[:4] != MAGIC:
        return _inflate(stored, limit)
    if (size := content_bytes(stored)) > limit:
        raise ValueError(f"a zstd frame claims {size} bytes, over the limit of {limit}")
    dictionary = _dictionary(base) if base else None
    try:
        return zstandard.ZstdDecompressor(
            dict_data=dictionary, max_window_size=2**_MAX_WINDOW_LOG
        ).decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"is not what was stored, or its base is not: {error}") from error


def decompress_array(stored: bytes, base: bytes = b"", *, limit: int = MAX_VALUE_BYTES) -> bytes:
    """As `decompress`, for a packed array, which older versions do not compress."""
    return decompress(stored, base, limit=limit) if stored[:4] == MAGIC else stored


def content_bytes(head: bytes) -> int:
    """Return the length of a frame's value. head: the frame, or its first `HEAD_BYTES`.

    Raises: ValueError when the head is damaged.
    """
    try:
        size = zstandard.get_frame_parameters(head).content_size
    except zstandard.ZstdError as error:
        raise ValueError(f"the head of a zstd frame is damaged: {error}") from error
    if size == _UNKNOWN:
        raise ValueError("a zstd frame does not say how long its value is")
    return size


def decoded_ids(head: bytes, stored_bytes: int) -> int:
    """Return how long a packed array is. head: its first `HEAD_BYTES`, as it is stored.

    A damaged one counts as it is stored.
    """
    if is_sealed(head):
        return sealed_size(head)
    packed = not isinstance(head, bytes) or head[:4] != MAGIC
    return stored_bytes if packed else decoded_bytes(head, stored_bytes)


def decoded_bytes(head: bytes, stored_bytes: int) -> int:
    """Return about how long a body is. head: its first `HEAD_BYTES`, as it is stored.

    A zlib stream does not say it: ten times its length is assumed, more than JSON gives. A damaged
    one counts as it is stored.
    """
    if is_sealed(head):
        return sealed_size(head)
    if not isinstance(head, bytes) or head[:4] != MAGIC:
        return 10 * stored_bytes
    try:
        return content_bytes(head)
    except ValueError:
        return stored_bytes


def exact_bytes(stored: bytes) -> int:
    """Return how long a body is, whose zlib stream is read for it. A damaged one: as it is stored.

    stored: not encrypted.
    """
    if stored[:4] == MAGIC:
        return decoded_bytes(stored[:HEAD_BYTES], len(stored))
    stream = zlib.decompressobj()
    total, left = 0, stored
    try:
        while not stream.eof and left:
            total += len(stream.decompress(left, _PIECE_BYTES))
            left = stream.unconsumed_tail
    except zlib.error:
        return len(stored)
    return total if stream.eof else len(stored)


def _inflate(stored: bytes, limit: int) -> bytes:
    if len(stored) * _MOST_INFLATED <= limit:
        return zlib.decompress(stored)  # half the time of what follows
    if limit <= 0:  # zlib takes 0 for no limit
        raise ValueError(f"a zlib stream is longer than {limit} bytes")
    stream = zlib.decompressobj()
    value = stream.decompress(stored, limit)
    if not stream.eof:
        if stream.unconsumed_tail:
            raise ValueError(f"a zlib stream is longer than {limit} bytes")
        raise zlib.error("incomplete or truncated stream")
    return value


def _dictionary(base: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(base, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


# Make the parameters of a statement the same for SQLite and PostgreSQL. Pure.

REPLACEMENT = "\ufffd"
"""What stands for a character that a store cannot hold, and for bytes that are not UTF-8."""


_encode = json.JSONEncoder(allow_nan=False).encode
"""`json.dumps` makes an encoder at each call with other arguments than its own."""


def is_storable_text(value: str) -> bool:
    """Return True for a text that every store holds as it is."""
    if "\0" in value:
        return False
    if value.isascii():  # nearly always
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def storable_text(value: str) -> str:
    """Return the text with U+FFFD for each NUL and each half of a surrogate pair."""
    if is_storable_text(value):
        return value
    return "".join(
        REPLACEMENT if letter == "\0" or "\ud800" <= letter <= "\udfff" else letter
        for letter in value
    )


def storable_parameters(parameters: Any) -> Any:  # Any: as the driver takes them
    """Return the parameters of a statement (a mapping, a tuple, or a list of these) as both stores
    hold them; the same object when nothing is to be changed."""
    if isinstance(parameters, list):
        changed = [storable_parameters(row) for row in parameters]
        return changed if any(map(is_not, changed, parameters)) else parameters
    if isinstance(parameters, Mapping):
        if _are_storable(parameters.values()):
            return parameters
        return {name: _storable(value) for name, value in parameters.items()}
    return parameters if _are_storable(parameters) else tuple(map(_storable, parameters))


def _are_storable(values: Collection[Any]) -> bool:
    # One check of all texts together: each statement of ingest comes here.
    texts = "".join([value for value in values if type(value) is str])
    return is_storable_text(texts) and not [
        value for value in values if type(value) is float and value != value
    ]


def _storable(value: Any) -> Any:  # Any: a parameter of a statement
    if isinstance(value, str):
        return storable_text(value)
    return None if value != value else value  # NaN is no number, also to itself


def to_json(value: Any) -> str:  # Any: JSON
    """Encode a JSON column: numbers that are not finite become null."""
    try:
        return _encode(value)
    except ValueError:
        return json.dumps(_finite(value))


def from_json(stored: Any) -> Any:  # Any: JSON, or what a faulty disk left of it
    """Decode a JSON column; None for a text that is no JSON."""
    try:
        return json.loads(stored)
    except (ValueError, TypeError, RecursionError):
        return None


def _finite(value: Any) -> Any:  # Any: JSON
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
