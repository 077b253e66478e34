"""What tells a dead letter that came twice, and the captures made before they were counted

Revision ID: 0014_funnel
Revises: 0013_feedback
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014_funnel"
down_revision = "0013_feedback"
branch_labels = None
depends_on = None

CAME = "FROM counter WHERE stage = 'consume' AND reason IN ('stored', 'poison') AND count > 0"
"""Records that ingest took: so many were captured, at least."""


def upgrade() -> None:
    op.add_column("dead_letter", sa.Column("digest", sa.String(64), nullable=True))
    op.create_index("ix_dead_letter_digest", "dead_letter", ["digest"], unique=True)
    for stage, reason in (("capture", "kept"), ("requests", "before_counting")):
        op.execute(
            f"INSERT INTO counter (stage, reason, count) SELECT '{stage}', '{reason}', "
            f"SUM(count) {CAME} HAVING COUNT(*) > 0"
        )


def downgrade() -> None:
    op.drop_index("ix_dead_letter_digest", "dead_letter")
    op.drop_column("dead_letter", "digest")
