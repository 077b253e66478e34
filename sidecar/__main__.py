"""`python -m sidecar`: the proxy process."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidecar.proxy import Proxy

SWITCH_INTERVAL_S = 0.0005
"""The capture's thread gives the interpreter back to the relay after this long, not after 5 ms."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sidecar proxy", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="the settings file (TOML)")
    config: Path | None = parser.parse_args(argv).config

    import uvloop

    from sidecar.errors import SettingsError
    from sidecar.logs import configure_logging
    from sidecar.proxy import Proxy
    from sidecar.settings import load_settings
    from sidecar.telemetry import configure_tracing

    try:
        settings = load_settings(config)
        configure_logging(settings.telemetry, "proxy")
        tracing = configure_tracing(settings.telemetry, "proxy")
        proxy = Proxy(settings, tracing)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(proxy))
    except (SettingsError, OSError) as error:
        print(f"sidecar proxy: {error}", file=sys.stderr)  # noqa: T201 - to the person who typed it
        return 2 if isinstance(error, SettingsError) else 1
    tracing.shutdown()
    return 0


async def _serve(proxy: Proxy) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await proxy.start()
    await stopping.wait()
    await proxy.stop()


if __name__ == "__main__":
    sys.exit(main())
