"""No limit counts the groups of a project any more, so its index goes.

Revision ID: 0047_no_project_cap
"""

from __future__ import annotations

from alembic import op

revision = "0047_no_project_cap"
down_revision = "0046_newest_members"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_answer_group_project", table_name="answer_group")
