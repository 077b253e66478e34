"""Best of N, between a flight and its upstream connection.

`BestOf` is the state of one request: what is asked, how it ended, what the reply's header says.
`BestOfConnection` replaces the flight's upstream connection and has its interface. It holds vLLM's
reply, has it judged, and gives the flight the head, body and end of a plain reply: to the flight
one answer was asked for and took a little longer. A reply without N answers (an error, an adapter
that vLLM does not know) is passed on unchanged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sidecar.errors import UNREADABLE_JSON
from sidecar.metrics.proxy import Metrics
from sidecar.relay.best_of.plan import BestOfPlan
from sidecar.relay.best_of.reply import (
    Answers,
    UnreadableAnswersError,
    read_answers,
    stream_reply,
    whole_reply,
)
from sidecar.relay.http1.heads import ReplyHeaders
from sidecar.relay.http1.reply_parser import ReplyHead, ReplyReader
from sidecar.relay.payload.reply_edit import MAX_HELD_BYTES
from sidecar.relay.payload.request_edit import PiecedBody
from sidecar.relay.upstream.connection import SendingConnection
from sidecar.scoring.client import Picker
from sidecar.scoring.wire import Material, NoPick, Pick, Verdict

REPLY_HEADER = "x-sidecar-best-of"
STREAM_TYPE = b"text/event-stream; charset=utf-8"


class BestOf:
    """One request for best of N, from its plan to its metrics. `close` it once, at the end."""

    def __init__(
        self,
        plan: BestOfPlan | str,
        picker: Picker,
        metrics: Metrics,
        *,
        exchange_id: str,
        request: bytes,
        keep: bool,
        project: str,
        timeout_s: float,
    ) -> None:
        """plan: a text says why N answers are not asked for. request: the client's body. keep: the
        exchange is recorded. project: of the client's key.

        timeout_s: how long the judge may take.
        """
        if not isinstance(plan, str) and not picker.ready:
            plan = "not_ready"  # no judge would choose: N answers would be sampled for nothing
        self.plan = None if isinstance(plan, str) else plan
        """None: send the plain request over the plain connection."""
        self.picker = picker
        self.timeout_s = timeout_s
        self.returned_index = 0
        """Which of vLLM's choices the client got; for the record."""
        self._fallback: str | None = plan if isinstance(plan, str) else None
        self._picked = False
        self._metrics = metrics
        self._exchange_id = exchange_id
        self._request = request
        self._keep = keep
        self._project = project
        self._sampled = 1

    def plain_instead(self, status: int) -> bool:
        """True when vLLM's reply to N says that the plain request should be sent instead: once.

        It refuses `n` for reasons of its own, such as a default temperature of 0. Where it was the
        client's own mistake it says so again, to the client's own request.
        """
        if status != 400 or self.plan is None:
            return False
        self.send_plainly()
        return True

    def send_plainly(self) -> None:
        """One answer is asked for from now on, because vLLM refused the request for several."""
        self.plan = None
        self._fallback = "refused"
        self._sampled = 1

    def material(self, answers: Answers) -> Material:
        self._sampled = len(answers.messages)
        return Material(
            exchange_id=self._exchange_id,
            request=self._request,
            answers=answers.messages,
            keep=self._keep,
            project=self._project,
        )

    def decide(self, verdict: Verdict, answers: Answers, waited_s: float) -> int:
        """Note the verdict. Returns: the index of the answer to return."""
        self._metrics.best_of_judge.observe(waited_s)
        if isinstance(verdict, Pick):
            self.returned_index, self._picked, self._fallback = verdict.index, True, None
        else:
            self._fallback = verdict.reason
        kept = answers.tokens[self.returned_index]
        if kept is not None:
            self._metrics.best_of_unreturned_tokens.inc(answers.completion_tokens - kept)
        return self.returned_index

    def fell_back(self, reason: str) -> None:
        """Note why the client gets no chosen answer; a later attempt may still give one."""
        self._fallback, self._picked, self.returned_index = reason, False, 0

    @property
    def own_lines(self) -> tuple[bytes, ...]:
        """The reply's header: how many were sampled, which one this is, and why if none was
        chosen."""
        line = f"{REPLY_HEADER}: {self._sampled};picked={self.returned_index}"
        if not self._picked:
            line += f";fallback={self._fallback or 'cut'}"
        return (line.encode(),)

    def close(self) -> None:
        """Count the request as picked, or as fallen back for one reason."""
        self._metrics.best_of_requests.inc()
        if self._picked:
            answer = "other" if self.returned_index else "first"
            self._metrics.best_of_picked.inc((answer,))
        else:
            self._metrics.best_of_fallbacks.inc((self._fallback or "cut",))


class BestOfConnection(ReplyReader):
    """One sending of a best-of-N request: a `ReplyReader` to vLLM, a connection to the flight.

    on_chunk: gets vLLM's bytes as they come: the capture holds all N answers, and all are charged.
    """

    def __init__(
        self,
        connection: SendingConnection,
        best_of: BestOf,
        plan: BestOfPlan,
        on_chunk: Callable[[bytes], None],
    ) -> None:
        self._upstream: SendingConnection | None = connection
        """None once its reply has ended: it may carry another request by then."""
        self._best_of = best_of
        self._plan = plan
        self._on_chunk = on_chunk
        self._reader: ReplyReader | None = None
        self._head: ReplyHead | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._passing = False
        self._asking: asyncio.Task[Verdict] | None = None

    # -- as the flight's connection

    def send(
        self, reader: ReplyReader, head: bytes, body: bytes | PiecedBody, *, head_only: bool
    ) -> None:
        assert self._upstream is not None, "one request each"
        self._reader = reader
        self._upstream.send(self, head, body, head_only=head_only)

    def abort(self) -> None:
        """The client is gone: stop waiting for the pick. The judge goes on by itself."""
        self._reader = None
        if self._upstream is not None:
            self._upstream.abort()
        elif self._asking is not None:
            self._asking.cancel()

    def pause(self) -> None:
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()

    # -- as vLLM's reader

    def reply_head(self, head: ReplyHead) -> None:
        self._head = head
        if head.status != 200 or head.headers.encoded:
            self._pass_on("not_200" if head.status != 200 else "encoded")

    def reply_body(self, data: bytes) -> None:
        self._on_chunk(data)
        if self._passing:
            if self._reader is not None:
                self._reader.reply_body(data)
            return
        self._chunks.append(data)
        self._size += len(data)
        if self._size > MAX_HELD_BYTES:
            self._pass_on("too_large")

    def pass_chunks(self, framed: bytes, received_at: float) -> bool:
        return False

    def batch_end(self, *, complete: bool, received_at: float) -> None:
        if complete:
            self._upstream = None
        if self._reader is None:
            return
        if self._passing or self._head is None:
            self._reader.batch_end(complete=complete, received_at=received_at)
        elif complete:
            self._judge(received_at)

    def upstream_lost(self, why: str, *, nothing_came: bool, reused: bool) -> None:
        self._upstream = None
        if self._reader is not None:
            self._best_of.fell_back("upstream_lost")
            self._reader.upstream_lost(why, nothing_came=nothing_came, reused=reused)

    # -- between the two

    def _pass_on(self, reason: str) -> None:
        """Pass vLLM's reply on unchanged, from here to its end."""
        self._passing = True
        self._best_of.fell_back(reason)
        if self._reader is None or self._head is None:
            return
        self._reader.reply_head(self._head)
        for chunk in self._chunks:
            self._reader.reply_body(chunk)
        self._chunks.clear()

    def _judge(self, received_at: float) -> None:
        try:
            answers = read_answers(b"".join(self._chunks), self._plan.n)
        except UnreadableAnswersError:
            self._hand_over_unread(received_at)
            return
        best_of, began = self._best_of, time.perf_counter()
        asking = asyncio.ensure_future(
            best_of.picker.pick(best_of.material(answers), best_of.timeout_s)
        )
        self._asking = asking

        def judged(_: asyncio.Future[Verdict]) -> None:
            if asking.cancelled():
                return
            # A picker should not raise; if one does, the client still gets an answer.
            verdict = NoPick(reason="failed") if asking.exception() else asking.result()
            ended = time.perf_counter()
            picked = best_of.decide(verdict, answers, ended - began)
            self._hand_over(answers, picked, ended)

        asking.add_done_callback(judged)

    def _hand_over(self, answers: Answers, picked: int, received_at: float) -> None:
        reader, head, plan = self._reader, self._head, self._plan
        if reader is None or head is None:
            return
        try:
            if plan.stream:
                body = stream_reply(
                    answers,
                    picked,
                    plan.strip,
                    include_usage=plan.include_usage,
                    continuous_usage=plan.continuous_usage,
                )
            else:
                body = whole_reply(answers, picked, plan.strip)
        except (LookupError, *UNREADABLE_JSON):  # vLLM does not write such a message
            self._hand_over_unread(received_at)
            return
        self._chunks.clear()
        if plan.stream:
            head = ReplyHead(head.status, head.reason, _as_stream(head.headers), None)
        else:
            head = ReplyHead(head.status, head.reason, head.headers, len(body))
        reader.reply_head(head)
        reader.reply_body(body)
        reader.batch_end(complete=True, received_at=received_at)

    def _hand_over_unread(self, received_at: float) -> None:
        self._pass_on("unreadable_reply")
        if self._reader is not None:
            self._reader.batch_end(complete=True, received_at=received_at)


def _as_stream(headers: ReplyHeaders) -> ReplyHeaders:
    """The headers of vLLM's whole reply, for the same reply as a stream."""
    streamed = ReplyHeaders()
    streamed.lines = [line for line in headers.lines if line[:13].lower() != b"content-type:"]
    streamed.lines.append(b"content-type: " + STREAM_TYPE)
    streamed.content_type = STREAM_TYPE
    return streamed
