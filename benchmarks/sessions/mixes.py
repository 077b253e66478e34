"""The mixes: each a stream with one difficulty, the same at each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from benchmarks.sessions.play import compaction, given, shapes
from benchmarks.sessions.play.clients import Client
from benchmarks.sessions.play.delegation import sub_agents
from benchmarks.sessions.records import SentRequest
from benchmarks.sessions.streams import SPACING_S, Choose, Data, Part, parts, play, some_surface
from benchmarks.sessions.tasks import Task

GENERAL_SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A stream and what is asked of a finder on it."""

    name: str
    what: str
    make: Callable[[Data, str], list[SentRequest]]
    """Given the data and a seed."""
    target: float = 0.99
    """Least share of requests in the right session, and with the right parent."""


def _each(
    pick: Callable[[Data], Sequence[Task]],
    client: Client | Choose = some_surface,
    shape: shapes.Shape = shapes.plain,
    late: float = 0.0,
) -> Callable[[Data, str], list[SentRequest]]:
    """One conversation for each picked task."""

    def make(data: Data, seed: str) -> list[SentRequest]:
        return play(parts(pick(data), client, shape, seed=seed), seed=seed, late=late)

    return make


def _alike(data: Data) -> list[Task]:
    """All sets of BFCL, the four that begin alike next to each other."""
    return [task for four in zip(*data.bfcl.values(), strict=True) for task in four]


def _openers(data: Data) -> list[Task]:
    return [replace(task, system=GENERAL_SYSTEM, tools=()) for task in data.general()]


def _two_users(data: Data, seed: str, *, named: bool) -> list[SentRequest]:
    tasks = [task for task in data.general()[:200] for _ in range(2)]
    rng = Random(seed)

    def who(task: Task, _: Random) -> Client:
        return Client(user=f"user-{rng.getrandbits(40):010x}" if named else "")

    return play(parts(tasks, who, seed=seed), seed=seed)


def _several_agents(data: Data, seed: str) -> list[SentRequest]:
    """Three agents work on each task: with all tools, with half of them, with none."""
    made = []
    for task in data.bfcl["base"]:
        silent = tuple(replace(turn, steps=()) for turn in task.turns)
        roles = (
            replace(task, system=f"You are the executor.\n{task.system}"),
            replace(task, system="You are the checker: do it again.", tools=task.tools[::2]),
            replace(task, system="You are the planner. Use no tools.", tools=(), turns=silent),
        )
        made += parts(roles, Client(), seed=seed)
    return play(made, seed=seed)


def _headers(data: Data, seed: str) -> list[SentRequest]:
    """All begin alike; a header names the session."""
    made = [
        Part(
            task=task,
            client=Client(session_header=f"{seed}-{number}"),
            shape=shapes.short_opener,
        )
        for number, task in enumerate(_openers(data))
    ]
    return play(made, seed=seed)


def _traces(data: Data, seed: str) -> list[SentRequest]:
    """Three tasks that share no word are steps of one run, which only the trace id says."""
    tasks = data.general()
    made = []
    third = len(tasks) // 3
    runs = zip(tasks[:third], tasks[third:], tasks[2 * third :], strict=False)
    for run, three in enumerate(runs):
        client = Client(trace_id=f"{run + 1:032x}")
        made += [
            Part(task=task, client=client, session=f"{seed}-run-{run}", delay_s=20.0 * step)
            for step, task in enumerate(three)
        ]
    return play(made, seed=seed, spacing_s=SPACING_S / 3)


def _examples(words: Sequence[str], *, anew: bool) -> Callable[[Data, str], list[SentRequest]]:
    """One key, one prompt; each request is a session."""

    def make(data: Data, seed: str) -> list[SentRequest]:
        tasks = data.general()
        shape = given.examples(tasks, words, anew=anew)
        return play(parts(tasks, Client(), shape, seed=seed), seed=seed)

    return make


_SHAPES: tuple[shapes.Shape, ...] = (
    shapes.plain,
    shapes.retries,
    shapes.regenerations,
    shapes.edits,
    shapes.parallel,
    compaction.summary,
    compaction.last_messages,
    compaction.truncated,
    sub_agents,
)


def _everything(data: Data, seed: str) -> list[SentRequest]:
    """Each conversation has a shape and habits of its own; all share a key."""
    rng = Random(seed)
    tasks = [*_alike(data)[:200], *data.general(), *data.tau2["telecom"][:100]]
    rng.shuffle(tasks)
    made = [
        Part(
            task=task,
            client=Client(
                surface=rng.choices(("chat", "responses", "messages"), (8, 1, 1))[0],
                clock=rng.random() < 0.3,
                loose_json=rng.random() < 0.3,
                new_call_ids=rng.random() < 0.3,
                loose_content=rng.random() < 0.3,
            ),
            shape=rng.choice(_SHAPES),
        )
        for task in tasks
    ]
    return play(made, seed=seed, late=0.05)


def _surface(name: str) -> Client:
    return Client(surface=name)


def _marks(task: Task, rng: Random) -> Client:
    kinds: tuple[Literal["blocks", "last"], ...] = ("blocks", "last")
    return Client(marks=rng.choice(kinds), surface=rng.choice(("chat", "messages")))


def _thinks(task: Task, rng: Random) -> Client:
    kinds: tuple[Literal["field", "tag"], ...] = ("field", "tag")
    return Client(thinks=rng.choice(kinds))


def _of(data: Data) -> list[Task]:
    return data.general()


def _domain(name: str) -> Callable[[Data], Sequence[Task]]:
    return lambda data: data.tau2[name]


def _set(name: str) -> Callable[[Data], Sequence[Task]]:
    return lambda data: data.bfcl[name]


MIXES: tuple[Mix, ...] = (
    *(
        Mix(name=f"bfcl-{name}", what="one multi-turn set of BFCL", make=_each(_set(name)))
        for name in ("base", "miss_func", "miss_param", "long_context")
    ),
    Mix(name="bfcl-all", what="four sets at once that begin alike", make=_each(_alike, Client())),
    *(
        Mix(name=f"tau2-{name}", what="one domain of tau2", make=_each(_domain(name)))
        for name in ("airline", "retail", "banking")
    ),
    Mix(
        name="tau2-telecom",
        what="355 customers with one opening and one policy",
        make=_each(_domain("telecom"), Client()),
    ),
    Mix(
        name="two-users-named",
        what="the same task by two users, `user` is sent",
        make=lambda data, seed: _two_users(data, seed, named=True),
    ),
    Mix(
        name="two-users",
        what="the same task twice at once, no name is sent",
        make=lambda data, seed: _two_users(data, seed, named=False),
    ),
    Mix(
        name="short-opener",
        what='"hi" and one greeting, no tools',
        make=_each(_openers, Client(), shapes.short_opener),
        target=0.95,
    ),
    Mix(name="clock", what="the time in the system prompt", make=_each(_of, Client(clock=True))),
    Mix(name="cache-control", what="marks move to the last message", make=_each(_of, _marks)),
    Mix(
        name="json-form",
        what="key order, white space and escapes change",
        make=_each(_of, Client(loose_json=True)),
    ),
    Mix(
        name="call-ids",
        what="ids of calls change with each request",
        make=_each(_of, Client(new_call_ids=True)),
    ),
    Mix(
        name="content-form",
        what='replies come back trimmed, null as ""',
        make=_each(_of, Client(loose_content=True)),
    ),
    Mix(name="reasoning", what="reasoning is not replayed", make=_each(_of, _thinks)),
    Mix(name="two-choices", what="n=2, the second is taken", make=_each(_of, Client(choices=2))),
    Mix(name="retries", what="requests sent again", make=_each(_of, Client(), shapes.retries)),
    Mix(
        name="regenerations",
        what="replies written anew",
        make=_each(_of, Client(), shapes.regenerations),
    ),
    Mix(name="edits", what="earlier messages changed", make=_each(_of, Client(), shapes.edits)),
    Mix(
        name="parallel",
        what="several requests at once from one history",
        make=_each(_of, Client(), shapes.parallel),
    ),
    *(
        Mix(name=f"compaction-{name}", what=what, make=_each(_of, Client(), shape))
        for name, what, shape in (
            ("summary", "a summary replaces the history", compaction.summary),
            ("system", "a summary in the system prompt", compaction.summary_in_system),
            ("transcript", "another prompt summarises a transcript", compaction.transcript),
            ("last", "only the last messages are sent", compaction.last_messages),
            ("truncated", "old messages are cut", compaction.truncated),
        )
    ),
    Mix(
        name="sub-agents",
        what="calls that sub-agents answer, some at once",
        make=_each(_of, some_surface, sub_agents),
    ),
    Mix(
        name="several-agents",
        what="three agents asked the same behind one key",
        make=_several_agents,
    ),
    *(
        Mix(name=f"few-shot-{name}{how}", what=what, make=_examples(words, anew=bool(how)))
        for name, words in (("labels", given.LABELS), ("answers", given.ANSWERS))
        for how, what in (
            ("", "examples in all requests, replies in their words"),
            ("-anew", "examples drawn for each request, replies in their words"),
        )
    ),
    Mix(
        name="greeting",
        what="the client's greeting, which the model repeats",
        make=_each(_of, Client(), given.greeted),
    ),
    Mix(name="react", what="one message that grows", make=_each(_of, Client(), given.react)),
    Mix(name="late", what="a fifth of the records late", make=_each(_of, late=0.2)),
    Mix(name="responses", what="the responses surface", make=_each(_of, _surface("responses"))),
    Mix(name="messages", what="Anthropic's surface", make=_each(_of, _surface("messages"))),
    Mix(name="everything", what="all shapes and habits at once", make=_everything),
    Mix(name="headers", what="a session header, all begin alike", make=_headers),
    Mix(name="traces", what="a trace id joins three agents", make=_traces),
)

BY_NAME = {mix.name: mix for mix in MIXES}
