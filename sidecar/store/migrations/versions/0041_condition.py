"""A table of conditions in place of states in `flag`, which are written again as they come.

Revision ID: 0041_condition
Revises: 0040_noise_of_passes
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0041_condition"
down_revision = "0040_noise_of_passes"
branch_labels = None
depends_on = None

MOVED = ("bus", "judge", "verifiers", "trouble_sampling", "learner_lacks", "champion_missing")


def upgrade() -> None:
    op.create_table(
        "condition",
        sa.Column("line", sa.String(length=255), nullable=False),
        sa.Column("kind", sa.String(length=128), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("code", sa.String(length=64), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("to_do", sa.Text(), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.Column("until", sa.Float(), nullable=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("line", "kind"),
    )
    flag = sa.table("flag", sa.column("name"))
    op.execute(flag.delete().where(flag.c.name.in_(MOVED)))
    op.execute(flag.delete().where(flag.c.name.startswith("learner_schedule")))
