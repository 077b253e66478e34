"""What is found in a text, and what only looks like it."""

from __future__ import annotations

import pytest

from ingest.privacy.detectors import MAX_FOUND, Detectors, TooManyError, secret_patterns
from sidecar.settings.store import BUILT_IN

DETECTORS = Detectors(BUILT_IN)


def found(text: str) -> list[tuple[str, str]]:
    data = text.encode()
    return [(one.kind, data[one.start : one.end].decode()) for one in DETECTORS.find(data)]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("CREDIT_CARD", "4111 1111 1111 1111"),
        ("CREDIT_CARD", "3782-822463-10005"),
        ("IBAN", "DE89 3704 0044 0532 0130 00"),
        ("IBAN", "GB82WEST12345698765432"),
        ("US_SSN", "123-45-6789"),
        ("EMAIL", "anna.m+x@mail.example.co.uk"),
        ("PHONE", "+49 30 901820"),
        ("PHONE", "(212) 555-0123"),
        ("SECRET", "AKIAIOSFODNN7EXAMPLE"),
        ("SECRET", "sk_live_" + "a1B2" * 20),  # longer than the pattern of detect-secrets
        ("SECRET", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"),
        ("SECRET", "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n+/=\n-----END RSA PRIVATE KEY-----"),
        ("SECRET", "://user:p@ss.w@rd!@"),
        ("SECRET", "://:hunter!2,x@"),
    ],
)
def test_a_value_is_found_whole(kind: str, value: str) -> None:
    assert found(f"It is {value}, as asked.") == [(kind, value)]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\\n"])
def test_the_body_of_a_key_is_found_behind_headers_though_its_end_is_missing(newline: str) -> None:
    lines = [
        "-----BEGIN RSA PRIVATE KEY-----",
        "Proc-Type: 4,ENCRYPTED",
        "DEK-Info: AES-128-CBC,0A1B2C3D4E5F60718293A4B5C6D7E8F9",
        "",
        "MIIEpAIBAAKCAQEA/marker+",
        "bWFya2VyMQ==",
    ]

    ((kind, value),) = found(f"it is {newline.join(lines)}")

    assert (kind, value) == ("SECRET", newline.join(lines))


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("4111 1111 1111 1111 123", "CREDIT_CARD", "4111 1111 1111 1111"),
        ("4111 1111 1111 1111 2027", "CREDIT_CARD", "4111 1111 1111 1111"),
        ("4111 1111 1111 1111 12/26", "CREDIT_CARD", "4111 1111 1111 1111"),
        ("card 2 4111111111111111", "CREDIT_CARD", "4111111111111111"),
        ("12 34 56 4111 1111 1111 1111", "CREDIT_CARD", "4111 1111 1111 1111"),
        ("card=4111111111111111", "CREDIT_CARD", "4111111111111111"),
        ("IBAN DE89 3704 0044 0532 0130 00 BIC COBADEFFXXX", "IBAN", "DE89 3704 0044 0532 0130 00"),
        ("DE89370400440532013000 EUR 100", "IBAN", "DE89370400440532013000"),
        ("+14155552671 2 pieces", "PHONE", "+14155552671"),
        ("ssn=123-45-6789", "US_SSN", "123-45-6789"),
        (
            '{"Authorization": "Bearer abcdefghij0123456789"}',
            "SECRET",
            "Bearer abcdefghij0123456789",
        ),
    ],
)
def test_what_stands_beside_a_value_does_not_hide_it(text: str, kind: str, value: str) -> None:
    ((found_kind, found_value),) = found(text)
    assert found_kind == kind
    assert value in found_value


@pytest.mark.parametrize("around", ["_{}_", "__{}__", "see _{}_.", "____________________{}_____"])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("CREDIT_CARD", "4111 1111 1111 1111"),
        ("IBAN", "DE89370400440532013000"),
        ("US_SSN", "219-09-9999"),
        ("PHONE", "+1 415 555 2671"),
        ("PHONE", "415-555-2671"),
        ("EMAIL", "alice@example.org"),
        ("SECRET", "sk-ant-api03-" + "a1B2" * 10),
        ("SECRET", "hf_" + "a1" * 17),
    ],
)
def test_a_value_between_underscores_is_found_alone(kind: str, value: str, around: str) -> None:
    assert found(around.format(value)) == [(kind, value)]


def test_an_underscore_that_joins_a_token_or_an_address_to_a_word_does_not_hide_it() -> None:
    token = "sk-ant-api03-" + "a1B2" * 10
    assert found(f"OPENAI_KEY_{token}") == [("SECRET", token)]
    assert found("alice@example.org_old") == [("EMAIL", "alice@example.org")]


@pytest.mark.parametrize(
    "text",
    [
        "4539 1488 0343 6467 5500 0050 4111 1111 1111 1111 6011 4500",  # a table of numbers
        "order #W4111111111111111 and call_4111111111111111",  # ids with the digits of a card
        "order_4111111111111111_x, _4111111111111111_x, __id__4111111111111111, 4111111111111111_b",
        "item_219-09-9999, ref_DE89370400440532013000_2, line_+14155552671, /_4111111111111111_",
        "credit_card_7815826, toolu_01_4111111111111111, 550e8400_4111111111111111",
        "see http://localhost:8080/a@b and http://[::1]:80/?q=c@d",
        "card ending in 1111, order 4111111111111112",  # a wrong check digit
        "chatcmpl-tool-9f0b2c4d5e6f47a890b1c2d3e4f5a6b7",
        "550e8400-e29b-41d4-a716-446655440000",
        "2024-05-15T15:00:00, $1,234,567.89, 0000000000000000",
        "DE89 3704 0044 0532 0130 01",  # a wrong checksum
        # Right checksums: no such country, digits in place of a bank's letters, too short.
        "US88370400440532013000, GB46123456987654321234, DE863704004405320130",
        "000-12-3456 and 123-45-67890",
        "call 999-999-9999",  # no such number
        "version 1.2.3.4 at http://127.0.0.1:8000/v1",
        "skip sk-learn, taskmaster@ and @channel",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    ],
)
def test_what_only_looks_like_a_value_is_not_found(text: str) -> None:
    assert found(text) == []


def test_the_password_of_a_url_is_found_with_its_user() -> None:
    assert found("postgres://anna:s3cret@db/x") == [("SECRET", "://anna:s3cret@db")]


def test_of_two_that_overlap_the_first_kind_covers_both() -> None:
    assert found("https://u:pw@example.com/") == [("SECRET", "://u:pw@example.com")]


def test_a_card_number_within_an_iban_is_a_part_of_the_iban() -> None:
    assert found("DE83 4111 1111 1111 1111 22") == [("IBAN", "DE83 4111 1111 1111 1111 22")]


def test_own_patterns_are_kinds_like_the_others() -> None:
    own = Detectors(("ORDER",), {"ORDER": r"\bORD-\d{4}\b"})
    assert [one.kind for one in own.find(b"ORD-1234 and ORD-12345")] == ["ORDER"]
    assert own.kinds_in(b"ORD-1234") == ["ORDER"]


def test_more_values_than_are_counted_are_an_error() -> None:
    with pytest.raises(TooManyError):
        DETECTORS.find(b"a@b.de " * (MAX_FOUND + 1))


def test_every_pattern_of_detect_secrets_that_is_named_runs_on_re2() -> None:
    assert len(secret_patterns()) > 20
    assert Detectors(("SECRET",)).kinds_in(b"nothing") == []
