"""Identifiers of exchanges: unique and sorted by time. Pure; the caller passes the randomness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

PREFIX: Final = "ex_"
_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's base 32, which has no letter that looks like a digit, as in a ULID."""
_BY_LOW_BITS: Final = _ALPHABET.encode() * 8
"""Maps a byte to the letter of its five low bits, so that all letters are equally likely."""
_TIME_BITS: Final = 48
RANDOM_CHARS: Final = 16
_BLOCK: Final = 400
"""Identifiers for which randomness is fetched by one system call, to save the others."""


def exchange_id(at_s: float, randomness: bytes) -> str:
    """Return `ex_` and 26 characters: 48 bits of milliseconds, then 80 random bits. at_s: unix
    seconds. randomness: 16 bytes, of which five bits each are used, to save a microsecond."""
    return _time_part(int(at_s * 1000)) + _random_part(randomness)


def _time_part(milliseconds: int) -> str:
    number = milliseconds % (1 << _TIME_BITS)
    return PREFIX + "".join([_ALPHABET[number >> shift & 31] for shift in range(45, -1, -5)])


def _random_part(randomness: bytes) -> str:
    return randomness.translate(_BY_LOW_BITS).decode()


class ExchangeIds:
    """Makes identifiers of exchanges. For one thread."""

    def __init__(self, randomness: Callable[[int], bytes]) -> None:
        """randomness: returns the given number of unpredictable bytes."""
        self._randomness = randomness
        self._block = ""
        self._at = 0
        self._millisecond = -1
        self._time = ""

    def new(self, at_s: float) -> str:
        """Return a new identifier. at_s: unix seconds."""
        start = self._at
        if start >= len(self._block):
            self._block = _random_part(self._randomness(RANDOM_CHARS * _BLOCK))
            start = 0
        self._at = end = start + RANDOM_CHARS
        millisecond = int(at_s * 1000)
        if millisecond != self._millisecond:
            self._millisecond, self._time = millisecond, _time_part(millisecond)
        return self._time + self._block[start:end]
