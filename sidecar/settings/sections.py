"""The sections of the settings file: every key of every process, with its default.

The classes live in the leftmost room, so that every process reads the file alike. Nothing is read
at import.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX = "SIDECAR_"
DEFAULT_RUBRIC = (
    "An answer that reaches the goal set by the system prompt and the user beats one that does "
    "not.\n"
    "Among answers that reach it, the one that follows the system prompt's instructions about form "
    "more closely, and wastes fewer words, beats the others.\n"
    "A small difference in quality is a small difference in score, a large one a large one.\n"
    "Partial progress earns partial credit."
)


class Section(BaseModel):
    """A frozen section that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Serving(Section):
    """The vLLM that answers, and how it was started."""

    upstreams: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """Base URLs of vLLM, without `/v1`: one, or several replicas that serve the same model."""
    model: str = "smollm2-135m"
    """The public model name; must be vLLM's `--served-model-name`."""
    api_key: SecretStr | None = None
    """vLLM's own `--api-key`, for the calls that the sidecar makes on its own account, and for
    every call when `access.mode` is `keys`."""
    base_model_path: str = ""
    """Folder or hub name of the base weights, for the learner; must be what vLLM serves."""
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """vLLM's `--logprobs-mode`. With raw ones only answers sampled at temperature 1 are exact."""
    max_lora_rank: int = 16
    """vLLM's `--max-lora-rank`; an adapter of a higher rank is refused before it is loaded."""
    max_loras: int = Field(default=4, ge=3)
    """vLLM's `--max-loras`; older adapters are unloaded beyond it. Three are needed: champion,
    previous and candidate."""


class Engine(Section):
    """A vLLM that `sidecar up` starts and owns. Empty command: it attaches to yours."""

    command: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)


class Proxy(Section):
    """The data plane's listener and limits."""

    host: str = "127.0.0.1"
    port: int = 8080
    workers: int = Field(default=1, ge=1, le=128)
    """Processes that share the port. One serves about what one core can."""
    max_body_bytes: int = 32 * 2**20
    connect_timeout_s: float = 5.0
    max_connections: int = 4096
    """Client connections at once, per worker; a further one is closed as it comes."""
    max_in_flight: int = 2048
    """Model requests at once, per worker; a further one is answered 503 with `Retry-After`."""
    idle_timeout_s: float = 75.0
    """An idle client connection is closed after this long."""
    head_timeout_s: float = 10.0
    """From a request's first byte to the end of its headers."""
    body_timeout_s: float = 30.0
    """Longest stand-still of a request's body; beyond it a body must also come at 1 kB/s."""
    write_timeout_s: float = 60.0
    """A client that takes nothing of its reply for this long is cut off."""
    upstream_timeout_s: float = 600.0
    """Longest silence of vLLM in a reply; then 504, or the stream ends with an error."""
    health_interval_s: float = 2.0
    """How often each vLLM is asked for its health and its adapters."""
    drain_timeout_s: float = 20.0
    """On SIGTERM, replies in flight have this long to finish."""
    routing_poll_s: float = 0.2
    """How often the routing table is looked up; bounds how long a rollback takes to be obeyed."""
    allow_remote_without_keys: bool = False
    """In words: `host` may be reachable from outside with `access.mode = "open"`."""


class Access(Section):
    """Who may ask the model. Limits are each key's own (`sidecar keys create`)."""

    mode: Literal["open", "keys", "upstream"] = "open"
    """`open`: no key is asked for. `keys`: the sidecar's own. `upstream`: the caller's credentials
    go on to vLLM, which judges them by its `--api-key`."""


class Capture(Section):
    """What is recorded, and how much may wait in memory."""

    sample_rate: float = Field(default=1.0, ge=0.0, le=1.0)
    projects: dict[str, Annotated[float, Field(ge=0.0, le=1.0)]] = Field(default_factory=dict)
    """Rates of single projects, by name; multiplied with `sample_rate`."""
    surfaces: dict[
        Literal["chat", "completions", "responses", "messages"],
        Annotated[float, Field(ge=0.0, le=1.0)],
    ] = Field(default_factory=dict)
    """Rates of single surfaces; multiplied with the others. Embeddings are never captured."""
    max_pending: int = 8_000
    max_pending_bytes: int = 64 * 2**20
    max_reply_bytes: int = 8 * 2**20
    """A longer reply is relayed and not recorded."""
    flush_interval_s: float = 0.1
    """SIGKILL of the proxy loses at most what came in this long."""


class Bus(Section):
    url: str = "sqlite:///.sidecar/outbox.db"
    """`sqlite:///path`: the embedded outbox. Kafka comes with a later release."""
    max_rows: int = 200_000
    """Unread records that the outbox keeps; beyond, the newest is dropped and counted."""
    poll_interval_s: float = 0.2
    batch: int = 200


class Store(Section):
    url: str = "sqlite:///.sidecar/store.db"
    """Any SQLAlchemy URL; SQLite is the one that is tested in this release."""


class Groups(Section):
    """Which exchanges become groups, and how the extra candidates are sampled."""

    size: int = Field(default=8, ge=2, le=8)
    """Answers per group, the served one counted."""
    rate: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of eligible exchanges that are chosen."""
    held_out_rate: float = Field(default=0.2, ge=0.0, lt=1.0)
    """Share of sessions, by hash of their key, never trained on; they feed the deployment gate."""
    max_groups_per_session: int = 4
    max_pending_groups: int = 64
    """Groups that wait for candidates or for scores, and those of the adapters that serve now that
    wait for the learner or are in it; beyond, exchanges wait unchosen: more would grow stale."""
    tokens_per_day: int = 5_000_000
    """Sampled candidate tokens a day; when spent, sampling waits for midnight UTC."""
    concurrency: int = 16
    """Candidates in flight at once."""
    max_running_requests: int = 48
    """vLLM's running + waiting requests over which sampling holds back for the users."""
    timeout_s: float = 120.0


class Judge(Section):
    """RULER: which model judges, by which rubric."""

    model: str = ""
    """A LiteLLM model name, such as `openai/gpt-...` or `hosted_vllm/...`."""
    api_base: str | None = None
    api_key: SecretStr | None = None
    """Else LiteLLM reads the provider's own environment variable."""
    rubric: str = DEFAULT_RUBRIC
    passes: int = Field(default=1, ge=1, le=8)
    """Judge calls per group, each in another order; the score is their mean."""
    concurrency: int = 8
    timeout_s: float = 60.0
    params: dict[str, Any] = Field(default_factory=dict)
    """Further LiteLLM parameters (`temperature`, `reasoning_effort`, …)."""


class BestOf(Section):
    """Best of N at serving time. `concurrency` and `max_waiting` count requests of one proxy."""

    enabled: bool = False
    max_n: int = Field(default=4, ge=2, le=8)
    """Largest N of a request; a key may have a smaller one."""
    timeout_s: float = Field(default=5.0, gt=0.0)
    """How long a request waits for the judge; then it gets the first answer."""
    concurrency: int = Field(default=8, ge=1)
    max_waiting: int = Field(default=32, ge=0)


class Learner(Section):
    """When the learner runs and what one run does. Sources of the defaults: docs/decisions."""

    schedule: Literal["interval", "cron", "groups", "manual"] = "groups"
    interval_s: float = 3600.0
    cron: str = "0 3 * * *"
    min_groups: int = 16
    """A run starts, and `groups` fires, only with this many scored groups waiting."""
    max_groups: int = 64
    """Groups that one run takes, the newest first."""
    max_age_versions: int = 2
    """A group sampled under an adapter more training runs away from the champion than this is
    stale: dropped and counted."""
    steps: int = Field(default=3, ge=1)
    """Optimiser steps per run; the groups are dealt over them, each used once."""
    rank: int = 8
    alpha: int = 32
    learning_rate: float = 2e-4
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_grad_norm: float = 1.0
    min_spread: float = 0.02
    """Groups whose scores have a smaller standard deviation teach nothing: dropped and counted."""
    max_drift: float = 0.1
    """Mean |recorded - recomputed| log-probability in nats over which a run refuses to train.
    Measured on a bf16 server: 0.03 to 0.05 with the right adapter, which is rounding, and 0.13
    with its parent in its place."""
    adapters_dir: Path = Path(".sidecar/adapters")
    threads: int = 0
    """Torch threads; 0 takes what the machine has."""
    seed: int = 0
    pack_tokens: int = 2048
    """Longest input that is computed at once; memory grows with it. A group is split over several
    such inputs; one whose prompt and longest answer do not fit is dropped and counted."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bf16 matrix products where the processor has instructions for them."""
    device: str = "cpu"
    """A torch device. This release is tested on the CPU only."""
    poll_s: float = 2.0
    """How often the schedule looks at flags, trials and waiting groups."""


class Canary(Section):
    """Gate and ramp of a new adapter."""

    gate_prompts: int = 12
    """Held-out prompts on which candidate and champion are compared."""
    gate_answers: int = 2
    """Answers of each per prompt; with both arms they make one blind group."""
    gate_min_prompts: int = 4
    """With fewer held-out prompts than this the candidate waits."""
    gate_margin: float = 0.02
    """The candidate passes when its mean judged difference to the champion is above minus this."""
    gate_timeout_s: float = 600.0
    max_tokens: int = 256
    steps: tuple[int, ...] = (2_000, 5_000)
    """Weights of the ramp, in basis points; the candidate is promoted after the last step."""
    step_min_s: float = 60.0
    step_min_exchanges: int = 20
    """Canary exchanges that a step must see."""
    step_max_s: float = 86_400.0
    """A step that has not seen them by then ends inconclusive: the champion stays."""
    max_error_excess: float = 0.10
    max_truncated_excess: float = 0.25
    """Canary's share of failed (truncated or empty) replies may exceed the champion's by this."""
    poll_s: float = 0.5


class Admin(Section):
    host: str = "127.0.0.1"
    port: int = 8081
    tokens: tuple[str, ...] = ()
    """SHA-256 hex digests of the accepted bearer tokens. None: only a loopback host is allowed."""


class Telemetry(Section):
    otlp_endpoint: str = ""
    """OTLP/HTTP traces endpoint; empty: spans go nowhere unless `spans_file` is set."""
    spans_file: str = ""
    """Append finished spans to this file, one JSON object a line."""
    otlp_metrics_endpoint: str = ""
    """OTLP/HTTP metrics endpoint for the GenAI metrics; empty: none are made."""
    trace_sample_rate: float = Field(default=1.0, ge=0.0, le=1.0)
    """Of the traces that begin at the proxy; those that a client began follow the client."""
    content: bool = False
    """Put what was said into the spans."""
    semantic_conventions: Literal["latest", "1.41"] = "latest"
    """Which names the GenAI metrics have."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False


class Settings(BaseSettings):
    """All sections. Frozen: read once in `main`, passed down."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    state_dir: Path = Path(".sidecar")
    """The proxy's socket, the limits' file and the logs of `sidecar up`."""
    serving: Serving = Serving()
    engine: Engine = Engine()
    proxy: Proxy = Proxy()
    access: Access = Access()
    capture: Capture = Capture()
    bus: Bus = Bus()
    store: Store = Store()
    groups: Groups = Groups()
    judge: Judge = Judge()
    best_of: BestOf = BestOf()
    learner: Learner = Learner()
    canary: Canary = Canary()
    admin: Admin = Admin()
    telemetry: Telemetry = Telemetry()

    @classmethod
    def settings_customise_sources(  # type: ignore[no-untyped-def]
        cls, settings_cls, init_settings, env_settings, dotenv_settings, file_secret_settings
    ):
        """The environment wins over the file, which arrives as init arguments."""
        return env_settings, init_settings
