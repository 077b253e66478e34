"""The address that an audited change was asked for from

Revision ID: 0005_audit_source
Revises: 0004_best_of
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005_audit_source"
down_revision = "0004_best_of"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("audit", schema=None) as batch_op:
        batch_op.add_column(
            sa.Column("source", sa.String(length=64), server_default="", nullable=False)
        )


def downgrade() -> None:
    with op.batch_alter_table("audit", schema=None) as batch_op:
        batch_op.drop_column("source")
