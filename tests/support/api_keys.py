"""API keys as `sidecar keys` writes them, for tests of rooms that may not import deploy."""

from __future__ import annotations

from deploy.registry.api_keys import create, revoke

__all__ = ["create", "revoke"]
