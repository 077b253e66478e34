"""Estimate how many tokens a judge takes for a text, without its tokenizer. Pure.

A judge may be any model, so its tokenizer is not at hand; and the estimate must be quick for texts
of megabytes. It counts bytes by class. Measured on the tokenizers of SmolLM2, Claude 2, `cl100k`
and `o200k` (docs/log.md): bytes for each token are at least 2.5 for words (Finnish; English has 3.2
to 4.2), 1 for digits, 1.5 for punctuation, 2.1 for letters beyond ASCII (Arabic; Chinese has 3),
1.1 for random digits and letters. Each class is charged at about that rate, so the estimate is
mostly 1.05 to 1.7 times the true number. It is too low for text that no one writes: random Chinese
characters (1.3), rows of emoji (1.4).
"""

from __future__ import annotations

import re
from math import ceil

WORD_BYTES = 2.5
"""Letters of ASCII and spaces for one token."""
MARK_BYTES = 1.5
"""Punctuation for one token. A digit is a token of its own: several tokenizers write it so."""
BEYOND_ASCII_BYTES = 2.0
"""Bytes of UTF-8 beyond ASCII for one token."""
_UNBROKEN = re.compile(rb"[A-Za-z0-9+/=_-]{24,}")
"""Base64, digests, long ids: one token for each character."""
_WORDS = bytes(code for code in range(128) if chr(code).isalpha() or chr(code).isspace())
_DIGITS = b"0123456789"
_BEYOND_ASCII = bytes(range(128, 256))


def estimate_tokens(text: str) -> int:
    """Estimate the tokens of a text, rather too many than too few; time is linear in its length."""
    data = text.encode("utf-8", "surrogatepass")
    broken = _UNBROKEN.sub(b"", data)
    no_words = broken.translate(None, _WORDS)
    no_digits = no_words.translate(None, _DIGITS)
    marks = no_digits.translate(None, _BEYOND_ASCII)
    return ceil(
        (len(broken) - len(no_words)) / WORD_BYTES
        + (len(no_words) - len(no_digits))
        + len(marks) / MARK_BYTES
        + (len(no_digits) - len(marks)) / BEYOND_ASCII_BYTES
        + (len(data) - len(broken))
    )
