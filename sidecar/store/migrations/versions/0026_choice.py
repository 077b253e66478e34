"""Why a step became a group, with what probability, and what its caps count by

Revision ID: 0026_choice
Revises: 0025_group_passes
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0026_choice"
down_revision = "0025_group_passes"
branch_labels = None
depends_on = None

COLUMNS: dict[str, Any] = {  # Any: SQLAlchemy's types
    "project": sa.String(64),
    "near_key": sa.String(32),
    "opening_key": sa.String(32),
    "propensity": sa.Float(),
    "chosen_because": sa.Text(),
}
INDEXES = {"project": "created_at", "near_key": "created_at", "opening_key": "seq"}


def upgrade() -> None:
    for name, kind in COLUMNS.items():
        op.add_column("answer_group", sa.Column(name, kind, nullable=True))
    for name, second in INDEXES.items():
        where = sa.text(f"{name} IS NOT NULL")
        op.create_index(
            f"ix_answer_group_{name}",
            "answer_group",
            [name, second],
            sqlite_where=where,
            postgresql_where=where,
        )


def downgrade() -> None:
    for name in INDEXES:
        op.drop_index(f"ix_answer_group_{name}", table_name="answer_group")
    for name in COLUMNS:
        op.drop_column("answer_group", name)
