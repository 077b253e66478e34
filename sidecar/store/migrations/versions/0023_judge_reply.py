"""Replies of judges that are kept, and which calls were answered by one

Revision ID: 0023_judge_reply
Revises: 0022_reward_watch
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from sidecar.store.tables import WIDE

revision = "0023_judge_reply"
down_revision = "0022_reward_watch"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "judge_reply",
        sa.Column("seq", WIDE, autoincrement=True, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("exchange_id", sa.String(64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("written_bytes", WIDE, nullable=False),
        sa.Column("size_bytes", WIDE, nullable=False),
        sa.Column("reply", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
        sa.UniqueConstraint("digest"),
    )
    op.create_index("ix_judge_reply_exchange", "judge_reply", ["exchange_id"])
    op.create_index("ix_judge_reply_written", "judge_reply", ["written_bytes"])
    op.create_index("ix_judge_reply_at", "judge_reply", ["at"])
    op.add_column(
        "judge_call",
        sa.Column("cached", sa.Boolean(), nullable=False, server_default=sa.false()),
    )


def downgrade() -> None:
    op.drop_column("judge_call", "cached")
    for name in ("ix_judge_reply_at", "ix_judge_reply_written", "ix_judge_reply_exchange"):
        op.drop_index(name, table_name="judge_reply")
    op.drop_table("judge_reply")
