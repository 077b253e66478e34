"""Whether an exchange begins a session as those on the other side of held-out begin

It was read from `untrainable_reason`, where an earlier reason of the exchange has its place.

Revision ID: 0018_shares_opening
Revises: 0017_disagreement
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018_shares_opening"
down_revision = "0017_disagreement"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "exchange",
        sa.Column("shares_opening", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.execute(
        "UPDATE exchange SET shares_opening = TRUE WHERE untrainable_reason = 'shared_opening'"
    )


def downgrade() -> None:
    op.drop_column("exchange", "shares_opening")
