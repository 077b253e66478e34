"""When the learner's schedule comes round next

Revision ID: 0028_schedule
Revises: 0027_run_steps
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028_schedule"
down_revision = "0027_run_steps"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "schedule_job",
        sa.Column("id", sa.String(255), primary_key=True),
        sa.Column("next_run_time", sa.Float(), nullable=False),
        sa.Column("job_state", sa.Text(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("schedule_job")
