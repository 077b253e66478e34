"""Which conversation a request belongs to, with or without the agent's help. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any, Final

from xxhash import xxh3_128_digest

DEFAULT_PROJECT: Final = "default"
LONGEST_NAME_BYTES: Final = 255
"""Longest session key or user name, in bytes of UTF-8: the store's columns hold no more."""
LONG_PIECE_BYTES: Final = 64 * 1024
"""A longer message is hashed by its XXH3 digest: SHA-256 of a megabyte takes 0.7 ms, as
long as the scan of the whole prompt, and XXH3 0.02. A client that makes two messages collide only
mixes up two conversations of its own."""


def session_key(
    *,
    header: str | None,
    user: str,
    conversation_prefix: Iterable[Any],
    project: str = DEFAULT_PROJECT,
    key_id: str = "",
) -> str:
    """Name the session of a request: the same for every turn of one conversation.

    header: the agent's own `x-sidecar-session`, which wins when it is sent.
    user: `short_name` of `x-sidecar-user` or of the body's `user`; two users that open alike stay
    apart.
    conversation_prefix: bytes or msgspec's Raw (which its types call bytes, so that mypyc would
    insist on them): what the conversation opens with, up to and including the first user message,
    as it stands in the body: every later turn repeats it. With nothing the key and the user name
    it. project: sessions of two projects are never the same one. Its name holds no "/" and no ":".
    key_id: of the API key, for requests that open with nothing. Returns: "h:" + header, "hx:" + 64
    hex digits for a header that is too long, or "m:" + 32 hex digits.
    """
    if header:
        return _of_header(header, project)
    pieces: list[Any] = [_short(piece) for piece in conversation_prefix]
    named_by_key = not pieces
    pieces.append(user.encode("utf-8", "surrogatepass"))
    pieces.append(project.encode("utf-8", "surrogatepass"))
    if named_by_key:
        # No project is named like this, so what ends with a project is never the same.
        pieces.append(b"key:" + key_id.encode("utf-8", "surrogatepass"))
    # JSON and names have no zero bytes, and a digest is told by its name and length: pieces stay
    # apart.
    return "m:" + sha256(b"\x00".join(pieces)).digest()[:16].hex()


def hash_of_address(address: str, salt: str) -> str:
    """Return 4 hex digits for the address of a client's connection; "" for none.

    It tells one canary's callers apart and names nobody: 65,536 values, so that of all IPv4
    addresses as many share each. salt: the canary's, so that the value says nothing elsewhere.
    """
    return sha256(f"{salt}\x00{address}".encode()).digest()[:2].hex() if address else ""


def short_name(text: str) -> str:
    """A user's name as it is kept: itself, or "sha256:" and its digest where the store could not
    hold it: over `LONGEST_NAME_BYTES`, a zero character, half of a surrogate pair. A name that is
    cut would make one user of two."""
    if len(text) <= LONGEST_NAME_BYTES and text.isascii() and "\0" not in text:  # nearly always
        return text
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) <= LONGEST_NAME_BYTES and b"\0" not in encoded and _is_utf8(encoded):
        return text
    return "sha256:" + sha256(encoded).hexdigest()


def header_name(value: bytes | None) -> str:
    """The value of a header that names a session or a user, as text; "" when there is none. Bytes
    that are not UTF-8 become their digest: as text they could be the same as another name."""
    value = (value or b"").strip(b" \t")
    if value.isascii() or _is_utf8(value):
        return value.decode()
    return "sha256:" + sha256(value).hexdigest()


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _of_header(header: str, project: str) -> str:
    """Each pair of project and header has a key of its own: the text before the first "/" is the
    project; without a "/" it is the default one."""
    if project == DEFAULT_PROJECT and "/" not in header:
        key = f"h:{header}"
    else:
        key = f"h:{project}/{header}"
    if len(key) <= LONGEST_NAME_BYTES and key.isascii():  # nearly always
        return key
    encoded = key.encode("utf-8", "surrogatepass")
    if len(encoded) <= LONGEST_NAME_BYTES:
        return key
    return "hx:" + sha256(encoded).hexdigest()


def _short(piece: Any) -> Any:  # Any: as in `conversation_prefix`
    """The piece, or what stands for a long one; JSON begins with no letter `x`."""
    if len(piece) <= LONG_PIECE_BYTES:
        return piece
    return b"xxh3:" + xxh3_128_digest(piece)
