"""The history of aliases, chained by hashes; what the audit knows of earlier moves comes along

Revision ID: 0034_alias_history
Revises: 0033_table_taken
"""

from __future__ import annotations

import hashlib
import json

import sqlalchemy as sa
from alembic import op

revision = "0034_alias_history"
down_revision = "0033_table_taken"
branch_labels = None
depends_on = None

WIDE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    table = op.create_table(
        "alias_event",
        sa.Column("seq", WIDE, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("alias", sa.String(32), nullable=False),
        sa.Column("before", sa.String(255)),
        sa.Column("after", sa.String(255)),
        sa.Column("generation", WIDE, nullable=False),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("prev_hash", sa.String(64), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
    )
    op.create_index("ix_alias_event_alias", "alias_event", ["model", "at"])
    moves = op.get_bind().execute(
        sa.text(
            "SELECT at, subject, action, before, after, actor, reason FROM audit "
            "WHERE action LIKE 'alias.%' ORDER BY seq"
        )
    )
    hash_before = "0" * 64
    for at, model, action, before, after, actor, reason in moves.all():
        try:
            found = [_json(before)["adapter"], _json(after)["adapter"], _json(after)["generation"]]
        except (ValueError, TypeError, KeyError):
            continue  # a damaged row of the audit; it stays there
        row = [at, model, action.removeprefix("alias."), *found, actor, reason]
        text = json.dumps([hash_before, *row], separators=(",", ":"), default=repr)
        hashed = hashlib.sha256(text.encode("ascii")).hexdigest()
        names = ("at", "model", "alias", "before", "after", "generation", "actor", "reason")
        values = dict(zip(names, row, strict=True))
        op.execute(table.insert().values(**values, prev_hash=hash_before, hash=hashed))
        hash_before = hashed


def downgrade() -> None:
    op.drop_index("ix_alias_event_alias", "alias_event")
    op.drop_table("alias_event")


def _json(value: object) -> dict[str, object]:
    found = json.loads(value) if isinstance(value, str | bytes) else value
    if not isinstance(found, dict):
        raise TypeError("no object")
    return found
