"""Who runs a training run, and how often it was killed and resumed

Revision ID: 0032_resume
Revises: 0031_control
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032_resume"
down_revision = "0031_control"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("training_run", sa.Column("holder", sa.JSON()))
    op.add_column("training_run", sa.Column("deaths", sa.JSON()))


def downgrade() -> None:
    op.drop_column("training_run", "deaths")
    op.drop_column("training_run", "holder")
