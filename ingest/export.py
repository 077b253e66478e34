"""Write exchanges and scored groups as JSON objects: our own form, TRL's, ART's. Pure.

Each carries what was told of the exchange (`ingest.feedback.store`): our own form all of it, the
others its summary, which is about the answer that the agent got.

TRL: conversational "prompt-completion" and "preference" rows (its page "Dataset formats and
types"), with tools in `tools` and the arguments of tool calls as objects, for chat templates.
ART 0.5: one object for each group, with the fields of `art.Trajectory`: the request's messages and
then the answer as a choice of chat completions. The reward is what is learned from: the judge's
score, or what verifiers made of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from ingest.feedback.store import Annotations
from ingest.records import Answer, ScoredGroup
from ingest.store.exchanges import StoredExchange
from sidecar.records import IMPORTED, Choice

Object = dict[str, Any]
"""A JSON object. Any: JSON."""
NOTHING = Annotations()


def exchange_object(stored: StoredExchange, notes: Annotations = NOTHING) -> Object:
    """The whole record, with bodies as JSON and without token ids (their number instead)."""
    exchange = stored.exchange
    return {
        "exchange_id": exchange.exchange_id,
        "at": exchange.timings.started_at,
        "session": stored.place.session,
        "parent": stored.place.parent,
        "turn": stored.place.turn,
        "branch": stored.place.branch,
        "segment": stored.place.segment,
        "placed_by": stored.place.how,
        "project": exchange.project,
        "user": exchange.user,
        "key_id": exchange.key_id,
        "trace_id": exchange.trace_id,
        "surface": exchange.surface,
        "model": exchange.public_model,
        "adapter": exchange.adapter,
        "arm": exchange.arm,
        "task": exchange.task,
        "origin": exchange.origin,
        "status": exchange.status,
        "outcome": exchange.outcome,
        "held_out": stored.held_out,
        "selection": stored.selection,
        "untrainable_reason": exchange.untrainable_reason,
        "sampling": msgspec.to_builtins(exchange.sampling),
        "timings": msgspec.to_builtins(exchange.timings),
        "prompt_tokens": len(exchange.prompt_token_ids),
        "completion_tokens": exchange.completion_tokens,
        **notes.objects(),
        "request": _json(exchange.request),
        "answers": [_choice(choice) for choice in exchange.choices],
    }


def prompt_completion(stored: StoredExchange, notes: Annotations = NOTHING) -> Object | None:
    """TRL's "prompt-completion": what was asked, and the answer that the agent got.

    None: the exchange is no chat, has no complete answer, or another model's.
    """
    exchange = stored.exchange
    request = _json(exchange.request)
    answer = next((one for one in exchange.choices if one.index == exchange.returned_index), None)
    complete = exchange.outcome == "ok" and exchange.status == 200
    if exchange.surface != "chat" or not complete or answer is None or exchange.origin == IMPORTED:
        return None
    completion = [_trl_message(_json(answer.message))]
    return _trl_row(request, {"completion": completion, **notes.summary()})


def preference(scored: ScoredGroup, notes: Annotations = NOTHING) -> Object | None:
    """TRL's "preference": the best and the worst answer of a group by their rewards; None when they
    tie."""
    by_score = sorted(
        zip(scored.rewards, scored.group.answers, strict=True), key=lambda pair: pair[0]
    )
    (low, worst), (high, best) = by_score[0], by_score[-1]
    if low == high:
        return None
    return _trl_row(
        _json(scored.group.request),
        {
            "chosen": [_trl_message(_json(best.message))],
            "rejected": [_trl_message(_json(worst.message))],
            "score_chosen": high,
            "score_rejected": low,
            **notes.summary(),
        },
    )


def art_group(scored: ScoredGroup, notes: Annotations = NOTHING) -> Object | None:
    """ART's trajectory group; None when the request has no messages."""
    request = _json(scored.group.request)
    messages = request.get("messages") if isinstance(request, dict) else None
    if not isinstance(messages, list):
        return None
    return {
        "trajectories": [
            {
                "reward": scored.rewards[place],
                "metrics": _metrics(scored, place),
                "metadata": {
                    "group_id": scored.group.group_id,
                    "exchange_id": scored.group.exchange_id,
                    "session_id": scored.group.session_id,
                    "adapter": scored.group.adapter,
                    "origin": answer.origin,
                    "judge_model": scored.judge_model,
                    **(_metadata(notes) if answer.origin == "served" else {}),
                },
                "messages_and_choices": [*messages, _choice(answer)],
                "tools": request.get("tools"),
                "additional_histories": [],
                "logs": [why] if why else [],
            }
            for place, (answer, why) in enumerate(
                zip(scored.group.answers, scored.explanations, strict=True)
            )
        ]
    }


def _metrics(scored: ScoredGroup, place: int) -> Object:
    """ART's own names of a reward's parts; empty when the reward is the judge's score alone."""
    if scored.rewarded is None:
        return {}
    found = {"ruler_score": scored.scores[place]}
    if scored.rewarded.independent:
        found["independent_reward"] = scored.rewarded.independent[place]
    return found


def _metadata(notes: Annotations) -> Object:
    """The summary as plain values, which is all that ART's metadata takes; without nulls."""
    found = notes.summary()
    found["signals"] = ",".join(found["signals"])
    return {name: value for name, value in found.items() if value not in (None, "")}


def _choice(answer: Answer | Choice) -> Object:
    return {
        "index": answer.index,
        "finish_reason": answer.finish_reason,
        "message": _json(answer.message),
    }


def _trl_row(request: Any, answers: Object) -> Object | None:  # Any: JSON
    messages = request.get("messages") if isinstance(request, dict) else None
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return None
    row: Object = {"prompt": [_trl_message(one) for one in messages], **answers}
    if request.get("tools"):
        row["tools"] = request["tools"]
    return row


def _trl_message(message: Mapping[str, Any]) -> Object:  # Any: JSON
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_trl_call(call) for call in calls]}


def _trl_call(call: Any) -> Any:  # Any: JSON
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (TypeError, KeyError, ValueError):
        return call  # no function, or arguments that are no JSON: left as the model wrote it
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _json(body: bytes) -> Any:  # Any: JSON
    """The decoded body; its text when it is no JSON (a request that vLLM refused)."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body.decode("utf-8", "replace")
