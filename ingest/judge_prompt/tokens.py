"""Estimate how many tokens a judge takes for a text, without its tokenizer. Pure.

A judge may be any model, so its tokenizer is not at hand; and the estimate must be quick for texts
of megabytes. It counts bytes by class. The rates are after bytes for each token that were measured
(docs/log.md, 2026-11-23) with the tokenizers of Claude 2, `cl100k` and `o200k`: letters of ASCII
2.6 to 4.4 (the least for Finnish), digits 1.5 to 3 (1 where each is a token of its own, as in many
open models), punctuation 1.5, letters beyond ASCII 2.1 to 10 (the least for Arabic), random digits
and letters 1.4 to 1.8. With these the estimate is 1.0 to 1.9 times the true number for prose, code,
JSON and digests, and more for some other languages. It is too low for text that no one writes:
random letters between spaces (0.9), random Chinese characters (0.6), rows of emoji (0.7); and for
Japanese where a model has a small vocabulary of English (SmolLM2: 0.8).
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
