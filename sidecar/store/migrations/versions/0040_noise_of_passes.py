"""Drop the second scorings of groups; the judge's noise is measured on the passes of each.

Revision ID: 0040_noise_of_passes
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Float, Integer, String

revision = "0040_noise_of_passes"
down_revision = "0039_address_hash"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("rescoring")
    op.drop_table("judge_noise")
    op.drop_column("judge_call", "again")
    op.create_table(
        "judge_noise_day",
        Column("rubric_hash", String(64), primary_key=True),
        Column("judge_model", String(255), primary_key=True),
        Column("day", Integer, primary_key=True, autoincrement=False),
        *(Column(name, Integer, nullable=False) for name in ("groups", "freedom")),
        *(
            Column(name, Float, nullable=False)
            for name in ("squares", "by_position", "of_position", "flips")
        ),
    )
