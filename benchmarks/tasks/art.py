"""The same groups of whole sessions by the product, and by ART's own trajectory path.

openpipe-art's capture of trajectories, `tokenize_trajectory_groups`, packing and loss are read from
its unpacked wheel (`benchmarks/learner/art.py`) and run as they are, with the defaults of its local
backend: rewards over their standard deviation, a sequence for each trajectory, CISPO. The drawn
model is ours. Gradients are compared, at the policy that sampled: ART's optimizer, which takes a
step for each sequence, needs Unsloth and a GPU.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.learner import sides
from benchmarks.learner.art import CHUNK, FOLDER, Art as Step, load as load_step, surroundings
from benchmarks.tasks import world
from benchmarks.tasks.spoken import CASES, Turn, make_tokenizer, turns
from ingest.sessions.rows import join_rows
from ingest.tasks.material import TaskGroup, TaskSession
from learner.policy.logprobs import Policy
from learner.policy.packing import pack_group
from learner.records import TrainingGroup
from learner.runs.selection import task_group

GROUPS = slice(0, 8, 2)
"""Of a night's whose rewards differ. In two of these one session succeeded, in two half of them."""
SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
WAYS = {
    "ART": (True, False),
    "ART, scale_rewards off": (False, False),
    "ART, one sequence": (True, True),
    "ART, both": (False, True),
}
"""Name -> its own `scale_rewards`; and one sequence for all, as its Megatron backend packs."""
SAME = "ART, both"
"""What should have our gradient: each session counts alike, deviations do not count."""


Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Session:
    """A session with its exchanges."""

    name: str
    turns: list[Turn]
    reward: float


@dataclass(frozen=True, slots=True)
class Art:
    """ART's modules."""

    tokenize: Any
    pack: Any
    inputs: Any
    capture: Any
    trajectories: Any
    step: Step
    tokenizer: Any
    told: dict[tuple[float, ...], list[tuple[int, Any]]] = field(default_factory=dict)
    """Rewards of a group -> its results by session, of sessions of one short answer."""

    def trajectory(self, session: Session) -> Any:
        """Return what ART's capture makes of the HTTP exchanges of a session."""
        context = self.capture.AutoTrajectoryContext()
        for turn in session.turns:
            (own,) = turn.tokens.answers
            content = [
                {"token": f"token_id:{one}", "logprob": value, "top_logprobs": []}
                for one, value in zip(own.token_ids, own.logprobs, strict=True)
            ]
            choice = {"index": 0, "finish_reason": "stop", "message": turn.answer}
            reply = {"choices": [{**choice, "logprobs": {"content": content}}]}
            sent = SimpleNamespace(_content=json.dumps({"messages": turn.messages}).encode())
            context.handle_httpx_response(
                SimpleNamespace(_content_so_far=json.dumps(reply).encode(), request=sent)
            )
        context.trajectory.reward = session.reward
        return context.trajectory

    def tokenized(self, groups: Sequence[Sequence[Any]], *, scale: bool) -> list[Any]:
        """Return its `TokenizedResult`s of groups of trajectories; it shuffles them."""
        made = [self.trajectories.TrajectoryGroup(one) for one in groups]
        return list(self.tokenize.tokenize_trajectory_groups(self.tokenizer, made, False, scale))

    def packed(self, found: Sequence[Any], size: int, *, together: bool = False) -> Any:
        """Return its tensors, sequences of `size` tokens."""
        return self.pack.packed_tensors_from_tokenized_results(
            list(found), size, pad_token_id=self.tokenizer.eos_token_id,
            truncate_long_results=False, pack_results=together,
        )  # fmt: skip

    def factors(self, found: Sequence[Any]) -> list[float]:
        """Return by what it multiplies the tokens of each result: advantage times weight."""
        marked = [replace(one, prompt_id=number) for number, one in enumerate(found)]
        tensors = self.packed(marked, max(len(one.token_ids) for one in found))
        mask_BS, values = tensors["assistant_mask"], [0.0] * len(found)
        factor_BS = tensors["advantages"] * tensors["weights"]
        for row, number in enumerate(tensors["parent_ids"][:, 0].tolist()):
            values[number] = float(factor_BS[row][mask_BS[row]].mean())
        return values

    def advantages(self, rewards: Sequence[Sequence[float]]) -> list[float]:
        """Return its advantages of the sessions of a step, which are all of one length."""
        found = [
            (number * world.SIZE + place, result)
            for number, group in enumerate(rewards)
            for place, result in self._of_rewards(tuple(group))
        ]
        values = [0.0] * (len(rewards) * world.SIZE)
        factors = self.factors([one for _, one in found]) if found else []
        for (place, _), factor in zip(found, factors, strict=True):
            values[place] = factor
        return values

    def _of_rewards(self, rewards: tuple[float, ...]) -> list[tuple[int, Any]]:
        if rewards not in self.told:
            said = turns(
                self.tokenizer, [0], "plain", lambda _, s: [-1.0] * len(s), task=0, name=""
            )
            made = [self.trajectory(Session("", said, one)) for one in rewards]
            places = {id(one): place for place, one in enumerate(made)}
            found = self.tokenized([made], scale=True)
            self.told[rewards] = [(places[id(one.trajectory)], one) for one in found]
        return self.told[rewards]


def load(folder: Path = FOLDER) -> Art:
    """Read ART's modules from its unpacked wheel. Raises: ImportError."""
    step, of = load_step(folder), "preprocessing"
    names = (f"{of}.tokenize", f"{of}.pack", f"{of}.inputs", "auto_trajectory", "trajectories")
    with surroundings(folder / "art", ["dev"]):
        tokenize, pack, inputs, capture, trajectories = (
            importlib.import_module(f"art.{name}") for name in names
        )
    return Art(tokenize, pack, inputs, capture, trajectories, step, make_tokenizer())


def compare(art: Art, folder: Path) -> list[Row]:
    """Return a row for each case and side, and one for each session of the first case.

    folder: of the drawn model's files.
    """
    torch.set_num_threads(1)  # the matrices are tiny: a second thread only waits
    policy = sides.make_policy(
        folder, {**SHAPE, "vocab_size": len(art.tokenizer)}, "cpu", "float32"
    )
    rng = np.random.default_rng(1)
    night = world.play(world.site(rng), np.zeros((world.STEPS, world.ACTIONS)), rng, 0)
    drawn = [one for one in world.groups(night) if len({reward for _, reward in one}) > 1]

    def logprobs(prompt: Sequence[int], sampled: Sequence[int]) -> Sequence[float]:
        with torch.no_grad():
            logits_LV = policy.model(torch.tensor([[*prompt, *sampled]])).logits[0]
        values_SV = logits_LV[len(prompt) - 1 : -1].log_softmax(-1)
        found: list[float] = values_SV.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()
        return found

    found: list[Row] = []
    for case in CASES:
        groups = [
            [
                Session(name := one.ready.session_id, turns(
                    art.tokenizer, one.actions, case, logprobs, task=one.template, name=name
                ), reward)
                for one, reward in group
            ]
            for group in drawn[GROUPS]
        ]  # fmt: skip
        found += _compare(art, policy, groups, case)
    return found


def _compare(art: Art, policy: Policy, groups: Sequence[Sequence[Session]], case: str) -> list[Row]:
    seen = {
        (*turn.tokens.prompt_token_ids, *turn.tokens.answers[0].token_ids)
        for group in groups for one in group for turn in one.turns
    }  # fmt: skip
    own = [_task_group(group) for group in groups]
    sides.gradients(policy, [pack for one in own for pack in pack_group(one, max_tokens=4_096)])
    own_P = _gradient(policy)
    rows = [
        ((*(start := one.prompt_token_ids), *row.token_ids), (*(False for _ in start), *row.kept))
        for one in own
        for row in one.rows
    ]
    found: list[Row] = [{"case": case, "side": "ours", **_trained(rows, seen)}]
    made = [[art.trajectory(one) for one in group] for group in groups]
    for side, (scale, together) in WAYS.items():
        if side != "ART" and case != CASES[0]:
            continue
        told = art.tokenized(made, scale=scale)
        lengths = [len(one.token_ids) for one in told]
        size = -(-(sum(lengths) if together else max(lengths)) // CHUNK) * CHUNK
        tensors = art.packed(told, size, together=together)
        for at in range(len(tensors["tokens"])):
            inputs = art.inputs.create_train_inputs(tensors, at, None, {}, False)
            art.step.backward(policy, inputs, {})
        cosine = float(torch.cosine_similarity(own_P, _gradient(policy), dim=0))
        counts = _trained([(one.token_ids, one.assistant_mask) for one in told], seen)
        found.append({"case": case, "side": side, **counts, "cosine": round(cosine, 4)})
    if case == CASES[0]:
        found += _sessions(art, own, made)
    return found


def _task_group(group: Sequence[Session]) -> TrainingGroup:
    """Return a group as the learner trains on it."""
    sessions = []
    for one in group:
        names = [turn.tokens.exchange_id for turn in one.turns]
        sessions.append(
            TaskSession(
                session_id=one.name, reward=one.reward, source="outcome", exchange_ids=tuple(names),
                rows=tuple(join_rows(turn.tokens for turn in one.turns)),
                steps=dict.fromkeys(names, 1.0),
            )
        )  # fmt: skip
    task = TaskGroup(
        group_id=group[0].name, key_kind="template", adapter="base", judge_model="",
        rubric_hash="", sessions=tuple(sessions),
    )  # fmt: skip
    made = task_group(task, {}, loss=sides.SETTINGS["loss"])
    assert made is not None
    return made


def _trained(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]], seen: Collection[tuple[int, ...]]
) -> Row:
    """Count what rows (tokens, mask) train on; `as_seen`: behind exactly what vLLM saw."""
    trained = as_seen = 0
    for tokens, mask in rows:
        ends = [at for at, (one, other) in enumerate(pairwise([0, *mask, 0])) if one != other]
        for start, stop in zip(ends[::2], ends[1::2], strict=True):
            trained += stop - start
            as_seen += (stop - start) * (tuple(tokens[:stop]) in seen)
    computed = sum(len(tokens) for tokens, _ in rows)
    return {"rows": len(rows), "tokens": computed, "trained": trained, "as_seen": as_seen}


def _sessions(art: Art, own: Sequence[TrainingGroup], made: Sequence[Sequence[Any]]) -> list[Row]:
    """Return both sides' advantage of each session, and how much it counts in the gradient of the
    mean of its tokens, relative to the mean session."""
    by_id = {id(one.trajectory): one for one in art.tokenized(made, scale=True)}
    told = [by_id[id(one)] for group in made for one in group]
    rows = [row for group in own for row in group.rows]
    advantages = world.leave_one_out([group.scores for group in own])
    ours, theirs = [row.advantage * row.kept_tokens for row in rows], art.factors(told)
    return [
        {
            "case": f"session {number}",
            "reward": one.trajectory.reward,
            "trained": row.kept_tokens,
            "advantage": round(advantages[number], 3),
            "art_advantage": round(one.advantage, 3),
            "part": round(ours[number] * len(ours) / sum(map(abs, ours)), 3),
            "art_part": round(theirs[number] * len(theirs) / sum(map(abs, theirs)), 3),
        }
        for number, (row, one) in enumerate(zip(rows, told, strict=True))
    ]


def _gradient(policy: Policy) -> torch.Tensor:
    """Return the gradient that was added up, and clear it."""
    found = [one.grad.flatten() for one in policy.model.parameters() if one.requires_grad]
    policy.model.zero_grad()
    return torch.cat(found)
