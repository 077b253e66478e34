"""Judges with known virtues and faults, behind one OpenAI-compatible server on loopback.

The name of the model says how it judges:

    honest    the known score of each answer
    biased    the known score, and 0.4 more at the first position than at the last, evenly between
    random    any score
    rubbish   three replies of ten are no scores; the others are honest

Chance is drawn from the answers in their order and from whether it is a retry, so the same question
gets the same reply, in whatever words it is asked.

    python -m support.scripted_judges      serves the shipped groups, and prints its address
"""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ingest.calibration.figures import KnownGroup
from ingest.calibration.running import read_groups
from ingest.calibration.shipped import NAME, PATH
from ingest.judge_prompt import shown_answer

ANSWER = re.compile(r'^<answer-[0-9a-f]+ id="(\w+)">\n(.*)\n</answer-[0-9a-f]+>$', re.MULTILINE)
CONVERSATION = re.compile(r"^<conversation-[0-9a-f]+>\n(.*?)\n</conversation-", re.DOTALL)
BIAS = 0.4


def judged(model: str, truth: Mapping[str, float], messages: Sequence[Mapping[str, str]]) -> str:
    """The reply's text. truth: key of an answer (`key_of`) -> known score, 0..1."""
    prompt = messages[1]["content"]
    (conversation,) = CONVERSATION.findall(prompt)
    context = [json.loads(line) for line in conversation.split("\n")]
    shown = [(name, key_of(context, json.loads(body))) for name, body in ANSWER.findall(prompt)]
    rng = random.Random(f"{model} {len(messages)} {[key for _, key in shown]}")
    if model == "rubbish" and rng.random() < 0.3:
        return "They are all fine in their own way."
    scores: list[dict[str, Any]] = []
    for position, (name, key) in enumerate(shown):
        score = rng.random() if model == "random" else truth[key]
        if model == "biased":
            place = position / max(1, len(shown) - 1)
            score = score * (1 - BIAS) + BIAS * (1 - place)
        scores.append({"id": name, "explanation": f"by {model}", "score": round(score, 4)})
    return json.dumps({"scores": scores})


def truth_of(groups: Iterable[KnownGroup]) -> dict[str, float]:
    """The known score of every answer, by its key."""
    return {
        key_of(group.context, shown_answer(one.message)): one.score
        for group in groups
        for one in group.candidates
        if one.score is not None
    }


def key_of(context: Sequence[Mapping[str, Any]], shown: Mapping[str, Any]) -> str:
    return json.dumps([*context, shown], sort_keys=True)


class ScriptedJudges:
    """The server."""

    def __init__(self, truth: Mapping[str, float]) -> None:
        asked = self.asked = threading.Event()
        """Set by the first question."""
        models = self.models = list[str]()
        """The judge of each question."""

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.set()
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                models.append(body["model"])
                data = json.dumps(_completion(body, truth)).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def _completion(body: Mapping[str, Any], truth: Mapping[str, float]) -> dict[str, Any]:
    """An OpenAI chat completion; tokens are words."""
    text = judged(body["model"], truth, body["messages"])
    asked = sum(len(message["content"].split()) for message in body["messages"])
    said = len(text.split())
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text},
    }
    usage = {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}
    made = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"]}
    return {**made, "choices": [choice], "usage": usage}


def shipped_truth() -> dict[str, float]:
    return truth_of(read_groups(PATH.read_text(encoding="utf-8"), NAME))


if __name__ == "__main__":
    sys.stdout.write(f"{ScriptedJudges(shipped_truth()).url}\n")
    sys.stdout.flush()
