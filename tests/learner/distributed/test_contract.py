"""One contract for ranks: one process alone, and two processes that a real torchrun starts."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in its exports

from learner.distributed.exchange import Exchange
from learner.distributed.place import Place
from learner.ranks import Alone, Ranks

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class Row:
    trainable: bool
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    group_id: str
    prompt_token_ids: tuple[int, ...]
    rows: tuple[Row, ...]


GROUPS = [Group(f"g{n}", (1,) * 4, (Row(True, (2,) * n),)) for n in (3, 9, 5, 2, 7)]


def keep_contract(ranks: Ranks) -> None:
    """What every kind of ranks does. Each process of a run calls it."""
    # Each group is computed once, and all know what was found, in order.
    mine: list[str] = []

    def compute(group: Group) -> str:
        mine.append(group.group_id)
        return f"of {group.group_id}"

    assert ranks.each(GROUPS, compute) == ["of g3", "of g9", "of g5", "of g2", "of g7"]
    assert len(mine) == len(set(mine))
    assert ranks.each([], compute) == []
    times = torch.tensor([mine.count(group.group_id) for group in GROUPS])
    ranks.add([times])
    assert times.tolist() == [1, 1, 1, 1, 1]

    # Groups with one id are told apart.
    twice = [GROUPS[0], GROUPS[0]]
    assert ranks.each(twice, lambda group: group.group_id) == ["g3", "g3"]

    # Sums: of each type, in place, with the shape kept.
    one, other = torch.full((2, 3), 0.5), torch.ones(4, dtype=torch.float64)
    ranks.add([one, other])
    assert one.tolist() == [[0.5 * ranks.size] * 3] * 2
    assert other.tolist() == [1.0 * ranks.size] * 4

    # What the first finds, all get.
    assert ranks.first(lambda: {"sha": "x"}) == {"sha": "x"}

    # A gradient.
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    ranks.backward((weight * 3.0).sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0]

    ranks.require_same({"w": torch.arange(3.0)})

    # An error of one group reaches all; the process that met it raises it as it is.
    def fail(group: Group) -> None:
        if group.group_id == "g9":
            raise KeyError("broken")

    mine.clear()
    ranks.each(GROUPS, compute)
    expected: type[Exception] = KeyError
    if "g9" not in mine:
        from learner.errors import RankFailedError

        expected = RankFailedError
    with pytest.raises(expected, match="broken"):
        ranks.each(GROUPS, fail)

    # And the next exchange works.
    assert ranks.each(GROUPS[:1], lambda group: 1) == [1]


def test_a_process_alone_keeps_the_contract() -> None:
    keep_contract(Alone())
    assert Alone().size == 1


PROGRAM = """
import importlib.util, os, sys
import pytest, torch
from learner.distributed.place import given_place
from learner.distributed.exchange import DataParallel
from learner.distributed.trainer import joined
from learner.errors import RankLostError, RanksDisagreeError
from sidecar.settings import Learner

spec = importlib.util.spec_from_file_location("contract", sys.argv[1])
contract = importlib.util.module_from_spec(spec)
sys.modules["contract"] = contract
spec.loader.exec_module(contract)

place = given_place(os.environ)
with joined(place, Learner()) as exchange:
    ranks = DataParallel(exchange, pack_tokens=100)
    assert ranks.size == place.size == 2
    contract.keep_contract(ranks)

    with pytest.raises(RanksDisagreeError, match="processes 1 of 2 have other weights"):
        ranks.require_same({"w": torch.tensor([float(place.rank)])})

    place_of = contract.GROUPS[place.rank:]
    with pytest.raises(RanksDisagreeError, match="at another place of the run"):
        ranks.each(place_of, lambda group: 1)
print(f"process {place.rank} kept it")
"""


def test_two_processes_of_torchrun_keep_the_contract(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(program), __file__),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    # Two processes write to one stream: their lines may run into each other.
    assert sorted(re.findall(r"process \d kept it", done.stdout)) == [
        "process 0 kept it",
        "process 1 kept it",
    ]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "[../third_party/gloo/x.cc:119] Timed out waiting 2000ms for recv operation. GLHF!",
            r"process 0 of 1 waited 2 s for another \(its start with torch",
        ),
        (
            "[../third_party/gloo/x.cc:553] Connection closed by peer [::1]:46. GLHF!",
            "process 0 of 1 lost another: its connection is closed; its own lines in the log",
        ),
    ],
)
def test_a_lost_process_is_told_without_the_words_of_gloo(said: str, words: str) -> None:
    exchange = Exchange(place=Place(0, 1, 0, 1), store=HashStore(), cards=False, timeout_s=2.0)
    try:
        error = exchange.lost(said)
    finally:
        exchange.close()

    assert re.match(words, str(error))
    assert "gloo" not in str(error)
    assert "GLHF" not in str(error)
