"""How far the passes of the judge differ, by group and by answer

Revision ID: 0017_disagreement
Revises: 0016_second_name
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017_disagreement"
down_revision = "0016_second_name"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("answer_group", sa.Column("disagreement", sa.Float(), nullable=True))
    op.add_column("answer_group", sa.Column("flipped_pairs", sa.Float(), nullable=True))
    op.add_column("answer", sa.Column("disagreement", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("answer", "disagreement")
    op.drop_column("answer_group", "flipped_pairs")
    op.drop_column("answer_group", "disagreement")
