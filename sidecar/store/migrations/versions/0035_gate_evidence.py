"""Each judged prompt of a canary says its place, its difference to the anchor, fault and flaws.

Revision ID: 0035_gate_evidence
Revises: 0034_alias_history
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0035_gate_evidence"
down_revision = "0034_alias_history"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("gate_comparison", sa.Column("place", sa.Integer(), nullable=True))
    op.add_column("gate_comparison", sa.Column("anchor_difference", sa.Float(), nullable=True))
    op.add_column("gate_comparison", sa.Column("fault", sa.String(16), nullable=True))
    op.add_column("gate_comparison", sa.Column("flaws", sa.JSON(), nullable=True))


def downgrade() -> None:
    for name in ("flaws", "fault", "anchor_difference", "place"):
        op.drop_column("gate_comparison", name)
