"""Groups that are scored again later, and the judge's noise by window

Revision ID: 0021_judge_noise
Revises: 0020_rewards
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021_judge_noise"
down_revision = "0020_rewards"
branch_labels = None
depends_on = None

FIGURES = ("slope", "first_minus_last", "shift", "flips")


def upgrade() -> None:
    op.add_column(
        "judge_call", sa.Column("again", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    op.create_table(
        "rescoring",
        sa.Column("group_id", sa.String(64), nullable=False),
        sa.Column("chosen_at", sa.Float(), nullable=False),
        sa.Column("due_at", sa.Float(), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("judge_model", sa.String(255), nullable=False),
        sa.Column("rubric_hash", sa.String(64), nullable=False),
        sa.Column("passes", sa.Integer(), nullable=False),
        sa.Column("first", sa.JSON(), nullable=False),
        sa.Column("again", sa.JSON(), nullable=True),
        sa.Column("at", sa.Float(), nullable=True),
        sa.Column("window_number", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("group_id", name=op.f("pk_rescoring")),
    )
    _partial_index("ix_rescoring_due", ["due_at"], "window_number IS NULL")
    _partial_index(
        "ix_rescoring_window",
        ["rubric_hash", "judge_model", "passes", "window_number"],
        "window_number IS NOT NULL",
    )
    op.create_table(
        "judge_noise",
        sa.Column("rubric_hash", sa.String(64), nullable=False),
        sa.Column("judge_model", sa.String(255), nullable=False),
        sa.Column("passes", sa.Integer(), nullable=False),
        sa.Column("window_number", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("whole", sa.Boolean(), nullable=False),
        sa.Column("reference", sa.Boolean(), nullable=False),
        sa.Column("groups", sa.Integer(), nullable=False),
        sa.Column("answers", sa.Integer(), nullable=False),
        sa.Column("sd", sa.Float(), nullable=False),
        sa.Column("sd_error", sa.Float(), nullable=False),
        sa.Column("sd_low", sa.Float(), nullable=False),
        sa.Column("sd_high", sa.Float(), nullable=False),
        sa.Column("pass_sd", sa.Float(), nullable=False),
        *(
            sa.Column(f"{name}{end}", sa.Float(), nullable=False)
            for name in FIGURES
            for end in ("", "_error", "_low", "_high")
        ),
        sa.Column("drift", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint(
            "rubric_hash", "judge_model", "passes", "window_number", name=op.f("pk_judge_noise")
        ),
    )
    op.create_index("ix_judge_noise_at", "judge_noise", ["rubric_hash", "judge_model", "at"])


def downgrade() -> None:
    op.drop_table("judge_noise")
    op.drop_table("rescoring")
    op.drop_column("judge_call", "again")


def _partial_index(name: str, columns: list[str], where: str) -> None:
    condition = sa.text(where)
    op.create_index(name, "rescoring", columns, sqlite_where=condition, postgresql_where=condition)
