"""learner: failed attempts of a group, and the group that a run computes

Revision ID: 0007_learner_attempts
Revises: 0006_judge_attempts
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007_learner_attempts"
down_revision = "0006_judge_attempts"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Not in batch mode: SQLite adds such columns in place, a batch would copy the whole table.
    attempts = sa.Column("learn_attempts", sa.Integer(), nullable=False, server_default="0")
    op.add_column("answer_group", attempts)
    op.add_column("training_run", sa.Column("place", sa.String(length=64), nullable=True))


def downgrade() -> None:
    op.drop_column("training_run", "place")
    op.drop_column("answer_group", "learn_attempts")
