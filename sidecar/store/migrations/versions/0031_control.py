"""Several canaries of one adapter, the lease of control, graces in the store, banned digests

Revision ID: 0031_control
Revises: 0030_masked_by
"""

from __future__ import annotations

import re

import sqlalchemy as sa
from alembic import op

revision = "0031_control"
down_revision = "0030_masked_by"
branch_labels = None
depends_on = None

UNIQUE = "uq_canary_candidate"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.drop_constraint(UNIQUE, "canary", type_="unique")
    else:
        _rebuild_canaries(re.compile(rf",\s*CONSTRAINT {UNIQUE} UNIQUE \(candidate\)"), "")
    op.create_index("ix_canary_candidate", "canary", ["candidate", "created_at"])
    op.create_table(
        "lease",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("beat", sa.Integer(), nullable=False),
        sa.Column("taken_at", sa.Float(), nullable=False),
        sa.Column("told", sa.String(255), nullable=False),
    )
    op.create_table(
        "unwanted_adapter",
        sa.Column("replica", sa.String(255), primary_key=True),
        sa.Column("adapter", sa.String(255), primary_key=True),
        sa.Column("since", sa.Float(), nullable=False),
    )
    op.create_table(
        "banned_digest",
        sa.Column("model", sa.String(255), primary_key=True),
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("adapter", sa.String(255), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
    )


def downgrade() -> None:
    for table in ("banned_digest", "unwanted_adapter", "lease"):
        op.drop_table(table)
    op.drop_index("ix_canary_candidate", "canary")
    older = (
        "SELECT canary_id FROM canary AS one WHERE EXISTS (SELECT 1 FROM canary AS other WHERE "
        "other.candidate = one.candidate AND (other.created_at, other.canary_id) > "
        "(one.created_at, one.canary_id))"
    )
    op.execute(f"DELETE FROM gate_comparison WHERE canary_id IN ({older})")
    op.execute(f"DELETE FROM canary WHERE canary_id IN ({older})")
    if op.get_bind().dialect.name == "postgresql":
        op.create_unique_constraint(UNIQUE, "canary", ["candidate"])
    else:
        _rebuild_canaries(re.compile(r"\)\s*$"), f", CONSTRAINT {UNIQUE} UNIQUE (candidate))")


def _rebuild_canaries(pattern: re.Pattern[str], replacement: str) -> None:
    """SQLite drops no constraint of a table, so the table is made anew, and with it the one that
    refers to it: a reference follows a renamed table."""
    bind = op.get_bind()
    tables = ("gate_comparison", "canary")
    made: dict[str, str] = {}
    indexes: list[str] = []
    for table in tables:
        found = bind.execute(
            sa.text("SELECT type, name, sql FROM sqlite_master WHERE tbl_name = :table"),
            {"table": table},
        )
        for kind, name, sql in found.all():
            if kind == "table":
                made[table] = sql
            elif kind == "index" and sql is not None:
                indexes.append(sql)
                bind.exec_driver_sql(f'DROP INDEX "{name}"')
    for table in tables:
        bind.exec_driver_sql(f"ALTER TABLE {table} RENAME TO {table}_before")
    changed, times = pattern.subn(replacement, made["canary"])
    assert times == 1, made["canary"]
    for table, sql in (("canary", changed), ("gate_comparison", made["gate_comparison"])):
        bind.exec_driver_sql(sql)
        bind.exec_driver_sql(f"INSERT INTO {table} SELECT * FROM {table}_before")
    for table in tables:
        bind.exec_driver_sql(f"DROP TABLE {table}_before")
    for sql in indexes:
        bind.exec_driver_sql(sql)
