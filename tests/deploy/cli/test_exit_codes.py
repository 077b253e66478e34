"""The exit code of every command: done, failed, badly used, and those that scripts branch on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from demo.ports import free_port
from deploy.admin.context import AdminContext
from deploy.cli.app import EXAMPLES
from deploy.cli.main import main
from deploy.engine.reconcile import Fleet
from deploy.examiner import examiner_of
from deploy.registry import canaries, transitions
from deploy.registry.canary_rule import Move
from sidecar.conditions import Condition, write
from sidecar.settings import Settings
from sidecar.store.models import CanaryRow
from support import page_history
from support.served_admin import served_admin
from tests.deploy.conftest import write_adapter

if TYPE_CHECKING:
    from tests.deploy.conftest import World

PROCESSES = frozenset({"up", "proxy", "ingest", "score", "control"})
"""They run until they are stopped; tests/deploy/supervise and the tests of each process have their
codes."""
ALONE = frozenset(
    {"config init", "config show", "config check", "keys create", "keys ls", "store new-key"}
    | {"dashboards", "docs"}
)
"""They need nothing that runs, and no store that exists."""
DONE: dict[str, tuple[str, ...]] = {
    "status": (),
    "progress": (),
    "tasks ls": (),
    "rehearsals ls": (),
    "lineage": ("v1",),
    "canary get": (),
    "canary pause": ("--reason", "x"),
    "canary resume": (),
    "canary skip-step": (),
    "canary promote": ("--reason", "x"),
    "adapters allow": ("v2", "--reason", "x"),
    "canary start": ("v3", "--reason", "x"),
    "canary abort": ("--reason", "x"),
    "adapters ls": (),
    "adapters show": ("v1",),
    "adapters alias": ("anchor", "v1", "--reason", "x"),
    "adapters diff": ("v1", "v3"),
    "adapters export": ("v1", "{folder}/v1.tar"),
    "adapters import": ("{folder}/mine", "--reason", "x"),
    "adapters prune": ("--dry-run",),
    "rollback": ("--reason", "x"),
    "config init": ("{folder}/new.toml",),
    "config show": (),
    "config check": (),
    "keys create": ("--project", "p"),
    "keys ls": (),
    "groups ls": (),
    "groups show": ("group-1",),
    "groups retry": ("group-2", "--reason", "x"),
    "audit": (),
    "audit verify": (),
    "judge noise": (),
    "hooks ls": (),
    "learner pause": ("--reason", "x"),
    "learner resume": (),
    "learner watch": (),
    "learner run": (),
    "runs ls": (),
    "runs show": ("run-2",),
    "runs plot": ("run-2", "--out", "{folder}/run.png"),
    "exchanges ls": (),
    "exchanges export": ("--out", "{folder}/out.jsonl"),
    "forget": ("--user", "4711", "--yes"),
    "store new-key": ("--file", "{folder}/keys"),
    "store backup": ("{folder}/backup",),
    "dashboards": ("{folder}/monitoring",),
    "docs": (),
}
"""Command -> what ends with 0 over the history, in an order in which each can."""
ELSEWHERE = {
    "learn": "tests/learner/test_once.py",
    "doctor": "tests/deploy/doctor",
    "canary wait": "tests/deploy/cli/test_exit_codes.py",
    "canary watch": "tests/deploy/cli/test_exit_codes.py",
    "keys revoke": "tests/deploy/cli/test_exit_codes.py",
    "adapters push": "tests/deploy/adapters/test_push.py",
    "learner override": "tests/deploy/admin/test_watch.py",
    "hooks test": "tests/deploy/cli/test_hooks.py",
    "judge calibrate": "tests/deploy/cli/test_judge.py",
    "judge sessions": "tests/deploy/cli/test_judge_sessions.py",
    "exchanges import": "tests/deploy/cli/test_exchanges_import.py",
    "exchanges show": "tests/deploy/cli/test_exchanges.py",
    "tasks show": "tests/deploy/admin/test_task_groups.py",
    "replay": "tests/deploy/canary/test_replay.py",
    "store rotate-key": "tests/deploy/cli/test_store.py",
    "store restore": "tests/deploy/test_backup.py",
}
"""Command -> where its 0 is tested."""
COMMANDS = sorted(set(EXAMPLES) - PROCESSES)
ROOT = Path(__file__).parents[3]
Run = Callable[..., int]


def context_of(world: World) -> AdminContext:
    return AdminContext(
        database=world.database,
        model="m",
        rules=world.rules,
        fleet=Fleet({}),
        clock=world.clock,
        examiner=examiner_of(Settings()),
    )


def settings(folder: Path, store: str, port: int) -> Path:
    path = folder / "sidecar.toml"
    path.write_text(
        f'state_dir = "{folder}/state"\n[serving]\nmodel = "m"\n[store]\nurl = "{store}"\n'
        f'[admin]\nport = {port}\n[learner]\nadapters_dir = "{folder}/adapters"\n'
    )
    return path


@pytest.fixture
def run(world: World, tmp_path: Path) -> Iterator[Run]:
    """Run a command beside a control that has a history."""
    page_history.tell(world)
    with served_admin(context_of(world)) as port:
        config = settings(tmp_path, world.database.url, port)
        yield lambda *words: main(["--config", str(config), *words])


@pytest.fixture
def run_alone(tmp_path: Path) -> Run:
    """Run a command where no control listens and no store exists."""
    config = settings(tmp_path, f"sqlite:///{tmp_path}/none/store.db", free_port())
    return lambda *words: main(["--config", str(config), *words])


def test_every_command_has_its_codes_tested() -> None:
    assert set(DONE) | set(ELSEWHERE) == set(COMMANDS)
    assert not set(DONE) & set(ELSEWHERE)
    assert [path for path in ELSEWHERE.values() if not (ROOT / path).exists()] == []


def test_what_is_done_ends_with_0(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(tmp_path / "mine", values=(0.5, 0.25))
    codes = {
        command: run(*command.split(), *(word.format(folder=tmp_path) for word in words))
        for command, words in DONE.items()
    }

    assert {command: code for command, code in codes.items() if code != 0} == {}
    assert (
        "no judge is set: it waits at its gate; name one in judge.model" in capsys.readouterr().err
    )


def test_an_option_that_a_command_does_not_have_is_bad_use(
    run_alone: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in {*COMMANDS, *PROCESSES}:
        assert run_alone(*command.split(), "--no-such-option") == 2, command
        assert "Traceback" not in capsys.readouterr().err, command


def test_what_cannot_be_done_ends_with_1_and_says_why(
    run_alone: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for command in sorted(set(COMMANDS) - ALONE):
        words = DONE.get(command, MISSING.get(command, ()))

        code = run_alone(*command.split(), *(word.format(folder=tmp_path) for word in words))

        said = capsys.readouterr()
        assert code == OTHER_CODES.get(command, 1), (command, said)
        assert (said.out + said.err).strip(), command
        assert "Traceback" not in said.out + said.err, command


OTHER_CODES = {
    "canary wait": 4,
    "canary watch": 4,
    "rehearsals ls": 0,
    "store backup": 0,
    "learn": 3,
    "judge calibrate": 2,
    "judge sessions": 2,
}
"""`canary wait`, `watch`: 1 says rolled back. `learn --once`: nothing to learn from; it makes
a store, in which nothing was rehearsed, and which a backup has. `judge calibrate`: its file is not
there. `judge sessions`: the settings name no judge."""
MISSING: dict[str, tuple[str, ...]] = {
    "learn": ("--once",),
    "adapters push": ("v1", "--to", "hub:o/n", "--reason", "x"),
    "keys revoke": ("key_1a2b3c",),
    "hooks test": (),
    "judge calibrate": ("{folder}/none.jsonl", "--judge", "openai/none"),
    "judge sessions": ("a", "b"),
    "exchanges import": ("langfuse", "{folder}/none.jsonl"),
    "exchanges show": ("ex_1",),
    "tasks show": ("tg_1",),
    "learner override": ("--reason", "x"),
    "replay": ("v1",),
    "store rotate-key": (),
    "store backup": ("{folder}/backup",),
    "store restore": ("{folder}/none",),
}


@pytest.mark.parametrize(
    ("ends", "code"), [("promoted", 0), ("rolled_back", 1), ("inconclusive", 3), ("", 124)]
)
@pytest.mark.parametrize("command", ["wait", "watch"])
def test_waiting_for_a_canary_tells_how_it_ended(
    world: World, run: Run, command: str, ends: str, code: int
) -> None:
    if ends:
        end(world, ends)

    assert run("canary", command, "--timeout", "0") == code


def end(world: World, phase: Any) -> None:
    with world.database.write() as session:
        row = next(
            row for row in session.query(CanaryRow).all() if row.state in ("ramping", "gating")
        )
        state = {"promoted": "champion", "inconclusive": "retired"}.get(phase, phase)
        move = Move(to=phase, candidate_state=state, reason="x")
        transitions.apply(session, canaries.to_canary(row), move, evidence={}, now=world.clock.now)


def test_a_key_is_revoked_once_it_exists(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("keys", "create", "--project", "p") == 0
    key_id = capsys.readouterr().out.split("key_id: ")[1].split()[0]

    assert run("keys", "revoke", key_id) == 0
    assert run("keys", "revoke", "key_none") == 1


def test_learn_takes_once_or_replay_not_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "--once", "--replay", "v1"]) == 2
    assert "does not go with --replay; give one of them" in capsys.readouterr().err


def test_a_switch_does_not_print_what_the_schedule_said_before_it(
    run: Run, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "the schedule has not come round"
    told = Condition(kind="schedule", line="m", code="not_due", message=why)
    with world.database.write() as session:
        write(session, told, now=world.clock())

    assert run("learner", "pause", "--reason", "x") == 0
    printed = capsys.readouterr().out
    assert "paused" in printed
    assert "the schedule has not come round" not in printed
