"""`python -m benchmarks.relay.own_lines`: what `serving.own_adapters` costs each request.

As `benchmarks.relay.steps`: one relay without projects of their own and one with twenty, in one
process, in turn. The ratio of the CPU of the two is that of pairs that follow each other. The
requests are of a project without adapters of its own: the relay looks for its line in vain.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import sys
import time

import structlog

from benchmarks.relay import ours, scenarios
from benchmarks.relay.steps import Nowhere, Steps, fake_upstream, place
from sidecar.proxy import Proxy, relay_is_compiled
from sidecar.settings import Settings, load_settings

PAIRS = 30
REQUESTS = {"small32": 2_000, "fresh32": 2_000}
PROJECTS = tuple(f"project-{number}" for number in range(20))


def main() -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    asyncio.run(_measure())
    return 0


async def _measure() -> None:
    build_name = "compiled" if relay_is_compiled() else "interpreted"
    with fake_upstream() as (folder, port):
        launch = ours.pure_capture_on(place(folder / "on", port))
        plain = load_settings(folder / "on" / "sidecar.toml")
        for name, count in REQUESTS.items():
            scenario = scenarios.BY_NAME[name]
            without, with_lines = (
                Steps(Proxy(settings, sink=Nowhere()), launch, scenario, port)
                for settings in (plain, _with_lines(plain))
            )
            for steps in (without, with_lines):
                steps.run(count)
            pairs = [(_us(without, count), _us(with_lines, count)) for _ in range(PAIRS)]
            ratio = statistics.median(after / before for before, after in pairs)
            spread = statistics.quantiles([after / before for before, after in pairs], n=20)
            before, after = (statistics.median(one) for one in zip(*pairs, strict=True))
            print(
                f"{build_name:12} {name:8} without {before:6.1f} us, with {after:6.1f} us, "
                f"ratio {ratio:.3f} (90% of the pairs {spread[0]:.3f} to {spread[-1]:.3f})"
            )


def _with_lines(settings: Settings) -> Settings:
    serving = settings.serving.model_copy(update={"own_adapters": PROJECTS})
    return settings.model_copy(update={"serving": serving})


def _us(steps: Steps, count: int) -> float:
    """CPU of the relay's thread, microseconds a request."""
    began = time.thread_time()
    steps.run(count)
    return (time.thread_time() - began) / count * 1e6


if __name__ == "__main__":
    sys.exit(main())
