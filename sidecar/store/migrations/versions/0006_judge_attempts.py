"""A group's failed attempts at the judge, and the judge's last words on it

Revision ID: 0006_judge_attempts
Revises: 0005_breaker_trip
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006_judge_attempts"
down_revision = "0005_breaker_trip"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("answer_group", schema=None) as batch_op:
        batch_op.add_column(
            sa.Column("judge_attempts", sa.Integer(), server_default="0", nullable=False)
        )
        batch_op.add_column(sa.Column("judging_since", sa.Float(), nullable=True))
        batch_op.add_column(sa.Column("detail", sa.Text(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("answer_group", schema=None) as batch_op:
        batch_op.drop_column("detail")
        batch_op.drop_column("judging_since")
        batch_op.drop_column("judge_attempts")
