"""A group's failed attempts at the judge, by reason

Revision ID: 0008_judge_failures
Revises: 0007_learner_attempts
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008_judge_failures"
down_revision = "0007_learner_attempts"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("answer_group", sa.Column("judge_failures", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("answer_group", "judge_failures")
