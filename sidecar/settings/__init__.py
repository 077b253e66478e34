"""Every setting of every process: kinds <- sections <- checks, shown <- load."""

from sidecar.settings.bus_url import KafkaUrl, OutboxUrl, read_bus_url
from sidecar.settings.judge import DEFAULT_RUBRIC, GateJudge, Judge, ProjectRubric
from sidecar.settings.kafka import Kafka
from sidecar.settings.kinds import Fallback
from sidecar.settings.learning import BestOf, Canary, Groups, Watch
from sidecar.settings.load import DEFAULT_FILE, NOT_SETTINGS, load_settings, with_workers
from sidecar.settings.outside.asked import Approval, Metric
from sidecar.settings.outside.told import Hook, Notify
from sidecar.settings.privacy import Privacy, ProjectPrivacy
from sidecar.settings.reward import (
    EntryPointVerifier,
    HttpVerifier,
    Reward,
    VerifierSection,
)
from sidecar.settings.section import Section
from sidecar.settings.sections import (
    ENV_PREFIX,
    Access,
    Admin,
    Bus,
    Capture,
    Engine,
    Feedback,
    Proxy,
    Retention,
    SamplingField,
    Serving,
    Settings,
    Telemetry,
)
from sidecar.settings.shown import shown_settings
from sidecar.settings.store import Store, open_keyring
from sidecar.settings.training.learner import Learner

__all__ = [
    "DEFAULT_FILE",
    "DEFAULT_RUBRIC",
    "ENV_PREFIX",
    "NOT_SETTINGS",
    "Access",
    "Admin",
    "Approval",
    "BestOf",
    "Bus",
    "Canary",
    "Capture",
    "Engine",
    "EntryPointVerifier",
    "Fallback",
    "Feedback",
    "GateJudge",
    "Groups",
    "Hook",
    "HttpVerifier",
    "Judge",
    "Kafka",
    "KafkaUrl",
    "Learner",
    "Metric",
    "Notify",
    "OutboxUrl",
    "Privacy",
    "ProjectPrivacy",
    "ProjectRubric",
    "Proxy",
    "Retention",
    "Reward",
    "SamplingField",
    "Section",
    "Serving",
    "Settings",
    "Store",
    "Telemetry",
    "VerifierSection",
    "Watch",
    "load_settings",
    "open_keyring",
    "read_bus_url",
    "shown_settings",
    "with_workers",
]
