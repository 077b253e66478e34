"""Canaries that the breaker of a proxy took out

Revision ID: 0005_breaker_trip
Revises: 0005_audit_source
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005_breaker_trip"
down_revision = "0005_audit_source"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "breaker_trip",
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("canary", sa.String(length=255), nullable=False),
        sa.Column("salt", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("model", "canary", "salt", name=op.f("pk_breaker_trip")),
    )


def downgrade() -> None:
    op.drop_table("breaker_trip")
