"""A request that the routed adapter and its fallback failed counts for the routed one.

Revision ID: 0038_failed_twice
Revises: 0037_removed_folders
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0038_failed_twice"
down_revision = "0037_removed_folders"
branch_labels = None
depends_on = None

NAME = "ix_exchange_taken_over"


def upgrade() -> None:
    _index("fallback_from <> ''")


def downgrade() -> None:
    _index("fallback_from <> '' AND outcome <> 'upstream_error'")


def _index(condition: str) -> None:
    where = sa.text(condition)
    op.drop_index(NAME, "exchange")
    op.create_index(
        NAME,
        "exchange",
        ["fallback_from", "seq"],
        sqlite_where=where,
        postgresql_where=where,
    )
