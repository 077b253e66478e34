"""Refuse settings that would open the sidecar to other machines without an explicit setting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.errors import SettingsError
from sidecar.settings.addresses import is_loopback

if TYPE_CHECKING:
    from sidecar.settings.sections import Settings


def refuse_unsafe(settings: Settings) -> None:
    """Raises: SettingsError, one line: what, why, what to do."""
    proxy, admin = settings.proxy, settings.admin
    asks_nobody = settings.access.mode == "open" and not proxy.allow_remote_without_keys
    if not is_loopback(proxy.host) and asks_nobody:
        raise SettingsError(
            f'proxy.host {proxy.host} is reachable from outside and access.mode is "open"; set '
            'access.mode = "keys" (`sidecar keys create` makes one) or "upstream" (vLLM has '
            "--api-key), or, behind a gateway of yours, proxy.allow_remote_without_keys = true"
        )
    if not is_loopback(admin.host) and not admin.tokens:
        raise SettingsError(
            f"admin.host {admin.host} is reachable from outside and admin.tokens is empty; "
            "add the SHA-256 hex digest of a token, or listen on 127.0.0.1"
        )
