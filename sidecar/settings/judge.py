"""The section of the reward: verifiers, and how their findings join the judge's scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from sidecar.settings.kinds import (
    Between,
    Budget,
    ContextTokens,
    Fallback,
    Key,
    Line,
    Name,
    Parallel,
    PerMinute,
    Price,
    Project,
    Section,
    Text,
    Timeout,
    WebUrl,
    Word,
    matching,
    read_secret,
)
from sidecar.settings.store import compiled

# The sections of the settings file for judges: [judge] and [gate_judge].

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

MOST_FALLBACKS = 4
"""Each may be waited for in turn; a group's lease covers them all."""


class ProjectRubric(Section):
    """The rubric of one project."""

    rubric: Word = ""
    """What makes an answer of this project better; `file:PATH` as in `judge.rubric`."""


class Judge(Section):
    """RULER: the judge model and the rubric."""

    model: Line = ""
    """A LiteLLM model name, such as `openai/gpt-...` or `hosted_vllm/...`."""
    api_base: WebUrl | None = None
    """Base URL, for a judge of your own."""
    api_key: Annotated[Key | None, BeforeValidator(read_secret)] = None
    """Key of the judge's API. Without it LiteLLM reads the provider's own environment variable."""
    rubric: Text = DEFAULT_RUBRIC
    """What makes an answer better, in plain words, or `file:PATH`: a file of plain text, read when
    a process starts."""
    projects: Mapping[Project, ProjectRubric] = Field(default_factory=dict)
    """Other rubrics for single projects, by name: `[judge.projects.NAME]`."""
    passes: Annotated[int, Between(1, 8, "each is a call that is paid for")] = 2
    """Judge calls per group; the score is their mean. The second shows the answers in the reverse
    order of the first, so that what a judge gives to a position cancels out."""
    concurrency: Parallel = 8
    """Groups judged at once."""
    timeout_s: Timeout = 60.0
    """Longest time of one call."""
    context_tokens: ContextTokens = 0
    """Most tokens of a prompt and its reply together. The oldest messages of a conversation that
    is longer are left out, with a mark. 0: `num_ctx` of `params`, or what LiteLLM knows of the
    model; of an unknown model nothing is left out."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Further LiteLLM parameters (`temperature`, `reasoning_effort`, …). Without `max_tokens` in
    them a reply may take 256 tokens and 128 for each answer; a judge that thinks has no limit."""
    budget: Annotated[float, Between(0, 1_000_000, "0 sets no limit")] = 0.0
    """US dollars a day for all that judges are asked by the sidecar's processes. When they are
    spent, judging waits for midnight UTC. 0: no limit."""
    budget_tokens: Budget = 0
    """Prompt and reply tokens a day, for a judge of your own that costs no money. 0: no limit."""
    price: Price | None = None
    """US dollars for a million tokens, such as `{input = 0.15, output = 0.6}`. Not set: LiteLLM's
    price, if it knows one; without any price no budget in dollars can be kept, and the judge is
    not asked."""
    requests_per_minute: PerMinute = 0
    """Calls that one process makes in any minute. 0: no limit."""
    fallbacks: Annotated[
        tuple[Fallback, ...], Field(max_length=MOST_FALLBACKS, validate_default=False)
    ] = ()
    """Judges that are asked, in this order, while those before them are away, reject everything or
    are limited for long: `[[judge.fallbacks]]`. One judge gives all scores of a group."""

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
    api_key: Annotated[Key | None, BeforeValidator(read_secret)] = None
    """Key of that judge's API; needs `model`. `judge.api_key` is never sent to it."""
    rubric: Word = ""
    """What makes an answer better, in the gate, for all projects. Empty: those of `[judge]`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Further LiteLLM parameters of that judge; needs `model`."""
    price: Price | None = None
    """As `judge.price`, of that judge; needs `model`. What it costs counts in the budgets of
    [judge]."""


MAX_VERIFIERS = 16
MAX_PATTERN = 4_000
"""Characters of a pattern."""
MAX_TEXTS = 1_000
MAX_TEXT = 100_000
"""Characters of an expected text."""


def _pattern(pattern: str) -> str:
    compiled(pattern, MAX_PATTERN)
    return pattern


def is_found_everywhere(pattern: str) -> bool:
    """Tell whether a valid pattern matches the empty text, another and a long one with every
    printable ASCII character: such a pattern tells no two answers apart."""
    import re2

    printable = "".join(map(chr, range(32, 127)))
    probes = ("", "\ufffd", printable + "\n" + 100 * printable)
    return all(re2.search(pattern, probe) is not None for probe in probes)


VerifierName = Annotated[
    str,
    matching(
        r"[a-z][a-z0-9_]{0,31}",
        "is no name of a verifier: small letters, digits and underscores, 32 at most, such as "
        "valid_calls",
    ),
]
EntryPoint = Annotated[
    str,
    matching(
        r"[\w.-]{1,100}",
        "is no name of an entry point; give the one that your package declares",
    ),
]
Weight = Annotated[float, Between(0, 1_000, "with 0 the reward does not count it")]
Limit = Annotated[int, Between(0, 100_000_000, "0 allows the empty answer alone")]


class VerifierSection(Section):
    """What every verifier has, whatever its kind."""

    weight: Weight = 1.0
    """Its share in the weighted mean, beside 1 for the judge and the other verifiers."""
    gate: bool = False
    """An answer below `pass_at` ranks below all that pass; `weight` is then not used."""
    pass_at: Annotated[float, Between(0, 1, "at 0 every answer passes", above_low=True)] = 1.0
    """The least score that passes the gate."""
    on_error: Literal["ignore", "fail", "hold"] = "ignore"
    """What becomes of a group over an answer of which it fails (time limit, exception, no reply).
    `ignore`: the verifier does not count in this group. `fail`: that answer gets 0. `hold`: the
    group waits and is tried again."""
    timeout_s: Annotated[float, Between(0.01, 300, "it is waited for with each answer", "s")] = 2.0
    """Longest time of one answer."""
    projects: tuple[Name, ...] = ()
    """Projects whose answers it checks; empty: those of all."""


class ToolCallsVerifier(VerifierSection):
    """Calls name a tool of the request, with arguments that fit its JSON schema."""

    kind: Literal["tool_calls"]
    required: bool = False
    """An answer without a call fails; it also does when the request says so (`tool_choice`)."""


class JsonSchemaVerifier(VerifierSection):
    """The content is JSON that fits a schema."""

    kind: Literal["json_schema"]
    json_schema: dict[str, Any] | None = None
    """None: that of the request's `response_format`; a request without one is not checked."""


class RegexVerifier(VerifierSection):
    """The content matches a pattern of RE2 somewhere, or nowhere."""

    kind: Literal["regex"]
    pattern: Annotated[str, AfterValidator(_pattern)]
    must: Literal["match", "not_match"] = "match"


class ExactVerifier(VerifierSection):
    """The content is one of these texts, or what the request's metadata expects."""

    kind: Literal["exact"]
    texts: tuple[str, ...] = ()
    metadata: Line = ""
    """Key of the request's `metadata` that holds the expected text; a request without it is not
    checked."""
    ignore_case: bool = False
    strip: bool = True
    """White space around the content does not count."""

    @model_validator(mode="after")
    def _one_source(self) -> ExactVerifier:
        if bool(self.texts) == bool(self.metadata):
            raise ValueError("has texts and metadata, or neither; give one of them")
        if len(self.texts) > MAX_TEXTS or any(len(text) > MAX_TEXT for text in self.texts):
            raise ValueError(f"there are over {MAX_TEXTS} texts, or one is over {MAX_TEXT} long")
        return self


class LengthVerifier(VerifierSection):
    """The answer is neither too short nor too long."""

    kind: Literal["length"]
    min_characters: Limit = 0
    """Fewest characters of the content."""
    max_characters: Limit | None = None
    min_tokens: Limit = 0
    """Sampled tokens, thoughts and calls included; not checked where they are not known."""
    max_tokens: Limit | None = None
    fade: Annotated[float, Between(0, 100, "the score falls to 0 over so many lengths")] = 0.0
    """Share of a maximum over which the score falls from 1 to 0 beyond it; 0: at once."""

    @model_validator(mode="after")
    def _some_limit(self) -> LengthVerifier:
        limits = (
            ("characters", self.min_characters, self.max_characters),
            ("tokens", self.min_tokens, self.max_tokens),
        )
        if all(not low and high is None for _, low, high in limits):
            raise ValueError("has no limit; give min_ or max_characters, min_ or max_tokens")
        for name, low, high in limits:
            if high is not None and low > high:
                raise ValueError(f"has min_{name} over max_{name}, so no answer would pass")
        return self


class EntryPointVerifier(VerifierSection):
    """Code of an installed package, in a process of its own."""

    kind: Literal["entry_point"]
    entry_point: EntryPoint
    """Its name in the group `learning_sidecar.verifiers`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that it is made with; no secrets."""


class HttpVerifier(VerifierSection):
    """A service of yours that is asked about each answer."""

    kind: Literal["http"]
    url: WebUrl
    token: Annotated[Key | None, BeforeValidator(read_secret)] = None
    """Sent as `Authorization: Bearer`."""
    version: Line = "1"
    """Change it when the service begins to answer otherwise: kept findings are then not used."""
    redact: bool = True
    """It sees what the judge sees, with placeholders for secrets and personal data."""


AnyVerifier = (
    ToolCallsVerifier
    | JsonSchemaVerifier
    | RegexVerifier
    | ExactVerifier
    | LengthVerifier
    | EntryPointVerifier
    | HttpVerifier
)
KINDS: Mapping[str, type[VerifierSection]] = {
    get_args(one.model_fields["kind"].annotation)[0]: one for one in get_args(AnyVerifier)
}


class Reward(Section):
    """What the learner trains on: the weighted mean of the judge's score and the verifiers'.
    Answers that fail a verifier with `gate = true` come below all that pass."""

    verifiers: Mapping[VerifierName, Annotated[AnyVerifier, Field(discriminator="kind")]] = Field(
        default_factory=dict
    )
    """Verifiers by name: `[reward.verifiers.NAME]` with a `kind`."""

    @field_validator("verifiers")
    @classmethod
    def _few(cls, verifiers: Mapping[str, AnyVerifier]) -> Mapping[str, AnyVerifier]:
        if len(verifiers) > MAX_VERIFIERS:
            raise ValueError(f"there are over {MAX_VERIFIERS} verifiers")
        return verifiers
