"""Best of N, the scoring process's side: judge answers while a user waits, keep them.

Each question is one task and uses the same code as every other judgement: RULER, one pass. The
verdict is returned first, and the store is written after that. A judgement that has begun is
completed even when the asking proxy disconnects: its scores serve training all the same. While the
judge is down, questions are declined at once, so that users do not wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import structlog
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from ingest.errors import (
    JudgeGarbledError,
    JudgeLimitedError,
    JudgeRejectedError,
    JudgeSpentError,
    UnreadableExchangesError,
)
from ingest.grouping.features import turn_of
from ingest.grouping.selection import (
    BACKLOG,
    CHOSEN,
    RATE,
    RETRIED_TURN,
    TURN_DECIDED,
    Live,
    Rules,
    group_id_of,
    judged_group,
    live_now,
    rules_now,
    rules_of,
)
from ingest.judge_prompt import shown_answer
from ingest.privacy.texts import JudgeView
from ingest.records import Answer, Group
from ingest.ruler.calls import save_judge_calls
from ingest.ruler.group import (
    REFUSED,
    TOO_LONG,
    GroupOutcome,
    Scored,
    SetAside,
    Unanswered,
    judge_group,
)
from ingest.ruler.judge import Judge
from ingest.ruler.prompt import hash_of, read_material
from ingest.ruler.ruler import SEED_BITS, JudgeCall
from ingest.ruler.waiting import Waiting
from ingest.store.exchanges import NEW, StoredExchange, load_exchange, set_selection, turns_with
from ingest.store.groups import keep_scores, load_group, mark_sampled, mark_scored, save_group
from ingest.store.listing import patiently
from ingest.store.sessions import count_by_session
from sidecar.errors import StoreError
from sidecar.records import Exchange
from sidecar.scoring import (
    CONCURRENCY,
    MAX_QUESTION_BYTES,
    Material,
    NoPick,
    NothingSaidError,
    Pick,
    Verdict,
    WireError,
    encode_frame,
    read_frame,
    read_material as read_frame_material,
)
from sidecar.settings import Settings
from sidecar.store.contents import keyring_of
from sidecar.store.database import Database, count, insert_into
from sidecar.store.keyring import MissingKeyError, place_in
from sidecar.store.models import BestOfScoreRow
from sidecar.unix_socket import bind, kernel_path

# Scores of best-of-N requests in the store, until their exchange arrives.

STAGE = "best_of"
"""Stage of the counter rows: ("best_of", outcome) -> requests."""
UNREADABLE = "unreadable"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfScores:
    """The judge's scores of one request's answers, given while its user waited."""

    exchange_id: str
    at: float
    answers_digest: str
    """Hash of the judged answers, as the judge saw them, in order."""
    scores: tuple[float, ...]
    """[N] unitless, 0..1, by choice index."""
    explanations: tuple[str, ...]
    """[N] the judge's explanations, by choice index."""
    judge_model: str
    rubric_hash: str


def save_scores(session: Session, scores: BestOfScores) -> bool:
    """Store the scores. Returns: False, with nothing changed, when the exchange has some."""
    statement = (
        insert_into(session, BestOfScoreRow)
        .on_conflict_do_nothing()
        .values(
            exchange_id=scores.exchange_id,
            at=scores.at,
            answers_digest=scores.answers_digest,
            scores=list(scores.scores),
            explanations=[
                keyring_of(session).seal_text(words, _place(scores.exchange_id))
                for words in scores.explanations
            ],
            judge_model=scores.judge_model,
            rubric_hash=scores.rubric_hash,
        )
    )
    return session.scalar(statement.returning(BestOfScoreRow.exchange_id)) is not None


def load_scores(session: Session, exchange_ids: Sequence[str]) -> dict[str, BestOfScores]:
    """Return the scores that wait for these exchanges, by exchange id; damaged ones are removed."""
    if not any_scores(session):
        return {}  # nearly always
    rows = session.scalars(
        select(BestOfScoreRow).where(BestOfScoreRow.exchange_id.in_(exchange_ids))
    )
    return {scores.exchange_id: scores for scores in _readable(session, rows.all())}


def oldest_scores(session: Session, *, limit: int) -> list[BestOfScores]:
    """List waiting scores, the oldest first; damaged ones are removed."""
    rows = session.scalars(select(BestOfScoreRow).order_by(BestOfScoreRow.at).limit(limit))
    return _readable(session, rows.all())


def any_scores(session: Session) -> bool:
    return session.scalar(select(BestOfScoreRow.exchange_id).limit(1)) is not None


def remove_scores(session: Session, exchange_id: str) -> None:
    session.execute(delete(BestOfScoreRow).where(BestOfScoreRow.exchange_id == exchange_id))


def _place(exchange_id: str) -> bytes:
    return place_in("best_of_score", "explanations", exchange_id)


def _readable(session: Session, rows: Sequence[BestOfScoreRow]) -> list[BestOfScores]:
    """Read rows. A damaged one is counted and removed; selection then decides its exchange."""
    found = []
    for row in rows:
        values = {field.name: getattr(row, field.name) for field in fields(BestOfScores)}
        try:
            scores = msgspec.convert(values, BestOfScores)
            opened = tuple(
                keyring_of(session).open_text(words, _place(row.exchange_id))
                for words in scores.explanations
            )
            found.append(replace(scores, explanations=opened))
        except MissingKeyError as error:
            log.error("best_of_scores_unreadable", exchange_id=row.exchange_id, why=str(error))
        except ValueError as error:
            log.error("best_of_scores_unreadable", exchange_id=row.exchange_id, why=str(error))
            remove_scores(session, row.exchange_id)
            count(session, STAGE, UNREADABLE)
    return found


# Join the scores of a best-of-N request with its exchange to one scored group.

SCORED = "scored"
ANSWERS_DIFFER = "answers_differ"
CAME_SECOND = "came_second"
LEFT_OUT = (NEW, BACKLOG, RATE)
"""Selections of exchanges that were left out only for their cost, or are not decided yet."""


def answers_digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """Hash answers by what the judge saw of them, in order. Pure."""
    shown = [shown_answer(message) for message in messages]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def settle_new(
    session: Session,
    batch: Sequence[StoredExchange],
    rules: Rules,
    *,
    live: Live,
    now: float,
) -> list[StoredExchange]:
    """Make the groups of those exchanges whose scores wait in the store.

    Returns: the other exchanges of the batch, for selection to decide.
    """
    waiting = load_scores(session, [stored.exchange.exchange_id for stored in batch])
    return [
        stored
        for stored in batch
        if (scores := waiting.get(stored.exchange.exchange_id)) is None
        or not settle(session, stored, scores, rules, live=live, now=now)
    ]


def settle(
    session: Session,
    stored: StoredExchange,
    scores: BestOfScores,
    rules: Rules,
    *,
    live: Live,
    now: float,
) -> bool:
    """Join scores and exchange, and remove the waiting scores.

    Returns: True when a group was made. Otherwise the reason is counted, and the exchange stays
        unchanged.
    """
    remove_scores(session, scores.exchange_id)
    reason = _settle(session, stored, scores, rules, live, now)
    count(session, STAGE, reason)
    return reason == SCORED


def _settle(
    session: Session,
    stored: StoredExchange,
    scores: BestOfScores,
    rules: Rules,
    live: Live,
    now: float,
) -> str:
    exchange = stored.exchange
    if _digest(exchange) != scores.answers_digest:
        return ANSWERS_DIFFER
    chosen = stored.selection == CHOSEN
    by_session = (
        {}
        if chosen
        else count_by_session(session, [stored.session_id], since=now - rules.session_window_s)
    )
    group = judged_group(
        exchange,
        stored.held_out,
        live_adapters=live.of(exchange.project),
        session_id=stored.session_id,
        in_session=by_session.get(stored.session_id, 0),
        rules=rules,
    )
    if isinstance(group, str):
        return group
    turn = turn_of(exchange)
    undecided = turn is not None and stored.selection in (NEW, BACKLOG)
    if turn is not None and undecided and turns_with(session, {turn}, selections=TURN_DECIDED):
        return RETRIED_TURN
    if not chosen and stored.selection not in LEFT_OUT:
        return CAME_SECOND  # left out for another reason, which is not decided again
    if chosen:
        held = load_group(session, group.group_id)
        if held is None or held.answers != group.answers:
            return CAME_SECOND  # it has candidates
    elif not save_group(session, group, now=now):
        return CAME_SECOND
    else:
        set_selection(session, [exchange.exchange_id], CHOSEN)
        count(session, "selection", CHOSEN)
        if stored.selection != NEW:
            count(session, "selection", stored.selection, -1)
    mark_sampled(session, group.group_id)
    judged = (scores.scores, scores.explanations, scores.judge_model, scores.rubric_hash)
    if rules.verified:  # score lets verifiers check it, and does not ask the judge again
        keep_scores(session, group.group_id, *judged)
        return SCORED
    return SCORED if mark_scored(session, group.group_id, *judged, now) else CAME_SECOND


def _digest(exchange: Exchange) -> str | None:
    try:
        return answers_digest([json.loads(choice.message) for choice in exchange.choices])
    except (ValueError, TypeError, AttributeError):  # not messages: nothing was judged of the kind
        return None


EXPIRE_S = 86_400.0
"""Age after which scores without an exchange (its capture was lost) are given up."""
SWEEP_S = 60.0
SWEEP_LIMIT = 500
LONGEST_KEPT_S = 600.0
"""Longest time that scores are kept for a store that refuses them."""
MOST_KEPT = 64
"""Questions whose scores wait for the store; more are given up at once, since each holds a request
in memory."""
STOP_GRACE_S = 15.0
"""Longest time that a stop waits for the store; as `ingest.ruler.judging.STOP_GRACE_S`."""
NEVER_CAME = "exchange_never_came"
NOT_KEPT = "not_kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One question with its outcome and judge calls."""

    material: Material
    group: Group
    outcome: GroupOutcome
    calls: tuple[JudgeCall, ...]


class BestOfJudge:
    """Judges questions and keeps the scores. Belongs to one event loop."""

    def __init__(
        self,
        database: Database,
        judge: Judge,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.time,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS),
    ) -> None:
        self._database = database
        self._judge = judge
        # One pass only: passes are sequential calls, and a user is waiting.
        self._settings = settings.judge.model_copy(update={"passes": 1})
        self._rules = rules_of(settings)
        self._view = JudgeView(settings.privacy)
        self._model = settings.serving.model
        self._clock = clock
        self._draw_seed = draw_seed
        self._waiting = Waiting()
        self._judging: set[asyncio.Task[Verdict]] = set()
        self._keeping: set[asyncio.Task[None]] = set()

    async def decide(self, material: Material) -> Verdict:
        """Return the best answer, or the reason why there is none.

        Cancelling the caller does not stop the judgement.
        """
        if len(self._judging) >= CONCURRENCY:
            return NoPick(reason="busy")
        _, why = self._waiting.free_at(self._clock())
        if why != "free":
            return NoPick(reason="judge_down" if why == "failing" else JudgeSpentError.reason)
        task = asyncio.create_task(self._judge_now(material))
        self._judging.add(task)
        task.add_done_callback(self._judging.discard)
        return await asyncio.shield(task)

    async def settled(self) -> None:
        """Wait until every question in progress is judged and stored."""
        while self._judging or self._keeping:
            await asyncio.wait({*self._judging, *self._keeping})

    async def aclose(self) -> None:
        """Cancel the judgements in progress, and store those that have ended."""
        for task in self._judging:
            task.cancel()
        await asyncio.gather(*self._judging, return_exceptions=True)
        if not self._keeping:
            return
        _, late = await asyncio.wait(self._keeping, timeout=STOP_GRACE_S)
        for waiting in late:
            waiting.cancel()
        if late:
            log.warning("best_of_scores_lost", questions=len(late), error="the process stops")

    async def sweep(self) -> None:
        """Settle scores that were left over, or give them up; see `EXPIRE_S`."""
        try:
            await asyncio.to_thread(self._sweep)
        except StoreError as error:
            log.warning("best_of_sweep_failed", error=str(error))

    async def _judge_now(self, material: Material) -> Verdict:
        group = _as_group(material)
        calls: list[JudgeCall] = []
        try:
            outcome = await judge_group(
                group,
                self._judge,
                self._settings.of(group.project),
                seed=self._draw_seed(),
                on_call=calls.append,
                view=self._view,
            )
        except StoreError as error:  # a budget is set, and nobody can know what is spent
            log.warning("best_of_not_judged", error=str(error))
            return NoPick(reason="failed")
        self._note_outage(outcome)
        judged = Judged(material=material, group=group, outcome=outcome, calls=tuple(calls))
        keeping = asyncio.create_task(self._keep(judged))
        self._keeping.add(keeping)
        keeping.add_done_callback(self._keeping.discard)
        return _verdict(outcome)

    def _note_outage(self, outcome: GroupOutcome) -> None:
        if isinstance(outcome, Unanswered):
            if outcome.reason == JudgeSpentError.reason:
                self._waiting = self._waiting.withheld(outcome.until or 0.0)
            if outcome.until is not None or _why_unanswered(outcome) == REFUSED:
                return  # our own limits, or this question only: the judge is not down
            if not self._waiting.lasts:
                log.warning("best_of_judge_down", model=self._judge.model, error=outcome.detail)
            self._waiting = self._waiting.failed(self._clock(), retry_after_s=outcome.retry_after_s)
        elif isinstance(outcome, Scored) or outcome.asked:
            if (since := self._waiting.failing_since) is not None:
                log.warning("best_of_judge_up", lasted_s=round(self._clock() - since, 1))
            self._waiting = self._waiting.answered()

    async def _keep(self, judged: Judged) -> None:
        exchange_id = judged.material.exchange_id
        many = len(self._keeping) > MOST_KEPT
        try:
            await patiently(
                lambda: self._store(judged),
                on_failure=lambda error, pause_s: log.warning(
                    "best_of_scores_wait",
                    exchange_id=exchange_id,
                    error=str(error),
                    again_s=pause_s,
                ),
                longest_s=0.0 if many else LONGEST_KEPT_S,
            )
        except StoreError as error:
            # The user has the answer; the exchange is selected and judged like any other.
            log.warning("best_of_scores_lost", exchange_id=exchange_id, error=str(error))

    def _store(self, judged: Judged) -> None:
        now, outcome, keep = self._clock(), judged.outcome, judged.material.keep
        rubric_hash = hash_of(self._settings.of(judged.group.project))
        with self._database.write() as session:
            if keep:
                save_judge_calls(
                    session,
                    judged.group.group_id,
                    judged.calls,
                    rubric_hash=rubric_hash,
                    now=now,
                )
            else:  # the calls quote the answers, so they are stored only with an exchange
                for call in judged.calls:
                    count(session, "judge_calls", "good" if call.ok else "bad")
            if isinstance(outcome, Unanswered):
                count(session, "judge_calls", "unanswered")
                count(session, "judge_failures", outcome.reason)
                count(session, STAGE, _why_unanswered(outcome))
            elif isinstance(outcome, SetAside):
                count(session, STAGE, outcome.reason)
            elif not keep:
                count(session, STAGE, NOT_KEPT)
            else:
                judgement = outcome.judgement
                scores = BestOfScores(
                    exchange_id=judged.group.exchange_id,
                    at=now,
                    answers_digest=answers_digest(read_material(judged.group).answers),
                    scores=judgement.scores,
                    explanations=judgement.explanations,
                    judge_model=judgement.judge_model or self._judge.model,
                    rubric_hash=rubric_hash,
                )
                save_scores(session, scores)
                stored = self._exchange(session, scores.exchange_id)
                if stored is not None and stored.selection != NEW:  # selection has decided it
                    live = live_now(session, self._model, self._rules)
                    settle(
                        session, stored, scores, rules_now(session, self._rules), live=live, now=now
                    )

    def _exchange(self, session: Session, exchange_id: str) -> StoredExchange | None:
        """Load an exchange; None also when it is damaged: its scores then make no group."""
        try:
            return load_exchange(session, exchange_id)
        except UnreadableExchangesError as error:
            log.error("exchange_unreadable", exchange_id=exchange_id, why=str(error))
            return None

    def _sweep(self) -> None:
        now = self._clock()
        with self._database.read() as session:
            if not any_scores(session):
                return  # nearly always: take no write lock
        with self._database.write() as session:
            live = live_now(session, self._model, self._rules)
            for scores in oldest_scores(session, limit=SWEEP_LIMIT):
                stored = self._exchange(session, scores.exchange_id)
                if stored is not None and stored.selection != NEW:
                    settle(
                        session, stored, scores, rules_now(session, self._rules), live=live, now=now
                    )
                elif stored is None and scores.at < now - EXPIRE_S:
                    remove_scores(session, scores.exchange_id)
                    count(session, STAGE, NEVER_CAME)


def _as_group(material: Material) -> Group:
    """Convert a question to a group record; its ids and adapter come with the exchange."""
    return Group(
        group_id=group_id_of(material.exchange_id),
        exchange_id=material.exchange_id,
        session_key="",
        project=material.project,
        adapter="",
        request=material.request,
        prompt_token_ids=(),
        answers=tuple(
            Answer(index=index, origin="served", message=message)
            for index, message in enumerate(material.answers)
        ),
    )


def _why_unanswered(outcome: Unanswered) -> str:
    """Return the reason for the user: the judge is down or withheld, or refuses this question."""
    if outcome.reason == JudgeSpentError.reason:
        return outcome.reason
    if outcome.reason == JudgeLimitedError.reason:
        return "busy"
    refused = (JudgeRejectedError.reason, JudgeGarbledError.reason)
    return REFUSED if outcome.reason in refused else "judge_down"


def _verdict(outcome: GroupOutcome) -> Verdict:
    if isinstance(outcome, Unanswered):
        return NoPick(reason=_why_unanswered(outcome))
    if isinstance(outcome, SetAside):
        return NoPick(reason=REFUSED if outcome.reason == TOO_LONG else outcome.reason)
    scores = outcome.judgement.scores
    # Among equal scores the first answer wins: without best of N the user would get it too.
    return Pick(index=scores.index(max(scores)), scores=scores)


# Listen for best-of-N questions on a Unix socket in `state_dir`, open to this user only.

QUESTION_TIMEOUT_S = 5.0
"""Timeout for receiving a whole question from a process on this machine."""
TAKE_OVER_S = 2.0
"""Interval at which a second scoring process checks whether the first has ended."""


class BestOfServer:
    """Answers questions until stopped. Of several servers on one machine, one listens."""

    def __init__(self, path: Path, judge: BestOfJudge) -> None:
        self._path = path
        self._judge = judge
        self._waited = False

    async def run(self, stop: asyncio.Event) -> None:
        """Listen until `stop` is set, then store the finished judgements."""
        listener = await self._take_path(stop)
        if listener is None:
            return
        server = await asyncio.start_unix_server(self._serve, sock=listener)
        own = self._path.stat().st_ino
        log.info("best_of_listens", path=str(self._path))
        try:
            while not stop.is_set():
                await self._judge.sweep()
                await _wait(stop, SWEEP_S)
        finally:
            server.close()
            if self._path.exists() and self._path.stat().st_ino == own:
                self._path.unlink()
            await self._judge.aclose()

    async def _take_path(self, stop: asyncio.Event) -> socket.socket | None:
        """Return the listening socket; None if stopped while another process holds the path."""
        while not stop.is_set():
            if not await _answers(self._path):
                return bind(self._path)
            if not self._waited:
                self._waited = True
                log.info("best_of_waits", why="another scoring process listens")
            await _wait(stop, TAKE_OVER_S)
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            material = await _question(reader)
            if material is not None:
                writer.write(encode_frame(await self._judge.decide(material)))
                await writer.drain()
        except OSError as error:  # the proxy no longer waits
            log.debug("best_of_asker_left", error=str(error))
        finally:
            writer.close()


async def _question(reader: asyncio.StreamReader) -> Material | None:
    """Read a question; None when there is no valid one. Raises: OSError."""
    try:
        async with asyncio.timeout(QUESTION_TIMEOUT_S):
            frame = await read_frame(reader, limit=MAX_QUESTION_BYTES)
        return read_frame_material(frame)
    except TimeoutError:
        log.warning("best_of_question_refused", why="it did not arrive in time")
    except NothingSaidError:
        log.debug("best_of_looked_at")
    except WireError as error:
        log.warning("best_of_question_refused", why=str(error))
    return None


async def _answers(path: Path) -> bool:
    try:
        with kernel_path(path) as name:
            _, writer = await asyncio.open_unix_connection(name)
    except OSError:
        return False
    writer.close()
    return True


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), timeout=seconds)
    except TimeoutError:
        return
