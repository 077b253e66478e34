"""Hide secrets in what is shown to people: URLs, commands, free-form parameters. Pure.

A secret is known by the name beside it (`api_key=...`, `--hf-token ...`, `?sig=...`), by its place
(before the `@` of a URL, after `Bearer` or `Authorization:`, behind the colon of `-u user:...`), or
by a well-known prefix. A free-form text parameter is hidden as well unless it has the form that its
name promises: to show too little costs less than to show a key.
Not known, and so shown: a secret in the path of a URL, behind an option of one letter (`-p ...`,
which is a port elsewhere), or as a plain argument (`echo ...`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus, unquote, urlsplit, urlunsplit

HIDDEN = "**********"
"""The mask, as pydantic shows a `SecretStr`."""
MIN_KEY = 4
MIN_FREE_FORM = 8
MIN_PART = 16
"""Shortest part of a secret that is searched for in a text, in characters."""
LONGEST_MESSAGE = 16_000
"""Longest part of somebody else's message that is searched for secrets, in characters. Callers show
a few hundred."""

_SECRET_NAME = re.compile(
    r"secret|passw|passphrase|credential|authori[sz]ation|bearer|cookie|signature"
    r"|(?:api|access|private|signing|encryption)[-_.]?key|(?:key|token)$"
    r"|(?:^|[-_.])(?:key|token|auth|pat|sig|pwd|pw|pass|sas)(?:$|[-_.])",
    re.IGNORECASE,
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_AFTER_SCHEME = re.compile(r"://[^\s'\"<>]+")
_QUERY = re.compile(r"([?&;#])([^?&;#=\s'\"]+)=([^&;#\s'\"]+)")
_SHORT_PARAMETERS = frozenset({"code", "k"})
"""In the query of a URL these names hold keys (in Azure Functions, for example); elsewhere they are
ordinary words."""
_AUTHORIZATION = re.compile(
    r"""(?i)(authori[sz]ation["']?\s*[:=]\s*["']?)((?:[a-z][\w-]*\s+)?)[^\s"'][^"'\r\n]*"""
)
_USER = re.compile(
    r"""(?P<before>(?<!\S)(?:-[uU]|--(?:proxy-)?user)(?:\s+|=)["']?[^\s:"']+:)(?!\d+\b)[^\s"']+"""
)
_SCHEME = re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\",]+")
_PREFIXED = re.compile(
    r"\b(?:sk-|sk_|hf_|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abprs]-|AKIA|AIza|eyJ)[\w.-]{12,}"
)
_NAMED = re.compile(
    r"""(?<![\w.-])(?P<name>[\w.-]++)
        (?P<between>["']\s*[:=]\s*|\s*=\s*|:\s+)(?=[^\s,;&}\]])""",
    re.VERBOSE,
)
_VALUE = re.compile(r"""("[^"]*"|'[^']*'|[^\s,;&}\]]+)""")
_GAP = r"(?:\s|\\\r?\n)+"
"""Matches what separates the words of a command: white space or an escaped line break."""
_WORD = r"""(?:"[^"]*"|'[^']*'|\S)++"""
_FLAG = re.compile(
    rf"(?P<flag>(?<!\S)--?[A-Za-z][\w.-]*){_GAP}(?P<value>{_WORD})(?P<more>(?:{_GAP}(?![-|&;<>()\\]){_WORD})*)"
)
_A_WORD = re.compile(r"(?=.{1,32}\Z)[a-z]+(?:[-_][a-z0-9]+)*")
_ANY = re.compile(r".*", re.DOTALL)
_PLAIN_PARAMS = {
    **dict.fromkeys(
        (
            "api_type", "effort", "reasoning_effort", "service_tier", "summary", "truncation",
            "type", "verbosity",
        ),
        _A_WORD,
    ),
    "api_version": re.compile(r"v?\d{1,4}(?:[.-]\d{1,4}){0,3}(?:-[a-z]{1,10})?"),
    "stop": re.compile(r".{0,15}", re.DOTALL),
    "api_base": _ANY,
    "base_url": _ANY,
}  # fmt: skip
"""Text parameters of a model call that hold no secret, and the form of their values."""


def is_secret_name(name: str) -> bool:
    """True when the value under this name is most likely a secret."""
    return _SECRET_NAME.search(_HUMP.sub("_", name)) is not None


def hide_in_url(text: str) -> str:
    """Hide the user information and the key-like query parameters of every URL in a text.

    Keys that are known by what is before them (`Bearer`, `sk-`) are hidden too.
    """
    text = _AFTER_SCHEME.sub(_hide_user_information, text)
    text = _QUERY.sub(_hide_parameter, text)
    text = _AUTHORIZATION.sub(rf"\1\2{HIDDEN}", text)
    text = _SCHEME.sub(rf"\1 {HIDDEN}", text)
    return _PREFIXED.sub(HIDDEN, text)


def hide_beside_path(url: str) -> str:
    """Hide the user information, the whole query and the fragment of one URL."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return HIDDEN
    _, at, place = parts.netloc.rpartition("@")
    shown = parts._replace(
        netloc=f"{HIDDEN}@{place}" if at else place,
        query=HIDDEN if parts.query else "",
        fragment=HIDDEN if parts.fragment else "",
    )
    return urlunsplit(shown)


def values_beside_path(url: str) -> Iterator[str]:
    """The texts that `hide_beside_path` hides, to look for where a library quotes them."""
    try:
        parts = urlsplit(url)
    except ValueError:
        yield url
        return
    user_information = parts.netloc.rpartition("@")[0]
    for text in (user_information, parts.password or "", parts.query, parts.fragment):
        if len(text) >= MIN_KEY:
            yield text


def hide_in_text(text: str) -> str:
    """Like `hide_in_url`, and also hide values of key-like names and flags."""
    text = _USER.sub(rf"\g<before>{HIDDEN}", hide_in_url(text))
    return _hide_named(_FLAG.sub(_hide_flag, text))


def hide_in_command(arguments: Iterable[str]) -> list[str]:
    """Hide the values of key-like options: `--api-key=X`, `--api-key X Y`, `HF_TOKEN=X`."""
    shown = []
    follows_flag = in_values = False
    before = ""
    for argument in arguments:
        user = _USER.fullmatch(f"{before} {argument}")
        before = argument
        is_flag = argument.startswith("-")
        if follows_flag or (in_values and not is_flag):
            shown.append(HIDDEN)
            follows_flag, in_values = False, True
            continue
        in_values = False
        if user is not None:
            shown.append(user["before"].partition(" ")[2] + HIDDEN)
            continue
        name, equals, _ = argument.partition("=")
        if is_flag and is_secret_name(name):
            shown.append(f"{name}={HIDDEN}" if equals else name)
            follows_flag = not equals
        else:
            shown.append(hide_in_text(argument))
    return shown


def hide_in_params(value: Any, name: str = "") -> Any:  # Any: JSON
    """Hide free-form parameters: every text but those known to be harmless, all that is key-like.

    name: of the parameter that holds the value.
    """
    if isinstance(value, Mapping):
        return {
            hide_in_text(str(key)): (
                HIDDEN
                if is_secret_name(str(key)) and inner is not None
                else hide_in_params(inner, str(key))
            )
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [hide_in_params(inner, name) for inner in value]
    if isinstance(value, str):
        form = _PLAIN_PARAMS.get(name)
        return hide_in_text(value) if form is not None and form.fullmatch(value) else HIDDEN
    return value


def hidden_values(
    value: Any,  # Any: JSON
    name: str = "",
    *,
    free_form: bool = True,
) -> Iterator[str]:
    """The texts that `hide_in_params` hides, to look for where somebody else quotes them.

    name: of the parameter that holds the value. free_form: also those under names that say nothing.
    Shorter ones than MIN_KEY, or MIN_FREE_FORM, are left out: they occur in every text.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            below = name if is_secret_name(name) else str(key)
            yield from hidden_values(inner, below, free_form=free_form)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from hidden_values(inner, name, free_form=free_form)
    elif is_secret_name(name):
        if isinstance(value, str | int | float) and len(str(value)) >= MIN_KEY:
            yield str(value)
    elif not isinstance(value, str) or name in _PLAIN_PARAMS or not free_form:
        return
    elif len(value) >= MIN_FREE_FORM:
        yield value


def hide_values(text: str, values: Iterable[str]) -> str:
    """Hide these values, also as JSON, Python or a URL writes them, and as parts of lines.

    Forms shorter than MIN_KEY stay: they occur in every text, and no secret is that short.
    """
    forms = {form for value in values for form in _forms(value) if len(form.strip()) >= MIN_KEY}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return text


def beginning(text: str, limit: int = LONGEST_MESSAGE) -> str:
    """Return at most `limit` characters of a text, cut where a word ends.

    A long message is cut before its secrets are hidden, so that hiding takes bounded time. The word
    at the cut is left out: half a secret would not be recognized, and would be shown.
    """
    if len(text) <= limit:
        return text
    words = text[: limit + 1].rsplit(maxsplit=1)
    return words[0] if len(words) == 2 else ""


def _forms(value: str) -> Iterator[str]:
    yield from (value, value.strip(), " ".join(value.split()), json.dumps(value)[1:-1])
    yield from (json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1])
    yield from (quote(value, safe="", errors="replace"), quote_plus(value, errors="replace"))
    # A key of several lines may be quoted in part.
    yield from (part for part in value.split() if len(part) >= MIN_PART)


def _hide_user_information(found: re.Match[str]) -> str:
    _, at, place = found[0].rpartition("@")
    return f"://{HIDDEN}@{place}" if at else found[0]


def _hide_parameter(found: re.Match[str]) -> str:
    mark, name, _ = found.groups()
    known = is_secret_name(unquote(name)) or unquote(name).lower() in _SHORT_PARAMETERS
    return f"{mark}{name}={HIDDEN}" if known else found[0]


def _hide_named(text: str) -> str:
    """Hide the values of key-like names. What another name has may hold names itself."""
    pieces: list[str] = []
    at = shown = 0
    while (found := _NAMED.search(text, at)) is not None:
        at = found.end()
        if is_secret_name(found["name"]) and (value := _VALUE.match(text, at)) is not None:
            pieces += (text[shown:at], _masked(value[0]))
            at = shown = value.end()
    return "".join((*pieces, text[shown:]))


def _hide_flag(found: re.Match[str]) -> str:
    if not is_secret_name(found["flag"]):
        return found[0]
    more = f" {HIDDEN}" if found["more"] else ""
    return f"{found['flag']} {_masked(found['value'])}{more}"


def _masked(value: str) -> str:
    """Return the mask in the value's own quotes."""
    quote = value[0] if value[:1] in ("'", '"') else ""
    return f"{quote}{HIDDEN}{quote}"
