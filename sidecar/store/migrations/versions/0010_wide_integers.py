"""Row numbers, counts and generations of 64 bits on PostgreSQL; SQLite's have as many already

Revision ID: 0010_wide_integers
Revises: 0009_sessions
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010_wide_integers"
down_revision = "0009_sessions"
branch_labels = None
depends_on = None

NUMBERED = ("exchange", "dead_letter", "answer_group", "judge_call", "audit")
"""Tables whose key `seq` is counted by a sequence."""
WIDE = {
    **dict.fromkeys(NUMBERED, ("seq",)),
    "exchange": ("seq", "request_bytes", "reply_bytes"),
    "judge_call": ("seq", "order_seed", "prompt_tokens", "completion_tokens"),
    "counter": ("count",),
    "routing_table": ("generation",),
    "api_key": ("generation",),
    "alias": ("generation",),
    "canary": ("generation",),
}


def upgrade() -> None:
    _alter(sa.Integer(), sa.BigInteger(), "bigint")


def downgrade() -> None:
    _alter(sa.BigInteger(), sa.Integer(), "integer")


def _alter(before: sa.types.TypeEngine[int], after: sa.types.TypeEngine[int], name: str) -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    for table, columns in WIDE.items():
        for column in columns:
            op.alter_column(table, column, existing_type=before, type_=after)
    for table in NUMBERED:
        op.execute(f"ALTER SEQUENCE {table}_seq_seq AS {name}")
