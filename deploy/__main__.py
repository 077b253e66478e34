"""The control process: `python -m deploy [--config PATH]`.

It runs the canary controller, the reconcilers and the admin API in one event loop. While vLLM, the
judge or the store is unreachable, it logs that, and continues when they are back.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from sidecar.processes import ends_in_one_line, raise_open_files


def main(argv: list[str] | None = None) -> int:
    """Run control. Returns: 0 after a stop by signal, 1 when it cannot start, 2 for bad use."""
    with ends_in_one_line("sidecar control"):
        return _main(argv)


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy", description="canaries and admin API")
    parser.add_argument("--config", type=Path, help="TOML file; default ./sidecar.toml")
    arguments = parser.parse_args(argv)

    from deploy.process import serve
    from deploy.registry.leases import own_id
    from sidecar.errors import SettingsError, StateLockError, StoreError
    from sidecar.logs import configure_logging
    from sidecar.processes import only_one
    from sidecar.settings import load_settings, open_keyring
    from sidecar.store.database import Database
    from sidecar.tracing.telemetry import configure_tracing

    raise_open_files()
    try:
        settings = load_settings(arguments.config)
        configure_logging(settings.telemetry, "control")
        tracing = configure_tracing(settings.telemetry, "control")
        database = Database(settings.store.url, open_keyring(settings.store))
        database.upgrade()
    except SettingsError as error:
        sys.stderr.write(f"sidecar control: {error}\n")
        return 2
    except StoreError as error:
        sys.stderr.write(f"sidecar control: {error}\n")
        return 1
    try:
        with only_one(settings.state_dir, "control"):
            try:
                own_id(settings.state_dir)
            except OSError as error:
                sys.stderr.write(
                    f"sidecar control: {error.filename}: {error.strerror}; it is the file of "
                    "control's own id, which control must read, or make where it is absent\n"
                )
                return 1
            return asyncio.run(serve(settings, database))
    except StateLockError as error:
        sys.stderr.write(f"sidecar control: {error}\n")
        return 1
    finally:
        database.close()
        tracing.shutdown()


if __name__ == "__main__":
    raise SystemExit(main())
