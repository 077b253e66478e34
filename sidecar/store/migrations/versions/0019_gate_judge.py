"""Who judged a gate's comparison, and how far the judge's passes differ

Revision ID: 0019_gate_judge
Revises: 0018_shares_opening
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019_gate_judge"
down_revision = "0018_shares_opening"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("gate_comparison", sa.Column("judge_model", sa.String(255), nullable=True))
    op.add_column("gate_comparison", sa.Column("rubric_hash", sa.String(64), nullable=True))
    op.add_column("gate_comparison", sa.Column("disagreement", sa.Float(), nullable=True))
    op.add_column("gate_comparison", sa.Column("flipped_pairs", sa.Float(), nullable=True))


def downgrade() -> None:
    for name in ("flipped_pairs", "disagreement", "rubric_hash", "judge_model"):
        op.drop_column("gate_comparison", name)
