"""The section `[adapters]`: what becomes of adapter folders after a run made them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from sidecar.settings.kinds import Between
from sidecar.settings.section import Section

_URL = re.compile(r"[a-z][a-z0-9+.-]{0,30}://[^\s@]{1,1000}")


def _shared(value: str) -> str:
    if value and not _URL.fullmatch(value):
        raise ValueError(
            "is not a URL such as s3://bucket/adapters, without spaces and without a user or "
            "password (the plugin takes those from its own variables)"
        )
    return value


class Adapters(Section):
    """Adapter folders after a run made them. Control removes what nothing needs any more; what an
    alias, a canary, a run or a vLLM needs stays, and its parent, and all lineage and events."""

    folder_days: Annotated[float, Between(0, 36_500, "0 keeps them for good")] = 30.0
    """Days without use after which the folder of a version that nothing needs goes. 0: never."""
    keep_champions: Annotated[
        int, Between(1, 10_000, "one at least must be there to return to")
    ] = 10
    """Newest champions whose folders stay, however long ago they served."""
    url: Annotated[str, AfterValidator(_shared)] = ""
    """Where folders are shared by machines that have no disk in common: a URL of fsspec, such as
    s3://bucket/adapters (`pip install s3fs`). Empty: `learner.adapters_dir` is seen by all."""
