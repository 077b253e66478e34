"""`sidecar judge sessions`: recorded sessions, ranked as wholes beside their outcomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ingest.ruler.judge
import sidecar.logs
from ingest.errors import JudgeUnavailableError
from ingest.feedback.deriving import save_feedback
from ingest.ruler.prompt import rubric_hash
from ingest.sessions.messages import Place
from ingest.store.exchanges import save_exchange
from ingest.trajectories import scoring
from ingest.trajectories.recorded import Step, last_of_each_part
from sidecar.records import Choice, Timings
from sidecar.settings import Judge
from sidecar.store.database import Database
from support.ingest_kit import make_exchange, make_feedback
from support.stores import NewStore
from support.trajectory_judge import RankingJudge, shown_trajectories
from tests.deploy.cli.conftest import Command

pytestmark = pytest.mark.both_stores
Run = Callable[..., tuple[int, str, str]]
SYSTEM = {"role": "system", "content": "You give refunds."}
TASK = {"role": "user", "content": "I want my money back. I am ann@example.org"}
TOOL = {"type": "function", "function": {"name": "refund"}}
WORTH = {"Refunded.": 0.9, "No.": 0.2, "Sent <EMAIL_1> a form.": 0.6}


@pytest.fixture
def database(new_store: NewStore) -> Database:
    return new_store()


@pytest.fixture
def judges(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The judges that the command made."""
    made: list[Any] = []

    class Made(RankingJudge):
        def __init__(self, settings: Judge) -> None:
            super().__init__(WORTH)
            self.settings = settings
            self.closed = False
            made.append(self)

        async def aclose(self) -> None:
            self.closed = True

    monkeypatch.setattr(ingest.ruler.judge, "LiteLlmJudge", Made)
    # Set up in this process, the log would keep a stream that is closed when the test ends.
    monkeypatch.setattr(sidecar.logs, "configure_logging", lambda *_: None)
    scoring._warn_of.cache_clear()
    yield made
    assert all(one.closed for one in made)


@pytest.fixture
def run(database: Database, config: Path, sidecar: Command, judges: list[Any]) -> Run:
    url = database.engine.url.render_as_string(hide_password=False)
    config.write_text(
        f'[store]\nurl = "{url}"\n[judge]\nmodel = "openai/x"\nrubric = "Be kind."\npasses = 1\n'
    )
    return partial(sidecar.said, "judge", "sessions")


def save(
    database: Database,
    exchange_id: str,
    messages: list[dict[str, Any]],
    reply: str,
    *,
    session: str,
    parent: str | None = None,
    how: Any = "answered",
    segment: int = 0,
    at: float = 1.0,
    **changes: Any,
) -> None:
    body = json.dumps({"role": "assistant", "content": reply}).encode()
    exchange = make_exchange(
        exchange_id,
        request={"messages": messages, "tools": [TOOL]},
        choices=(Choice(index=0, message=body),),
        timings=Timings(started_at=at),
        **changes,
    )
    place = Place(
        exchange_id=exchange_id,
        session=session,
        parent=parent,
        turn=0,
        branch=0,
        segment=segment,
        how=how,
    )
    with database.write() as store:
        assert save_exchange(store, exchange, held_out=False, now=at, place=place)


def save_three(database: Database) -> None:
    """Three sessions of one task, of one exchange each; the first has an outcome."""
    for name, reply in (("a", "No."), ("b", "Refunded."), ("c", "Sent ann@example.org a form.")):
        save(database, f"x{name}", [SYSTEM, TASK], reply, session=name, how="root")
    told = make_feedback("f1", "xa", kind="outcome", score=None, success=False, reward=0.25)
    with database.write() as session:
        save_feedback(session, [told], now=1.0)


def test_sessions_are_ranked_beside_their_outcomes(
    database: Database, run: Run, judges: list[Any]
) -> None:
    save_three(database)

    code, out, errors = run("a", "b", "c", "-o", "json")

    assert code == 0, errors
    found = json.loads(out)
    ranked = [(one["session"], one["score"], one["success"]) for one in found["sessions"]]
    assert ranked == [("b", 0.9, None), ("c", 0.6, None), ("a", 0.2, False)]
    assert found["sessions"][2]["reward"] == 0.25
    assert found["judge"] == "openai/x"
    assert "3 trajectories against each other; 4 to 8 are best" in errors
    (judge,) = judges
    assert "Grading standards:\nBe kind.\n" in judge.conversations[0][0]["content"]
    assert "ann@example.org" not in judge.prompts[0]  # the privacy view
    assert '"name": "refund"' in judge.prompts[0]

    _, text, _ = run("a", "b", "c")
    assert [line for line in text.splitlines() if not line.startswith(" ")] == [
        "0.900  b  no outcome",
        "0.600  c  no outcome",
        "0.200  a  success False, reward 0.25",
    ]


def test_a_session_is_its_whole_main_conversation(
    database: Database, run: Run, judges: list[Any]
) -> None:
    more = {"role": "user", "content": "And the fee?"}
    first = {"role": "assistant", "content": "Wait."}
    save(database, "a1", [SYSTEM, TASK], "Wait.", session="a", how="root", at=1.0)
    save(database, "a2", [SYSTEM, TASK, first, more], "Hm.", session="a", parent="a1", at=2.0)
    short = [SYSTEM, {"role": "user", "content": "Summary: a fee"}]
    save(
        database, "a3", short, "Refunded.", session="a", parent="a2", how="kept", segment=1, at=3.0
    )
    save(database, "a4", [{"role": "user", "content": "sub"}], "sub agent", session="a",
         parent="a3", how="called", segment=1, at=4.0)  # fmt: skip
    save(database, "a5", short, "failed", session="a", parent="a3", segment=1, at=5.0, status=500)
    save(database, "b1", [SYSTEM, TASK], "No.", session="b", how="root")

    code, out, errors = run("a", "b", "-o", "json")

    assert code == 0, errors
    assert [one["session"] for one in json.loads(out)["sessions"]] == ["a", "b"]
    shown = sorted(shown_trajectories(judges[0].prompts[0]).values(), key=len)
    assert [line["content"] for line in shown[0]] == ["No."]
    assert [line["content"] for line in shown[1]] == [
        "Wait.",
        "And the fee?",
        "Hm.",
        "here the client shortened the conversation",
        "You give refunds.",
        "Summary: a fee",
        "Refunded.",
    ]


def test_what_is_known_of_tools_is_counted_once_where_a_later_part_repeats_it(
    database: Database, run: Run
) -> None:
    def result(content: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": "c1", "content": content}

    call = {"id": "c1", "type": "function", "function": {"name": "refund", "arguments": "{}"}}
    calling: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    well = result('{"content": [], "isError": false}')
    first = [SYSTEM, TASK, calling, well, result("Done."), result("Done.")]
    later = [SYSTEM, calling, result("Done."), calling, result("Error: no money"), well]
    save(database, "a1", first, "Wait.", session="a", how="root")
    save(database, "a2", later, "Refunded.", session="a", parent="a1", segment=1, at=2.0)
    save(database, "b1", [SYSTEM, TASK], "No.", session="b", how="root")

    code, out, errors = run("a", "b", "-o", "json")

    assert code == 0, errors
    sessions = json.loads(out)["sessions"]
    assert [one["tools"] for one in sessions] == ["1 ok, 1 failed, 2 unknown", None]
    assert "0.900  a  tools 1 ok, 1 failed, 2 unknown\n" in run("a", "b")[1]


def test_the_last_of_the_main_conversation_survives_circles_and_lost_parents() -> None:
    def step(name: str, parent: str | None, how: str = "answered", **changes: Any) -> Step:
        values = {"segment": 0, "began_at": 1.0, "fits": True, **changes}
        return Step(exchange_id=name, parent=parent, how=how, **values)

    assert last_of_each_part([]) == []
    assert last_of_each_part([step("a", None, fits=False)]) == []
    assert last_of_each_part([step("a", "b"), step("b", "a", began_at=2.0)]) == ["b"]
    below = [step("s", "gone", "called"), step("t", "s", began_at=9.0), step("m", "gone")]
    assert last_of_each_part(below) == ["m"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["a"], 1, "1 trajectories cannot be compared"),
        (["a", "gone"], 1, "no session gone is stored"),
        (["a", "a"], 1, "named twice"),
        (["a", "e"], 1, "session e has no answered chat"),
        (["a", "b", "--rubric", "gone.txt"], 2, "gone.txt cannot be read"),
        (["a", "b", "--passes", "9"], 2, "less than or equal to 8"),
    ],
)
def test_bad_use_is_one_line_and_the_judge_is_not_asked(
    arguments: list[str], code: int, said: str, database: Database, run: Run, judges: list[Any]
) -> None:
    save_three(database)
    save(database, "xe", [TASK], "x", session="e", how="root", surface="embeddings")

    ended, out, errors = run(*arguments)

    assert (ended, out) == (code, "")
    (line,) = errors.splitlines()
    assert said in line
    assert all(one.conversations == [] for one in judges)


def test_sessions_that_begin_differently_are_warned_of(database: Database, run: Run) -> None:
    save(database, "xa", [SYSTEM, TASK], "No.", session="a", how="root")
    save(database, "xb", [TASK], "Refunded.", session="b", how="root")
    code, _, errors = run("a", "b")
    assert code == 0
    assert "these sessions begin with different messages" in errors


def test_a_judge_that_is_away_is_one_line(
    database: Database, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> Any:
        raise JudgeUnavailableError("judge openai/x: down")

    monkeypatch.setattr(RankingJudge, "complete", away)
    save_three(database)
    code, out, errors = run("a", "b", "c")
    assert (code, out) == (1, "")
    assert errors.splitlines()[-1] == "sidecar: judge openai/x: down"


def test_sessions_of_a_project_are_ranked_by_its_rubric(
    database: Database, run: Run, judges: list[Any], tmp_path: Path
) -> None:
    config = tmp_path / "sidecar.toml"
    config.write_text(f'{config.read_text()}[judge.projects.shop]\nrubric = "Sell politely."\n')
    for name, reply, project in (("a", "No.", "shop"), ("b", "Refunded.", "shop"),
                                 ("c", "Refunded.", "default")):  # fmt: skip
        save(database, f"x{name}", [SYSTEM, TASK], reply, session=name, how="root", project=project)

    code, out, errors = run("a", "b", "-o", "json")

    assert code == 0, errors
    assert json.loads(out)["rubric_hash"] == rubric_hash("Sell politely.")
    assert "Grading standards:\nSell politely.\n" in judges[0].conversations[0][0]["content"]

    code, _, errors = run("a", "c")
    assert code == 2
    assert "the sessions are of projects with different rubrics (default, shop)" in errors
    (tmp_path / "own.txt").write_text("Be quick.")
    assert run("a", "c", "--rubric", str(tmp_path / "own.txt"))[0] == 0
    assert "Grading standards:\nBe quick.\n" in judges[-1].conversations[0][0]["content"]
