"""The sections of the settings file for serving traffic, and the whole of the settings.

The classes live in the leftmost room, so that every process reads the file alike. Nothing is read
at import.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PrivateAttr
from pydantic_settings import BaseSettings, SettingsConfigDict

from sidecar.errors import SettingsError
from sidecar.lines import Line, lines_of
from sidecar.settings.judge import GateJudge, Judge, Reward
from sidecar.settings.kinds import (
    AdminToken,
    AdminUrl,
    Between,
    BusUrl,
    Bytes,
    Folder,
    Host,
    Key,
    Name,
    Port,
    Project,
    Section,
    Share,
    Timeout,
    Upstream,
    WebUrlOrNone,
    Word,
    base_url,
    read_secret,
)
from sidecar.settings.learning import BestOf, Canary, Groups, Rehearsals, Tasks, Watch
from sidecar.settings.outside import Approval, Notify
from sidecar.settings.removed import without_removed
from sidecar.settings.store import Kafka, Privacy, Store
from sidecar.settings.training import Adapters, Learner

ENV_PREFIX = "SIDECAR_"


SamplingField = Literal[
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
]
SamplingValue = Annotated[float, Between(-2, 1_000_000, "vLLM fills no other value")]


class Serving(Section):
    """The vLLM that answers, and how it was started."""

    upstreams: tuple[Upstream, ...] = ("http://127.0.0.1:8000",)
    """Base URLs of vLLM, without `/v1`: one, or several replicas that serve the same model.
    `dns+http://NAME:PORT`: every address of a DNS name, as replicas come and go."""
    model: Name = "smollm2-135m"
    """The public model name; must be vLLM's `--served-model-name`."""
    api_key: Annotated[Key | None, BeforeValidator(read_secret)] = None
    """vLLM's own `--api-key`, for the calls that the sidecar makes on its own account, and for
    every call when `access.mode` is `keys`."""
    base_model_path: Word = ""
    """Folder or hub name of the base weights, for the learner; must be what vLLM serves."""
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """vLLM's `--logprobs-mode`. With raw ones only answers sampled at temperature 1 are exact."""
    sampling_defaults: Mapping[SamplingField, SamplingValue] | None = None
    """What vLLM takes for sampling fields that a request leaves out; a field that is not named is
    neutral. None: found out, and not learned from where it is not neutral."""
    grammar: Literal["find_out", "as_asked", "with_tools", "always"] = "find_out"
    """When vLLM forbids tokens: as a request asks, with every request that has tools, always."""
    max_lora_rank: Annotated[int, Between(1, 512, "vLLM serves no higher rank")] = 16
    """vLLM's `--max-lora-rank`; an adapter of a higher rank is refused before it is loaded."""
    max_loras: Annotated[
        int, Between(3, 10_000, "champion, previous and candidate are loaded at once")
    ] = 4
    """vLLM's `--max-loras`; older adapters are unloaded beyond it. Three are needed: champion,
    previous and candidate; for each project of `own_adapters` three more."""
    own_adapters: tuple[Project, ...] = ()
    """Projects that have adapters of their own, with a canary and learner runs of their own. They
    begin at the base, and learn from their own traffic alone. All others share one line."""


class Engine(Section):
    """A vLLM that `sidecar up` starts and owns. Empty command: it attaches to yours."""

    command: tuple[Word, ...] = ()
    """Program and arguments. Empty: attach to the vLLM that `serving.upstreams` names."""
    env: dict[Word, Word] = Field(default_factory=dict)
    """Variables added to its environment."""


class Proxy(Section):
    """The data plane's listener and limits."""

    host: Host = "127.0.0.1"
    """Address to listen on. Not loopback: needs `access.mode` `"keys"` or `"upstream"`, or
    `allow_remote_without_keys`."""
    port: Port = 8080
    """Port to listen on; 0 takes a free one."""
    workers: Annotated[int, Between(1, 128, "each is a process of its own")] = 1
    """Processes that share the port. One serves about what one core can."""
    max_body_bytes: Annotated[
        int, Between(1, 4_000_000_000, "nothing fits into less, and a body is held in memory")
    ] = 32 * 2**20
    """A longer request body is answered with 413. A worker holds eight such at most, coming in or
    in flight: one that does not fit is answered 503 with `Retry-After`."""
    upstream_timeout_s: Timeout = 600.0
    """Longest silence of vLLM in a reply; then 504, or the stream ends with an error."""
    drain_timeout_s: Annotated[
        float, Between(0, 86_400, "0 closes connections immediately; at most one day", "s")
    ] = 20.0
    """At the end, replies in flight have this long to finish."""
    shutdown_delay_s: Annotated[float, Between(0, 3_600, "a stop must end", "s")] | None = None
    """On SIGTERM, `/readyz` says 503 for this long before the drain, and requests are still
    answered: a load balancer stops sending. Not set: 5 s if one is seen to ask (two probes within
    100 s), else 0. SIGINT, which people send, never waits."""
    allow_remote_without_keys: bool = False
    """Allows a `host` that is reachable from outside with `access.mode = "open"`: for a gateway of
    yours that authenticates agents."""


class Access(Section):
    """Who may ask the model. Limits are each key's own (`sidecar keys create`)."""

    mode: Literal["open", "keys", "upstream"] = "open"
    """`open`: no key is asked for. `keys`: the sidecar's own. `upstream`: the caller's credentials
    go on to vLLM, which judges them by its `--api-key`."""


class Capture(Section):
    """What is recorded."""

    sample_rate: Share = 1.0
    """Share of the requests on captured surfaces that are recorded."""
    projects: dict[str, Share] = Field(default_factory=dict)
    """Rates of single projects, by name; multiplied with `sample_rate`."""
    surfaces: dict[Literal["chat", "completions", "responses", "messages"], Share] = Field(
        default_factory=dict
    )
    """Rates of single surfaces; multiplied with the others. Embeddings are never captured."""


class Bus(Section):
    """The bus from the proxy to ingest."""

    url: BusUrl = "sqlite:///.sidecar/outbox.db"
    """`sqlite:///path`: the embedded outbox. `kafka://host:port,host:port/topic`: Kafka, to which
    the proxy forwards what is in an outbox in `state_dir`."""
    max_bytes: Bytes = 4 * 2**30
    """Size of the unread records in the outbox file, and one record for each 20 kB of it; beyond,
    the newest is dropped and counted."""


Days = Annotated[float, Between(0, 36_500, "0 keeps them for good")]


class Retention(Section):
    """How long records stay in the store. Ingest deletes older ones, a few at a time; what the
    lineage of adapters needs of them stays as digests. 0: they stay for good."""

    exchanges_days: Days = 90.0
    """Exchanges that have no group, with their replies, and feedback that is joined to none."""
    groups_days: Days = 90.0
    """Exchanges that have a group, with the group, its answers and scores; replies of the judge."""
    max_bytes: Annotated[int, Between(0, 10**15, "0 sets no limit; no disk is larger")] = 0
    """Size of the store; beyond it the oldest exchanges go, whatever their age. 0: no limit."""


class Admin(Section):
    """The admin API, which the `sidecar` command asks."""

    host: Host = "127.0.0.1"
    """Address to listen on, plain HTTP. Not loopback: needs `tokens`."""
    port: Port = 8081
    """Port to listen on; 0 takes a free one, which `sidecar up` and the log print."""
    url: AdminUrl = ""
    """Where the `sidecar` command asks for it, from another host or through TLS; empty: at `host`
    and `port`."""
    tokens: tuple[AdminToken, ...] = ()
    """SHA-256 hex digests of the accepted bearer tokens, each with its scopes after a colon
    (`<digest>:read+content`) or with every scope; `<digest>:operate@support` is for what takes
    `?project=` with that project alone. None: only a loopback host is allowed."""

    @property
    def base_url(self) -> str:
        """Where commands ask."""
        return self.url.rstrip("/") or base_url(self.host, self.port)


class Telemetry(Section):
    """Traces, GenAI metrics and logs."""

    otlp_endpoint: WebUrlOrNone = ""
    """OTLP/HTTP traces endpoint; empty: spans go nowhere unless `spans_file` is set."""
    spans_file: Word = ""
    """Append finished spans to this file, one JSON object a line."""
    otlp_metrics_endpoint: WebUrlOrNone = ""
    """OTLP/HTTP metrics endpoint for the GenAI metrics; empty: none are made."""
    content: bool = False
    """Put what was said into the spans."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged: `debug`, `info`, `warning` or `error`."""
    log_json: bool = False
    """One JSON object a line instead of text."""


class Settings(BaseSettings):
    """All sections. Frozen: read once in `main`, passed down."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
    )

    state_dir: Folder = Path(".sidecar")
    """The proxy's socket, usage of limits and the logs of `sidecar up`."""
    serving: Serving = Serving()
    engine: Engine = Engine()
    proxy: Proxy = Proxy()
    access: Access = Access()
    capture: Capture = Capture()
    bus: Bus = Bus()
    kafka: Kafka = Kafka()
    store: Store = Store()
    privacy: Privacy = Privacy()
    retention: Retention = Retention()
    adapters: Adapters = Adapters()
    groups: Groups = Groups()
    judge: Judge = Judge()
    gate_judge: GateJudge = GateJudge()
    reward: Reward = Reward()
    best_of: BestOf = BestOf()
    tasks: Tasks = Tasks()
    rehearsals: Rehearsals = Rehearsals()
    learner: Learner = Learner()
    watch: Watch = Watch()
    canary: Canary = Canary()
    approval: Approval = Approval()
    notify: Notify = Notify()
    admin: Admin = Admin()
    telemetry: Telemetry = Telemetry()

    _project: str | None = PrivateAttr(None)

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines of adapters: the default one first, then those of `serving.own_adapters`."""
        return lines_of(self.serving.model, self.serving.own_adapters)

    @property
    def line(self) -> Line:
        """The line of adapters that these settings are used for; see `of_line`."""
        return next(line for line in self.lines if line.project == self._project)

    def line_named(self, project: str | None) -> Line:
        """Return the line of a project; the default line for None.

        Raises: SettingsError when the project has none of its own.
        """
        for line in self.lines:
            if line.project == project:
                return line
        known = ", ".join(self.serving.own_adapters) or "none"
        raise SettingsError(
            f"project {project} has no adapters of its own (serving.own_adapters has: {known}); "
            "name one of those, or leave the project out"
        )

    def of_line(self, line: Line) -> Settings:
        """Return the same settings, for what is done for one of `lines`."""
        settings = self.model_copy()
        settings._project = line.project
        return settings

    @property
    def only_sampling(self) -> tuple[str, ...]:
        """The vLLMs that sample candidates and answer no user."""
        serving = self.serving.upstreams
        return tuple(url for url in self.groups.sampling_upstreams if url not in serving)

    @property
    def tasks_are_examined(self) -> bool:
        """Candidates are compared by whole tasks, which the runner attempts, and no judge."""
        return self.rehearsals.are_on and self.tasks.learn != "off"

    @property
    def judge_of_gate(self) -> Judge:
        """The settings of the gate's judge: those of [gate_judge] where it has its own, else those
        of [judge]."""
        own, judge = self.gate_judge, self.judge
        shared = {
            "rubric": own.rubric if own.rubric.strip() else judge.rubric,
            # A rubric of the gate's own is another exam, also for projects with a reward's rubric.
            "projects": {} if own.rubric.strip() else judge.projects,
        }
        if not own.model:
            return judge.model_copy(update=shared)
        return judge.model_copy(
            update={
                **shared,
                "model": own.model,
                "api_base": own.api_base,
                "api_key": own.api_key,
                "context_tokens": 0,
                "params": own.params,
                "price": own.price,
                # Those of the other judge; and a fallback to it would mark its own exam.
                "requests_per_minute": 0,
                "fallbacks": (),
            }
        )

    @classmethod
    def settings_customise_sources(  # type: ignore[no-untyped-def]
        cls, settings_cls, init_settings, env_settings, dotenv_settings, file_secret_settings
    ):
        """The environment wins over the file, which arrives as init arguments."""

        def environment():  # type: ignore[no-untyped-def]
            return without_removed(env_settings())

        return environment, init_settings
