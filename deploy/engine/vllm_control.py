"""Control vLLM's adapters, and prove that a loaded one is the registered one.

`AdapterControl` is the interface: `VllmControl` implements it over HTTP, the tests in memory, and
one contract suite runs against both. Loading and unloading are idempotent. A name is never loaded
again with other files, because vLLM's prefix cache is keyed by the name.

The probe requests one token after each of the fixed prompts and reads the likeliest tokens'
log-probabilities, so adapter and base are compared at the same positions. It must not request
`prompt_logprobs`: next to any other request, that fails in vLLM's LoRA kernels for the CPU (0.32,
`punica_cpu.add_lora_logits`) and stops the whole engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import httpx

from deploy.engine.validation import check_digest
from deploy.errors import (
    AlteredAdapterError,
    EngineError,
    InvalidAdapterError,
    NotAsRegisteredError,
)
from learner.adapter_folder import (
    LINEAGE,
    MAX_BYTES,
    PROBE,
    Mark,
    ProbeFile,
    folder_marks,
    open_file,
    open_folder,
    read_probe,
)

# Check by log-probabilities on fixed prompts that a loaded adapter has an effect ("live"). Pure.

MIN_DIFFERENCE = 1e-4
"""Least mean difference of a live adapter, in nats a token. Measured on SmolLM2-135M: a fresh
adapter gives 0, B matrices of 5e-4 give 0.05."""
NOISE_FACTOR = 2.0
"""Least ratio of the adapter's difference to the difference between the two probes of the base."""


MAX_NOISE = 1.0
"""Largest mean difference of two probes of the base that still decide, in nats a token. It was 0.0
in 14 of 15 canaries of one run on SmolLM2-135M beside other traffic, and 9,246 in the fifteenth."""
IMPOSSIBLE = -9999.0
"""vLLM's log-probability of a token that cannot follow. No truncation is requested, so every token
can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A model's distribution of the next token after each of the fixed prompts."""

    model_in_reply: str
    next_tokens: tuple[Mapping[int, float], ...]
    """[prompts] likeliest next tokens: token id -> log-probability in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Result of the comparison, kept as evidence."""

    live: bool
    unsure: bool
    """The probes decide nothing: vLLM answered wrongly, and is to be asked again. Then not live."""
    reason: str
    model_in_reply: str
    tokens: int
    """Number of compared log-probabilities."""
    max_difference: float
    """Largest difference between adapter and base, in nats."""
    mean_difference: float
    noise: float
    """Mean difference between the two probes of the base, in nats a token."""
    kl: float = 0.0
    """KL divergence of the adapter from the base, in nats: mean over the prompts (`divergence`)."""


_LEAST = 1e-9
"""Least probability that a term divides by: rounding may leave less than nothing of the rest."""


def divergence(base: Probe, other: Probe) -> float:
    """Return the least KL(base || other) of the next token that the probes allow, in nats.

    The mean over the prompts. Tokens that both list are compared one by one, those that the other
    does not list together: each has at most its least listed probability there. All further tokens
    are one group. The true divergence is at least as large (data-processing inequality).
    """
    found = [
        _of_prompt(ours, theirs)
        for ours, theirs in zip(base.next_tokens, other.next_tokens, strict=False)
        if ours and theirs
    ]
    return max(0.0, _mean(found))


def _of_prompt(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    shared = [
        (math.exp(nats), math.exp(theirs[token])) for token, nats in ours.items() if token in theirs
    ]
    unlisted = [math.exp(nats) for token, nats in ours.items() if token not in theirs]
    left = max(1.0 - sum(q for _, q in shared), _LEAST)
    at_most = min(len(unlisted) * math.exp(min(theirs.values())), left)
    p_unlisted = sum(unlisted)
    p_rest = max(0.0, 1.0 - sum(p for p, _ in shared) - p_unlisted)
    if p_unlisted * (left - at_most) <= p_rest * at_most:  # they need not be told apart
        groups = [(p_unlisted + p_rest, left)]
    else:
        groups = [(p_unlisted, at_most), (p_rest, left - at_most)]
    pairs = [*shared, *groups]
    return sum(p * math.log(p / max(q, _LEAST)) for p, q in pairs if p > 0.0)


def compare(name: str, *, adapter: Probe, base_before: Probe, base_after: Probe) -> Liveness:
    """Compare the probes: does the adapter `name` change the base's log-probabilities?"""
    differences = _differences(base_before, adapter)
    noise = max(
        _mean(_differences(base_before, base_after)), _mean(_differences(base_after, base_before))
    )
    mean, kl = _mean(differences), divergence(base_before, adapter)
    impossible = any(map(has_impossible, (base_before, adapter, base_after)))
    unsure = impossible or not noise <= MAX_NOISE
    if impossible:
        reason = "the probe decides nothing: vLLM calls a likely next token impossible (-9999 nats)"
    elif unsure:
        reason = f"the probe decides nothing: two of the base are {noise:.2g} nats a token apart"
    elif adapter.model_in_reply != name:
        reason = f"not live: the reply to {name} names {adapter.model_in_reply}"
    elif not differences:
        reason = "not live: the probe gave no log-probabilities to compare"
    elif not math.isfinite(mean):
        reason = "not live: its log-probabilities are not finite"
    elif mean <= max(MIN_DIFFERENCE, NOISE_FACTOR * noise):
        reason = (
            f"not live: its log-probabilities are the base's ({mean:.2g} nats a token away, noise "
            f"{noise:.2g})"
        )
    else:
        reason = f"live: differs from the base by {mean:.3g} nats a token"
    return Liveness(
        live=reason.startswith("live"),
        unsure=unsure,
        reason=reason,
        model_in_reply=adapter.model_in_reply,
        tokens=len(differences),
        max_difference=max(differences, default=0.0),
        mean_difference=mean,
        noise=noise,
        kl=kl if math.isfinite(kl) else 0.0,
    )


def _differences(base: Probe, other: Probe) -> list[float]:
    """Return |difference| in nats for every likely token of the base, prompt by prompt.

    A token missing from the other probe's likeliest has at most the lowest log-probability listed
    there; the distance from that bound down from the base's value is used.
    """
    found: list[float] = []
    for ours, theirs in zip(base.next_tokens, other.next_tokens, strict=False):
        if not theirs:
            continue
        least = min(theirs.values())
        for token_id, logprob in ours.items():
            if token_id in theirs:
                found.append(abs(logprob - theirs[token_id]))
            else:
                found.append(max(0.0, logprob - least))
    return found


def has_impossible(probe: Probe) -> bool:
    """Return True when vLLM calls a likely next token impossible: a wrong answer."""
    return any(nats <= IMPOSSIBLE for likeliest in probe.next_tokens for nats in likeliest.values())


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


PROBE_PROMPTS = (
    "A customer writes: my parcel has not arrived. The agent answers:",
    "A customer writes: my parcel has not arrived. The agent answers: I am",
    "To reset your password, open the settings page and",
    "The capital of France is",
    "Thank you for your question. The",
    "def add(a, b):\n    return",
    "Once upon a time there was a",
    "Question: is the shop open on Sunday?\nAnswer:",
)
LIKELIEST = 5
"""Next tokens compared for each prompt; every vLLM allows this many (`--max-logprobs`)."""
LORA_METRIC = "vllm:lora_requests_info"
"""A metric that vLLM (0.32) has only with `--enable-lora`. Its label `max_lora` is the flag's
value."""
LOAD_METRIC = "vllm:num_requests_running"
"""A metric that every vLLM has, unless it was started with `--disable-log-stats`."""
_LORA_REQUESTS = re.compile(rf"^{LORA_METRIC}\{{([^}}\n]*)\}} ([0-9.e+]{{1,40}})$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
CALL_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 120.0
"""Timeout of a load: vLLM reads the weights during the call, after a running batch has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a vLLM tells of its adapters, after its first request."""

    max_loras: int | None = None
    """Its `--max-loras`; None: it does not tell."""
    busy: frozenset[str] = frozenset()
    """Adapters that answer a request now, or that one waits for."""
    tells: bool = False
    """Its metrics can be read: an adapter that is not `busy` answers nothing."""


class AdapterControl(Protocol):
    """The operations that deploy needs of a vLLM replica."""

    async def loaded(self) -> frozenset[str]:
        """Return the names of the loaded adapters. Raises: EngineError when vLLM is unreachable."""
        ...

    async def load(self, name: str, path: str) -> None:
        """Load a PEFT folder under a name; no effect when the name is loaded already.

        Raises: InvalidAdapterError when vLLM refuses the folder, EngineError when it fails.
        """
        ...

    async def unload(self, name: str) -> None:
        """Unload a name; no effect when it is not loaded. Raises: EngineError."""
        ...

    async def probe(self, model_name: str, prompts: Sequence[Sequence[int]] | None = None) -> Probe:
        """Probe an adapter, or the base model by its name.

        prompts: token ids; None: the fixed prompts.
        Raises: EngineError, also when the name is not loaded.
        """
        ...

    async def room(self) -> Room:
        """Return what it tells of its adapters' places and requests. Raises: EngineError."""
        ...


class VllmControl:
    """`AdapterControl` over vLLM's HTTP API (`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`)."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        """client: with vLLM's base URL and key; the caller closes it."""
        self._client = client

    async def loaded(self) -> frozenset[str]:
        reply = await self._ask("GET", "/v1/models", timeout_s=CALL_TIMEOUT_S)
        _raise_for_status(reply, "list models")
        try:
            cards = reply.json()["data"]
            # A base model's card has no parent; an adapter's names its base.
            return frozenset(card["id"] for card in cards if card.get("parent") is not None)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"vLLM's list of models cannot be read: {error}") from error

    async def load(self, name: str, path: str) -> None:
        body = {"lora_name": name, "lora_path": path}
        reply = await self._ask(
            "POST", "/v1/load_lora_adapter", json=body, timeout_s=LOAD_TIMEOUT_S
        )
        if reply.is_success or (reply.status_code == 400 and "already been loaded" in reply.text):
            return
        if reply.status_code == 404 and _error_message(reply) is None:
            raise EngineError(
                "vLLM has no /v1/load_lora_adapter; start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            )
        if reply.status_code in (400, 404, 422):
            raise InvalidAdapterError(f"vLLM refused {name}: {_error_text(reply)}")
        _raise_for_status(reply, f"load {name}")

    async def unload(self, name: str) -> None:
        body = {"lora_name": name}
        reply = await self._ask(
            "POST", "/v1/unload_lora_adapter", json=body, timeout_s=CALL_TIMEOUT_S
        )
        if reply.status_code == 404 and _error_message(reply) is not None:
            return
        _raise_for_status(reply, f"unload {name}")

    async def probe(self, model_name: str, prompts: Sequence[Sequence[int]] | None = None) -> Probe:
        body = {
            "model": model_name,
            "prompt": list(PROBE_PROMPTS) if prompts is None else list(map(list, prompts)),
            "max_tokens": 1,
            "logprobs": LIKELIEST,
            "return_tokens_as_token_ids": True,
            # Every sampling parameter is set: generation_config could truncate the distribution.
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        reply = await self._ask("POST", "/v1/completions", json=body, timeout_s=LOAD_TIMEOUT_S)
        _raise_for_status(reply, f"probe {model_name}")
        try:
            return _read_probe(reply.json())
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise EngineError(f"vLLM's reply to the probe cannot be read: {error!r}") from error

    async def room(self) -> Room:
        reply = await self._ask("GET", "/metrics", timeout_s=CALL_TIMEOUT_S)
        return read_room(reply.text) if reply.is_success else Room()

    async def _ask(
        self, method: str, path: str, *, timeout_s: float, json: dict[str, Any] | None = None
    ) -> httpx.Response:
        try:
            return await self._client.request(method, path, json=json, timeout=timeout_s)
        except httpx.TransportError as error:
            why = str(error) or type(error).__name__  # a timeout says nothing
            raise EngineError(f"vLLM at {self._client.base_url} gave no reply: {why}") from error


def read_room(metrics: str) -> Room:
    """Read vLLM's metrics. Each combination of labels stays there, with the time at which it last
    held: the newest one holds. Pure."""
    tells = LOAD_METRIC in metrics
    newest, room = -1.0, Room(tells=tells)
    for found in _LORA_REQUESTS.finditer(metrics):
        labels, at = dict(_LABEL.findall(found[1])), float(found[2])
        if at >= newest and labels.get("max_lora", "").isdigit():
            busy = f"{labels.get('running_lora_adapters', '')},"
            busy += labels.get("waiting_lora_adapters", "")
            names = frozenset(name for name in busy.split(",") if name)
            newest, room = at, Room(max_loras=int(labels["max_lora"]), busy=names, tells=tells)
    return room


def _read_probe(body: dict[str, Any]) -> Probe:
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    return Probe(
        model_in_reply=body["model"],
        next_tokens=tuple(_likeliest(choice["logprobs"]["top_logprobs"][0]) for choice in choices),
    )


def _likeliest(logprobs: dict[str, float]) -> dict[int, float]:
    """Return the LIKELIEST entries of {"token_id:17": nats}, which also holds the sampled token."""
    by_id = {int(name.removeprefix("token_id:")): float(nats) for name, nats in logprobs.items()}
    return dict(sorted(by_id.items(), key=lambda item: (-item[1], item[0]))[:LIKELIEST])


def _raise_for_status(reply: httpx.Response, what: str) -> None:
    if not reply.is_success:
        raise EngineError(f"vLLM failed to {what}: {reply.status_code} {_error_text(reply)}")


def _error_message(reply: httpx.Response) -> str | None:
    """Return vLLM's error message, or None when the error is not vLLM's (an unknown path)."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


def _error_text(reply: httpx.Response) -> str:
    return _error_message(reply) or reply.text[:200]


# Compare what vLLM serves under an adapter's name with what the learner trained. Pure.

EFFECT_SHARE = 0.25
"""Share of an adapter's difference to the base that is taken for rounding. Measured: 0.055 to 0.069
at a difference of 0.25 to 0.56, and 0.051 at none, so about 0.05 of it beside the base's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Result of the comparison, kept as evidence."""

    same: bool
    unsure: bool
    """vLLM answered wrongly, and is to be asked again. Then not `same`."""
    reason: str
    tokens: int
    """Number of compared log-probabilities."""
    mean_difference: float
    """nats a token."""
    max_difference: float
    tolerance: float
    """Largest mean difference that is taken for rounding, nats a token."""


def read_probe_file(folder: Path) -> ProbeFile | None:
    """Read the `probe.json` of an adapter's folder; None where there is none and the lineage names
    none, as of an adapter that was imported.

    The lineage names the file's digest; `validate_folder` compares the lineage's own with the
    audit. Raises: NotAsRegisteredError when a file is gone or cannot be opened, AlteredAdapterError
    when it is another than the lineage names, InvalidAdapterError when it is no such file.
    """
    try:
        with open_folder(folder) as descriptor:
            named = _named_digest(descriptor)
            try:
                with open_file(descriptor, PROBE) as file:
                    content = file.read(MAX_BYTES + 1)
            except FileNotFoundError as error:
                if named is None:
                    return None
                raise NotAsRegisteredError(
                    f"{PROBE}: is gone, and {LINEAGE} names it: it cannot be told whether vLLM "
                    "serves what was trained; restore the file"
                ) from error
    except OSError as error:
        raise NotAsRegisteredError(f"{PROBE}: {error}") from error
    if named is not None and hashlib.sha256(content).hexdigest() != named:
        raise AlteredAdapterError(
            f"{PROBE}: was changed after it was registered: {LINEAGE} names another digest"
        )
    try:
        return read_probe(content)
    except ValueError as error:
        raise InvalidAdapterError(f"{PROBE}: {error}") from error


def _named_digest(folder: int) -> str | None:
    """Return the SHA-256 (hex) of `probe.json` by the lineage; None where it names none.

    Raises: NotAsRegisteredError when the lineage is damaged; OSError.
    """
    try:
        with open_file(folder, LINEAGE) as file:
            lineage = json.loads(file.read())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise NotAsRegisteredError(f"{LINEAGE}: cannot be read ({error})") from error
    algorithm = lineage.get("algorithm") if isinstance(lineage, dict) else None
    named = algorithm.get("probe_sha256") if isinstance(algorithm, dict) else None
    return named if isinstance(named, str) else None


def compare_served(trained: ProbeFile, served: Probe, *, effect: float = 0.0) -> Agreement:
    """Compare vLLM's likeliest next tokens with the learner's, prompt by prompt.

    effect: mean difference of the adapter to the base in vLLM, nats a token.

    A token that the learner does not list has at most the least log-probability that it lists; the
    distance down from vLLM's to that bound is used.
    """
    differences: list[float] = []
    for ours, theirs in zip(trained.likeliest, served.next_tokens, strict=False):
        least = min(ours.values())
        for token, nats in theirs.items():
            known = ours.get(token)
            differences.append(abs(nats - known) if known is not None else max(0.0, nats - least))
    mean = sum(differences) / len(differences) if differences else math.nan
    impossible = has_impossible(served)
    allowed = max(trained.tolerance, EFFECT_SHARE * effect)
    complete = len(served.next_tokens) == len(trained.prompts) and all(served.next_tokens)
    same = complete and not impossible and mean <= allowed
    if impossible:
        reason = "vLLM calls a likely next token impossible (-9999 nats): nothing is decided"
    elif not complete:
        reason = "vLLM gave no log-probabilities for some of the learner's prompts"
    elif same:
        reason = f"served as trained: {mean:.3g} nats a token from the learner's"
    else:
        reason = (
            f"not what was trained: vLLM's log-probabilities are {mean:.3g} nats a token from the "
            f"learner's over {len(differences)} tokens (largest {max(differences):.3g}, allowed "
            f"{allowed:.3g}); check that serving.base_model_path is what vLLM serves"
        )
    return Agreement(
        same=same,
        unsure=impossible or not complete,
        reason=reason,
        tokens=len(differences),
        mean_difference=mean,
        max_difference=max(differences, default=math.nan),
        tolerance=allowed,
    )


# Load an adapter into vLLM only if its files are those that were registered; prove it live there.

FOLDER_THREADS = 4
"""Folders that are read at once: hashing keeps a core busy, so more would not be faster."""
_threads = ThreadPoolExecutor(FOLDER_THREADS, thread_name_prefix="adapter-folder")
Marks = tuple[Mark, ...]
P = ParamSpec("P")
T = TypeVar("T")


async def in_folder_thread(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, in one of the threads that only read adapter folders."""
    work = partial(copy_context().run, read, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


async def load_checked(
    control: AdapterControl,
    name: str,
    path: str,
    digest: str,
    *,
    begins: Callable[[Marks], None] = lambda marks: None,
) -> None:
    """Load a folder under a name, if its digest is `digest` (SHA-256, hex).

    begins: told the folder's marks before vLLM is asked; a load that is cut off here may end there,
        and is then to be compared by `check_unchanged`.
    Raises: AlteredAdapterError when it is not; InvalidAdapterError when the folder is unreadable or
        vLLM refuses it; EngineError; OSError when the disk fails.
    """
    marks = await in_folder_thread(check_digest, Path(path), digest)
    begins(marks)
    await control.load(name, path)
    await check_unchanged(control, name, path, marks)


async def check_unchanged(control: AdapterControl, name: str, path: str, marks: Marks) -> None:
    """Unload an adapter whose folder changed since it had these marks.

    Raises: AlteredAdapterError when it did.
    """
    if await in_folder_thread(_marks, Path(path)) == marks:
        return
    changed = f"{path}: the folder changed while vLLM read it"
    try:
        await control.unload(name)
    except EngineError as error:
        raise AlteredAdapterError(f"{changed}, and is still loaded: {error}") from error
    raise AlteredAdapterError(changed)


async def ask_liveness(control: AdapterControl, name: str, *, model: str) -> Liveness:
    """Ask a vLLM whether an adapter that it has loaded has an effect there. Raises: EngineError.

    model: name of the base.
    """
    before = await control.probe(model)
    adapter = await control.probe(name)
    after = await control.probe(model)
    return compare(name, adapter=adapter, base_before=before, base_after=after)


def _marks(folder: Path) -> Marks:
    """Return the folder's marks; empty when it became unreadable, which is a change too."""
    try:
        return folder_marks(folder)
    except OSError:
        return ()
