"""Rewards of answers, made of the judge's scores and what verifiers found

Revision ID: 0020_rewards
Revises: 0019_gate_judge
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020_rewards"
down_revision = "0019_gate_judge"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("answer", sa.Column("independent_reward", sa.Float(), nullable=True))
    op.add_column("answer", sa.Column("reward", sa.Float(), nullable=True))
    op.add_column("answer", sa.Column("checks", sa.Text(), nullable=True))
    op.add_column("answer_group", sa.Column("reward_rule", sa.Text(), nullable=True))
    op.add_column("group_digest", sa.Column("rewards", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("group_digest", "rewards")
    op.drop_column("answer_group", "reward_rule")
    op.drop_column("answer", "checks")
    op.drop_column("answer", "reward")
    op.drop_column("answer", "independent_reward")
