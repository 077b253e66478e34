"""The section `[adapters]`: what becomes of adapter folders after a run made them."""

from __future__ import annotations

from typing import Annotated

from sidecar.settings.kinds import Between
from sidecar.settings.section import Section


class Adapters(Section):
    """Adapter folders after a run made them. Control removes what nothing needs any more; what an
    alias, a canary, a run or a vLLM needs stays, and its parent, and all lineage and events."""

    folder_days: Annotated[float, Between(0, 36_500, "0 keeps them for good")] = 30.0
    """Days without use after which the folder of a version that nothing needs goes. 0: never."""
    keep_champions: Annotated[
        int, Between(1, 10_000, "one at least must be there to return to")
    ] = 10
    """Newest champions whose folders stay, however long ago they served."""
