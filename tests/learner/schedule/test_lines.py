"""Lines of adapters at the learner: each learns from its own groups, and none waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
from sqlalchemy import update

from learner.errors import RunInProgressError
from learner.resume import present_holder
from learner.runs.material import claim
from learner.runs.runs import find_parent, open_run, take_over
from learner.runs.source import count_fresh, waiting_groups
from learner.schedule.loop import PAUSED_FLAG, REQUESTED_FLAG, InTurn, Schedule
from sidecar.conditions import read
from sidecar.lines import flag_of
from sidecar.settings import Settings
from sidecar.store.database import Database, get_flag, set_flag
from sidecar.store.models import AliasRow, CanaryRow, ExchangeRow, GroupRow
from support.clock import Clock
from tests.learner.conftest import PutGroup, make_scored_group

OWN = "m@@support"
Put = Callable[..., None]


class FakeChild:
    def __init__(self) -> None:
        self.code: int | None = None

    def exit_code(self) -> int | None:
        return self.code

    def stop(self) -> None:
        self.code = -15


class Device:
    """The schedules of two lines, and the runs that they started, in order."""

    def __init__(self, settings: Settings, database: Database, clock: Clock) -> None:
        self.runs: list[tuple[str, FakeChild]] = []
        self.database, self.clock = database, clock
        self.schedules = {
            line.name: Schedule(
                settings.of_line(line), database, partial(self._launch, line.name), clock=clock
            )
            for line in settings.lines
        }
        self.turns = InTurn(list(self.schedules.values()))

    def _launch(self, line: str, _run_id: str) -> FakeChild:
        self.runs.append((line, FakeChild()))
        return self.runs[-1][1]

    def poll(self) -> list[str]:
        """Returns: the lines of the runs so far."""
        self.turns.poll()
        return [line for line, _ in self.runs]

    def end(self, code: int = 0) -> None:
        self.runs[-1][1].code = code

    def flag(self, name: str, line: str, value: str = "1") -> None:
        with self.database.write() as session:
            set_flag(session, flag_of(name, line), value, now=self.clock.now)

    def told(self, line: str) -> str:
        with self.database.read() as session:
            told = read(session, "schedule", line)
        assert told is not None
        return f"{told.code}: {told.message}"


@pytest.fixture
def lines(settings: Settings) -> Settings:
    serving = settings.serving.model_copy(update={"own_adapters": ("support",)})
    return settings.model_copy(update={"serving": serving})


@pytest.fixture
def device(lines: Settings, database: Database, clock: Clock) -> Device:
    return Device(lines, database, clock)


@pytest.fixture
def put(put_group: PutGroup, database: Database) -> Put:
    """Put a scored group of a project."""

    def make(group_id: str, project: str | None, *, of_exchange: str = "shop") -> None:
        put_group(make_scored_group([0.0, 1.0], group_id=group_id))
        with database.write() as session:
            of_group = GroupRow.group_id == group_id
            session.execute(update(GroupRow).where(of_group).values(project=project))
            row = session.query(GroupRow).filter(of_group).one()
            of_row = ExchangeRow.exchange_id == row.exchange_id
            session.execute(update(ExchangeRow).where(of_row).values(project=of_exchange))

    return make


def test_a_run_takes_the_groups_of_its_lines_projects_alone(
    put: Put, lines: Settings, database: Database
) -> None:
    put("a", "shop")
    put("b", "support", of_exchange="support")
    put("c", None, of_exchange="support")  # of a best-of-N request: its exchange names the project
    put("d", None, of_exchange="default")
    put("e", "support", of_exchange="support")
    default, own = lines.lines
    with database.read() as session:
        fresh = {
            line.name: waiting_groups(session, line=line, parent="base", max_age=4).fresh
            for line in lines.lines
        }
        counted = {
            line.name: count_fresh(session, line=line, parent="base", max_age=4)
            for line in lines.lines
        }

    assert fresh == {"m": ("d", "a"), OWN: ("e", "c", "b")}
    assert counted == {"m": 2, OWN: 3}
    with database.write() as session:
        open_run(session, run_id="r", model=OWN, parent="base", settings={}, now=1.0)
    with database.read() as session:
        parent = find_parent(session, OWN)
    claimed = claim(
        database, lines.of_line(own), "r", parent, when_unlocked=lambda work, doing: work()
    )
    assert set(claimed.group_ids) == {"b", "c", "e"}
    assert claimed.unclaimed == {}, "the groups of others wait as before"
    with database.read() as session:
        waiting = waiting_groups(session, line=default, parent="base", max_age=4)
    assert (waiting.fresh, dict(waiting.stale)) == (("d", "a"), {})


def test_without_the_setting_a_run_takes_every_projects_groups(
    put: Put, settings: Settings, database: Database
) -> None:
    put("a", "shop")
    put("b", "support", of_exchange="support")

    with database.read() as session:
        waiting = waiting_groups(session, line=settings.line, parent="base", max_age=4)

    assert waiting.fresh == ("b", "a")


def test_a_run_continues_the_champion_of_its_line(lines: Settings, database: Database) -> None:
    with database.write() as session:
        session.add(AliasRow(model="m", alias="champion", adapter="base", generation=1))
        session.add(AliasRow(model=OWN, alias="champion", adapter="gone", generation=1))

    with database.read() as session:
        assert find_parent(session, "m").name == "base"
        with pytest.raises(Exception, match="champion gone is no registered adapter of m@@support"):
            find_parent(session, OWN)


def test_lines_take_turns_on_the_device(device: Device, put: Put) -> None:
    for number in range(3):
        put(f"s{number}", "support", of_exchange="support")
        put(f"d{number}", "shop")

    assert device.poll() == ["m"]
    assert device.poll() == ["m"], "one run at a time"
    assert device.told(OWN) == "running: a run of another line is in progress"
    device.end()
    assert device.poll() == ["m", OWN], "though the default line has groups too"
    device.end()
    assert device.poll() == ["m", OWN, "m"]
    assert device.told(OWN) == "running: a run of another line is in progress"


def test_a_pause_a_failure_and_a_canary_hold_one_line(
    device: Device, put: Put, database: Database
) -> None:
    for number in range(3):
        put(f"s{number}", "support", of_exchange="support")
        put(f"d{number}", "shop")
    device.flag(PAUSED_FLAG, "m")

    assert device.poll() == [OWN]
    device.end(1)
    assert device.poll() == [OWN], "after a failure it waits"
    assert device.told(OWN).startswith("held_back")
    device.flag(PAUSED_FLAG, "m", "0")
    assert device.poll() == [OWN, "m"], "the failure of one line holds no other"
    device.end()
    with database.write() as session:
        session.add(
            CanaryRow(
                canary_id="c",
                model="m",
                candidate="m--v1",
                champion="base",
                state="ramping",
                salt="s",
                created_at=1.0,
                step_started_at=1.0,
                evidence={},
            )
        )
    device.clock.now += 4000.0
    assert device.poll() == [OWN, "m", OWN], "the canary of one line holds no other"
    assert device.told("m").startswith("canary")


def test_a_request_to_run_is_of_one_line(device: Device, database: Database) -> None:
    device.flag(REQUESTED_FLAG, OWN)

    assert device.poll() == [OWN]
    with database.read() as session:
        assert get_flag(session, flag_of(REQUESTED_FLAG, OWN)) == "0"
        assert get_flag(session, REQUESTED_FLAG) is None


def test_a_living_run_of_another_line_has_the_device(lines: Settings, database: Database) -> None:
    now = time.time()
    with database.write() as session:
        open_run(session, run_id="alive", model=OWN, parent="base", settings={}, now=now)

    with database.write() as session, pytest.raises(RunInProgressError):
        take_over(
            session,
            model="m",
            adapters_dir=lines.learner.adapters_dir,
            holder=present_holder(),
            now=now,
            beside=[OWN],
        )
