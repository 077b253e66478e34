"""Plays many conversations at once and orders their requests as a sidecar hands them over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from benchmarks.sessions import bfcl, tau2
from benchmarks.sessions.play.agent import Conversation, Sent
from benchmarks.sessions.play.clients import Client
from benchmarks.sessions.play.shapes import Shape, plain
from benchmarks.sessions.records import SentRequest
from benchmarks.sessions.tasks import Task

EPOCH = 1_760_000_000.0
"""When each stream begins, in Unix seconds."""
SPACING_S = 1.2
"""Between two first requests: with conversations of a minute and more, 50 and more run at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The tasks of both packages, by set and by domain."""

    bfcl: dict[str, list[Task]]
    tau2: dict[str, list[Task]]

    @classmethod
    def read(cls, folder: Path) -> Data:
        """Read the packages that lie in the folder. Raises: OSError when they do not."""
        return cls(
            bfcl={name: bfcl.read_set(folder / "bfcl_eval", name) for name in bfcl.SETS},
            tau2={name: tau2.read_domain(folder / "inspect_evals", name) for name in tau2.DOMAINS},
        )

    def general(self) -> list[Task]:
        """Tasks of several kinds that begin differently: 364 with the real packages."""
        return [*self.bfcl["base"], *self.tau2["airline"], *self.tau2["retail"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One conversation to be played."""

    task: Task
    client: Client
    shape: Shape = plain
    session: str = ""
    """The true session, when several parts share one."""
    delay_s: float = 0.0
    """Beginning after its turn."""


Choose = Callable[[Task, Random], Client]


def some_surface(task: Task, rng: Random) -> Client:
    """Mostly chat, some of the others."""
    return Client(surface=rng.choices(("chat", "responses", "messages"), (8, 1, 1))[0])


def parts(
    tasks: Iterable[Task], client: Client | Choose, shape: Shape = plain, *, seed: str
) -> list[Part]:
    """One conversation for each task."""
    rng = Random(f"{seed}\x00clients")
    return [
        Part(
            task=task,
            client=client if isinstance(client, Client) else client(task, rng),
            shape=shape,
        )
        for task in tasks
    ]


def play(
    parts: Sequence[Part], *, seed: str, late: float = 0.0, spacing_s: float = SPACING_S
) -> list[SentRequest]:
    """Play the parts, each `spacing_s` after the one before. late: share of records that are handed
    over up to a minute late."""
    sent: list[Sent] = []
    for number, part in enumerate(parts):
        name = f"{seed}-{number}"
        conversation = Conversation(name=name, client=part.client, rng=Random(name))
        part.shape(conversation, part.task, EPOCH + number * spacing_s + part.delay_s)
        if part.session:
            for one in conversation.sent:
                own = replace(one.request, true_session=part.session)
                sent.append(replace(one, request=own))
        else:
            sent += conversation.sent
    rng = Random(f"{seed}\x00late")
    if late:
        sent = [
            replace(one, ended=one.ended + rng.uniform(1, 60)) if rng.random() < late else one
            for one in sent
        ]
    sent.sort(key=lambda one: (one.ended, one.request.exchange_id))
    return [replace(one.request, handed_at=one.ended) for one in sent]


def at_once(stream: Sequence[SentRequest]) -> int:
    """Conversations that have begun and not ended, in the middle of a stream."""
    middle = stream[len(stream) // 2].at
    times: dict[str, list[float]] = {}
    for one in stream:
        times.setdefault(one.true_session, []).append(one.at)
    return sum(min(spans) <= middle <= max(spans) for spans in times.values())
