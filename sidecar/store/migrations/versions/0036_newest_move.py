"""The newest move of each alias is one step in an index.

Revision ID: 0036_newest_move
Revises: 0035_gate_evidence
"""

from __future__ import annotations

from alembic import op

revision = "0036_newest_move"
down_revision = "0035_gate_evidence"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_alias_event_alias", "alias_event")
    op.create_index("ix_alias_event_model", "alias_event", ["model", "alias", "seq"])


def downgrade() -> None:
    op.drop_index("ix_alias_event_model", "alias_event")
    op.create_index("ix_alias_event_alias", "alias_event", ["model", "at"])
