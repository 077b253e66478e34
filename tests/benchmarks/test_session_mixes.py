"""The streams that session finders are scored on, made from a small copy of the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.sessions.bfcl import SETS
from benchmarks.sessions.finders import by_key, by_tree
from benchmarks.sessions.mixes import BY_NAME, MIXES, Mix
from benchmarks.sessions.records import SentRequest
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


@pytest.mark.parametrize("mix", MIXES, ids=[mix.name for mix in MIXES])
def test_a_stream_is_the_same_each_time(mix: Mix, data: Data) -> None:
    assert mix.make(data, "seed") == mix.make(data, "seed")
    assert mix.make(data, "seed") != mix.make(data, "other")


def calls_of(one: SentRequest) -> list[dict[str, dict[str, str]]]:
    return [call for raw in one.replies for call in json.loads(raw).get("tool_calls", ())]


def parents(stream: list[SentRequest]) -> list[tuple[SentRequest, SentRequest]]:
    """Each request that has a parent, with it."""
    by_name = {one.exchange_id: one for one in stream}
    return [(one, by_name[one.true_parent]) for one in stream if one.true_parent]


def test_the_prompt_of_a_sub_agent_is_an_argument_of_the_call_that_its_parent_made(
    data: Data,
) -> None:
    stream = [
        one for one in BY_NAME["sub-agents"].make(data, "seed") if one.surface == "chat"
    ]  # its messages are the easiest to read

    begun = 0
    for one, parent in parents(stream):
        system, first, *more = json.loads(one.request)["messages"]
        if more or "sub-agent" not in system["content"]:
            continue
        prompts = [json.loads(call["function"]["arguments"]) for call in calls_of(parent)]
        assert first["content"] in [prompt["prompt"] for prompt in prompts]
        begun += 1
    assert begun > TASKS


def test_a_retry_is_the_same_bytes_and_shares_the_parent(data: Data) -> None:
    stream = BY_NAME["retries"].make(data, "seed")

    lost = [one for one in stream if not one.replies]
    assert lost
    for one in lost:
        again = [other for other in stream if other.request == one.request and other is not one]
        assert one.true_parent in [other.true_parent for other in again]
        assert one.true_session in [other.true_session for other in again]


@pytest.mark.parametrize("name", ["retries", "regenerations", "edits", "parallel"])
def test_a_branch_shares_its_parent_with_another_request(name: str, data: Data) -> None:
    stream = BY_NAME[name].make(data, "seed")

    named = [one.true_parent for one in stream if one.true_parent]
    assert len(named) > len(set(named))


@pytest.mark.parametrize("name", ["summary", "system", "transcript"])
def test_after_a_summary_the_text_of_it_is_sent_and_the_history_is_not(
    name: str, data: Data
) -> None:
    stream = BY_NAME[f"compaction-{name}"].make(data, "seed")

    summaries = [
        one for one in stream if b"Summarise" in one.request.rpartition(b'"role": "user"')[2]
    ]
    assert len(summaries) > TASKS
    for one in summaries:
        text = json.dumps(json.loads(one.replies[0])["content"], ensure_ascii=False)[1:-1].encode()
        later = [
            other
            for other in stream
            if other.true_session == one.true_session and other.at > one.at
        ]
        assert text in later[0].request
        if name != "transcript":
            assert later[0].true_parent == one.exchange_id


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
