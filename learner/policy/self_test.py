"""Trial runs of a policy: against the model's own pass, compiled, and probes for vLLM.

`checked` runs at the start of a run, `write_probe` at its end.

The config says which models can be packed, but a new architecture may say it in a way that nobody
knew. So two short answers of drawn tokens are computed both ways: behind a short prompt, and behind
one for each length at which the config changes the arithmetic, if a run may have such inputs. One
of the two answers ends within that length, the other beyond it. A model whose pack differs, or
cannot be computed, gets attention by paths, and if that is no better a dense mask; if that is not,
it is computed in rows; one whose rows differ too is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor
from transformers import AutoTokenizer

from learner.adapter_folder import PROBE, ProbeFile, file_digest, render_probe
from learner.errors import ParentError
from learner.explain import one_line
from learner.policy.architecture import Form, blocks_of
from learner.policy.logprobs import Policy, packs_of
from learner.policy.memory import is_out_of_memory
from learner.policy.packing import Pack, chain, pack_rows
from learner.records import TrainableRow, TrainingGroup

log = structlog.get_logger()

PATHS: Form = "paths"
DENSE: Form = "dense"
SELF_TEST = "self-test"
"""Id of the drawn group."""
PROMPT, ANSWERS = 24, (9, 14)
"""Tokens. Short: a step of a large model on a CPU takes long."""
MARGIN = 3
"""Tokens by which the shorter answer ends within a length at which the arithmetic changes."""
TOLERANCE = 1e-3
BF16_TOLERANCE = 0.1
"""Mean differences in nats a token that rounding explains, with products in fp32 and in bf16. The
state of a recurrent layer that leaks from one answer into the next makes 0.2 to 0.7."""
SELF_TEST_ERRORS = (
    RuntimeError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError,
    AssertionError,
)  # fmt: skip
"""Errors of a model's code for masks and keys that it does not know."""


def checked(policy: Policy, model_name: str, parent: str = "", *, most: int = 0) -> Policy:
    """Return the policy, packed or in rows, whichever is exact. Raises: ParentError when none is.

    model_name: of the base, for the message. parent: of the adapter; empty: it is a fresh one.
    most: tokens of the longest input of a run.
    """
    half = policy.autocast or next(policy.model.parameters()).dtype != torch.float32
    limit = BF16_TOLERANCE if half else TOLERANCE
    prompts = [PROMPT, *(length - ANSWERS[0] - MARGIN for length in policy.shape.turns)]
    lengths = [one for one in prompts if one == PROMPT or PROMPT < one <= most - sum(ANSWERS)]
    tests: list[tuple[TrainingGroup, Tensor]] = []
    try:
        for length in lengths:
            group = _drawn(policy.vocabulary, length)
            tests.append((group, _own_logprobs(policy, group)))
    except SELF_TEST_ERRORS as error:
        if is_out_of_memory(error):
            raise
        why = f"its own forward pass fails: {type(error).__name__}: {one_line(error)}"
        raise ParentError(refusal(model_name, why)) from error
    if not all(bool(torch.isfinite(expected).all()) for _, expected in tests):
        raise ParentError(_not_finite(policy, group, model_name, parent))
    first = ""
    if policy.shape.packs:
        others = () if policy.form == DENSE else (PATHS,)  # the model takes other forms
        for form in dict.fromkeys((policy.form, *others, DENSE)):
            policy = replace(policy, form=form)
            first = _fault(policy, tests, limit)
            if not first:
                return policy
            log.info("form_differs", base=model_name, form=form, why=first)
        first = f"packed answers {first}"
        policy = replace(policy, shape=replace(policy.shape, packs=False, why=first))
    log.info("answers_not_packed", base=model_name, why=policy.shape.why)
    rows = _fault(policy, tests, limit)
    if rows:
        why = f"{first + '; ' if first else ''}rows {rows}"
        raise ParentError(refusal(model_name, why))
    return policy


def refusal(model_name: str, why: str) -> str:
    return (
        f"base {model_name}: the learner does not compute this architecture's log-probabilities "
        f'({why}); serve it without a learner (learner.schedule = "manual"), or name another base'
    )


def _not_finite(policy: Policy, group: TrainingGroup, model_name: str, parent: str) -> str:
    if parent and _finite_without(policy, group):
        return (
            f"parent {parent}: its weights are finite, but so large that the log-probabilities "
            "with it are not, and those of the base alone are; roll back to another version "
            "(`sidecar rollback --reason ...`)"
        )
    bad = next(
        (n for n, one in policy.model.named_parameters() if not bool(torch.isfinite(one).all())), ""
    )
    if bad:
        why, todo = f"its weight {bad} holds", "copy or download its files again"
    else:
        why = "no weight, but its own forward pass, gives"
        single = not policy.autocast and next(policy.model.parameters()).dtype == torch.float32
        other = "copy or download its files again, or name another base"
        todo = other if single else 'set learner.precision = "float32"'
    return f"base {model_name}: {why} an infinity or NaN; {todo}"


def _finite_without(policy: Policy, group: TrainingGroup) -> bool:
    with policy.model.disable_adapter():
        return bool(torch.isfinite(_own_logprobs(policy, group)).all())


def _fault(policy: Policy, tests: Sequence[tuple[TrainingGroup, Tensor]], limit: float) -> str:
    for group, expected in tests:
        length = len(group.prompt_token_ids)
        try:
            with torch.no_grad():
                packs = packs_of(policy, group, 10 * (length + sum(ANSWERS)))
                values = torch.cat([policy.logprobs(pack)[0] for pack in packs])
            found = float((values - expected).abs().mean())
        except SELF_TEST_ERRORS as error:
            if is_out_of_memory(error):
                raise
            return f"cannot be computed ({type(error).__name__}: {one_line(error)})"
        if not found <= limit:
            behind = f" behind {length} tokens" if length != PROMPT else ""
            return f"differ by {found:.2g} nats a token from the model's own{behind}"
    return ""


def _own_logprobs(policy: Policy, group: TrainingGroup) -> Tensor:
    """[N] nats of the answers' tokens, by the model's own forward pass over each row."""
    values = []
    prompt = list(group.prompt_token_ids)
    # Where the model can leave out logits that nobody reads: of 4,000 tokens they take gigabytes.
    takes = "logits_to_keep" in signature(policy.model.get_base_model().forward).parameters
    kept = {"logits_to_keep": max(ANSWERS) + 1} if takes else {}
    for row in group.rows:
        ids = torch.tensor([[*prompt, *row.token_ids]], device=policy.device)
        with torch.no_grad(), policy.precision():
            logits = policy.model(input_ids=ids, use_cache=False, **kept).logits[0].float()
        told = torch.log_softmax(logits[-len(row.token_ids) - 1 : -1], dim=-1)
        values.append(told.gather(-1, ids[0, len(prompt) :, None])[:, 0])
    return torch.cat(values)


def _drawn(vocabulary: int, prompt: int) -> TrainingGroup:
    draw = torch.Generator().manual_seed(1)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (number,), generator=draw).tolist())

    rows = tuple(
        TrainableRow(
            token_ids=tokens(length),
            logprobs=(-1.0,) * length,
            advantage=0.0,
            temperature=1.0,
            trainable=True,
        )
        for length in ANSWERS
    )
    return TrainingGroup(
        group_id=SELF_TEST,
        adapter="",
        prompt_token_ids=tokens(prompt),
        rows=rows,
        scores=(0.0,) * len(rows),
    )


# Compile the decoder's blocks, on trial.

COMPILED_TOKENS = {"cuda": 2_500_000}
"""By kind of device: tokens of a run's packs from which on its blocks are compiled. On an H100 two
graphs took 77 s for 1.7B and 113 s for 8B, and saved 18 and 37 us a token (measured, a new cache);
here it is one graph, taken for half."""
TRIED = 1_999
"""Tokens of the trial, at most: the first length decides on kernels. It is the width of no model:
what is equal by chance is taken for one."""


def compile_blocks(policy: Policy, lengths: Sequence[int]) -> bool:
    """Compile the blocks for packs of any length, where a run is long enough to gain by it.

    Only passes with a gradient, which always have the same adapter, and not the first block, whose
    input has none: anything else would be a graph of its own.
    lengths: tokens of the run's packs.
    Returns: whether they are. Where it fails, or gives other gradients, they are not (logged).
    """
    least = COMPILED_TOKENS.get(policy.device.type, math.inf)
    if sum(lengths) < least or policy.form == DENSE:
        return False
    group = _drawn(policy.vocabulary, max(PROMPT, min(TRIED, max(lengths)) - sum(ANSWERS)))
    blocks = blocks_of(policy.model.get_base_model().get_decoder())[1:]
    limit = BF16_TOLERANCE if policy.autocast else TOLERANCE
    try:
        expected = _tried(policy, group)
        for block in blocks:
            block.forward = _compiled(type(block).forward.__get__(block))
        away = float((_tried(policy, group) - expected).norm() / expected.norm())
        why = "" if away <= limit else f"gradients differ by {away:.2g} of their norm"
    except Exception as error:  # noqa: BLE001  a compiler and its tools raise errors of any class
        why = f"{type(error).__name__}: {one_line(error)}"
    if why:
        for block in blocks:
            vars(block).pop("forward", None)
        log.warning("blocks_not_compiled", why=why, to_do="none: the run is slower")
        return False
    torch._dynamo.config.suppress_errors = True  # a later length that fails is computed as before
    log.info("blocks_compiled", blocks=len(blocks))
    return True


def _compiled(plain: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(plain, dynamic=True)

    def forward(*given: Any, **named: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else plain)(*given, **named)

    return forward


def _tried(policy: Policy, group: TrainingGroup) -> Tensor:
    """Return the adapter's gradient of the sum of a group's log-probabilities."""
    values, _ = policy.logprobs(pack_rows(group, group.rows))
    adapter = [one for one in policy.model.parameters() if one.requires_grad]
    found = torch.autograd.grad(values.sum(), adapter, materialize_grads=True)
    return torch.cat([one.flatten() for one in found])


# Compute what `probe.json` holds: next-token log-probabilities after fixed texts.

TEXTS = (
    "A customer writes: my parcel has not arrived. The agent answers: I am sorry to hear that.",
    "To reset your password, open the settings page and choose the account.",
    "The capital of France is Paris, and it lies on the Seine.",
    "Thank you for your question. The shop opens at nine.",
    "def add(a, b):\n    return a + b\n",
    "Once upon a time there was a king who had three sons.",
    "Question: is the shop open on Sunday?\nAnswer: no, it is closed.",
    "The order number is 4711; the total is 19.90 euros.",
)
PROBE_ERRORS = (RuntimeError, LookupError, ValueError, TypeError, ArithmeticError)
"""Errors of torch and a model's code for texts that they cannot compute."""
PLACES = 4
"""Last tokens of each text behind which the next one is predicted."""
LIKELIEST = 10
"""Tokens kept of each distribution: twice what deploy asks vLLM for, so that a token that two
implementations rank differently is found in both."""


def write_probe(
    policy: Policy, base_model_path: str, folder: Path, *, tolerance: float
) -> str | None:
    """Write `probe.json` into an adapter's folder. Returns: its SHA-256 (hex).

    tolerance: largest mean difference that is taken for rounding, nats a token.

    Returns None when the base has no tokenizer that can be read and knows these texts, or the
    model cannot compute them: then there is no file (logged), and the version is served without
    this check. Raises: OSError when the disk refuses.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(base_model_path)
        texts = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        log.warning("no_probe_file", why=one_line(error))
        return None
    texts = [ids for ids in texts if ids and max(ids) < policy.vocabulary]
    # transformers 5.5 reads a folder without a tokenizer as one that makes all texts alike.
    if len(set(texts)) < 2:
        log.warning("no_probe_file", why="the base's tokenizer makes no tokens of the fixed texts")
        return None
    try:
        content = render_probe(probe_of(policy, texts, tolerance=tolerance))
    except PROBE_ERRORS as error:
        log.warning("no_probe_file", why=one_line(error))
        return None
    path = folder / PROBE
    path.write_text(content, encoding="utf-8")
    return file_digest(path)


def probe_of(policy: Policy, texts: Sequence[Sequence[int]], *, tolerance: float) -> ProbeFile:
    """Compute the likeliest next tokens behind the last `PLACES` tokens of each text.

    texts: token ids. The policy is computed as in a training step: its own masks, head and
    precision.
    """
    prompts: list[tuple[int, ...]] = []
    likeliest: list[dict[int, float]] = []
    for ids in texts:
        places = range(max(0, len(ids) - PLACES), len(ids))
        with torch.no_grad():
            logprobs_PV = policy.distributions(_pack(ids, places))
        nats_PK, tokens_PK = logprobs_PV.topk(min(LIKELIEST, logprobs_PV.shape[-1]))
        for place, nats, tokens in zip(places, nats_PK.tolist(), tokens_PK.tolist(), strict=True):
            prompts.append(tuple(ids[: place + 1]))
            likeliest.append(dict(zip(tokens, nats, strict=True)))
    return ProbeFile(prompts=tuple(prompts), likeliest=tuple(likeliest), tolerance=tolerance)


def _pack(ids: Sequence[int], places: Sequence[int]) -> Pack:
    return Pack(
        group_id="",
        adapter="",
        input_ids=tuple(ids),
        positions=tuple(range(len(ids))),
        segments=chain(len(ids)),
        sources=tuple(places),
        targets=(0,) * len(places),
        recorded=(0.0,) * len(places),
        advantages=(0.0,) * len(places),
        temperatures=(1.0,) * len(places),
        answers=(0,) * len(places),
        start=(0.0,) * len(places),
    )
