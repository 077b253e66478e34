"""An example of each command and group, and its exit codes, for the end of its help. Pure.

They stand in one table, so that a test finds the command that lacks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import typer

EXAMPLES: dict[str, str] = {
    "up": "sidecar --config sidecar.toml up",
    "proxy": "sidecar proxy --workers 4",
    "ingest": "sidecar ingest",
    "score": "sidecar score",
    "learn": "sidecar learn --once",
    "control": "sidecar control",
    "status": "sidecar status",
    "doctor": "sidecar doctor --offline",
    "rollback": 'sidecar rollback --to v7 --reason "replies got worse"',
    "lineage": "sidecar lineage v7",
    "forget": "sidecar forget --user 4711 --yes",
    "canary get": "sidecar canary get -o json",
    "canary start": 'sidecar canary start v7 --reason "the judge was away"',
    "canary pause": 'sidecar canary pause --reason "a sale begins"',
    "canary resume": "sidecar canary resume",
    "canary promote": 'sidecar canary promote --reason "seen enough"',
    "canary abort": 'sidecar canary abort --reason "too long"',
    "canary skip-step": "sidecar canary skip-step",
    "canary wait": "sidecar canary wait --timeout 7200 && echo promoted",
    "canary watch": "sidecar canary watch",
    "adapters import": 'sidecar adapters import ./my-lora --reason "our SFT"',
    "adapters diff": "sidecar adapters diff v7 champion",
    "adapters export": "sidecar adapters export v7 /tmp/v7.tar",
    "adapters push": 'sidecar adapters push champion --to hub:our-team/agent --reason "shared"',
    "adapters prune": "sidecar adapters prune --dry-run",
    "adapters ls": "sidecar adapters ls --at 2026-03-01T09:30Z",
    "adapters alias": 'sidecar adapters alias anchor v7 --reason "a good month"',
    "adapters allow": 'sidecar adapters allow v7 --reason "the judge was wrong"',
    "adapters show": "sidecar adapters show champion",
    "config init": "sidecar config init",
    "config show": "sidecar config show",
    "config check": "sidecar config check --online",
    "keys create": "sidecar keys create --project shop --rpm 60",
    "keys ls": "sidecar keys ls",
    "keys revoke": "sidecar keys revoke key_1a2b3c",
    "groups ls": "sidecar groups ls --status set_aside",
    "groups show": "sidecar groups show 0f3a9c",
    "audit": "sidecar audit --limit 50",
    "audit verify": "sidecar audit verify -o json",
    "judge calibrate": "sidecar judge calibrate --judge openai/gpt-4.1-mini",
    "judge noise": "sidecar judge noise",
    "judge sessions": "sidecar judge sessions session-1 session-2",
    "hooks ls": "sidecar hooks ls",
    "hooks test": "sidecar hooks test",
    "learner pause": 'sidecar learner pause --reason "a sale begins"',
    "learner resume": "sidecar learner resume",
    "learner run": "sidecar learner run",
    "learner override": 'sidecar learner override --reason "longer answers are wanted"',
    "learner watch": "sidecar learner watch",
    "runs ls": "sidecar runs ls --limit 5",
    "runs show": "sidecar runs show",
    "runs plot": "sidecar runs plot --out run.png",
    "exchanges ls": "sidecar exchanges ls --since 1h",
    "exchanges show": "sidecar exchanges show ex_1a2b3c",
    "exchanges export": "sidecar exchanges export --help",
    "store new-key": "sidecar store new-key --file keys",
    "store rotate-key": "sidecar store rotate-key",
}
"""Words of a command -> a line that can be typed."""

GROUPS: dict[str, tuple[str, ...]] = {
    "": (
        "sidecar config init      # writes sidecar.toml, with every setting explained",
        "sidecar config check --online",
        "sidecar up",
        "sidecar status",
    ),
    "canary": ("sidecar canary watch", 'sidecar canary pause --reason "a sale begins"'),
    "adapters": ("sidecar adapters ls", "sidecar adapters show v7"),
    "config": ("sidecar config init", "sidecar config check --online"),
    "keys": ("sidecar keys create --project shop --rpm 60", "sidecar keys ls"),
    "groups": ("sidecar groups ls --status set_aside", "sidecar groups show 0f3a9c"),
    "hooks": ("sidecar hooks ls", "sidecar hooks test"),
    "judge": ("sidecar judge calibrate --judge openai/gpt-4.1-mini", "sidecar judge noise"),
    "learner": ('sidecar learner pause --reason "a sale begins"', "sidecar learner run"),
    "runs": ("sidecar runs ls", "sidecar runs show"),
    "exchanges": ("sidecar exchanges ls --since 1h", "sidecar exchanges show ex_1a2b3c"),
    "store": ("sidecar store new-key --file keys", "sidecar store rotate-key"),
}
"""Words of a group of commands -> lines that can be typed."""

USUAL = "0 done, 1 failed, 2 bad use"
ENDED = (
    "0 promoted, 1 rolled back or rejected, 2 bad use, 3 inconclusive or withdrawn, "
    "4 could not ask, 124 timed out"
)
EXITS: dict[str, str] = {
    "": f"{USUAL}, 130 interrupted; the help of a command names those that it has besides",
    "canary": f"{USUAL}; `canary wait` and `canary watch` also 3, 4 and 124, which their help "
    "explains",
    "canary wait": ENDED,
    "canary watch": f"{ENDED}, 130 interrupted",
    "doctor": "0 records come through, 1 something stops them, 2 bad use",
    "learn": "0 done, 1 failed, 2 bad use; with --once also 3 nothing to learn from, 4 held, "
    "5 no room, 6 stopped (the next start goes on with it)",
    "audit verify": "0 whole, 1 broken or not read, 2 bad use",
    "config check": "0 sound, 1 something cannot run, 2 the file is not sound",
}


def teach(app: typer.Typer) -> None:
    """Give every command and group of the application its examples and exit codes, at the end of
    its help, and every command its whole first sentence in the list of its group."""
    for words, command in _commands(app):
        name = " ".join(words)
        examples = (EXAMPLES[name],) if name in EXAMPLES else GROUPS.get(name, ())
        if examples:
            command.epilog = _epilog(examples, EXITS.get(name, USUAL))
        if name in EXAMPLES and command.callback is not None:
            command.short_help = _first_sentence(command.callback.__doc__ or "")


def _commands(app: typer.Typer, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not words:
        yield words, app.registered_callback
    for command in app.registered_commands:
        name = str(command.name or getattr(command.callback, "__name__", ""))
        yield (*words, name), command
    for group in app.registered_groups:
        below = group.typer_instance
        if below is None or not group.name:
            continue
        name = str(group.name)
        yield (*words, name), below.registered_callback or group
        yield from _commands(below, *words, name)


def _first_sentence(text: str) -> str:
    """The CLI library would cut it off at the end of a line."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".") + "."


def _epilog(examples: Sequence[str], exits: str) -> str:
    lines = "\n".join(f"    {one}" for one in examples)
    return f"Example:\n\n\b\n{lines}\n\nExit codes: {exits}."
