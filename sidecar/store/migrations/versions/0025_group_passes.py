"""How many passes of the judge a group's scores are the mean over

Revision ID: 0025_group_passes
Revises: 0024_same_prompt
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025_group_passes"
down_revision = "0024_same_prompt"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("answer_group", sa.Column("passes", sa.Integer(), nullable=True))


def downgrade() -> None:
    op.drop_column("answer_group", "passes")
