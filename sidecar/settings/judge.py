"""The sections of the settings file for judges: [judge] and [gate_judge]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sidecar.settings.kinds import (
    Between,
    Budget,
    ContextTokens,
    Fallback,
    Key,
    Line,
    Parallel,
    PerMinute,
    Price,
    Project,
    Share,
    Text,
    Timeout,
    WebUrl,
    Word,
    no_empty_key,
)
from sidecar.settings.section import Section

DEFAULT_RUBRIC = (
    "An answer that reaches the goal set by the system prompt and the user, or takes the right "
    "next step towards it, always scores significantly higher than one that does not.\n"
    "Among answers that reach it, one that keeps to the system prompt's instructions and takes no "
    "detours (needless steps, tool calls or questions) scores higher. Length by itself is neither "
    "a merit nor a fault.\n"
    "If one answer is only slightly better than another, the difference in score is small; if it "
    "is significantly better, the difference is large.\n"
    "An answer that makes progress towards the goal without reaching it may get partial credit."
)
"""After the default rubric of RULER as published (openpipe-art 0.5.18): its four rules in the same
order, said of next actions in place of trajectories."""

Dollars = Annotated[float, Between(0, 1_000_000, "0 sets no limit")]
MOST_FALLBACKS = 4
"""Each may be waited for in turn; a group's lease covers them all."""


class ProjectRubric(Section):
    """The rubric of one project: one of the two keys."""

    rubric: Word = ""
    """What makes an answer of this project better, in plain words."""
    rubric_file: Word = ""
    """A file of plain text in place of `rubric`, read when a process starts."""


class Judge(Section):
    """RULER: the judge model and the rubric."""

    model: Line = ""
    """A LiteLLM model name, such as `openai/gpt-...` or `hosted_vllm/...`."""
    api_base: WebUrl | None = None
    """Base URL, for a judge of your own."""
    api_key: Annotated[Key | None, BeforeValidator(no_empty_key)] = None
    """Key of the judge's API. Without it LiteLLM reads the provider's own environment variable."""
    rubric: Text = DEFAULT_RUBRIC
    """What makes an answer better, in plain words."""
    rubric_file: Word = ""
    """A file of plain text in place of `rubric`, read when a process starts."""
    projects: Mapping[Project, ProjectRubric] = Field(default_factory=dict)
    """Other rubrics for single projects, by name: `[judge.projects.NAME]`."""
    passes: Annotated[int, Between(1, 8, "each is a call that is paid for")] = 2
    """Judge calls per group; the score is their mean. The second shows the answers in the reverse
    order of the first, so that what a judge gives to a position cancels out."""
    concurrency: Parallel = 8
    """Groups judged at once."""
    rescore_share: Share = 0.05
    """Share of the scored groups, by hash of their id, that are scored a second time later, to
    measure the judge's noise; each costs as many calls as the first time. 0: none."""
    rescore_after_s: Annotated[
        float, Between(0, 2_592_000, "up to a month, before groups are deleted by age", "s")
    ] = 21_600.0
    """How long after its scores such a group is scored again, at the earliest. A model that a
    provider puts behind the same name meanwhile is compared with the one before it."""
    timeout_s: Timeout = 60.0
    """Longest time of one call."""
    json_schema: Literal["auto", "on", "off"] = "auto"
    """Whether the judge is sent the JSON schema of its reply. `auto`: unless LiteLLM knows that the
    model takes none; a server that refuses it is asked without it from then on."""
    context_tokens: ContextTokens = 0
    """Most tokens of a prompt and its reply together. The oldest messages of a conversation that
    is longer are left out, with a mark. 0: `num_ctx` of `params`, or what LiteLLM knows of the
    model; of an unknown model nothing is left out."""
    show_reasoning: bool = False
    """Whether the judge sees the reasoning before an answer. Users do not get it, and an agent
    that is scored by it learns to reason for the judge; but it is trained on with the answer."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Further LiteLLM parameters (`temperature`, `reasoning_effort`, …). Without `max_tokens` in
    them a reply may take 256 tokens and 128 for each answer; a judge that thinks has no limit."""
    budget: Dollars = 0.0
    """US dollars a day for all that judges are asked by the sidecar's processes. When they are
    spent, judging waits for midnight UTC. 0: no limit."""
    budget_per_hour: Dollars = 0.0
    """US dollars an hour; when spent, judging waits for the next. 0: no limit."""
    budget_tokens: Budget = 0
    """Prompt and reply tokens a day, for a judge of your own that costs no money. 0: no limit."""
    price: Price | None = None
    """US dollars for a million tokens, such as `{input = 0.15, output = 0.6}`. Not set: LiteLLM's
    price, if it knows one; without any price no budget in dollars can be kept, and the judge is
    not asked."""
    requests_per_minute: PerMinute = 0
    """Calls that one process makes in any minute. 0: no limit."""
    tokens_per_minute: PerMinute = 0
    """Prompt and reply tokens that one process uses in a minute. 0: no limit."""
    fallbacks: Annotated[
        tuple[Fallback, ...], Field(max_length=MOST_FALLBACKS, validate_default=False)
    ] = ()
    """Judges that are asked, in this order, while those before them are away, reject everything or
    are limited for long: `[[judge.fallbacks]]`. One judge gives all scores of a group."""
    cache_bytes: Annotated[int, Between(0, 10**12, "0 keeps none")] = 64 * 2**20
    """Size of the replies that are kept in the store, so that the same question is paid for once.
    Beyond it the oldest go. 0: none is kept."""
    cache_days: Annotated[
        float, Between(0, 3_650, "an older reply may be of another judge", above_low=True)
    ] = 7.0
    """An older reply is not used: a provider may have changed the model behind the name."""

    def of(self, project: str) -> Judge:
        """Return these settings with the rubric of a project."""
        own = self.projects.get(project)
        return self if own is None else self.model_copy(update={"rubric": own.rubric})


class GateJudge(Section):
    """The judge of the deployment gate, apart from the one whose scores are the reward. Without
    `model` the gate asks the judge of [judge]: the reward then marks its own exam, and control,
    `sidecar status` and `sidecar doctor` say so."""

    model: Line = ""
    """A LiteLLM model name. Empty: `judge.model`, with its address, key and parameters."""
    api_base: WebUrl | None = None
    """Base URL, for a judge of your own; needs `model`."""
    api_key: Annotated[Key | None, BeforeValidator(no_empty_key)] = None
    """Key of that judge's API; needs `model`. `judge.api_key` is never sent to it."""
    rubric: Word = ""
    """What makes an answer better, in the gate. Empty: `judge.rubric`."""
    rubric_file: Word = ""
    """A file of plain text in place of `rubric`, read when a process starts."""
    projects: Mapping[Project, ProjectRubric] = Field(default_factory=dict)
    """Other rubrics for single projects, in the gate. A project without one has `rubric`; where
    that is empty too, its own of `[judge.projects.NAME]`; else `judge.rubric`."""
    passes: Annotated[
        int, Between(0, 8, "0 takes judge.passes; each is a call that is paid for")
    ] = 0
    """Judge calls per comparison. 0: `judge.passes`."""
    timeout_s: Annotated[float, Between(0, 604_800, "0 takes judge.timeout_s", "s")] = 0.0
    """Longest time of one call. 0: `judge.timeout_s`."""
    json_schema: Literal["auto", "on", "off"] = "auto"
    """Whether that judge is sent the JSON schema of its reply, as `judge.json_schema`; with `model`
    only."""
    context_tokens: ContextTokens = 0
    """Most tokens of a prompt to that judge and its reply, as `judge.context_tokens`; with `model`
    only."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Further LiteLLM parameters of that judge; needs `model`."""
    price: Price | None = None
    """As `judge.price`, of that judge; needs `model`. What it costs counts in the budgets of
    [judge]."""
