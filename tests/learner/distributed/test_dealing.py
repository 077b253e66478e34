"""Costs of groups and their dealing, by hand; which process this one is."""

from __future__ import annotations

import pytest

from learner.distributed.exchange import attention_share, deal_by_cost, group_cost
from learner.distributed.place import Place, given_place
from learner.distributed.trainer import device_of, threads_of
from sidecar.errors import SettingsError
from sidecar.settings import Learner
from tests.learner.conftest import make_group, make_row


def test_a_group_costs_its_tokens_and_the_square_of_its_packs() -> None:
    """A prompt of 4, answers of 5 and 3 whose last tokens are no input: 4 + 4 + 2 = 10 tokens."""
    one = make_group(
        [1, 2, 3, 4], [make_row([5] * 5), make_row([6] * 3), make_row([7] * 9, trainable=False)]
    )

    assert group_cost(one, pack_tokens=100, c=0.0) == 10
    assert group_cost(one, pack_tokens=100, c=0.5) == 10 + 0.5 * 100
    # 6 tokens of answers behind a prompt in packs of 7: two packs, and the prompt twice.
    assert group_cost(one, pack_tokens=7, c=0.5) == 14 + 0.5 * 14 * 14 / 2


def test_the_share_of_attention_by_hand() -> None:
    """A token and another: 4 * 10 operations in each of 3 layers, over 2 * 600 of the weights."""
    assert attention_share(layers=3, queries=10, weights=600) == 120 / 1200
    assert attention_share(layers=3, queries=10, weights=0) == 0


def test_each_process_has_the_same_cost() -> None:
    """8 to the first, 7 to the second; 6 to the second (7 < 8), 5 to the first, 4 to either."""
    assert deal_by_cost([4, 5, 6, 7, 8], 2) == [[0, 1, 4], [2, 3]]
    assert deal_by_cost([1, 1, 1], 2) == [[0, 2], [1]]
    assert deal_by_cost([3], 2) == [[0], []]
    assert deal_by_cost([], 2) == [[], []]


def test_the_place_is_what_the_launcher_says() -> None:
    assert given_place({}) is None
    assert given_place({"RANK": "0", "WORLD_SIZE": "1"}) is None
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert given_place(given) == Place(3, 4, 1, 2)
    with pytest.raises(SettingsError, match="WORLD_SIZE=many"):
        given_place({"RANK": "0", "WORLD_SIZE": "many"})


def test_each_process_has_a_card_of_its_own() -> None:
    assert device_of("cpu", 1) == "cpu"
    assert device_of("cuda", 1) == "cuda:1"
    assert device_of("cuda:2", 1) == "cuda:3"


def test_the_processes_share_the_threads_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.distributed.trainer.os.cpu_count", lambda: 8)

    assert threads_of(Learner(), 2) == 4
    assert threads_of(Learner(), 16) == 1
    assert threads_of(Learner(threads=3), 2) == 3
