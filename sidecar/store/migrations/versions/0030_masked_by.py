"""What forbade tokens while a group's answers were sampled

Revision ID: 0030_masked_by
Revises: 0029_admin_requests
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030_masked_by"
down_revision = "0029_admin_requests"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("answer_group", sa.Column("masked_by", sa.String(length=64), nullable=True))


def downgrade() -> None:
    op.drop_column("answer_group", "masked_by")
