"""Damaged rows that were taken out of use.

Revision ID: 0042_quarantine
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from sidecar.store.tables import WIDE

revision = "0042_quarantine"
down_revision = "0041_condition"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "quarantine",
        sa.Column("seq", WIDE, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("table_name", sa.String(64), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("reason", sa.String(16), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("row", sa.Text),
    )
