"""What removing records from an outbox says when it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.capture.outbox import remove_records
from sidecar.errors import OutboxError


def test_an_outbox_that_cannot_be_changed_is_named_and_what_to_do_is_left_to_the_command(
    tmp_path: Path,
) -> None:
    path = tmp_path / "outbox.db"
    path.write_bytes(b"no SQLite" * 99)

    with pytest.raises(OutboxError, match=r"file is not a database$") as raised:
        remove_records(path, "outbox", lambda _: True)

    assert str(path) in str(raised.value)
