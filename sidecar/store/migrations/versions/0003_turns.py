"""exchanges: turns, keys, sizes, and the adapter that was missing

Revision ID: 0003_turns
Revises: 0002_api_key
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003_turns"
down_revision = "0002_api_key"
branch_labels = None
depends_on = None

# Rows of the first schema get the value that says "not known": "" and 0.
COLUMNS = (
    ("key_id", sa.String(length=64), ""),
    ("turn_id", sa.String(length=64), ""),
    ("retry_count", sa.Integer(), "0"),
    ("request_bytes", sa.Integer(), "0"),
    ("reply_bytes", sa.Integer(), "0"),
    ("fallback_from", sa.String(length=255), ""),
)
INDEXED = ("turn_id", "fallback_from")


def upgrade() -> None:
    # Not in batch mode: SQLite can add a column with a default in place, a batch would copy
    # the whole table.
    for name, kind, default in COLUMNS:
        column = sa.Column(name, kind, nullable=False, server_default=default)
        op.add_column("exchange", column)
    for name in INDEXED:
        op.create_index(op.f(f"ix_exchange_{name}"), "exchange", [name], unique=False)


def downgrade() -> None:
    for name in INDEXED:
        op.drop_index(op.f(f"ix_exchange_{name}"), table_name="exchange")
    for name, _, _ in reversed(COLUMNS):
        op.drop_column("exchange", name)
