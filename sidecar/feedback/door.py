"""The two routes of feedback: `POST /sidecar/v1/feedback` and `POST /sidecar/v1/outcomes`.

The relay has checked the API key, counted the request against its limits and bounded the body; it
names project, key and user in headers that no client can send. Where vLLM checks the keys
(`access.mode = "upstream"`), vLLM is asked here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import structlog

from sidecar.access.header_names import OWN_KEY_ID, OWN_PROJECT, OWN_USER
from sidecar.errors import OutboxError
from sidecar.feedback.reading import Caller, FeedbackRefusedError, read_feedback
from sidecar.feedback.record import Feedback, Kind
from sidecar.feedback.writer import FeedbackWriter
from sidecar.metrics.proxy import Metrics
from sidecar.routing.session_key import DEFAULT_PROJECT, header_name, short_name

log = structlog.get_logger()
RANDOM_BYTES: Final = 16
MayAsk = Callable[[bytes | None], Awaitable[int | None]]
"""Ask vLLM whether it knows this `Authorization`. Returns: the status of its reply; None: it gave
none."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The record is on the disk of the proxy."""

    feedback_id: str


class FeedbackDoor:
    """Answers the requests of one proxy process."""

    def __init__(
        self,
        writer: FeedbackWriter,
        metrics: Metrics,
        *,
        may_ask: MayAsk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """may_ask: None when the relay itself checks the API keys, or asks for none."""
        self._writer = writer
        self._metrics = metrics
        self._may_ask = may_ask
        self._clock = clock

    async def take(self, kind: Kind, body: bytes, headers: dict[bytes, bytes]) -> Accepted:
        """Write the record of a request. headers: by lower-case name.

        Raises: FeedbackRefusedError, counted by its reason.
        """
        try:
            await self._check_sender(headers.get(b"authorization"))
            record = read_feedback(
                kind,
                body,
                _caller(headers),
                idempotency_key=header_name(headers.get(b"idempotency-key")),
                fresh_id=os.urandom(RANDOM_BYTES).hex(),
                now=self._clock(),
            )
            await self._write(record)
        except FeedbackRefusedError as error:
            self._metrics.feedback_refused.inc((error.reason,))
            raise
        self._metrics.feedback_accepted.inc((kind,))
        return Accepted(record.feedback_id)

    async def stop(self) -> None:
        await self._writer.stop()

    async def _write(self, record: Feedback) -> None:
        try:
            await self._writer.put(record)
        except OutboxError as error:
            log.warning("feedback_not_written", reason=error.reason, error=str(error))
            raise FeedbackRefusedError(
                503,
                error.reason,
                f"The sidecar cannot write feedback now ({error.reason}); send it again.",
            ) from error

    async def _check_sender(self, authorization: bytes | None) -> None:
        if self._may_ask is None:
            return
        status = await self._may_ask(authorization)
        if status is None:
            raise FeedbackRefusedError(
                503, "vllm_away", "vLLM, which checks the keys, gave no answer; send it again."
            )
        if status != 200:
            raise FeedbackRefusedError(
                401 if status == 401 else 403, "vllm_denied", "vLLM does not accept this key."
            )


def _caller(headers: dict[bytes, bytes]) -> Caller:
    return Caller(
        project=headers.get(OWN_PROJECT, b"").decode("ascii", "replace") or DEFAULT_PROJECT,
        key_id=headers.get(OWN_KEY_ID, b"").decode("ascii", "replace"),
        user=short_name(header_name(headers.get(OWN_USER))),
    )
