"""The streams that session finders are scored on, made from a small copy of the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.sessions.bfcl import SETS
from benchmarks.sessions.finders import by_key, by_tree
from benchmarks.sessions.mixes import BY_NAME, MIXES, Mix
from benchmarks.sessions.run import main
from benchmarks.sessions.scoring import score
from benchmarks.sessions.streams import Data

TASKS = 6


def write_bfcl(folder: Path) -> None:
    data = folder / "bfcl_eval" / "data"
    (data / "possible_answer").mkdir(parents=True)
    (data / "multi_turn_func_doc").mkdir()
    documents = [
        {
            "name": name,
            "description": f"This belongs to files. Tool description: {name} a file.",
            "parameters": {"type": "dict", "properties": {"file": {"type": "string"}}},
        }
        for name in ("read", "write", "sort")
    ]
    (data / "multi_turn_func_doc" / "gorilla_file_system.json").write_text(
        "\n".join(map(json.dumps, documents))
    )
    for name in SETS:
        questions, answers = [], []
        for number in range(TASKS):
            texts = [f"Read file {number}.", f"Sort it, then write {number}.", "Read it again."]
            question: dict[str, object] = {
                "id": f"multi_turn_{name}_{number}",
                "question": [[{"role": "user", "content": text}] for text in texts],
                "involved_classes": ["GorillaFileSystem"],
            }
            if name == "miss_func":
                question["missed_function"] = {"1": ["sort"]}
            questions.append(question)
            calls = [[f"read('{number}')"], ["sort(file='a')", "write(file='b')"], ["read('b')"]]
            answers.append({"id": question["id"], "ground_truth": calls})
        file = f"BFCL_v4_multi_turn_{name}.json"
        (data / file).write_text("\n".join(map(json.dumps, questions)))
        (data / "possible_answer" / file).write_text("\n".join(map(json.dumps, answers)))


def write_tau2(folder: Path) -> None:
    for name in ("airline", "retail", "banking_knowledge", "telecom"):
        domain = folder / "inspect_evals" / "tau2" / "data" / "domains" / name
        domain.mkdir(parents=True)
        told = {
            "reason_for_call": "You want your money back.",
            "known_info": "You are Ann.",
            "task_instructions": "You are short of time. You insist.",
        }
        tasks = [
            {
                "user_scenario": {
                    "instructions": f"Start by saying {number}. Then go."
                    if name == "banking_knowledge"
                    else told | {"known_info": f"You are Ann {number}."}
                },
                "evaluation_criteria": {
                    "actions": [
                        {"name": "find_user", "arguments": {"id": str(number)}},
                        {"name": "reboot", "arguments": {}, "requestor": "user"},
                        {"name": "refund", "arguments": {"id": str(number)}},
                    ]
                },
            }
            for number in range(TASKS)
        ]
        (domain / "tasks.json").write_text(json.dumps(tasks))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    write_bfcl(made)
    write_tau2(made)
    return made


@pytest.fixture(scope="module")
def data(folder: Path) -> Data:
    return Data.read(folder)


@pytest.mark.parametrize("mix", MIXES, ids=[mix.name for mix in MIXES])
def test_a_true_parent_is_in_the_same_session_and_started_before(mix: Mix, data: Data) -> None:
    stream = mix.make(data, "seed")

    by_name = {one.exchange_id: one for one in stream}
    assert len(by_name) == len(stream) > TASKS
    for one in stream:
        if one.true_parent is not None:
            parent = by_name[one.true_parent]
            assert parent.true_session == one.true_session
            assert parent.at < one.at
            assert parent.replies
    begun = {one.true_session for one in stream if one.true_parent is None}
    assert begun == {one.true_session for one in stream}


@pytest.mark.parametrize("name", ["retries", "regenerations", "edits", "parallel"])
def test_a_branch_shares_its_parent_with_another_request(name: str, data: Data) -> None:
    stream = BY_NAME[name].make(data, "seed")

    named = [one.true_parent for one in stream if one.true_parent]
    assert len(named) > len(set(named))


def test_a_clock_mixes_no_conversations_by_their_key_and_the_tree_links_turns(data: Data) -> None:
    stream = BY_NAME["clock"].make(data, "seed")

    key, tree = score(by_key, stream), score(by_tree, stream)

    assert key.leak == 0
    assert tree.parent > 0.9


def test_a_run_prints_the_table_and_writes_the_rows(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--data", str(folder), "--mix", "bfcl-base", "--out", str(tmp_path)])

    assert code == 0
    written = json.loads((tmp_path / "sessions-part.json").read_text())
    assert [row["finder"] for row in written["rows"]] == ["key", "tree", "ingest"]
    assert "bfcl-base" in capsys.readouterr().out
