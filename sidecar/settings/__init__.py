"""Every setting of every process: kinds <- sections <- checks, shown <- load."""

from sidecar.settings.explain import shown_settings
from sidecar.settings.judge import (
    DEFAULT_RUBRIC,
    EntryPointVerifier,
    GateJudge,
    HttpVerifier,
    Judge,
    ProjectRubric,
    Reward,
    VerifierSection,
)
from sidecar.settings.kinds import Fallback, KafkaUrl, OutboxUrl, Section, read_bus_url
from sidecar.settings.learning import BestOf, Canary, Groups, Watch
from sidecar.settings.load import DEFAULT_FILE, NOT_SETTINGS, load_settings, with_workers
from sidecar.settings.outside import Approval, Hook, Metric, Notify
from sidecar.settings.sections import (
    ENV_PREFIX,
    Access,
    Admin,
    Bus,
    Capture,
    Engine,
    Proxy,
    Retention,
    SamplingField,
    Serving,
    Settings,
    Telemetry,
)
from sidecar.settings.store import Kafka, Privacy, ProjectPrivacy, Store, open_keyring
from sidecar.settings.training import Advanced, Learner

__all__ = [
    "DEFAULT_FILE",
    "DEFAULT_RUBRIC",
    "ENV_PREFIX",
    "NOT_SETTINGS",
    "Access",
    "Admin",
    "Advanced",
    "Approval",
    "BestOf",
    "Bus",
    "Canary",
    "Capture",
    "Engine",
    "EntryPointVerifier",
    "Fallback",
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
