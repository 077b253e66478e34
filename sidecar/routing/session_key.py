"""The session key of a request: its conversation, with or without the agent's help. Pure.

Named, in this order: by the sidecar's own header; by a session name that coding agents and chat
applications send; by the opening of the conversation (`sidecar.routing.opening`). A client's own
name counts for its key and user only.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

import msgspec

DEFAULT_PROJECT: Final = "default"
LONGEST_NAME_BYTES: Final = 255
"""Longest session key or user name, in bytes of UTF-8: the store's columns hold no more."""
NAMED: Final = ("h:", "hx:", "n:")
"""Beginnings of the keys of sessions that the client names."""
MOST_OPENINGS: Final = 8
"""Conversations that begin in one session: its task, a title, some sub-agents. A name with more is
one that a client gives to all of its conversations, such as the id of its process."""
NAMES_KEPT: Final = 4096
AGENT_SESSION: Final = "_session_"


def session_key(
    *,
    header: str | None,
    user: str,
    opening: bytes = b"",
    name: str = "",
    hint: str = "",
    project: str = DEFAULT_PROJECT,
    key_id: str = "",
) -> str:
    """Name the session of a request: the same for every turn of one conversation. header: the
    agent's own `x-sidecar-session`, which wins when it is sent. user: `short_name` of
    `x-sidecar-user` or of the body's `user`; two users that open alike stay apart. opening: digest
    of what the conversation opens with; b"" when nobody knows. name: what the client calls the
    session. hint: what it tells of it, beside the opening. project: sessions of two projects are
    never the same one. Its name holds no "/" and no ":". key_id: of the API key; it holds no zero
    byte. Returns: "h:" + header, "hx:" + 64 hex digits for a header that is too long, "n:" + 32 hex
    digits for a name, or "m:" + 32 for an opening."""
    if header:
        return _of_header(header, project)
    kind, what = ("n:", _encoded(short_name(name))) if name else ("m:", opening.hex().encode())
    # `short_name` leaves no zero byte, so the pieces stay apart.
    pieces = (what, _encoded(short_name(hint)), _encoded(user), _encoded(project), _encoded(key_id))
    return kind + sha256(b"\x00".join(pieces)).digest()[:16].hex()


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class KnownSessions:
    """Remembers openings and names, and recognises names that a client gives to many conversations.
    For one thread."""

    def __init__(self) -> None:
        self.marks: dict[bytes, bytes] = {}
        """The cache of `RequestPeek.opening`."""
        self._openings: dict[str, set[bytes]] = {}

    def is_shared(self, key: str, opening: bytes, *, goes_on: bool) -> bool:
        """Return whether more than `MOST_OPENINGS` conversations began with this name. key: the
        session key by that name: two callers' names are two. goes_on: the request holds more than
        the opening. Then nothing begins: where the client keeps the newest messages only, each turn
        has another opening."""
        known = self._openings.pop(key, None)
        if known is None:
            known = set()
            if len(self._openings) >= NAMES_KEPT:
                del self._openings[next(iter(self._openings))]
        self._openings[key] = known  # the newest at the end
        if not goes_on and len(known) <= MOST_OPENINGS:
            known.add(opening)
        return len(known) > MOST_OPENINGS


def user_and_session(user_id: str) -> tuple[str, str]:
    """Split `metadata.user_id` as coding agents write it: JSON with a `session_id`, or
    "user_..._account_..._session_...". Returns: user and session; the session is "" without one."""
    if user_id.startswith("{"):
        try:
            value = msgspec.json.decode(user_id)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return user_id, ""
        session = value.get("session_id")
        if not isinstance(session, str) or not session:
            return user_id, ""
        for name in ("account_uuid", "device_id", "user_id"):
            user = value.get(name)
            if isinstance(user, str) and user:
                return user, session
        return "", session
    user, _, session = user_id.rpartition(AGENT_SESSION)
    return (user, session) if user and session else (user_id, "")


def looks_drawn(name: str) -> bool:
    """Return whether a name looks like an id that was drawn for one conversation, as a UUID does,
    and not like an application's."""
    return len(name) >= 16 and sum(map(str.isdigit, name)) >= 4 and " " not in name


def hash_of_address(address: str, salt: str) -> str:
    """Return 4 hex digits for the address of a client's connection; "" for none. It tells one
    canary's callers apart and names nobody: 65,536 values, so that of all IPv4 addresses as many
    share each. salt: the canary's, so that the value says nothing elsewhere."""
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
