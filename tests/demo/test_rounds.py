"""The watcher of the demo's rounds."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx
import pytest

from demo.rounds import RoundWatcher


class Control:
    """Answers as the admin API does, with one canary that ramps before it is promoted."""

    def __init__(self, *, away: bool = False) -> None:
        self.states = ["ramping", "ramping", "promoted"]
        self.away = away
        """The first pause does not reach it."""
        self.calls: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.removeprefix("/admin/v1/")
        self.calls.append(name)
        if self.away and name == "learner/pause":
            self.away = False
            raise httpx.ConnectError("control restarts", request=request)
        items: list[dict[str, Any]] = []
        if name == "canaries":
            state = self.states.pop(0)
            shown = {"state": state, "step": 0, "weight_bp": 4000, "reason": ""}
            items = [{"canary_id": "c", "candidate": "v1", **shown}]
        elif name == "aliases":
            items = [{"alias": "champion", "adapter": "v1"}]
        return httpx.Response(200, json={"items": items})


@pytest.mark.parametrize(
    ("last", "away", "pauses"), [(True, False, 1), (True, True, 2), (False, False, 0)]
)
async def test_pauses_the_learner_while_the_last_canary_runs(
    last: bool, away: bool, pauses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Control(away=away)
    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(control))
    monkeypatch.setattr("demo.rounds.httpx.AsyncClient", client)
    done = await RoundWatcher("http://admin", lambda _: None).next_round(last=last)
    assert (done.state, done.champion) == ("promoted", "v1")
    assert control.calls.count("learner/pause") == pauses, "again where it did not arrive"
    if last:
        assert control.calls.index("learner/pause") < len(control.calls) - 3, "while it ramps"
