"""Prompts of the gate and the shadow: one turn of each session, wherever it stands."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import given, strategies as st

from deploy.canary.gate_store import SETTLED_S, drawn_turn, held_out_prompts, live_prompts
from sidecar.lines import Line
from sidecar.store.models import ExchangeRow
from support.adapter_endpoints import MODEL
from support.made_canary import made_canary

if TYPE_CHECKING:
    from tests.deploy.conftest import World

LINE = Line(name=MODEL)


def prompts(world: World, *, salt: str = "", until: float | None = None) -> dict[str, str]:
    """Return session -> exchange."""
    with world.database.read() as session:
        found = held_out_prompts(session, LINE, limit=100, salt=salt, until=until)
    return {prompt.session_id: prompt.exchange_id for prompt in found}


def test_each_turn_is_drawn_with_the_same_chance_over_the_salts() -> None:
    turns = [f"x{number}" for number in range(6)]

    drawn = Counter(drawn_turn(f"salt-{number}", "s", turns) for number in range(6_000))

    # A turn has a mean of 1,000 and a standard deviation of 29.
    assert min(drawn[turn] for turn in turns) > 1_000 - 4 * 29
    assert max(drawn[turn] for turn in turns) < 1_000 + 4 * 29


@given(st.text(), st.text(), st.lists(st.text(), min_size=2, unique=True))
def test_the_order_of_the_turns_and_one_that_is_added_do_not_move_the_others(
    salt: str, session_id: str, turns: list[str]
) -> None:
    before, after = drawn_turn(salt, session_id, turns[:-1]), drawn_turn(salt, session_id, turns)

    assert after in (before, turns[-1])
    assert drawn_turn(salt, session_id, reversed(turns)) == after


def test_a_held_out_session_gives_one_turn_which_the_canary_decides(world: World) -> None:
    with world.together():
        for number in range(30):
            for _ in range(6):
                world.serve(f"h{number}", held_out=True)

    first, again = prompts(world, salt="one"), prompts(world, salt="one")

    assert len(first) == 30
    assert first == again
    assert list(first) == [f"h{number}" for number in reversed(range(30))], "the newest first"
    places = Counter((int(name[1:]) - 1) % 6 for name in first.values())
    assert places == {0: 7, 1: 5, 2: 9, 4: 5, 5: 4}, "with this salt; the mean is 5 of each"
    assert prompts(world, salt="two") != first


def test_a_session_that_goes_on_waits_until_it_has_ended(world: World) -> None:
    world.serve("ended", held_out=True)
    world.serve("goes-on", held_out=True)
    world.clock.now += SETTLED_S
    world.serve("goes-on", held_out=True)

    assert set(prompts(world, until=world.clock.now - SETTLED_S)) == {"ended"}
    assert set(prompts(world)) == {"ended", "goes-on"}
    world.clock.now += SETTLED_S
    assert set(prompts(world, until=world.clock.now - SETTLED_S)) == {"ended", "goes-on"}


def test_a_users_session_gives_one_of_the_champions_good_turns(world: World) -> None:
    """Whichever it is: a cut turn, and one that nobody decided, is none of them."""
    good = {world.serve("s") for _ in range(4)}
    world.serve("s", outcome="cut")
    with world.database.write() as session:
        session.query(ExchangeRow).update({"selection": "rate"})
    world.serve("s")
    drawn = set()
    with world.database.read() as session:
        for number in range(60):
            canary = made_canary(champion="base", salt=f"salt-{number}")
            found = live_prompts(
                session, canary, LINE, after=0.0, until=world.clock.now, limit=9, known=()
            )
            drawn |= {prompt.exchange_id for prompt in found}

    assert drawn == good
