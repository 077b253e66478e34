"""The sidecar as a contender: `python -m sidecar` with a settings file, a store and a bus.

Clients send a key of the sidecar's, routing is on (a champion, and a canary for a fifth of the
conversations), metrics are on, and what is captured goes to a real outbox, which a reader on the
other core empties. Each is there twice: with the relay compiled, as a production install has it and
as the targets are judged; and interpreted, as it runs from a working tree.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.compiled import ROOT, CompileError, build, search_path
from benchmarks.relay.contenders import Launch, Place
from benchmarks.relay.interpreter import chosen, packages_of
from benchmarks.relay.scenarios import MODEL
from benchmarks.relay.unavailable import UnavailableError
from sidecar.routing.table import RoutingTable, encode_table
from sidecar.store.database import Database
from sidecar.store.models import RoutingRow

ACCESS_MODE = "keys"
"""`open`, or `keys`: then a key without limits is made by the command and sent by every client."""
CHAMPION = f"{MODEL}--v1-0123456789ab"
CANARY = f"{MODEL}--v2-cdef01234567"
CANARY_WEIGHT_BP = 2_000


def capture_off(place: Place) -> Launch:
    """Nothing is captured; routing, metrics and keys are on. Compiled."""
    return _compiled(_launch(place, sample_rate=0.0))


def capture_on(place: Place) -> Launch:
    """Everything is captured. Compiled."""
    return _compiled(_launch(place, sample_rate=1.0))


def pure_capture_off(place: Place) -> Launch:
    """`capture_off`, interpreted."""
    return _launch(place, sample_rate=0.0)


def pure_capture_on(place: Place) -> Launch:
    """`capture_on`, interpreted."""
    return _launch(place, sample_rate=1.0)


def _compiled(launch: Launch) -> Launch:
    try:
        made = build()
    except CompileError as error:
        raise UnavailableError(str(error)) from error
    program, *rest = launch.command
    env = {**launch.env, **environment(search_path(made))}
    return replace(launch, command=(program, "-P", *rest), env=env)


def environment(first: str) -> dict[str, str]:
    """What lets the chosen Python run the sidecar whose folders are `first`, with the packages that
    are installed for this one."""
    return packages_of(Path(sys.prefix), first)


def _launch(place: Place, *, sample_rate: float) -> Launch:
    bus = f"sqlite:///{place.folder}/outbox.db"
    store = f"sqlite:///{place.folder}/store.db"
    # A folder of its own for the socket: its path may have 100 bytes at most.
    sockets = tempfile.mkdtemp(prefix="sidecar-bench-")
    config = place.folder / "sidecar.toml"
    config.write_text(
        f'state_dir = "{sockets}"\n'
        f'[serving]\nupstreams = ["http://127.0.0.1:{place.upstream_port}"]\nmodel = "{MODEL}"\n'
        f"[proxy]\nport = {place.port}\n"
        f"[capture]\nsample_rate = {sample_rate}\n"
        f'[bus]\nurl = "{bus}"\n[store]\nurl = "{store}"\n'
        + (f'[access]\nmode = "{ACCESS_MODE}"\n' if ACCESS_MODE != "open" else "")
    )
    _write_routing(store)
    return Launch(
        command=(chosen().path, "-m", "sidecar", "--config", str(config)),
        env=environment(str(ROOT)),
        version=chosen().what,
        key=_make_key(config) if ACCESS_MODE == "keys" else "sk-bench",
        beside=((sys.executable, "-m", "benchmarks.relay.drain", bus),) if sample_rate else (),
        metrics_path="/metrics",
        takes_away=(Path(sockets),),
    )


def _write_routing(store: str) -> None:
    database = Database(store)
    database.upgrade()
    table = RoutingTable(
        model=MODEL,
        champion=CHAMPION,
        canary=CANARY,
        canary_weight_bp=CANARY_WEIGHT_BP,
        salt="bench",
        generation=1,
    )
    with database.write() as session:
        session.add(RoutingRow(model=MODEL, generation=1, body=encode_table(table), updated_at=0.0))
    database.close()


def _make_key(config: Path) -> str:
    """An unlimited key, made as an operator makes one."""
    command = [sys.executable, "-c", "from deploy.cli.main import main; raise SystemExit(main())"]
    command += ["--config", str(config), "keys", "create", "--project", "bench"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.search(r"sk-sidecar-[\w-]+", done.stdout)
    if found is None:
        raise UnavailableError(f"`sidecar keys create` gave no key: {done.stderr.strip()}")
    return found.group()
