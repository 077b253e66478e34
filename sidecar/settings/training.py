"""The sections `[learner]` and `[adapters]`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, BeforeValidator

from sidecar.settings.kinds import Between, Count, Device, Folder, Line, Section

# The section `[adapters]`: what becomes of adapter folders after a run made them.

_URL = re.compile(r"[a-z][a-z0-9+.-]{0,30}://[^\s@]{1,1000}")


def _shared(value: str) -> str:
    if value and not _URL.fullmatch(value):
        raise ValueError(
            "is not a URL such as s3://bucket/adapters, without spaces and without a user or "
            "password (the plugin takes those from its own variables)"
        )
    return value


class Adapters(Section):
    """Adapter folders after a run made them. Control removes what nothing needs any more; what an
    alias, a canary, a run or a vLLM needs stays, and its parent, and all lineage and events."""

    folder_days: Annotated[float, Between(0, 36_500, "0 keeps them for good")] = 30.0
    """Days without use after which the folder of a version that nothing needs goes. 0: never."""
    url: Annotated[str, AfterValidator(_shared)] = ""
    """Where folders are shared by machines that have no disk in common: a URL of fsspec, such as
    s3://bucket/adapters (`pip install s3fs`). Empty: `learner.adapters_dir` is seen by all."""


AUTO = 0
"""`auto`, of a setting that the learner can find by itself."""
SHORT_PACK = 256
"""Tokens of a prompt with its answer that are short: no run begins where not even these fit, and
hardly a group would be trained on if `learner.pack_tokens` were smaller."""


def _or_auto(what: str) -> Callable[[object], object]:
    def read(value: object) -> object:
        if value == "auto":
            return AUTO
        try:
            float(value)  # type: ignore[arg-type]  # what it refuses is no number
        except (TypeError, ValueError):
            raise ValueError(f'must be {what}, or "auto"') from None
        except OverflowError:  # a whole number, and out of range
            return value
        return value

    return read


# The learner's settings for what a step minimises and how far it moves the weights.


class Advanced(Section):
    """Constants of the loss and the update (docs/losses.md)."""

    kl_coef: Annotated[float, Between(0, 10, "0 only measures")] = 0.0
    """Weight of the divergence from the base in the loss of a step that is over 0.2 nats a token
    away. It is measured at each step on a few answers."""


class ObjectiveSection(Section):
    """Loss, advantages, corrections and update. A part of `[learner]`."""

    loss: Literal["dppo_tv", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo_decoupled"] = (
        "dppo_tv"
    )
    """Loss of a step; formulas and sources: docs/losses.md."""
    advantage: Literal["mean", "leave_one_out", "std", "rank"] = "mean"
    """How the rewards of a group become advantages; docs/losses.md."""
    learning_rate: Annotated[
        float, Between(0, 1, "beyond 1 all is lost"), BeforeValidator(_or_auto("a number"))
    ] = AUTO
    """Adam's rate, of a step whose groups' scores spread by 0.25 or more; in proportion less of
    others. `auto` (0): 0.0004 at the width of a 135M model, where it was measured, and less on
    wider ones: 0.00002 at 8 billion parameters (docs/losses.md)."""


_EXPORT = re.compile(r"(?:tensorboard|mlflow|wandb):[^\s@]{1,500}")


def _export(value: str) -> str:
    if value and not _EXPORT.fullmatch(value):
        raise ValueError(
            "is not tensorboard:FOLDER, mlflow:URI or wandb:PROJECT, without spaces and without "
            "a user or password (MLflow and W&B take those from their own variables)"
        )
    return value


def _http(value: str) -> str:
    if value and not re.fullmatch(r"https?://[^\s@]{1,500}", value):
        raise ValueError("is not a URL such as http://trainer:8000, without a user or password")
    return value


def _zone(value: str) -> str:
    try:
        # A machine without the zones' files has UTC all the same.
        value == "UTC" or ZoneInfo(value)
    except (ValueError, OSError, ZoneInfoNotFoundError):
        raise ValueError(
            "is no time zone that this machine knows; give one as Europe/Berlin, and install "
            "tzdata where even that is unknown"
        ) from None
    return value


class Learner(ObjectiveSection):
    """When the learner runs and what one run does. Sources of the defaults: docs/decisions."""

    schedule: Literal["interval", "cron", "groups", "manual"] = "groups"
    """`groups`: as soon as `min_groups` wait; `interval`; `cron`; `manual`: only when asked for."""
    interval_s: Annotated[
        float, Between(1, 31_536_000, "it counts whole seconds, up to a year", "s")
    ] = 3600.0
    """For `schedule = "interval"`; rounded down to whole seconds."""
    cron: Line = "0 3 * * *"
    """For `cron`; five fields as crontab(5) has them: 0 and 7 are Sunday."""
    timezone: Annotated[Line, AfterValidator(_zone)] = "UTC"
    """The time zone of `cron`."""
    idle_below: Annotated[float, Between(0, 1_000_000_000, "0 sets no limit")] = 0.0
    """A scheduled run starts only while users make fewer requests a minute than this; 0: always."""
    min_groups: Count = 16
    """A run starts, and `groups` fires, only with this many scored groups waiting."""
    max_groups: Count = 256
    """Groups that one run takes, the newest first. As many may wait for candidates, scores or the
    learner, so a nightly run learns from as many a day; beyond, exchanges stay unchosen. Sampling
    256 groups of 8 takes about a seventh of `groups.tokens_per_day`, at 400 tokens an answer."""
    max_age_versions: Annotated[int, Between(0, 1_000, "0 takes those of the champion alone")] = 2
    """A group sampled under an adapter more training runs away from the champion than this is
    stale: dropped and counted."""
    groups_per_step: Annotated[int, Between(1, 10_000, "a step takes one at least")] = 8
    """Groups of an optimiser step, about: a run takes (its groups / this) steps, rounded, so that
    more groups teach more. Each group is used once."""
    rank: Annotated[int, Between(1, 512, "vLLM serves no higher rank")] = 8
    """LoRA rank of an adapter that starts from the base; not over `serving.max_lora_rank`."""
    alpha: Annotated[
        int, Between(1, 65_536, "at 0 or below the adapter learns nothing, or badly")
    ] = 32
    """LoRA alpha of an adapter that starts from the base."""
    max_drift: Annotated[
        float, Between(0, 10, "at 0 rounding alone refuses every run", above_low=True)
    ] = 0.1
    """Mean |recorded - recomputed| log-probability in nats over which an answer or a group is left
    out, and over which a run refuses to train. Measured on a bf16 server: 0.03 to 0.05 with the
    right adapter, which is rounding, and 0.13 with its parent in its place. Short answers are
    allowed more: the limit for n tokens is `max_drift + 0.3 / sqrt(n)`."""
    adapters_dir: Folder = Path(".sidecar/adapters")
    """Where adapter folders go. vLLM must see them under the same absolute path."""
    threads: Annotated[int, Between(0, 1_024, "0 takes what the machine has")] = 0
    """Torch threads; 0 takes what the machine has."""
    pack_tokens: Annotated[
        int,
        Between(0, 10_000_000, "a prompt and an answer must fit, and memory grows with it"),
        BeforeValidator(_or_auto("a whole number")),
    ] = AUTO
    """Longest input that is computed at once; memory grows with it. `auto` (0): what the learner
    finds that its memory holds, which it tells ingest through the store. A group is split over
    several such inputs; one whose prompt and longest answer do not fit is dropped and counted."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bf16 matrix products where the processor has instructions for them."""
    device: Device = "cpu"
    """A torch device. This release is tested on CPUs, and was run once on an H100."""
    tinker_url: Annotated[str, AfterValidator(_http)] = ""
    """URL of a server of the Tinker API, such as http://trainer:8000, which has the base on its
    GPUs and computes in place of this machine (docs/several-processes.md). A key is read from
    TINKER_API_KEY. Empty: this machine computes."""
    processes: Annotated[int, Between(1, 64, "they are of one machine")] = 1
    """Processes that compute a run together on this machine; each has the base, and a card where
    there are cards."""
    shard_base: bool = False
    """Whether the processes share the base's blocks, for a base that does not fit on one card."""
    memory_fraction: Annotated[
        float, Between(0, 1, "it is a share of the device's memory", above_low=True)
    ] = 1.0
    """Share of the device's memory that a run may take: of the card's, where torch is held to it,
    or of the machine's or its control group's. A run that would not fit waits."""
    export: Annotated[str, AfterValidator(_export)] = ""
    """Where each step's figures go besides the store: `tensorboard:FOLDER`, `mlflow:URI` or
    `wandb:PROJECT`; the package must be installed. Empty: nowhere."""
    advanced: Advanced = Advanced()
    """Constants of the loss and the update: `[learner.advanced]`."""
