"""The watcher of the demo's rounds."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx
import pytest

from demo.rounds import RoundWatcher


class Control:
    """Answers as the admin API does, with one canary that ramps before it is promoted."""

    def __init__(self) -> None:
        self.states = ["ramping", "ramping", "promoted"]
        self.calls: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.removeprefix("/admin/v1/")
        self.calls.append(name)
        items: list[dict[str, Any]] = []
        if name == "canaries":
            state = self.states.pop(0)
            items = [
                {
                    "canary_id": "c",
                    "candidate": "v1",
                    "state": state,
                    "step": 0,
                    "weight_bp": 4000,
                    "reason": "",
                }
            ]
        elif name == "aliases":
            items = [{"alias": "champion", "adapter": "v1"}]
        return httpx.Response(200, json={"items": items})


@pytest.mark.parametrize("last", [True, False])
async def test_pauses_the_learner_once_while_the_last_canary_runs(
    last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Control()
    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(control))
    monkeypatch.setattr("demo.rounds.httpx.AsyncClient", client)
    done = await RoundWatcher("http://admin", lambda _: None).next_round(last=last)
    assert (done.state, done.champion) == ("promoted", "v1")
    assert control.calls.count("learner/pause") == last
    if last:
        assert control.calls.index("learner/pause") < len(control.calls) - 3, "while it ramps"
