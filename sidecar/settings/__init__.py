"""Every setting of every process: kinds <- sections <- checks, shown <- load."""

from sidecar.settings.explain import shown_settings as shown_settings
from sidecar.settings.judge import (
    DEFAULT_RUBRIC as DEFAULT_RUBRIC,
    EntryPointVerifier as EntryPointVerifier,
    GateJudge as GateJudge,
    HttpVerifier as HttpVerifier,
    Judge as Judge,
    ProjectRubric as ProjectRubric,
    Reward as Reward,
    VerifierSection as VerifierSection,
)
from sidecar.settings.kinds import (
    Fallback as Fallback,
    KafkaUrl as KafkaUrl,
    OutboxUrl as OutboxUrl,
    Section as Section,
    read_bus_url as read_bus_url,
)
from sidecar.settings.learning import (
    BestOf as BestOf,
    Canary as Canary,
    Groups as Groups,
    Watch as Watch,
)
from sidecar.settings.load import (
    DEFAULT_FILE as DEFAULT_FILE,
    NOT_SETTINGS as NOT_SETTINGS,
    load_settings as load_settings,
    with_workers as with_workers,
)
from sidecar.settings.outside import (
    Approval as Approval,
    Hook as Hook,
    Metric as Metric,
    Notify as Notify,
)
from sidecar.settings.sections import (
    ENV_PREFIX as ENV_PREFIX,
    Access as Access,
    Admin as Admin,
    Bus as Bus,
    Capture as Capture,
    Engine as Engine,
    Proxy as Proxy,
    Retention as Retention,
    SamplingField as SamplingField,
    Serving as Serving,
    Settings as Settings,
    Telemetry as Telemetry,
)
from sidecar.settings.store import (
    Kafka as Kafka,
    Privacy as Privacy,
    ProjectPrivacy as ProjectPrivacy,
    Store as Store,
    open_keyring as open_keyring,
)
from sidecar.settings.training import Advanced as Advanced, Learner as Learner
