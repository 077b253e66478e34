"""Templates and static files. Every value is escaped: no template marks anything as safe."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape

from deploy.page.shown import changes, times, words
from deploy.records import LOADS, comes_next
from ingest.verifiers.records import check_words
from sidecar.hiding import hide_in_url
from sidecar.plurals import counted
from sidecar.replies.parts import answer_text

FOLDER: Final = Path(__file__).parent
_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
"""Nothing inline and nothing from elsewhere."""
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not `no-referrer`: a form would then be sent with the Origin `null`, which is refused.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
"""Headers of every reply of the page."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    content: bytes
    media_type: str
    tag: str
    """Changes with the content."""


class Templates:
    """The templates, and the static files that they name."""

    def __init__(self) -> None:
        self.files = {
            path.name: _load(path, _TYPES[path.suffix])
            for path in sorted((FOLDER / "static").iterdir())
            if path.suffix in _TYPES
        }
        self._environment = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(
            clock=_clock,
            iso=times.iso,
            length_of=times.length,
            measured=times.short_length,
            short=words.short,
            percent=words.percent,
            share=words.share,
            differences=changes.differences,
            counted=counted,
            host=hide_in_url,
            text=message_text,
            check=check_words,
            commands=commands_as_code,
        )
        self._environment.globals.update(static=self._static, comes_next=comes_next, loads=LOADS)

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """values: have `now`, Unix seconds."""
        return self._environment.get_template(template).render(values)

    def _static(self, name: str) -> str:
        return f"/static/{name}?v={self.files[name].tag}"


def _load(path: Path, media_type: str) -> StaticFile:
    content = path.read_bytes()
    return StaticFile(content, media_type, hashlib.sha256(content).hexdigest()[:12])


@pass_context
def _clock(context: Context, at: object) -> str:
    return times.clock(at, context.get("now", time.time()))


def commands_as_code(text: str) -> Markup:
    """Return the text as HTML, escaped, with what stands between two backticks as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one of the backticks has no other
        return escape(text)
    code = Markup("<code>{}</code>")
    return Markup("").join(
        code.format(part) if number % 2 else part for number, part in enumerate(parts)
    )


def message_text(message: object) -> str:
    """What a chat message says: its words (`answer_text`), then its tool calls."""
    if not isinstance(message, Mapping):
        return str(message)
    words = answer_text(message)
    found = [words] if words else []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        asked = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(asked, Mapping):
            found.append(f"calls {asked.get('name')}({asked.get('arguments')})")
    if not found and "unreadable" in message:
        found.append(str(message["unreadable"]))
    return "\n".join(found)
