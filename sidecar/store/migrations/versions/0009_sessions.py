"""Where each exchange stands in its session

Revision ID: 0009_sessions
Revises: 0008_judge_failures
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009_sessions"
down_revision = "0008_judge_failures"
branch_labels = None
depends_on = None

NUMBERS = ("turn", "branch", "segment")


def upgrade() -> None:
    op.add_column("exchange", _text("session_id", 255))
    op.add_column("exchange", sa.Column("parent_id", sa.String(64), nullable=True))
    for name in NUMBERS:
        op.add_column("exchange", sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
    op.add_column("exchange", _text("placed_by", 16))
    op.add_column("answer_group", _text("session_id", 255))
    for table in ("exchange", "answer_group"):
        op.execute(f"UPDATE {table} SET session_id = session_key")
        op.create_index(f"ix_{table}_session_id", table, ["session_id"])


def downgrade() -> None:
    for table in ("exchange", "answer_group"):
        op.drop_index(f"ix_{table}_session_id", table)
    op.drop_column("answer_group", "session_id")
    for name in ("placed_by", *NUMBERS, "parent_id", "session_id"):
        op.drop_column("exchange", name)


def _text(name: str, length: int) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=False, server_default="")
