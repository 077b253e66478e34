"""A run tells whether the rewards of its sessions said more than chance.

Revision ID: 0045_signal
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0045_signal"
down_revision = "0044_tasks"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("training_run", sa.Column("signal", sa.Float(), nullable=True))
