"""The index by which feedback finds a session under the second name that a client gave it

Revision ID: 0016_second_name
Revises: 0015_retention
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016_second_name"
down_revision = "0015_retention"
branch_labels = None
depends_on = None

NAMED_OTHERWISE = "substr(session_key, 1, 1) = 'h' AND session_key <> session_id"


def upgrade() -> None:
    op.create_index(
        "ix_exchange_named_otherwise",
        "exchange",
        ["session_key"],
        sqlite_where=sa.text(NAMED_OTHERWISE),
        postgresql_where=sa.text(NAMED_OTHERWISE),
    )


def downgrade() -> None:
    op.drop_index("ix_exchange_named_otherwise", "exchange")
