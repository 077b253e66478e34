"""Which conversation a request belongs to, with or without the agent's help. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any, Final

from xxhash import xxh3_128_digest

DEFAULT_PROJECT: Final = "default"
REMEMBERED: Final = 2048
"""Openings whose names are known: those of the conversations that go on now, whose every turn
begins with them. To hash one takes two microseconds, to find it half of one."""
REMEMBERED_BYTES: Final = 4096
"""Of an opening that is remembered: 8 MB for all of them at most."""
LONG_PIECE_BYTES: Final = 64 * 1024
"""A message longer than this has its XXH3 digest in the name instead of itself: SHA-256 of a
megabyte takes 0.7 ms, which is another look at the whole prompt, and XXH3 0.02. Who makes two that
collide has two conversations of his own taken for one."""
END_BYTES: Final = 96
"""Of an opening, by which it is looked up: what users wrote differs at its end, and to hash all of
it would take half as long as the name itself."""
_NAMES: Final[dict[bytes, tuple[bytes, str]]] = {}


def session_key(
    *,
    header: str | None,
    user: str,
    opening: Iterable[Any],
    project: str = DEFAULT_PROJECT,
    key_id: str = "",
) -> str:
    """Name the session of a request: the same for every turn of one conversation.

    header: the agent's own `x-sidecar-session`, which wins when it is sent.
    user: `x-sidecar-user` or the body's `user`; two users that open alike stay apart.
    opening: bytes or msgspec's Raw (which its types call bytes, so that mypyc would insist on
    them): what the conversation opens with, up to and including the first user message, as it
    stands in the body: every later turn repeats it. With nothing the key and the user name it.
    project: sessions of two projects are never the same one.
    key_id: of the API key, for requests that open with nothing.
    Returns: "h:" + header, or "m:" + 32 hex digits.
    """
    if header:
        return f"h:{header}" if project == DEFAULT_PROJECT else f"h:{project}/{header}"
    pieces: list[Any] = [_short(piece) for piece in opening]
    named_by_key = not pieces
    pieces.append(user.encode("utf-8", "surrogatepass"))
    pieces.append(project.encode("utf-8", "surrogatepass"))
    if named_by_key:
        pieces.append(key_id.encode("utf-8", "surrogatepass"))
    # JSON has no zero bytes, and a digest is told by its name and length: pieces stay apart.
    whole = b"\x00".join(pieces)
    if len(whole) > REMEMBERED_BYTES:
        return _name(whole)
    end = whole[-END_BYTES:]
    known = _NAMES.get(end)
    if known is not None and known[0] == whole:
        return known[1]
    if len(_NAMES) >= REMEMBERED:
        _NAMES.clear()
    name = _name(whole)
    _NAMES[end] = (whole, name)
    return name


def _short(piece: Any) -> Any:  # Any: as in `opening`
    """The piece, or what stands for a long one; JSON begins with no letter `x`."""
    if len(piece) <= LONG_PIECE_BYTES:
        return piece
    return b"xxh3:" + xxh3_128_digest(piece)


def _name(opening: bytes) -> str:
    return "m:" + sha256(opening).digest()[:16].hex()
