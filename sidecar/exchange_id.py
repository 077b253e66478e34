"""Names of exchanges: unique, and sorted by time. Pure but for the randomness that is handed in."""

from __future__ import annotations

from base64 import b32encode
from collections.abc import Callable

PREFIX = "ex_"
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's base 32: no letter that reads as a digit. (The ULID layout.)"""
_TO_CROCKFORD = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", _ALPHABET.encode())
_TIME_BITS = 48
RANDOM_BYTES = 10
_RANDOM_CHARS = 16
_BLOCK = 400
"""Identifiers whose randomness is fetched at once: a system call each would cost more."""


def exchange_id(at_s: float, randomness: bytes) -> str:
    """`ex_` and 26 characters: 48 bits of milliseconds, then 80 random bits.

    at_s: unix seconds. randomness: 10 bytes.
    """
    return _time_part(int(at_s * 1000)) + _random_part(randomness)


def _time_part(milliseconds: int) -> str:
    number = milliseconds % (1 << _TIME_BITS)
    return PREFIX + "".join([_ALPHABET[number >> shift & 31] for shift in range(45, -1, -5)])


def _random_part(randomness: bytes) -> str:
    return b32encode(randomness).translate(_TO_CROCKFORD).decode()


class ExchangeIds:
    """Makes them. One thread."""

    __slots__ = ("_at", "_block", "_millisecond", "_randomness", "_time")

    def __init__(self, randomness: Callable[[int], bytes]) -> None:
        """randomness: gives this many unguessable bytes."""
        self._randomness = randomness
        self._block = ""
        self._at = 0
        self._millisecond = -1
        self._time = ""

    def new(self, at_s: float) -> str:
        """The next one. at_s: unix seconds."""
        start = self._at
        if start >= len(self._block):
            self._block = _random_part(self._randomness(RANDOM_BYTES * _BLOCK))
            start = 0
        self._at = end = start + _RANDOM_CHARS
        millisecond = int(at_s * 1000)
        if millisecond != self._millisecond:
            self._millisecond, self._time = millisecond, _time_part(millisecond)
        return self._time + self._block[start:end]
