"""How far a training run is, and each of its steps while it goes on

Revision ID: 0027_run_steps
Revises: 0026_choice
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027_run_steps"
down_revision = "0026_choice"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("training_run", sa.Column("progress", sa.JSON()))
    op.create_table(
        "run_step",
        sa.Column("run_id", sa.String(64), primary_key=True),
        sa.Column("step", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("run_step")
    op.drop_column("training_run", "progress")
