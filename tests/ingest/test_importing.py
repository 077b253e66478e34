"""Logs of other gateways and tracers become exchanges: `ingest.importing`."""

from __future__ import annotations

import gzip
import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ingest.grouping.selection import group_id_of
from ingest.importing import (
    FORMS,
    Import,
    LeftOutError,
    Logged,
    Scored,
    exchange_of,
    imported_id,
    open_rows,
)
from ingest.intake.choose import Sessions
from ingest.intake.consume import Consumed
from sidecar.bounds import bound
from sidecar.feedback import Feedback, decode_feedback, encode_feedback
from sidecar.records import Exchange, encode_exchange
from sidecar.store.models import AliasRow
from support.ingest_kit import Kit

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is it?"}]
TOOL = {"type": "function", "function": {"name": "find", "description": "", "parameters": {}}}
ANSWER = {"role": "assistant", "content": "On its way."}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"a":1}'}}
IDS = (1, 9, 9, 4)
CUT = "Be ... (litellm_truncated skipped 900 chars) ... brief."
ALLOWED = json.dumps({"tools": ["find"], "choice": "explicit"})

BAD_PART = {"role": "user", "content": [{"type": "text", "text": {"a": 1}}]}
LITELLM: dict[str, Any] = {
    "id": "chatcmpl-1",
    "trace_id": "0190a2c1-0000-4000-8000-00000000000a",
    "session_id": "s1",
    "call_type": "acompletion",
    "status": "success",
    "startTime": 1_790_000_000.5,
    "endTime": 1_790_000_002.0,
    "model": "gpt-4o",
    "end_user": "anna",
    "messages": ASKED,
    "model_parameters": {"temperature": 0.5, "max_tokens": 64, "seed": 3, "stream": True},
    "response": {"choices": [{"message": ANSWER, "finish_reason": "stop"}]},
}
SPEND: dict[str, Any] = {
    "request_id": "chatcmpl-2",
    "session_id": "s1",
    "call_type": "acompletion",
    "startTime": "2026-09-21 14:13:20.500",
    "endTime": "2026-09-21T14:13:22+00:00",
    "messages": "{}",
    "proxy_server_request": json.dumps({"messages": ASKED, "tools": [TOOL], "temperature": 0.5}),
    "response": json.dumps({"choices": [{"message": {"content": None, "tool_calls": [CALL]}}]}),
    "end_user": "",
}
LANGFUSE: dict[str, Any] = {
    "id": "obs-1",
    "trace_id": "a" * 32,
    "type": "GENERATION",
    "start_time": "2026-09-21 14:13:20.500000",
    "end_time": "2026-09-21 14:13:22.000000",
    "input": json.dumps({"messages": ASKED, "tools": [TOOL]}),
    "output": json.dumps(ANSWER),
    "model_parameters": json.dumps({"temperature": 0.5, "max_tokens": 64}),
    "session_id": "s1",
    "user_id": "anna",
    "level": "DEFAULT",
}
LANGFUSE_API: dict[str, Any] = {
    "id": "obs-2",
    "traceId": "a" * 32,
    "type": "GENERATION",
    "startTime": "2026-09-21T14:13:20.500Z",
    "endTime": None,
    "input": ASKED,
    "output": "On its way.",
    "modelParameters": {},
}
TENSORZERO: dict[str, Any] = {
    "id": "01996cba-0000-7000-8000-000000000001",
    "function_name": "support",
    "variant_name": "gpt",
    "episode_id": "01996cba-0000-7000-8000-00000000000e",
    "input": json.dumps(
        {
            "system": "Be brief.",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Where is it?"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_call", "id": "c1", "name": "find", "arguments": "{}"}
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "id": "c1", "name": "find", "result": "7"}],
                },
            ],
        }
    ),
    "output": json.dumps([{"type": "text", "text": "On its way."}]),
    "inference_params": json.dumps({"chat_completion": {"temperature": 0.5}}),
    "dynamic_tools": [json.dumps({"name": "find", "description": "", "parameters": {}})],
    "processing_time_ms": 1500,
    "tags": {"user_id": "anna"},
}


def read(form: str, row: Mapping[str, Any]) -> Logged | Scored:
    return FORMS[form](json.loads(json.dumps(row)))


def made(form: str, row: Mapping[str, Any], **changes: Any) -> Exchange:
    logged = read(form, row)
    assert isinstance(logged, Logged)
    plain = {"public_model": "smollm", "project": "default"}
    return exchange_of(logged, form, **{**plain, "prompt_token_ids": IDS, **changes})


@pytest.mark.parametrize(
    ("form", "row"), [("litellm", LITELLM), ("langfuse", LANGFUSE)], ids=["litellm", "langfuse"]
)
def test_a_row_becomes_an_exchange_that_is_not_trained_on(
    form: str, row: Mapping[str, Any]
) -> None:
    found = made(form, row)

    body = json.loads(found.request)
    assert body["messages"] == ASKED
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("smollm", 0.5, 64)
    assert not {"seed", "stream"} & set(body), "candidates are sampled anew"
    assert (found.sampling.temperature, found.sampling.max_tokens) == (0.5, 64)
    assert json.loads(found.choices[0].message) == ANSWER
    assert (found.session_key, found.user) == ("h:s1", "anna")
    assert (found.timings.started_at, found.timings.total_s) == (
        1_790_000_000.5,
        1.5,
    )
    assert {found.arm, found.origin, found.untrainable_reason} == {"imported"}
    assert len(found.trace_id) == 32
    assert bound(found)[1] == (), "every store holds it as it is"


def test_a_row_of_the_spend_logs_is_read_from_the_request_that_it_kept() -> None:
    found = made("litellm", SPEND)

    assert json.loads(found.request)["tools"] == [TOOL]
    assert json.loads(found.choices[0].message)["tool_calls"] == [CALL]
    assert found.timings.started_at == 1_790_000_000.5


def test_an_observation_of_the_api_is_read_like_one_of_the_export() -> None:
    found = made("langfuse", LANGFUSE_API)

    assert json.loads(found.request)["messages"] == ASKED
    assert json.loads(found.choices[0].message) == ANSWER
    assert found.session_key.startswith("m:"), "without a name its opening names the session"
    assert found.timings.total_s == 0


def test_content_blocks_become_messages_of_chat_completions() -> None:
    found = made("tensorzero", TENSORZERO)

    body = json.loads(found.request)
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    assert body["messages"] == [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    assert body["tools"] == [TOOL]
    assert json.loads(found.choices[0].message) == ANSWER
    assert found.session_key == f"h:{TENSORZERO['episode_id']}"
    assert found.timings.started_at == int("01996cba0000", 16) / 1000


@pytest.mark.parametrize(
    ("form", "row", "change", "reason"),
    [
        ("litellm", LITELLM, {"id": None}, "no_id"),
        ("litellm", LITELLM, {"status": "failure"}, "failed"),
        ("litellm", LITELLM, {"call_type": "aembedding"}, "no_chat"),
        ("litellm", LITELLM, {"messages": "redacted-by-litellm"}, "cut_or_redacted"),
        ("litellm", LITELLM, {"messages": [{"role": "wizard", "content": ""}]}, "no_messages"),
        ("litellm", LITELLM, {"response": {}}, "no_answer"),
        ("litellm", LITELLM, {"response": {"choices": [7]}}, "no_answer"),
        ("litellm", LITELLM, {"startTime": "yesterday"}, "no_time"),
        ("litellm", LITELLM, {"startTime": True}, "no_time"),
        ("litellm", LITELLM, {"startTime": 9e10}, "no_time"),
        ("litellm", LITELLM, {"startTime": 20260921}, "no_time"),
        ("litellm", LITELLM, {"startTime": "9999-12-31T23:59:59Z"}, "no_time"),
        ("langfuse", LANGFUSE, {"start_time": "1900-01-01T00:00:00"}, "no_time"),
        ("langfuse", LANGFUSE, {"output": {"content": [1]}}, "no_answer"),
        ("langfuse", LANGFUSE, {"output": {"content": "a", "tool_calls": "x"}}, "no_answer"),
        ("litellm", LITELLM, {"messages": [{"role": "user", "content": [1]}]}, "no_messages"),
        ("litellm", LITELLM, {"messages": [BAD_PART]}, "no_messages"),
        ("litellm", LITELLM, {"messages": [{"role": "user", "tool_calls": "a"}]}, "no_messages"),
        ("langfuse", LANGFUSE, {"output": {"content": "a", "tool_calls": [1]}}, "no_answer"),
        ("langfuse", LANGFUSE, {"type": "SPAN"}, "no_chat"),
        ("langfuse", LANGFUSE, {"level": "ERROR"}, "failed"),
        ("langfuse", LANGFUSE, {"input": "a text"}, "no_messages"),
        ("langfuse", LANGFUSE, {"output": ""}, "no_answer"),
        ("langfuse", LANGFUSE, {"input": [{"role": "user", "content": {"a": 1}}]}, "no_messages"),
        ("litellm", LITELLM, {"messages": [{"role": "user", "content": CUT}]}, "cut_or_redacted"),
        (
            "tensorzero",
            TENSORZERO,
            {"dynamic_tools": [], "allowed_tools": ALLOWED},
            "tools_unreadable",
        ),
        ("tensorzero", TENSORZERO, {"id": "not-a-uuid"}, "no_time"),
        ("tensorzero", TENSORZERO, {"input": '{"system": {"name": "x"}}'}, "templated"),
        ("tensorzero", TENSORZERO, {"dynamic_tools": ["{}"]}, "tools_unreadable"),
        ("tensorzero", TENSORZERO, {"output": '[{"type": "image"}]'}, "not_text"),
    ],
)
def test_what_is_no_chat_is_left_out_by_its_reason(
    form: str, row: Mapping[str, Any], change: Mapping[str, Any], reason: str
) -> None:
    with pytest.raises(LeftOutError, match=f"^{reason}$"):
        made(form, {**row, **change})


@pytest.mark.parametrize("value", ["Infinity", "0.5", 10**30, True, None, [1]])
def test_a_parameter_that_cannot_be_sent_is_dropped_and_the_row_is_kept(value: object) -> None:
    found = made("litellm", {**LITELLM, "model_parameters": {"max_tokens": value, "top_p": 0.9}})

    body = json.loads(found.request)
    assert "max_tokens" not in body
    assert (body["top_p"], found.sampling.max_tokens, found.sampling.top_p) == (0.9, None, 0.9)
    assert encode_exchange(found)


def test_tools_that_langchain_writes_as_messages_are_tools() -> None:
    asked = [*ASKED, {"role": "tool", "content": TOOL}]

    body = json.loads(made("langfuse", {**LANGFUSE_API, "input": asked}).request)

    assert (body["messages"], body["tools"]) == (ASKED, [TOOL])


def test_an_answer_that_is_json_is_its_text() -> None:
    found = made("langfuse", {**LANGFUSE, "output": '{"order": 7}'})

    assert json.loads(found.choices[0].message)["content"] == '{"order": 7}'


def test_tensorzero_tools_of_the_configuration_and_a_named_choice_are_sent() -> None:
    more = {"name": "more", "description": "", "parameters": {}}
    params = json.dumps({"tools_available": [more], "tool_choice": {"specific": "more"}})

    body = json.loads(made("tensorzero", {**TENSORZERO, "tool_params": params}).request)

    assert [one["function"]["name"] for one in body["tools"]] == ["more"]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "more"}}


def test_the_id_of_an_import_is_the_same_each_time_and_sorts_by_time() -> None:
    assert imported_id("litellm", "a", 5.0) == imported_id("litellm", "a", 5.0)
    assert imported_id("litellm", "a", 5.0) != imported_id("langfuse", "a", 5.0)
    assert imported_id("litellm", "b", 5.0) < imported_id("litellm", "a", 6.0)


@pytest.mark.parametrize("as_array", [False, True], ids=["lines", "array"])
def test_rows_of_a_file_are_read_whatever_the_others_are(tmp_path: Path, as_array: bool) -> None:
    path = tmp_path / "log.json"
    if as_array:
        path.write_text(json.dumps([LITELLM, 7, "text", LITELLM]))
    else:
        path.write_text(f"{json.dumps(LITELLM)}\n\n7\nnot json\n{json.dumps(LITELLM)}")
    work = new_import()

    assert len(work.read([path])) == 2
    assert sum(work.left_out.values()) == 2
    empty = tmp_path / "empty"
    empty.touch()
    assert [*open_rows(empty)] == []


def new_import(form: str = "litellm", ids: Sequence[int] | None = IDS, **scores: Any) -> Import:
    return Import(
        form,
        public_model="smollm",
        project="default",
        scores=scores,
        render=lambda _: None if ids is None else (ids, 100),
    )


def rows_of(tmp_path: Path, *rows: Mapping[str, Any]) -> list[Path]:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return [path]


PAGE, DEEP = '{"data": [%s], "meta": {"data": [1]}}', "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("text", "found", "reason"),
    [
        (PAGE, 1, {}),
        (f"{PAGE}\n{PAGE}", 2, {}),
        ('{"meta": {"page": 1}, "data": [%s, %s]}', 2, {}),
        (json.dumps({"data": [LITELLM, LITELLM], "meta": {}}, indent=2), 2, {}),
        (json.dumps([LITELLM, LITELLM], indent=0), 2, {}),
        ("\ufeff%s\n\ufeff%s", 2, {}),
        (" " * 300 + "[%s]", 1, {}),
        ('[]\n["log began"]\n%s', 1, {"not_an_object": 1}),
        ('[%s, {"id": "\\ud800"}, %s]', 2, {"not_json": 1}),
        ('[%s, {"id": NaN}, {"id": "\t"}, %s]', 2, {"not_json": 2}),
        (f'[%s, {{"id": {DEEP}}}, %s]', 2, {"not_json": 1}),
        ("[%s, %s] and more", 2, {"not_json": 1}),
        pytest.param('"\\' * 2_000_000 + "\n%s", 1, {"not_json": 1}, id="takes-linear-time"),
        ('{"id": "cut\n%s\n{"id": [\n%s', 2, {"not_json": 2}),
        ('%s\n{"id": "cut', 1, {"not_json": 1}),
        ('[%s, {"id":', 1, {"not_json": 1}),
        ("[%s, ", 1, {"not_json": 1}),
        ('{"data": [%s, ', 1, {"not_json": 1}),
    ],
)
def test_a_bad_row_costs_itself_in_each_form_of_a_file(
    tmp_path: Path, text: str, found: int, reason: Mapping[str, int]
) -> None:
    path = tmp_path / "log.json"
    path.write_text(text.replace("%s", json.dumps(LITELLM)), encoding="utf-8")
    work = new_import()

    assert len(work.read([path])) == found
    assert work.left_out == reason


@pytest.mark.parametrize(
    ("text", "found", "reason"),
    [
        ("[%s, %s", 2, {"not_json": 1}),
        ('[{"id": 1, \n %s, \n %s]', 2, {"not_json": 1}),  # as json_agg of PostgreSQL writes it
        ('[%s\n,{"id": 1\n,%s\n]', 2, {"not_json": 1}),
        ('[\n%s\n,{"id": 1\n,%s\n]', 2, {"not_json": 1}),
        ("{\n%s\n%s", 2, {"not_json": 1}),
        ('[\n  {\n  {\n    "id": 1\n  }\n]', 0, {"not_json": 1, "no_time": 1}),
        ('[\n{\n\n"a": [\n{\n"b": 1\n}\n]\n},\n%s\n]', 1, {"no_time": 1}),
        ('\ufeff{\n "id": 1\n\n{\n "id": 2\n}', 0, {"not_json": 1, "no_time": 1}),
        ('[{"data": [%s, %s]}, {"data": [%s]}]', 3, {}),
    ],
)
def test_rows_are_found_behind_a_damaged_one(
    tmp_path: Path, text: str, found: int, reason: Mapping[str, int]
) -> None:
    path = tmp_path / "log.json"
    path.write_text(text.replace("%s", json.dumps(LITELLM)), encoding="utf-8")
    work = new_import()

    records = [*map(work.record, work.read([path]))]

    assert sum(one is not None for one in records) == found
    assert work.left_out == reason


@pytest.mark.parametrize("text", ["[" + "{}, " * 300_000, "]{" * 300_000, '{"data":[' * 100_000])
def test_one_long_line_takes_linear_time(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log.json"
    path.write_text(text)

    assert sum(1 for _ in open_rows(path)) > 0


@pytest.mark.parametrize("end", ["}", "]"])
@pytest.mark.parametrize(
    ("first", "between", "last", "indent"),
    [
        ("", "\n", "", None),
        (" ", "\n ", "", None),
        ("\ufeff", "\n\ufeff", "", None),
        ("[\n", ",\n", "\n]", None),
        ("", "\n", "", 2),
        ("[\n", ",\n", "\n]", 2),
        ('{"data": [\n', ",\n", '\n], "meta": {"page": 1}}', 2),
    ],
)
def test_a_row_that_lacks_a_bracket_costs_itself(
    tmp_path: Path, first: str, between: str, last: str, indent: int | None, end: str
) -> None:
    one = json.dumps(LITELLM, indent=indent)
    bad = end.join(one.rsplit(end, 2)[::2]) if end == "}" else one.replace("]", "", 1)
    rows = [one, one, bad, one, one]
    if indent and last:
        rows = [textwrap.indent(row, "  ") for row in rows]
    path = tmp_path / "log.json"
    path.write_text(f"{first}{between.join(rows)}{last}", encoding="utf-8")
    work = new_import()

    assert len(work.read([path])) == 4
    assert work.left_out == {"not_json": 1}


@pytest.mark.parametrize("data", [gzip.compress(b"{}"), "{}".encode("utf-16"), b"{\0}\0"])
def test_a_file_of_another_encoding_is_refused_in_words(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "log.json"
    path.write_bytes(data)

    with pytest.raises(OSError, match="no JSON in UTF-8; unpack it"):
        next(open_rows(path))


@pytest.mark.parametrize("at", [1_790_000_000_500, "2026-09-21 14:13:20.5 UTC"])
def test_usual_forms_of_a_time_are_read(at: object) -> None:
    found = made("litellm", {**LITELLM, "startTime": at, "endTime": at})

    assert found.timings.started_at == 1_790_000_000.5


def test_a_file_that_is_emptied_meanwhile_costs_its_rows(tmp_path: Path) -> None:
    work, paths = new_import(), rows_of(tmp_path, LITELLM, LITELLM)
    rows = work.read(paths)
    paths[0].write_bytes(b"")

    assert [work.record(one) for one in rows] == [None, None]
    assert work.left_out == {"not_json": 2}


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(OSError, match="no plain file"):
        new_import().read([tmp_path / "pipe"])
    with pytest.raises(OSError, match="mistyped is not there"):
        new_import().read([tmp_path / "mistyped"])


def test_a_name_that_one_request_has_names_no_session(tmp_path: Path) -> None:
    """Gateways draw one for each request without: turns of one conversation would be sessions, and
    some of them held out."""
    first, second = ({**LITELLM, "id": name, "session_id": name} for name in "ab")
    again = {**LITELLM, "id": "c", "session_id": "b"}
    work = new_import()

    keys = [
        one.session_key
        for one in map(work.record, work.read(rows_of(tmp_path, first, second, again)))
        if isinstance(one, Exchange)
    ]

    assert keys[0].startswith("m:")
    assert keys[1:] == ["h:b", "h:b"]


def test_a_limit_of_tokens_that_vllm_has_no_room_for_is_dropped(tmp_path: Path) -> None:
    parameters = {"max_tokens": 101, "temperature": 0.5}
    work = new_import()

    [found] = map(
        work.record,
        work.read(rows_of(tmp_path, {**LITELLM, "model_parameters": parameters})),
    )

    assert isinstance(found, Exchange)
    assert {"temperature"} == set(json.loads(found.request)) - {"model", "messages"}


def test_rows_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    """A log lists the newest first; a session is found by what came before."""
    later = {**LITELLM, "id": "later", "startTime": 1_790_000_100, "endTime": 1_790_000_101}
    work = new_import()

    rows = work.read(rows_of(tmp_path, later, LITELLM))

    assert [one.read()["id"] for one in rows] == ["chatcmpl-1", "later"]


@pytest.mark.parametrize(
    ("scored", "kind", "score"),
    [
        ({"observation_id": "obs-1", "trace_id": "a" * 32, "value": 1}, "exchange", 1),
        ({"observation_id": "", "trace_id": "a" * 32, "value": 0.25}, "trace", -0.5),
        ({"trace_id": None, "session_id": "s1", "value": 0}, "session", -1),
    ],
)
def test_a_score_becomes_feedback(
    tmp_path: Path, scored: Mapping[str, Any], kind: str, score: float
) -> None:
    row = {"id": "score-1", "name": "helpful", "timestamp": "2026-09-22 00:00:00.0", **scored}
    work = new_import("langfuse", helpful=(0.0, 1.0))
    later = {**LANGFUSE, "id": "obs-2", "start_time": "2026-09-21 15:00:00"}

    exchange, _, found = map(work.record, work.read(rows_of(tmp_path, row, LANGFUSE, later)))

    assert isinstance(exchange, Exchange)
    assert isinstance(found, Feedback)
    names = {"exchange": exchange.exchange_id, "trace": "a" * 32, "session": "h:s1"}
    assert (found.target_kind, found.target) == (kind, names[kind])
    assert (found.score, found.label, found.source) == (score, "helpful", "langfuse")
    assert decode_feedback(encode_feedback(found)) == found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"metric_name": "other"}, "score_not_asked_for"),
        ({"target_id": "01996cba-0000-7000-8000-0000000000ff"}, "score_of_nothing_imported"),
        ({"value": 7}, "score_out_of_range"),
        ({"value": "good"}, "no_number"),
    ],
)
def test_a_score_of_nothing_imported_is_left_out(
    tmp_path: Path, change: Mapping[str, Any], reason: str
) -> None:
    row = {
        "id": "01996cba-0000-7000-8000-0000000000f1",
        "target_id": TENSORZERO["id"],
        "metric_name": "solved",
        "value": True,
    }
    work = new_import("tensorzero", solved=(0.0, 1.0))

    records = [
        work.record(one) for one in work.read(rows_of(tmp_path, TENSORZERO, {**row, **change}))
    ]

    assert [type(one) for one in records if one is not None] == [Exchange]
    assert work.left_out == {reason: 1}


@pytest.mark.parametrize("held_out", [False, True], ids=["group", "held-out"])
def test_an_import_starts_a_group_without_its_own_answer(kit: Kit, held_out: bool) -> None:
    found = made("litellm", LITELLM)
    sessions = Sessions(held_out_rate=float(held_out))

    taken = kit.take(found, found, sessions=sessions, now=1_790_000_900.0)

    assert taken == Consumed(stored=1, repeated=1), "the same row again changes nothing"
    kit.choose()
    assert kit.stored(found.exchange_id).selection == ("held_out" if held_out else "chosen")
    if held_out:
        return
    group = kit.group(group_id_of(found.exchange_id))
    assert (group.adapter, group.prompt_token_ids, group.answers) == ("base", IDS, ())


def test_a_prompt_that_vllm_does_not_take_is_left_out(tmp_path: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    image = {**LITELLM, "id": "image", "messages": [{"role": "user", "content": [part]}]}
    work = new_import(ids=None)

    found = [*map(work.record, work.read(rows_of(tmp_path, LITELLM, image)))]

    assert found == [None, None]
    assert work.left_out == {"not_rendered": 1, "not_text": 1}


def test_an_import_that_waits_is_for_the_champion_of_the_time_when_it_is_chosen(kit: Kit) -> None:
    found = made("litellm", LITELLM)
    kit.store(found)
    kit.route(champion="smollm--v1")
    with kit.database.write() as session:
        session.add(AliasRow(model="smollm", alias="champion", adapter="smollm--v1", generation=1))

    kit.choose()

    assert kit.group(group_id_of(found.exchange_id)).adapter == "smollm--v1"


@pytest.mark.parametrize(
    ("form", "row", "change", "reason"),
    [
        ("litellm", LITELLM, {"messages": [{"role": [], "content": "a"}]}, "no_messages"),
        ("litellm", LITELLM, {"messages": [{"role": {}, "content": "a"}]}, "no_messages"),
        ("litellm", LITELLM, {"startTime": 10**400}, "no_time"),
        ("langfuse", LANGFUSE, {"start_time": 10**400}, "no_time"),
        ("tensorzero", TENSORZERO, {"id": "zzzzzzzzzzzz7zzzzzzzzzzzzzzzzzzz"}, "no_time"),
        ("tensorzero", TENSORZERO, {"target_id": "x", "value": 10**400}, "no_number"),
        ("tensorzero", TENSORZERO, {"processing_time_ms": 10**400}, None),
        ("litellm", LITELLM, {"model_parameters": {"max_tokens": 10**400}}, None),
        ("litellm", LITELLM, {"id": "\\ud800"}, None),
    ],
)
def test_a_row_of_strange_values_does_not_end_the_import(
    tmp_path: Path, form: str, row: Mapping[str, Any], change: Mapping[str, Any], reason: str | None
) -> None:
    work = new_import(form)

    found = [*map(work.record, work.read(rows_of(tmp_path, {**row, **change}, row)))]

    assert sum(isinstance(one, Exchange) for one in found) == (1 if reason else 2)
    assert work.left_out == ({reason: 1} if reason else {})


@pytest.mark.parametrize("error", [TypeError, ValueError, OverflowError, KeyError, RecursionError])
def test_a_row_that_a_reader_fails_on_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(logged: Logged) -> dict[str, Any]:
        raise error("strange")

    monkeypatch.setattr("ingest.importing.request_of", fail)
    work = new_import("litellm")

    assert [*map(work.record, work.read(rows_of(tmp_path, LITELLM)))] == [None]
    assert work.left_out == {"unreadable": 1}
