"""What the weights of a run depend on: base, parent, settings, groups, libraries, code, machine.

`fingerprint` names all of it, and `differences` says what changed: a run that is resumed or
replayed needs the same. `not_plain_lora` says whether an adapter that came from elsewhere is a LoRA
that can be continued and served.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path
from typing import Any

import structlog

from learner.adapter_folder import file_digest
from learner.base_weights import base_folder
from learner.records import Parent, TrainingGroup
from sidecar.settings import Learner

# The digests of what a run starts from: a base model's config and weights.

log = structlog.get_logger()

PATTERNS = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
"""Files that training depends on. The tokenizer is not among them: groups hold token ids."""
CACHE = "base-digests.json"
"""Name of the file in `state_dir` with the hashes of single files."""

Hashes = Mapping[str, tuple[int, int, str]]
"""Absolute path -> (size in bytes, time of change in ns, SHA-256 hex)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseDigest:
    digest: str
    """SHA-256 (hex) of the canonical list of (path, size, SHA-256) of its files."""
    revision: str
    """Commit on the Hugging Face Hub; "" for a folder that does not come from there."""


def base_digest(base_model_path: str, cache: Path) -> BaseDigest | None:
    """Hash the base model's files, as far as they have changed since the last time.

    base_model_path: a folder, or a name on the Hugging Face Hub whose files were fetched before.
    cache: a file for the hashes; one that is damaged or cannot be written costs time only (logged).
    Returns: None when the files are not there, or cannot be read (logged): loading will say why.
    """
    folder = base_folder(base_model_path)
    files = [] if folder is None else sorted({f for p in PATTERNS for f in folder.glob(p)})
    if folder is None or not files:
        log.info("base_digest_unknown", base=base_model_path, why="its files are not there yet")
        return None
    known, found = _read(cache), {}
    manifest = []
    try:
        for path in files:
            place, of_file = str(path.resolve()), path.stat()
            size, changed = of_file.st_size, of_file.st_mtime_ns
            before = known.get(place)
            digest = before[2] if before and before[:2] == (size, changed) else file_digest(path)
            found[place] = (size, changed, digest)
            manifest.append({"path": path.name, "size": size, "sha256": digest})
    except OSError as error:
        log.warning("base_digest_unknown", base=base_model_path, why=str(error))
        return None
    if any(known.get(place) != one for place, one in found.items()):
        _write(cache, {**{p: one for p, one in known.items() if Path(p).exists()}, **found})
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    revision = folder.name if folder.parent.name == "snapshots" else ""
    return BaseDigest(digest=hashlib.sha256(canonical.encode()).hexdigest(), revision=revision)


def _read(cache: Path) -> Hashes:
    try:
        stored = json.loads(cache.read_text(encoding="utf-8"))
        return {
            str(path): (int(size), int(changed), str(digest))
            for path, (size, changed, digest) in stored.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("base_digests_unreadable", path=str(cache), why=str(error))
        return {}


def _write(cache: Path, hashes: Hashes) -> None:
    unfinished = cache.with_name(f"{cache.name}.{os.getpid()}")
    try:
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(cache)
    except OSError as error:
        log.warning("base_digests_not_kept", path=str(cache), why=str(error))


# Everything that must be equal for two runs to end with the same weights, and what differs. Pure.

NOT_OF_THE_RESULT = frozenset(
    {
        "schedule",
        "interval_s",
        "cron",
        "min_groups",
        "max_groups",
        "max_age_versions",
        "adapters_dir",
        "export",
        "idle_below",
        "memory_fraction",
        "tinker_url",
    }
)
"""Settings that decide when a run starts, which groups it takes and where its files go. All others
count, so that a new one does."""

Fingerprint = Mapping[str, Any]
"""Part -> its value, as JSON."""


def fingerprint(
    *,
    settings: Learner,
    base: str,
    base_digest: str | None,
    parent: Parent,
    groups: Sequence[TrainingGroup],
    quiet: int,
    samplers: Mapping[str, Parent],
    libraries: Mapping[str, str],
    commit: str | None,
) -> dict[str, Any]:
    """Return the parts of a run that decide its weights.

    base: `serving.base_model_path`. base_digest: None: not known yet.
    groups: as the trainer gets them. commit: of the learner's code; None: not known.
    """
    return {
        "settings": settings_of_result(settings.model_dump(mode="json")),
        "base": base,
        "base_digest": base_digest,
        "parent": {"name": parent.name, "digest": parent.digest},
        "group_ids": [group.group_id for group in groups],
        "group_ids_sha256": ids_digest([group.group_id for group in groups]),
        "groups_sha256": groups_digest(groups),
        "quiet_groups": quiet,
        "samplers": {name: one.digest for name, one in sorted(samplers.items())},
        "libraries": dict(libraries),
        "commit": commit,
    }


def settings_of_result(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `[learner]` that the weights depend on. section: all of them."""
    return {k: v for k, v in section.items() if k not in NOT_OF_THE_RESULT}


def ids_digest(group_ids: Sequence[str]) -> str:
    """Return the SHA-256 (hex) of the ids, in order, one a line."""
    return hashlib.sha256("".join(f"{one}\n" for one in group_ids).encode()).hexdigest()


_OF_TASKS = ("sessions", "weights", "steps")
"""Left out where they are empty: lineages of before do not have them."""


def groups_digest(groups: Sequence[TrainingGroup]) -> str:
    """Return the SHA-256 (hex) of everything that the trainer reads of the groups."""
    found = hashlib.sha256()
    for group in groups:
        read = {name: one for name, one in asdict(group).items() if one or name not in _OF_TASKS}
        text = json.dumps(read, sort_keys=True, separators=(",", ":"))
        found.update(text.encode() + b"\n")
    return found.hexdigest()


def differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Say what is not as it was, a few words each; empty: the weights will be the same.

    A part that was not known before is taken for equal.
    """
    found: list[str] = []
    for part in ("settings", "libraries"):
        if part in before:
            found += _of_names(part, _object(before[part]), _object(now.get(part)))
    for part, words in _WORDS.items():
        was, found_now = before.get(part), now.get(part)
        if was is not None and was != found_now:
            found.append(words.format(was=_short(was), now=_short(found_now)))
    return found


_WORDS = {
    "base": "serving.base_model_path was {was} and is {now}",
    "base_digest": "the files of the base model were changed (digest {was}, now {now})",
    "parent": "the parent was {was} and is {now}",
    "group_ids": "other groups: some were removed, or are not usable any more",
    "groups_sha256": "the content of the groups was changed",
    "quiet_groups": "{was} quiet groups were left out, and {now} are",
    "samplers": "the adapters that sampled the groups were changed",
    "commit": "the learner's code was commit {was} and is {now}",
}


def _of_names(part: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    prefix = "learner." if part == "settings" else ""
    return [
        f"{prefix}{name} was {_short(before.get(name))} and is {_short(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _short(value: object) -> str:
    if isinstance(value, Mapping):  # the parent
        digest = str(value.get("digest") or "")[:12]
        return f"{value.get('name')} ({digest or 'no digest'})"
    text = str(value)
    is_digest = len(text) in (40, 64) and all(c in "0123456789abcdef" for c in text)
    return text[:12] if is_digest else text


# Whether an adapter's config is that of a plain LoRA, which adds two matrices to each layer that it
# names. peft knows many kinds that look alike and are more: they route, sample or project, have
# weights of their own, or change the base's. Such an adapter cannot be served as it was trained, or
# be continued and saved. Members that an older peft lacked are refused where they switch something
# on; those of a release to come are not known, so the rule for them is by their value. Pure.

TASKS = (None, "CAUSAL_LM")
"""Values of `task_type` with which peft puts a LoRA around a causal model and adds nothing."""
PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
"""Initialisations that keep the base's weights; the others (PiSSA, OLoRA, ...) change them."""
_INIT_CONFIGS = {"eva_config": "eva", "lora_ga_config": "lora_ga"}
"""Configs of an initialisation, and the `init_lora_weights` that reads them."""
_SWITCHES = (
    "alora_invocation_tokens", "layer_replication", "loftq_config", "lora_bias", "megatron_config",
    "modules_to_save", "target_parameters", "trainable_token_indices", "use_dora", "use_qalora",
)  # fmt: skip
"""Members that switch a feature on, by any value but null, false and empty ones."""
_FEATURE_CONFIGS = (
    "arrow_config", "corda_config", "kasa_config", "monteclora_config", "use_bdlora",
    "velora_config",
)  # fmt: skip
"""Members that switch a feature on, by any value but null and false: peft takes an empty object for
the feature's defaults."""
_FLAGS = ("ensure_weight_tying", "fan_in_fan_out", "inference_mode", "use_rslora")
"""Members of a plain LoRA that are true or false."""
_KNOWN = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "target_modules", "task_type",
    *_FLAGS, *_INIT_CONFIGS,
))  # fmt: skip
"""Members that a plain LoRA may have set. peft 0.21 writes them and the features' above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPlain:
    member: str
    why: str
    """Completes the sentence "MEMBER is VALUE, ..."."""


def not_plain_lora(config: Mapping[str, Any]) -> NotPlain | None:
    """Return the first member that no plain LoRA has, or has with another value; None: it is one.

    config: parsed `adapter_config.json`. Rank, alpha, modules and layers are not looked at.
    """
    if config.get("task_type") not in TASKS:
        return NotPlain(
            member="task_type",
            why="and only CAUSAL_LM can be served and continued; write CAUSAL_LM there if it is "
            "an adapter of a causal model without a head of its own",
        )
    if config.get("bias", "none") != "none":
        return NotPlain(member="bias", why="and biases cannot be served")
    for name in _FLAGS:
        if config.get(name) is not None and type(config[name]) is not bool:
            return NotPlain(member=name, why="which is not true or false")
    dropout = config.get("lora_dropout", 0.0)
    if dropout is not False and (type(dropout) not in (int, float) or not 0 <= dropout <= 1):
        return NotPlain(member="lora_dropout", why="which is no number of 0 to 1")
    return _of_init(config) or _of_features(config)


def _of_init(config: Mapping[str, Any]) -> NotPlain | None:
    init = config.get("init_lora_weights")
    if isinstance(init, str):
        if init.lower() not in PLAIN_INITS:
            return NotPlain(member="init_lora_weights", why="which may change the base's weights")
    elif init is not None and type(init) is not bool:
        return NotPlain(
            member="init_lora_weights", why="which is not true, false or an initialisation's name"
        )
    for name, reader in _INIT_CONFIGS.items():
        found = config.get(name)
        if found is None:
            continue
        plain = isinstance(found, dict) and not any(
            isinstance(one, (dict, list)) for one in found.values()
        )
        if not plain or not isinstance(init, str) or init.lower() != reader:
            return NotPlain(
                member=name, why=f"and init_lora_weights is not {reader}; remove it there"
            )
    return None


def _of_features(config: Mapping[str, Any]) -> NotPlain | None:
    unserved = (
        "which is no part of a plain LoRA; DoRA, biases, saved modules and the like cannot be "
        "served: merge such an adapter into the base"
    )
    for name in _SWITCHES:
        if config.get(name):
            return NotPlain(member=name, why=unserved)
    for name in _FEATURE_CONFIGS:
        found = config.get(name)
        if found is not None and found is not False:
            return NotPlain(member=name, why=unserved)
    for name in config.keys() - _KNOWN - {*_SWITCHES, *_FEATURE_CONFIGS}:
        found = config[name]
        # A number or a text is a parameter; what switches a feature on was always one of these.
        if found is True or (isinstance(found, (dict, list)) and found):
            return NotPlain(
                member=name,
                why="and this release does not know what it does; set it to null there if it does "
                "nothing",
            )
    return None


# What a run computes with: libraries, the learner's own code, and the machine.

LIBRARIES = ("learning-sidecar", "torch", "transformers", "peft", "safetensors", "numpy")
GIT_S = 5.0
"""A git that takes longer is not waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The learner's own code; both None where it is not known: a wheel names no commit."""

    commit: str | None
    dirty: bool | None
    """True when files were changed after that commit."""


def library_versions() -> dict[str, str]:
    """Return the versions of what computes, and of Python; "" for what is not installed."""
    found = {name: _version(name) for name in LIBRARIES}
    return {**found, "python": platform.python_version()}


def machine() -> dict[str, Any]:
    """Describe the machine, without what only its owner may know (no names, no addresses)."""
    return {"system": f"{platform.system()} {platform.machine()}", "processor": _processor()}


@cache
def code_version() -> Code:
    """Return the commit of the learner's code, from pip's record or from the clone it lies in."""
    recorded = _recorded_commit()
    if recorded is not None:
        return Code(commit=recorded, dirty=False)
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return Code(commit=None, dirty=None)
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return Code(commit=commit or None, dirty=None if changed is None else bool(changed))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _recorded_commit() -> str | None:
    try:
        text = Distribution.from_name(LIBRARIES[0]).read_text("direct_url.json")
        found = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
    except (PackageNotFoundError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    if sys.platform == "linux":
        try:
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except (OSError, ValueError):
            return platform.processor()
    return platform.processor()
