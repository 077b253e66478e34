"""Which exchanges are of the same prompt, and whose answers a group holds

Revision ID: 0024_same_prompt
Revises: 0023_judge_reply
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024_same_prompt"
down_revision = "0023_judge_reply"
branch_labels = None
depends_on = None

KEYED = sa.text("prompt_key IS NOT NULL")
JOINED = sa.text("exchange_id IS NOT NULL")


def upgrade() -> None:
    op.add_column("exchange", sa.Column("prompt_key", sa.String(32), nullable=True))
    op.create_index(
        "ix_exchange_prompt",
        "exchange",
        ["prompt_key", "selection", "seq"],
        sqlite_where=KEYED,
        postgresql_where=KEYED,
    )
    op.add_column("answer", sa.Column("exchange_id", sa.String(64), nullable=True))
    op.create_index(
        "ix_answer_exchange",
        "answer",
        ["exchange_id"],
        sqlite_where=JOINED,
        postgresql_where=JOINED,
    )


def downgrade() -> None:
    op.drop_index("ix_answer_exchange", table_name="answer")
    op.drop_column("answer", "exchange_id")
    op.drop_index("ix_exchange_prompt", table_name="exchange")
    op.drop_column("exchange", "prompt_key")
