"""The newest finished sessions of a project's tasks are read by an index.

Revision ID: 0046_newest_members
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0046_newest_members"
down_revision = "0045_signal"
branch_labels = None
depends_on = None


def upgrade() -> None:
    where = sa.text("over_at IS NOT NULL AND key_kind <> 'rehearsal'")
    op.create_index(
        "ix_task_member_project",
        "task_member",
        ["project", "over_at"],
        sqlite_where=where,
        postgresql_where=where,
    )
