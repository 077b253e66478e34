"""ART's step: its own mask, log-probabilities and loss, from its wheel, on the same group.

openpipe-art packs the answers of a group behind one prompt, as ours do, with a mask of all pairs of
tokens; it computes the head for every token of the sequence, in chunks. Its modules are read from
the unpacked wheel (`benchmarks/learner/setup`) without what they import around these functions: its
package pulls in litellm, vLLM's client and Unsloth. Two things are not ART's: the decoder is that
of the other contenders (ART's Unsloth needs a GPU), and it is told the positions of the answers,
which ART writes into `input_pos` and does not hand to its model: without them the answers behind
the first would get other values than a row of their own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from learner.policy.logprobs import Policy
from learner.records import TrainableRow, TrainingGroup

FOLDER = Path(__file__).resolve().parents[2] / ".bench/peers/art"
CHUNK = 1_024
"""Tokens of the head's chunks, ART's default; the sequence is padded to a multiple of it."""
LOSS = {"ppo": True, "epsilon": 0.2, "epsilon_high": 0.28}
"""ART's clipped loss with the constants of the other contenders; its default is CISPO's."""
STUBS = ("dev", "types", "preprocessing.inputs", "preprocessing.pack", "preprocessing.tokenize")
"""Modules of ART whose names are only imported here."""
PADDING = -1
"""ART's id of a group for tokens behind the last answer."""


class _Stub(ModuleType):
    """A module that has whatever is asked of it: a class that is used in annotations alone."""

    def __getattr__(self, name: str) -> Any:  # Any: any name
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@dataclass(frozen=True, slots=True)
class Art:
    """Three functions of ART."""

    attention: Callable[..., torch.Tensor]
    """`calculate_attn_bias`"""
    logprobs: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """`_calculate_logprobs`"""
    loss: Callable[..., Any]
    """`loss_fn`; it returns a record of its own."""

    def step(self, policy: Policy, group: TrainingGroup) -> float:
        """Compute the loss and its gradient. Returns: the loss."""
        loss = self.backward(policy, packed(group, policy.device), LOSS)
        policy.model.zero_grad()
        return loss

    def backward(
        self, policy: Policy, inputs: Mapping[str, torch.Tensor], config: Mapping[str, object]
    ) -> float:
        """Add the gradient of one packed sequence. config: ART's own, of its loss.

        Returns: the loss.
        """
        tokens_1S = inputs["tokens"]
        base = policy.model.get_base_model()
        decoder = base.get_decoder()
        dtype = torch.bfloat16 if policy.autocast else next(decoder.parameters()).dtype
        bias = self.attention(
            *tokens_1S.shape, policy.device, inputs["group_ids"], inputs["parent_ids"], dtype
        )
        with policy.precision():
            hidden_1SH = decoder(
                input_ids=tokens_1S,
                attention_mask=bias[:, None],
                position_ids=inputs["input_pos"],
                use_cache=False,
            ).last_hidden_state
        head_HV = base.get_output_embeddings().weight.t()
        following_1S = torch.nn.functional.pad(tokens_1S[:, 1:], (0, 1))
        logprobs_1S, entropies_1S = self.logprobs(head_HV, hidden_1SH, following_1S, CHUNK)
        loss = self.loss(inputs, logprobs_1S, None, entropies_1S, config).policy_loss
        loss.backward()
        return float(loss)


def load(folder: Path = FOLDER) -> Art:
    """Read ART's functions from its unpacked wheel. Raises: ImportError."""
    if not (folder / "art").is_dir():
        raise ImportError(f"{folder.name} is not in .bench/peers; run benchmarks/learner/setup")
    with surroundings(folder / "art"):
        train = importlib.import_module("art.unsloth.train")
    return Art(train.calculate_attn_bias, train._calculate_logprobs, train.loss_fn)


@contextmanager
def surroundings(package: Path, names: Sequence[str] = STUBS) -> Iterator[None]:
    """Let modules of the package be imported without its own `__init__`, until the end.

    names: modules of it that are not read: empty ones stand in their place.
    """
    stubs: dict[str, ModuleType] = {f"art.{name}": _Stub(f"art.{name}") for name in names}
    stubs["nest_asyncio"] = _Stub("nest_asyncio")
    stubs["nest_asyncio"].apply = lambda: None  # type: ignore[attr-defined]  # it changes asyncio
    for name in ("", ".utils", ".preprocessing", ".unsloth"):
        folder = ModuleType(f"art{name}")
        folder.__path__ = [str(package.joinpath(*name.split(".")[1:]))]
        stubs[f"art{name}"] = folder
    for name in names:
        if "." not in name:
            setattr(stubs["art"], name, stubs[f"art.{name}"])
    kept = sys.modules.get("nest_asyncio")
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in [one for one in sys.modules if one == "art" or one.startswith("art.")]:
            del sys.modules[name]
        del sys.modules["nest_asyncio"]
        if kept is not None:
            sys.modules["nest_asyncio"] = kept


def packed(group: TrainingGroup, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a group as ART packs it: one sequence, in which the prompt but for its last token
    stands once, and that token before each answer. The advantages stay as they are: ART's own
    packing scales those of a batch to a mean size of 1."""
    prompt = group.prompt_token_ids
    begin = len(prompt) - 1
    tokens, positions, owners = [*prompt[:begin]], [*range(begin)], [0] * begin
    kept, recorded, advantages = [False] * begin, [torch.nan] * begin, [0.0] * begin
    for number, row in enumerate(conversations(group), 1):
        own = len(row.token_ids) + 1
        tokens += [prompt[-1], *row.token_ids]
        positions += range(begin, begin + own)
        owners += [number] * own
        kept += [False, *(row.kept or (True,) * len(row.token_ids))]
        recorded += [torch.nan, *row.logprobs]
        advantages += [row.advantage] * own
    used, size = len(tokens), length(group)

    def padded(values: list[Any], by: Any) -> torch.Tensor:  # Any: a number or a truth value
        return torch.tensor([[*values, *[by] * (size - used)]], device=device)

    return {
        "tokens": padded(tokens, 0),
        "input_pos": padded(positions, 0),
        "group_ids": padded(owners, PADDING),
        "parent_ids": padded([0] * used, PADDING),
        "assistant_mask": padded(kept, False),
        "logprobs": padded(recorded, torch.nan),
        "advantages": padded(advantages, 0.0),
        "weights": padded([float(one) for one in kept], 0.0),
    }


def length(group: TrainingGroup) -> int:
    """Return how many tokens ART computes for a group, padding included."""
    rows = conversations(group)
    used = len(group.prompt_token_ids) - 1 + sum(1 + len(row.token_ids) for row in rows)
    return -(-used // CHUNK) * CHUNK


def conversations(group: TrainingGroup) -> list[TrainableRow]:
    """Join the turns of a conversation, each a row that begins with the one before, into one row,
    as ART trains a whole trajectory. Each token is trained on once either way."""
    found: list[TrainableRow] = []
    for row in group.rows:
        before = found[-1] if found else None
        if before is None or row.token_ids[: len(before.token_ids)] != before.token_ids:
            found.append(row)
            continue
        earlier = before.kept or (True,) * len(before.token_ids)
        after = (row.kept or (True,) * len(row.token_ids))[len(earlier) :]
        found[-1] = TrainableRow(
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            advantage=row.advantage,
            temperature=row.temperature,
            trainable=True,
            kept=(*earlier, *after),
        )
    return found
