"""The admin API keeps no replies by key.

Revision ID: 0043_no_replies_by_key
"""

from __future__ import annotations

from alembic import op

revision = "0043_no_replies_by_key"
down_revision = "0042_quarantine"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("idempotent_reply")
