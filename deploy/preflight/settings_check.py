"""The checks that `sidecar config check` and `sidecar up` add to the settings' own rules.

They need what the data plane must not load: the learner's scheduler, the driver of the store, the
prices of judges, and the verifiers.
"""

from __future__ import annotations

from pathlib import Path

from deploy.preflight.base_size import large_base
from deploy.preflight.useless import refuse_useless
from learner.schedule.cron import read_cron
from sidecar.errors import SettingsError
from sidecar.settings import Settings, load_settings
from sidecar.settings.checks import advice as settings_advice
from sidecar.store.url import refuse_bad_arguments


def checked_settings(config: Path | None) -> Settings:
    """The settings, if every process can work with them. Raises: SettingsError."""
    settings = load_settings(config)
    read_cron(settings.learner)
    try:
        refuse_bad_arguments(settings.store.url)
    except ValueError as error:
        raise SettingsError(f"setting store.url: {error}") from None
    refuse_useless(settings)
    _refuse_unpriced(settings)
    return settings


def _refuse_unpriced(settings: Settings) -> None:
    """Refuse a budget in dollars that cannot be kept. Raises: SettingsError."""
    if not (settings.judge.budget or settings.judge.budget_per_hour):
        return
    # Imported here: it loads LiteLLM, which takes seconds, to look prices up.
    from ingest.judges.build import each_judge
    from ingest.judges.meter import litellm_price, unpriced

    first, *fallbacks = each_judge(settings.judge)
    asked = [(first, "judge.price"), *((one, "price in judge.fallbacks") for one in fallbacks)]
    if settings.gate_judge.model:
        asked.append((settings.judge_of_gate, "gate_judge.price"))
    for judge, setting in asked:
        if judge.model and judge.price is None and litellm_price(judge.model) is None:
            raise SettingsError(f"setting {unpriced(judge.model, setting)}")


def advice(settings: Settings) -> list[str]:
    """Return what works with these settings, but does nothing, or less well than it could. Reads
    the base's config.json."""
    return [f"{'.'.join(key)} {what}" for key, what in settings_advice(settings)] + large_base(
        settings
    )


def will_not_happen(settings: Settings) -> list[str]:
    """Return what these settings leave out, for settings that are sound all the same. Pure."""
    left = []
    if not settings.judge.model:
        left.append(
            "judge.model is empty, so no group is sampled or scored and nothing is learned; "
            "requests are relayed and recorded"
        )
    if not settings.serving.base_model_path:
        left.append("serving.base_model_path is empty, so no training run can start")
    return left
