"""Sessions as attempts at tasks: the task and the origin of an exchange, groups and their members.

Revision ID: 0044_tasks
Revises: 0043_no_replies_by_key
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0044_tasks"
down_revision = "0043_no_replies_by_key"
branch_labels = None
depends_on = None

IN_TASK = sa.text("task <> ''")
READY = sa.text("over_at IS NOT NULL AND group_id IS NULL AND excluded IS NULL")
GROUPED = sa.text("group_id IS NOT NULL")
IN_RUN = sa.text("run_id IS NOT NULL")
WIDE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("exchange", _text("task", 64, ""))
    op.add_column("exchange", _text("origin", 16, "user"))
    op.add_column("exchange", sa.Column("task_group_id", sa.String(64)))
    op.add_column("feedback", sa.Column("done", sa.Boolean()))
    _partial("ix_exchange_task", "exchange", ["task", "seq"], IN_TASK)
    op.create_table(
        "task_group",
        sa.Column("seq", WIDE, primary_key=True, autoincrement=True),
        sa.Column("group_id", sa.String(64), nullable=False, unique=True),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("key_kind", sa.String(16), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("adapter", sa.String(255), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("detail", sa.Text()),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("scored_at", sa.Float()),
        sa.Column("judge_attempts", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("judge_model", sa.String(255)),
        sa.Column("rubric_hash", sa.String(64)),
        sa.Column("run_id", sa.String(64)),
        sa.Column("learn_attempts", sa.Integer(), nullable=False, server_default="0"),
    )
    op.create_index("ix_task_group_status", "task_group", ["status", "seq"])
    _partial("ix_task_group_run", "task_group", ["run_id"], IN_RUN)
    op.create_table(
        "task_member",
        sa.Column("session_id", sa.String(255), primary_key=True),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("key_kind", sa.String(16), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("adapter", sa.String(255), nullable=False),
        sa.Column("caller", sa.String(255), nullable=False),
        sa.Column("began_at", sa.Float(), nullable=False),
        sa.Column("over_at", sa.Float()),
        sa.Column("reopened", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("excluded", sa.String(32)),
        sa.Column("group_id", sa.String(64)),
        sa.Column("place", sa.Integer()),
        sa.Column("reward", sa.Float()),
        sa.Column("source", sa.String(16)),
        sa.Column("exchange_ids", sa.JSON()),
    )
    _partial("ix_task_member_ready", "task_member", ["key", "adapter", "over_at"], READY)
    _partial("ix_task_member_group", "task_member", ["group_id"], GROUPED)
    op.create_table(
        "rehearsal",
        sa.Column("seq", WIDE, primary_key=True, autoincrement=True),
        sa.Column("session_id", sa.String(255), nullable=False, unique=True),
        sa.Column("task", sa.String(64), nullable=False),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("adapter", sa.String(255), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("began_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float()),
        sa.Column("result", sa.String(32), nullable=False),
        sa.Column("detail", sa.Text()),
        sa.Column("outcome", sa.Float()),
        sa.Column("success", sa.Boolean()),
        sa.Column("tokens", sa.Integer(), nullable=False, server_default="0"),
    )
    op.create_index("ix_rehearsal_task", "rehearsal", ["task"])


def _text(name: str, longest: int, default: str) -> sa.Column[str]:
    return sa.Column(name, sa.String(longest), nullable=False, server_default=default)


def _partial(name: str, table: str, columns: list[str], where: sa.TextClause) -> None:
    op.create_index(name, table, columns, sqlite_where=where, postgresql_where=where)
