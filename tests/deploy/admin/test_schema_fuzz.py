"""The admin API against its own description: sequences of calls that schemathesis makes up.

No sequence may end in a server error, or in a media type that the description does not declare.
Cursors are replaced by hostile ones half of the time.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.deploy.admin.test_input import CURSORS, cursor

if TYPE_CHECKING:
    from tests.deploy.conftest import MakeApi, World

schemathesis = pytest.importorskip("schemathesis")

TOKEN = "t"
SEQUENCES = 12
STEPS = 10
EACH = 5
"""12 sequences of 10 calls and 5 calls of each operation take 20 s on a quiet core."""
PLAIN = settings(
    max_examples=SEQUENCES,
    stateful_step_count=STEPS,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
HOSTILE = itertools.cycle(CURSORS)
HEADERS = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def schema(world: World, make_api: MakeApi) -> Any:
    for version in (1, 2, 3):
        world.promote(world.register(version, values=(0.1 * version, 0.2)))
    world.register(4, values=(0.9, 0.1))
    world.serve("s-1", held_out=True)
    return schemathesis.openapi.from_asgi("/admin/openapi.json", make_api(TOKEN).app)


def make_hostile(case: Any) -> None:
    if case.path.endswith("/events"):
        case.query = {"for_s": 0}  # else it streams for an hour
    if case.query and "cursor" in case.query:
        listing = case.path.rsplit("/", 1)[1]
        text = next(HOSTILE).replace("[", f'["{listing}",', 1)
        case.query["cursor"] = cursor(text).decode()[len("cursor=") :]


def check(response: Any, case: Any) -> None:
    declared = case.operation.definition.raw["responses"]
    media = response.headers["content-type"][0].partition(";")[0]
    said = f"{case.method} {case.formatted_path}: {response.status_code} {response.text}"
    assert response.status_code < 500, said
    reply = declared.get(str(response.status_code), declared["default"])
    assert media in reply["content"], said


def test_no_sequence_of_calls_ends_in_an_error_or_an_undeclared_status(schema: Any) -> None:
    asked: set[tuple[str, int]] = set()

    class Calls(schema.as_state_machine()):  # type: ignore[misc]
        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            return {"headers": HEADERS}

        def before_call(self, case: Any) -> None:
            make_hostile(case)

        def validate_response(self, response: Any, case: Any, **_: Any) -> None:
            asked.add((f"{case.method} {case.path}", response.status_code))
            check(response, case)

    Calls.run(settings=PLAIN)

    assert len(asked) > 15
    assert len({operation for operation, status in asked if status == 200}) > 4


def test_every_operation_answers_as_it_declares(schema: Any) -> None:
    asked: set[str] = set()
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(PLAIN, max_examples=EACH)
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            make_hostile(case)
            check(case.call(headers=HEADERS), case)

        ask()
        asked.add(f"{operation.method} {operation.path}")

    assert len(asked) > 25
