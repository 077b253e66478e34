"""Names of exchanges: unique, and sorted by time. Pure."""

from __future__ import annotations

PREFIX = "ex_"
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's base 32: no letter that reads as a digit. (The ULID layout.)"""
_TIME_BITS = 48
RANDOM_BYTES = 10


def exchange_id(at_s: float, randomness: bytes) -> str:
    """`ex_` and 26 characters: 48 bits of milliseconds, then 80 random bits.

    at_s: unix seconds. randomness: 10 bytes.
    """
    milliseconds = int(at_s * 1000) % (1 << _TIME_BITS)
    number = milliseconds << (8 * RANDOM_BYTES) | int.from_bytes(randomness, "big")
    return PREFIX + "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))
