"""The estimate of tokens: not below what tokenizers count, not far above it, and quick."""

from __future__ import annotations

import random
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from ingest.judge_prompt import estimate_tokens

ROOT = Path(__file__).resolve().parents[3]
RNG = random.Random(1)
TEXTS = {
    "English": (ROOT / "docs" / "architecture.md").read_text(),
    "Python": (ROOT / "ingest" / "ruler" / "judging.py").read_text(),
    "chats as JSON": (ROOT / "ingest" / "calibration" / "shipped" / "groups.jsonl").read_text(),
    "German": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. " * 50,
    "Finnish": "Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan. "
    * 50,
    "Russian": "Все счастливые семьи похожи друг на друга, каждая несчастливая по-своему. " * 50,
    "Chinese": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心。" * 50,
    "Japanese": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。" * 50,
    "Arabic": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق. " * 50,
    "digits": "".join(RNG.choice("0123456789") for _ in range(5_000)),
    "times": " ".join(
        f"2026-01-{RNG.randrange(10, 29)}T09:{RNG.randrange(10, 60)}" for _ in range(300)
    ),
    "base64": "".join(RNG.choice("abcdefghijkLMNOPQRSTUVwxyz0123456789+/") for _ in range(5_000)),
    "hex": "".join(RNG.choice("0123456789abcdef") for _ in range(5_000)),
}
PROSE = ("English", "Python", "chats as JSON", "German", "Finnish")


@pytest.mark.parametrize("kind", TEXTS)
def test_the_estimate_is_not_below_the_count_of_a_tokenizer(kind: str) -> None:
    spec = find_spec("litellm")  # not imported: only the file that it ships is read
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "litellm_core_utils" / "tokenizers"
    tokenizer = Tokenizer.from_file(str(folder / "anthropic_tokenizer.json"))
    counted = len(tokenizer.encode(TEXTS[kind]).ids)

    assert estimate_tokens(TEXTS[kind]) >= counted
    if kind in PROSE:
        assert estimate_tokens(TEXTS[kind]) <= 1.9 * counted


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("abcde", 2),  # 5 / 2.5
        ("a1 b2 c3 d", 6),  # 7 / 2.5 and 3 digits: 5.8
        ('{"":[]}', 5),  # 7 / 1.5: 4.67
        ("éé", 2),  # 4 bytes / 2
        ("0a" * 12, 24),  # unbroken: a token each
        ("\ud800", 2),  # a lone surrogate: 3 bytes / 2
    ],
)
def test_each_class_of_bytes_has_its_rate(text: str, tokens: int) -> None:
    assert estimate_tokens(text) == tokens


@pytest.mark.parametrize("unit", ["word ", "a", "-", "9", "é", "a" * 23 + " ", "\n"])
def test_a_megabyte_takes_well_under_a_second(unit: str) -> None:
    started = time.process_time()
    estimate_tokens(unit * (1_000_000 // len(unit)))
    assert time.process_time() - started < 5.0  # measured: 5 to 50 ms
