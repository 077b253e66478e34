"""When each process of a proxy took its newest routing table

Revision ID: 0033_table_taken
Revises: 0032_resume
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033_table_taken"
down_revision = "0032_resume"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "table_taken",
        sa.Column("proxy", sa.String(length=255), nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column(
            "generation", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("taken_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("proxy", name=op.f("pk_table_taken")),
    )


def downgrade() -> None:
    op.drop_table("table_taken")
