"""Find secrets and personal data in a text. Pure.

Every pattern runs on RE2 (`google-re2`), whose time is linear in the text, so that no text and no
pattern of an operator can make it slow. Checksums and numbering plans (`phonenumberslite`) are
checked: order numbers and ids of tool calls look like card and phone numbers. The patterns of
tokens are those of `detect-secrets` which RE2 takes, and a few of newer ones. A secret without a
form of its own (a password in a sentence) is not found.
"""

from __future__ import annotations

import importlib
import logging
import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any, Final, NamedTuple

import phonenumbers
import re2

from sidecar.settings.store import CARD, EMAIL, IBAN, PHONE, PROGRAM_BYTES, SECRET, SSN

MAX_FOUND: Final = 10_000
"""Values in one text; more are an error, so that a text of card numbers is bounded in time."""
MAX_TRIED: Final = 40_000
"""Places of a text that have the form of one kind; each takes some 10 us."""
PLUGINS: Final = (
    "aws.AWSKeyDetector", "azure_storage_key.AzureStorageKeyDetector",
    "basic_auth.BasicAuthDetector", "discord.DiscordBotTokenDetector",
    "github_token.GitHubTokenDetector", "mailchimp.MailchimpDetector",
    "npm.NpmDetector", "openai.OpenAIDetector", "pypi_token.PypiTokenDetector",
    "sendgrid.SendGridDetector", "slack.SlackDetector", "square_oauth.SquareOAuthDetector",
    "stripe.StripeDetector", "telegram_token.TelegramBotTokenDetector",
    "twilio.TwilioKeyDetector",
)  # fmt: skip
"""Plugins of `detect-secrets` that are used. Left out: those by entropy or by a word beside them,
which flag ids and ordinary sentences; IP addresses; Artifactory (eight letters behind AP); those of
IBM, which RE2 does not take; private keys and JSON web tokens, of which they find the beginning
only."""
BUILT_IN_BYTES: Final = 64 * 2**20
"""Memory of RE2 for a built-in pattern, and for the union of those of some kinds."""
_REST = r"[A-Za-z0-9_-]*"
"""Behind a token: a longer one than a pattern counts is hidden whole."""
_ARMOR_HEADERS = (
    r"(?:(?:\s|\\[nrt])*(?:Proc-Type|DEK-Info|Version|Comment|Hash|Charset|MessageID):[^\r\n\\]*)*"
)
"""Lines between the first line of a private key and its base64 (RFC 1421, RFC 4880)."""
_IN_URL = r"[^\s/?#\"'<>`]"
_TOKENS: Final = r"""
    npm_[A-Za-z0-9]{36} rubygems_[a-f0-9]{48} cio[A-Za-z0-9]{32}\b
    dckr_[po]at_[A-Za-z0-9_-]{20,} do[opr]_v1_[a-f0-9]{64} dapi[a-f0-9]{32} sbp_[a-f0-9]{40}
    sb_secret_[A-Za-z0-9_-]{20,} tskey-[a-z]+-[A-Za-z0-9-]{20,} hvs\.[A-Za-z0-9_-]{24,}
    pscale_(?:tkn|pw|oauth)_[A-Za-z0-9_.=-]{32,} HRKU-[A-Za-z0-9_-]{36,} fm2_[A-Za-z0-9+/=]{40,}
    nfp_[A-Za-z0-9]{36,} GOCSPX-[A-Za-z0-9_-]{28} ya29\.[A-Za-z0-9_-]{30,}
    shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32} whsec_[A-Za-z0-9+/=]{24,}
    AT[AC]TT3xFfGF0[A-Za-z0-9_=-]{40,} ATBB[A-Za-z0-9]{28,} lin_api_[A-Za-z0-9]{32,}
    ntn_[A-Za-z0-9]{40,} figd_[A-Za-z0-9_-]{36,} PMAK-[a-f0-9]{24}
    dp\.(?:[a-z]+\.){1,2}[A-Za-z0-9]{40,} CFPAT-[A-Za-z0-9_-]{40,} sgp_[A-Za-z0-9_]{40,}
    gl(?:sa|c)_[A-Za-z0-9_+/=]{32,} sntr(?:ys|yu)_[A-Za-z0-9_+/=-]{40,} NRAK-[A-Z0-9a-z]{27}
    xapp-\d-[A-Za-z0-9-]{30,} xox[a-z]-[A-Za-z0-9-]{20,} ops_eyJ[A-Za-z0-9_=-]{40,}
    AGE-SECRET-KEY-1[A-Z0-9]{58} key-[a-f0-9]{32}\b sk-[A-Za-z0-9]{32,} sk-lf-[A-Za-z0-9-]{30,}
    sk_[a-f0-9]{48} gsk_[A-Za-z0-9]{40,} xai-[A-Za-z0-9]{40,} r8_[A-Za-z0-9]{30,}
    pplx-[A-Za-z0-9]{40,} tvly-[A-Za-z0-9-]{24,} nvapi-[A-Za-z0-9_-]{40,} fw_[A-Za-z0-9]{22,}
    csk-[A-Za-z0-9]{40,} pcsk_[A-Za-z0-9_]{40,} lsv2_[a-z]{2}_[a-f0-9]{32}[a-f0-9_]*
    jina_[A-Za-z0-9_-]{40,} apify_api_[A-Za-z0-9]{30,} hvb\.[A-Za-z0-9_-]{24,}
    1//0[A-Za-z0-9_-]{40,} [A-Za-z0-9]{3}8Q~[A-Za-z0-9_.~-]{34} vercel_blob_rw_[A-Za-z0-9_]{30,}
    vcp_[A-Za-z0-9]{40,} pat[A-Za-z0-9]{14}\.[a-f0-9]{64} LTAI[A-Za-z0-9]{16,}
    ph[cx]_[A-Za-z0-9]{40,} re_[A-Za-z0-9]{8}_[A-Za-z0-9]{20,} EZ[AT]K[A-Za-z0-9]{50,}
    sl\.[A-Za-z0-9_-]{100,} sq0[a-z]{3}-[A-Za-z0-9_-]{22,} EAAA[A-Za-z0-9_-]{56,}
    pa-[A-Za-z0-9_]{12}[A-Za-z0-9_-]{28,} api_org_[A-Za-z]{30,} secret_[A-Za-z0-9]{43}
    ABSK[A-Za-z0-9+/=]{60,}
    discord(?:app)?\.com/api/webhooks/[0-9]+/[A-Za-z0-9_-]{60,}
""".split()  # noqa: SIM905 - a list of 50 would take as many lines
"""Keys of registries, clouds, work tools, and providers of models and of search: how each begins,
and the least that follows."""
_LETTER = "[A-Za-z_.~+/=-]"
_SIGN = "[A-Za-z0-9_.~+/=-]"
_IS = r"[\"']?[ \t]*(?:=>|[:=])[ \t]*[\"']?"
OWN_SECRETS: Final = (
    rf"(?:\b|_)(?:{'|'.join(_TOKENS)})" + _REST,
    # What follows such a name is a key when it has a digit: a variable and a placeholder have none.
    rf"(?i:(?:\b|_)(?:secret_?(?:access_?)?key|(?:aws_?)?session_?token){_IS})"
    r"[A-Za-z0-9/+=]{40,}",
    r"(?i:(?:\b|_)secret_?(?:access_?)?key[ \t>])[A-Za-z0-9][A-Za-z0-9/+=]{39}(?:\b|_)",
    rf"(?i:\b(?:x-[a-z-]*(?:key|token)|[a-z_-]*api[_-](?:key|token)|[a-z-]*subscription-key){_IS})"
    # 20 characters with a digit among them, wherever it stands.
    rf"(?:{_LETTER}{{0,7}}[0-9]{_SIGN}{{12,}}|{_LETTER}{{8,15}}[0-9]{_SIGN}{{8,}}"
    rf"|{_LETTER}{{16,64}}[0-9]{_SIGN}*)",
    r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
    r"(?:[^\x00]*?-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|"
    + _ARMOR_HEADERS
    + r"[A-Za-z0-9+/=\s\\]*)",
    # Up to the last `@`: a password may hold one, as it may what a URL should escape.
    rf"://[^\s/?#\"'<>`:@]{{0,256}}:{_IN_URL}{{1,256}}@" + _REST,
    r"(?:\b|_)eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)*",
    r"(?:\b|_)github_pat_[A-Za-z0-9_]{22,}",
    r"(?:\b|_)(?:glpat|gldt|glft|glsoat|glrt|glcbt|glptt|glagent|gloas|glimt|glffct)-[A-Za-z0-9_-]{20,}",
    r"(?:\b|_)sk-(?:ant-|proj-|svcacct-|or-v1-)[A-Za-z0-9_-]{20,}",
    r"(?:\b|_)hf_[A-Za-z0-9]{30,}",
    r"(?:\b|_)AIza[A-Za-z0-9_-]{35}(?:\b|_)",
    r"(?i:(?:\b|_)bearer) [A-Za-z0-9+/=._~-]{20,}",
    r"(?i:(?:\b|_)authorization\b[\"']? ?[:=] ?[\"']?(?:bearer|basic|token)) "
    r"[A-Za-z0-9+/=._~-]{16,}",
)
# An underscore is emphasis in Markdown and joins words in names. One beside a number counts as
# emphasis only when no letter or digit stands behind it: `order_4111111111111111` is an id.
# Names in other scripts too. In a domain one letter beyond ASCII in its last label is enough: RE2's
# `\b` knows ASCII alone. The letters before the `@` are those of scripts with spaces between words.
_LOCAL = r"A-Za-z0-9\p{Latin}\p{Cyrillic}\p{Greek}"
_EMAIL = (
    rf"[{_LOCAL}][{_LOCAL}._%+-]{{0,63}}@(?:[\p{{L}}\p{{M}}\p{{N}}-]+\.)+"
    r"(?:xn--[A-Za-z0-9-]+|[A-Za-z]{2,24}(?:\b|_)|[^\x00-\x7F\p{P}\p{Z}]{2,24})"
)
_CARD = r"\b_*\d(?:[ -]?\d){12,18}_*\b"
_IBAN = r"\b_*(?:[A-Z]{2}\d{2}(?: ?[A-Z0-9]){11,30}|[a-z]{2}\d{2}(?: ?[a-z0-9]){11,30})_*\b"
_CLASSES = {"n": "[0-9]", "a": "[A-Z]", "c": "[0-9A-Z]"}
_IBANS: Final = """
    AD10n12c AE21n AL10n16c AT18n AZ2n4a20c BA18n BE14n BG2n4a6n8c BH2n4a14c BI25n BR25n1a1c
    BY2n4c4n16c CH7n12c CR20n CY10n16c CZ22n DE20n DJ25n DK16n DO2n4c20n EE18n EG27n ES22n FI16n
    FK2n2a12n FO16n FR12n11c2n GB2n4a14n GE2n2a16n GI2n4a15c GL16n GR9n16c GT2n24c HN2n4a20n
    HR19n HU26n IE2n4a14n IL21n IQ2n4a15n IS24n IT2n1a10n12c JO2n4a4n18c KW2n4a22c KZ5n13c
    LB6n20c LC2n4a24c LI7n12c LT18n LU5n13c LV2n4a13c LY23n MC12n11c2n MD2n20c ME20n MK5n10c2n
    MN18n MR25n MT2n4a5n18c MU2n4a19n3a NI2n4a20n NL2n4a10n NO13n OM5n16c PK2n4a16c PL26n
    PS2n4a21c PT23n QA2n4a21c RO2n4a16c RS20n RU16n15c SA4n18c SC2n4a20n3a SD16n SE22n SI17n
    SK22n SM2n1a10n12c SO21n ST23n SV2n4a20n TL21n TN22n TR8n16c UA8n19c VA20n VG2n4a16n XK18n
    YE2n4a4n18c
"""
"""By country: digits (n), capitals (a), either (c). SWIFT's IBAN registry, release 101."""
_IBAN_FORMS: Final = re.compile(
    re.sub(
        r"(\d+)([nac])",
        lambda part: f"{_CLASSES[part[2]]}{{{part[1]}}}",
        "|".join(_IBANS.split()),
    )
)
_PHONE = (
    r"(?:\+[1-9](?:[ .()/-]{0,2}\d){6,14}|\(\d{3}\) ?\d{3}[ .-]\d{4}"
    r"|\b_*\d{3}-\d{3}-\d{4}|\b_*\d{3}\.\d{3}\.\d{4})_*\b"
)
_SSN = r"\b_*\d{3}-\d{2}-\d{4}_*\b"
_ISSUERS = re.compile(r"4|5[1-5]|2[2-7]|3[47]|30[0-5]|3[68]|6011|64[4-9]|65|35|62")
"""First digits of cards: Visa, Mastercard, American Express, Diners, Discover, JCB, UnionPay."""


class Detection(NamedTuple):
    """A value in a text; its place in bytes of UTF-8."""

    kind: str
    start: int
    end: int


class TooManyError(ValueError):
    """A text holds more than `MAX_FOUND` values."""


class _Detector(NamedTuple):
    kind: str
    pattern: Any  # a pattern of RE2, which has no types
    needs: bytes
    """Bytes without which a text holds none."""
    holds: Callable[[str], bool]
    around: bytes = b"_"
    """Bytes at both ends of a match that are no part of the value."""

    def matches(self, text: bytes) -> Iterator[Detection]:
        """Raises: TooManyError when too many have the form, whether they are values or not."""
        if self.needs not in text:
            return
        at = 0
        for _ in range(MAX_TRIED):
            match = self.pattern.search(text, at)
            if match is None:
                return
            start, end = match.span()
            start += len(match[0]) - len(match[0].lstrip(self.around))
            end -= len(match[0]) - len(match[0].rstrip(self.around))
            found = next((one for one in self._ends(text, start, end) if start < one), None)
            if found is not None:
                yield Detection(self.kind, start, found)
                end = found
            elif self.kind in _GROUPED:  # a value may begin with the next group
                end = min(_places(text, start, end), default=end)
            at = max(end, start + 1)
        raise TooManyError(f"a text holds over {MAX_TRIED} values of the form {self.kind}")

    def _ends(self, text: bytes, start: int, end: int) -> Iterator[int]:
        """Yield where a value may end that begins here, the longest first: digits and capitals
        that follow it may have the form of a part of it."""
        ends = [end]
        if self.kind in _GROUPED:
            ends += reversed(_places(text, start, end))
        for one in ends:
            value = text[start:one].decode("utf-8", "replace")
            if _apart(text, start, one, self.kind) and self.holds(value):
                yield one


class Detectors:
    """Finds values of some kinds."""

    def __init__(self, kinds: Sequence[str], patterns: Mapping[str, str] | None = None) -> None:
        """patterns: those of kinds that are not built in."""
        own = patterns or {}
        self._detectors = [_detector(kind, own.get(kind)) for kind in kinds]
        self.built_in = not any(kind in own for kind in kinds)
        """All patterns are ours."""
        self._any = _union(kinds) if self.built_in and kinds else None

    def may_match(self, text: bytes) -> bool:
        """False when the text has nothing of the form of any kind: one search for all of them.
        Always true where an operator has patterns, whose union may be too large."""
        return self._any is None or self._any.search(text) is not None

    def find(self, text: bytes) -> list[Detection]:
        """Return the values in their order; of two that overlap, the kind that was named first.

        Raises: TooManyError.
        """
        found: list[Detection] = []
        for one in self._detectors:
            for match in one.matches(text):
                found.append(match)
                if len(found) > MAX_FOUND:
                    raise TooManyError(f"a text holds over {MAX_FOUND} values")
        return self.merged(found) if len(found) > 1 else found

    def merged(self, found: Sequence[Detection]) -> list[Detection]:
        """Return values in their order; those that overlap are one, of the kind named first."""
        kept: list[Detection] = []
        rank = {one.kind: place for place, one in enumerate(self._detectors)}
        for one in sorted(found, key=lambda one: (one.start, rank[one.kind], -one.end)):
            if not kept or one.start >= kept[-1].end:
                kept.append(one)
            else:
                last = kept[-1]
                kind = min(one.kind, last.kind, key=rank.__getitem__)
                kept[-1] = Detection(kind, last.start, max(one.end, last.end))
        return kept

    def kinds_in(self, text: bytes) -> list[str]:
        """Return the kinds of which the text holds a value. Raises: TooManyError."""
        return [one.kind for one in self._detectors if next(one.matches(text), None) is not None]


def _apart(text: bytes, start: int, end: int, kind: str) -> bool:
    """False for a number that is a part of a longer id, such as `call_4111-...` or a UUID."""
    if kind not in _NUMBERS:
        return True
    if kind == CARD and b" " in text[start:end] and _in_a_table(text, start, end):
        return False
    before, after = text[max(0, start - _MARKS) : start], text[end : end + _MARKS]
    if before.endswith(b"_"):
        before = before.rstrip(b"_")
        if before[-1:].isalnum():  # before the `+` of a phone number
            return False
    after = after.lstrip(b"_")[:1]
    return before[-1:] not in _JOINS and (after not in _JOINS or after == b".")


def _in_a_table(text: bytes, start: int, end: int) -> bool:
    """True when numbers of four digits stand around a number: any four of them look like a card."""
    before = _FOURS_BEFORE.search(text[max(0, start - 10) : start])
    after = _FOURS_AFTER.match(text[end : end + 11])
    return sum(len(one[0]) // 5 for one in (before, after) if one is not None) > 1


def _places(text: bytes, start: int, end: int) -> list[int]:
    """Return where the groups of a number end, but for the last one."""
    return [at for at in range(start + 1, end) if text[at : at + 1] in _BETWEEN]


_FOURS_BEFORE = re.compile(rb"(?:\b\d{4} ){1,2}$")
_FOURS_AFTER = re.compile(rb"(?: \d{4}\b){1,2}")
_BETWEEN = frozenset((b" ", b"-", b".", b"/", b"(", b")"))
_GROUPED = frozenset((CARD, IBAN, PHONE))
_NUMBERS = frozenset((CARD, SSN, PHONE))
_JOINS = frozenset((b"-", b"/", b"#", b"."))
_MARKS = 16
"""Bytes beside a number that are looked at; a longer row of underscores is a line to fill in."""


def _is_card(value: str) -> bool:
    digits = re.sub(r"[ -]", "", value)
    groups = re.split(r"[ -]", value)
    if len(groups) > 1 and (len(groups[0]) != 4 or len(groups) > 5):
        return False
    return (
        len(set(digits)) > 1
        and _ISSUERS.match(digits) is not None
        and (len(digits) in (15, 16, 19) or (len(digits) == 14 and digits.startswith("3")))
        and _passes_luhn(digits)
    )


_NO_EMAIL = re.compile(r"git@|.*@[1-9]x\.(?i:png|jpe?g|webp|gif|svg|avif)$")
"""The login of every `git@host:owner/repository`, and images for screens with more pixels."""


def _is_email(value: str) -> bool:
    return _NO_EMAIL.match(value) is None


def _passes_luhn(digits: str) -> bool:
    """ISO/IEC 7812-1: every second digit from the right counts as the digits of its double."""
    counted = (divmod(int(one) * (1 + at % 2), 10) for at, one in enumerate(reversed(digits)))
    return sum(map(sum, counted)) % 10 == 0


def _is_iban(value: str) -> bool:
    """The form of a country, and ISO 7064 MOD 97-10 with the first four characters at the end."""
    number = value.replace(" ", "").upper()
    digits = "".join(str(int(one, 36)) for one in number[4:] + number[:4])
    return _IBAN_FORMS.fullmatch(number) is not None and int(digits) % 97 == 1


def _is_ssn(value: str) -> bool:
    area, group, serial = value.split("-")
    return area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


def _is_phone(value: str) -> bool:
    try:
        number = phonenumbers.parse(value, None if value.startswith("+") else "US")
    except phonenumbers.NumberParseException:
        return False
    return phonenumbers.is_valid_number(number)


def _any(_value: str) -> bool:
    return True


def secret_patterns() -> list[tuple[str, bool]]:
    """Return the patterns of secrets, and whether each ignores case.

    Of two that match at one place the first counts: ours reach further than those of the plugins.
    """
    found = [(pattern, False) for pattern in OWN_SECRETS]
    for name in PLUGINS:
        module, _, plugin = name.partition(".")
        made = getattr(_plugins_of(f"detect_secrets.plugins.{module}"), plugin)
        found += [
            (f"(?:{one.pattern}){_REST}", bool(one.flags & re.IGNORECASE))
            for one in made().denylist
        ]
    return found


def _plugins_of(name: str) -> ModuleType:
    """Import a module of detect-secrets, and leave the program's warnings as they are.

    Its `core/log.py` calls `logging.captureWarnings(True)`, which sends every warning of the
    program to a logger that nobody reads.
    """
    before = warnings.showwarning
    found = importlib.import_module(name)
    if warnings.showwarning is not before:
        logging.captureWarnings(False)
    return found


@cache
def _built_in() -> dict[str, tuple[str, bytes, Callable[[str], bool]]]:
    secrets = "|".join(
        f"(?i:{pattern})" if ignores_case else f"(?:{pattern})"
        for pattern, ignores_case in secret_patterns()
    )
    return {
        SECRET: (secrets, b"", _any),
        EMAIL: (_EMAIL, b"@", _is_email),
        CARD: (_CARD, b"", _is_card),
        IBAN: (_IBAN, b"", _is_iban),
        SSN: (_SSN, b"-", _is_ssn),
        PHONE: (_PHONE, b"", _is_phone),
    }


def _detector(kind: str, pattern: str | None) -> _Detector:
    if pattern is not None:
        return _Detector(kind, re2.compile(pattern, _options(PROGRAM_BYTES)), b"", _any, b"")
    own, needs, holds = _built_in()[kind]
    return _Detector(kind, re2.compile(own, _options(BUILT_IN_BYTES)), needs, holds)


def _union(kinds: Sequence[str]) -> Any:  # Any: a pattern of RE2
    patterns = "|".join(f"(?:{_built_in()[kind][0]})" for kind in kinds)
    return re2.compile(patterns, _options(BUILT_IN_BYTES))


def _options(max_mem: int) -> Any:  # Any: options of RE2
    options = re2.Options()
    options.log_errors = False
    options.max_mem = max_mem
    return options


# Find values in a text that holds escapes of JSON and is no JSON as a whole. Pure.

MAX_LEVELS: Final = 4
"""Times that escapes are undone: JSON in JSON in a text takes two. Bounds the time."""
_ESCAPE: Final = re.compile(
    rb"\\(?:[\"'\\/bfnrt]"
    rb"|u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2}"
    rb"|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2})"
)
"""Those of JSON, a pair of surrogates as one, and two more of Python's and JavaScript's texts."""
_SHORT: Final = {
    b"\\b": b"\b",
    b"\\f": b"\f",
    b"\\n": b"\n",
    b"\\r": b"\r",
    b"\\t": b"\t",
    **{b"\\" + sign: sign for sign in (b'"', b"'", b"\\", b"/")},
}
_ASIDE: Final = b"\xff"
"""In place of an escaped backslash, while others are undone. No UTF-8 has this byte."""
_END_OF_ESCAPE: Final = re.compile(rb"\\(?:u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|[bfnrt])$")
_ESCAPE_BYTES: Final = 6
"""The longest match of `_END_OF_ESCAPE`."""


def levels(data: bytes) -> Iterator[bytes]:
    """Yield the text with its escapes undone once, twice, and so on while there are any."""
    for _ in range(MAX_LEVELS):
        if b"\\" not in data:
            return
        before = len(data)
        data = _undone_once(data)
        if len(data) == before:  # there was none: an escape is longer than its character
            return
        yield data


def undone(data: bytes) -> bytes:
    """Return the text with the escapes of all levels undone."""
    return [data, *levels(data)][-1]


def find(detectors: Detectors, data: bytes) -> list[Detection]:
    """Return the values in a text, with their places in it as it stands; as `Detectors.find`.

    A value that begins with the letter of an escape (`\\nanna@b.de`) begins behind the escape.
    Raises: TooManyError.
    """
    found = detectors.find(data)
    below: list[Detection] = []
    steps: list[_Escapes] = []
    outer = data
    for text in levels(data):
        steps.append(_Escapes(outer))
        outer = text
        if detectors.may_match(text):
            below += (_place(one, steps) for one in detectors.find(text))
    if not below:
        return found
    every = [*found, *below]
    last: dict[tuple[str, int], int] = {}
    for one in every:
        last[one.kind, one.end] = max(one.start, last.get((one.kind, one.end), 0))
    return detectors.merged(
        [one for one in every if not _is_behind_escape(last[one.kind, one.end], one.start, data)]
    )


def _undone_once(data: bytes) -> bytes:
    """Return what `_ESCAPE.sub(_character, data)` gives, in a fifth of the time: mostly there are
    short escapes only."""
    if _ASIDE in data:
        return _ESCAPE.sub(_character, data)
    data = data.replace(b"\\\\", _ASIDE)
    for escape, character in _SHORT.items():
        data = data.replace(escape, character)
    if b"\\" in data:
        data = _ESCAPE.sub(_character, data)
    return data.replace(_ASIDE, b"\\")


def _character(match: re.Match[bytes]) -> bytes:
    escape = match[0]
    if (short := _SHORT.get(escape)) is not None:
        return short
    code = int(escape[2:6], 16)
    if len(escape) == 12:  # two escapes, a pair of surrogates
        code = 0x10000 + ((code - 0xD800) << 10) + int(escape[8:], 16) - 0xDC00
    return chr(code).encode("utf-8", "surrogatepass")


class _Escapes:
    """Where the escapes of a text are, and where their characters are once they are undone."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._all: list[_Escape] | None = None  # made when a value is found: mostly there is none
        self._starts: list[int] = []

    def start(self, at: int) -> int:
        """Return the place of a byte before the escapes were undone; of an escape its first."""
        one = self._at(at)
        return one.start if at < one.undone_end else one.end + at - one.undone_end

    def end(self, at: int) -> int:
        """Return the place of an end (the byte behind it) before the escapes were undone."""
        one = self._at(at - 1)
        return one.end if at <= one.undone_end else one.end + at - one.undone_end

    def _at(self, at: int) -> _Escape:
        """Return the last escape that begins here or before."""
        if self._all is None:
            self._all = [_Escape(0, 0, 0)]
            self._starts = [0]
            shorter = 0
            for match in _ESCAPE.finditer(self._data):
                start, end = match.span()
                self._starts.append(start - shorter)
                shorter += end - start - len(_character(match))
                self._all.append(_Escape(start, end, end - shorter))
        return self._all[bisect_right(self._starts, at) - 1]


class _Escape(NamedTuple):
    start: int
    end: int
    undone_end: int
    """Where its character ends once the escapes are undone."""


def _place(found: Detection, steps: Sequence[_Escapes]) -> Detection:
    start, end = found.start, found.end
    for one in reversed(steps):
        start, end = one.start(start), one.end(end)
    return Detection(found.kind, start, end)


def _is_behind_escape(start: int, old: int, data: bytes) -> bool:
    """True when a value begins at `start`, and at `old` the letters of an escape before it."""
    if start <= old:
        return False
    before = max(0, start - _ESCAPE_BYTES)
    escape = _END_OF_ESCAPE.search(data[before:start])
    return escape is not None and before + escape.start() < old
