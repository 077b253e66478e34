"""What is known of one adapter's answers: sums without content, one row for each adapter."""

from __future__ import annotations

import math

import msgspec

from ingest.reward_watch.traits import Kind


class RateOf(msgspec.Struct, frozen=True, kw_only=True):
    """`statistics.Rate` as it is stored."""

    n: int
    hits: int
    weight: float
    sessions: int = 0


class MeanOf(msgspec.Struct, frozen=True, kw_only=True):
    """`statistics.Mean` as it is stored."""

    n: int
    mean: float
    error: float
    sessions: int = 0


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter's answers, of its newest window of served answers and of scored groups."""

    answers: int = 0
    """Served answers in the window."""
    sessions: int = 0
    """Sessions that they are of."""
    newest: int = 0
    """`exchange.seq` of the newest one."""
    rates: dict[Kind, RateOf] = {}
    log_tokens: MeanOf | None = None
    """Mean of log(1 + tokens) of the served answers."""
    groups: int = 0
    """Scored groups whose answers differ in length and in score."""
    newest_group: int = 0
    """`answer_group.seq` of the newest scored group that was looked at."""
    correlation: float | None = None
    """Correlation of reward and log length within groups."""
    correlation_error: float = 0.0
    signals: RateOf | None = None
    """Answers that the user corrected, asked again or asked anew."""
    feedback: MeanOf | None = None
    """Mean score of the feedback on these answers, -1..1."""
    lost: bool = False
    """What was stored before could not be read, and its answers were deleted since."""


class DamagedProfileError(ValueError):
    """The stored profile cannot be read."""


def read_body(body: object) -> Profile:
    """Decode a stored profile. Raises: DamagedProfileError."""
    if not isinstance(body, str):
        raise DamagedProfileError("the body is no text")
    try:
        found = msgspec.json.decode(body, type=Profile)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise DamagedProfileError(str(error)) from error
    if not _is_sound(found):
        raise DamagedProfileError("its numbers contradict each other")
    return found


def write_body(profile: Profile) -> str:
    """Encode a profile for its row."""
    return msgspec.json.encode(profile).decode()


def _is_sound(profile: Profile) -> bool:
    rates = [*profile.rates.values(), *([profile.signals] if profile.signals else [])]
    means = [one for one in (profile.log_tokens, profile.feedback) if one is not None]
    correlation = profile.correlation
    return (
        all(0 <= one.hits <= one.n and 0.0 <= one.weight <= one.n for one in rates)
        and all(one.n > 0 and one.error >= 0.0 and math.isfinite(one.mean) for one in means)
        and (correlation is None or -1.0 < correlation < 1.0)
        and profile.correlation_error >= 0.0
        and all(0 <= one.sessions <= one.n for one in rates)
        and all(0 <= one.sessions <= one.n for one in means)
        and 0 <= profile.sessions <= profile.answers
        and profile.groups >= 0
    )
