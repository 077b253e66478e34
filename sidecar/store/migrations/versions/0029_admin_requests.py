"""The request id of a change, and replies of the admin API by idempotency key

Revision ID: 0029_admin_requests
Revises: 0028_schedule
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029_admin_requests"
down_revision = "0028_schedule"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "audit", sa.Column("request_id", sa.String(64), nullable=False, server_default="")
    )
    op.create_table(
        "idempotent_reply",
        sa.Column("actor", sa.String(128), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("status", sa.Integer()),
        sa.Column("etag", sa.String(255), nullable=False, server_default=""),
        sa.Column("body", sa.Text(), nullable=False, server_default=""),
    )


def downgrade() -> None:
    op.drop_table("idempotent_reply")
    op.drop_column("audit", "request_id")
