"""Compare what vLLM serves under an adapter's name with what the learner trained. Pure.

The learner's `probe.json` has its own log-probabilities of the likeliest next tokens after fixed
prompts. vLLM is asked for the same. Two implementations round differently, and no more: an adapter
of an older version, a base with other weights, or a matrix that vLLM ignores shows as a difference.
Measured on SmolLM2-135M, four adapters of one line, a bf16 vLLM on a CPU: 0.051 to 0.072 nats a
token from the right adapter, 0.119 to 0.183 from its parent or child, 0.25 to 0.56 from the base
(docs/log.md). The default tolerance, `learner.max_drift`, is 0.1. Rounding grows with an adapter's
effect, so a share of that is allowed where it is more: a strong adapter must not be refused for it.
Two versions that are closer to each other than that are not told apart.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

from deploy.engine.probe import Probe, has_impossible
from deploy.errors import AlteredAdapterError, InvalidAdapterError, NotAsRegisteredError
from learner.adapter_folder import LINEAGE, PROBE, open_file, open_folder
from learner.probe_file import MAX_BYTES, ProbeFile, read_probe

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
