"""A store as a month of traffic leaves it, made by SQL in seconds: 200,000 exchanges.

The proportions are those of an agent's traffic: ten exchanges a session, a tenth of the sessions
held out, one exchange in eight a group, four answers a group, an adapter version for each 2,000
exchanges, a canary that ramps now. Bodies are small, and the same for all.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from ingest.ruler.prompt import rubric_hash
from sidecar.store.codec import pack_floats, pack_ids
from sidecar.store.database import Database, compress

MODEL = "m"
RUBRIC = "Be good."
"""The rubric of the judge `scripted`, whose noise is measured."""
EXCHANGES = 200_000
NOW = 1_800_000_000.0
SPAN_S = 30 * 86_400.0
PROMPT = (1, 9, 9, 4)
REQUEST = {"model": MODEL, "messages": [{"role": "user", "content": "What is it?"}]}
ANSWERS = 4
PER_VERSION = 2_000
"""Exchanges that each champion answers."""

_SESSION = "(i / 400) * 40 + i % 40"
"""40 sessions at a time, ten exchanges each."""
_VERSION = f"max(i - 1, 0) / {PER_VERSION}"
_ON_CANARY = f"(i % {PER_VERSION} >= {PER_VERSION // 2} AND ({_SESSION}) % 5 = 0)"
"""The next version has a fifth of the sessions in the second half of each champion's time."""
_HELD_OUT = f"(({_SESSION}) % 10 = 3)"


def adapter(version: int | str) -> str:
    """The name of a version; `version` may be an SQL expression's column. Version 0 is the base."""
    return f"{MODEL}--v{version}-{int(version):012x}" if int(version) else "base"


def _adapter_sql(version: str) -> str:
    return f"iif(({version}) = 0, 'base', printf('{MODEL}--v%d-%012x', ({version}), ({version})))"


def exchange_id(number: int) -> str:
    """The id of the exchange with this `seq`."""
    return f"ex_{number:026d}"


def make_large_store(path: Path, *, exchanges: int = EXCHANGES, body_bytes: int = 0) -> None:
    """Write a store of this many exchanges at `path`, without statistics.

    body_bytes: bytes of each stored prompt's token ids, at random; 0: four ids.
    """
    database = Database(f"sqlite:///{path}")
    database.upgrade()
    database.close()
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in ("PRAGMA journal_mode=OFF", "PRAGMA cache_size=-200000", "BEGIN"):
        connection.execute(statement)
    for statement, values in _statements(exchanges, body_bytes):
        connection.execute(statement, values)
    for statement in ("COMMIT", "DROP TABLE IF EXISTS sqlite_stat1", "PRAGMA journal_mode=WAL"):
        connection.execute(statement)
    connection.close()


def _statements(exchanges: int, body_bytes: int) -> list[tuple[str, dict[str, object]]]:
    versions = (exchanges - 1) // PER_VERSION + 1
    body: dict[str, object] = {
        "request": compress(json.dumps(REQUEST).encode()),
        "message": compress(b'{"role":"assistant","content":"It is one."}'),
        "other": compress(b'{"role":"assistant","content":"It is two."}'),
        "ids": pack_ids(PROMPT),
        "answer_ids": pack_ids((5, 6, 2)),
        "other_ids": pack_ids((5, 7, 2)),
        "logprobs": pack_floats((-0.5, -0.25, -1.0)),
    }
    return [
        (_EXCHANGE, {"last": exchanges, "filler": body_bytes, **body}),
        (_CHOICE, body),
        (_GROUP, {"last": exchanges}),
        (_ANSWER, body),
        (_JUDGE_CALL, {}),
        (_JUDGE_REPLY, {}),
        (_JUDGE_NOISE, {"last": max(1, exchanges // 50), "rubric": rubric_hash(RUBRIC)}),
        (_VERSIONS, {"last": versions}),
        (_RUNS, {"last": versions}),
        (_CANARIES, {"last": versions, "step": NOW - 3_600.0}),
        (_COMPARISONS, {"last": exchanges}),
        (_AUDIT, {"last": 20 * versions}),
        (_ALIASES, {"champion": adapter(versions - 1), "previous": adapter(versions - 2)}),
        (_MOVES, {"last": versions}),
        (_COUNTERS, {}),
        (_STORED, {}),
        (_FEEDBACK, {}),
        (_SIGNAL, {}),
        (_WATCHED, {}),
        (_DEAD, {"last": max(1, exchanges // 2_000)}),
    ]


_NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :last)"
_AT = f"{NOW - SPAN_S} + {SPAN_S} * i / :last"

_EXCHANGE = f"""
{_NUMBERS}, t AS (
  SELECT i, {_SESSION} AS s, {_VERSION} AS v, {_ON_CANARY} AS canary, {_HELD_OUT} AS held,
         {_AT} AS at, i * 2654435761 % 997 AS luck FROM n
)
INSERT INTO exchange (
  seq, exchange_id, stored_at, started_at, surface, public_model, adapter, arm, propensity,
  replica, session_key, session_id, held_out, request_body, prompt_token_ids, sampling, timings,
  stream, status, outcome, completion_tokens, trace_id, project, user, key_id, turn_id,
  retry_count, request_bytes, reply_bytes, fallback_from, selection
)
SELECT
  i, printf('ex_%026d', i), at, at - 1.0, iif(luck % 50 = 0, 'completions', 'chat'), '{MODEL}',
  {_adapter_sql("v + (canary AND luck <> 40)")},
  iif(canary AND luck <> 40, 'canary', 'champion'), 0.8, 'http://127.0.0.1:8000',
  printf('k:%016x', s * 2654435761 % 4294967296), printf('s:%016x', s * 2654435761 % 4294967296),
  held, :request, iif(:filler = 0, :ids, randomblob(4 * (:filler / 4))),
  '{{"temperature": 1.0, "max_tokens": 16}}',
  printf('{{"started_at": %f, "total_s": 0.5}}', at - 1.0), 0,
  CASE WHEN luck < 5 THEN 502 WHEN luck < 15 THEN 400 ELSE 200 END,
  CASE WHEN luck < 5 THEN 'upstream_error' WHEN luck BETWEEN 15 AND 30 THEN 'cut' ELSE 'ok' END,
  3, iif(i % 8 = 0, printf('%032x', i), ''), 'default', '', '',
  CASE luck WHEN 31 THEN printf('try-%024x', i) WHEN 32 THEN '' ELSE printf('ex_%026d', i) END,
  0, 400, 900, iif(canary AND luck = 40, {_adapter_sql("v + 1")}, ''),
  CASE
    WHEN held THEN 'held_out' WHEN i > :last - 50 THEN 'new' WHEN luck < 31 THEN 'outcome'
    WHEN i % 8 = 0 THEN 'chosen' WHEN i % 8 < 4 THEN 'rate' WHEN i % 8 < 6 THEN 'backlog'
    ELSE 'session_cap'
  END
FROM t
"""

_CHOICE = """
INSERT INTO choice (exchange_id, "index", message_body, finish_reason, token_ids, logprobs)
SELECT exchange_id, 0, :message, 'stop', :answer_ids, :logprobs FROM exchange
WHERE outcome = 'ok' AND status = 200
"""

_WATCHED = """
INSERT INTO watched_answer (seq, exchange_id, model, adapter, session_id, tokens, refusal,
  clarifying, invalid_call, repetition, empty, cut)
SELECT seq, exchange_id, public_model, adapter, session_id, completion_tokens, seq % 50 = 0,
  0, 0, 0, 0, 0
FROM exchange WHERE outcome = 'ok' AND status = 200 AND surface = 'chat'
"""

# The newest groups wait: for candidates, for the judge, for the learner.
_GROUP = """
INSERT INTO answer_group (
  group_id, exchange_id, session_key, session_id, adapter, status, reason, sampling_attempts,
  attempts, lease_until, created_at, scored_at, judge_model, rubric_hash, run_id, project,
  near_key, opening_key
)
SELECT
  'g-' || exchange_id, exchange_id, session_key, session_id, adapter,
  CASE
    WHEN seq > :last - 100 THEN 'sampling' WHEN seq > :last - 300 THEN 'sampled'
    WHEN seq > :last - 900 THEN 'scored' WHEN seq % 7 = 0 THEN 'set_aside'
    WHEN seq % 7 = 1 THEN 'dropped' ELSE 'trained'
  END,
  CASE
    WHEN seq > :last - 900 THEN NULL WHEN seq % 7 = 0 THEN 'judge_rejected'
    WHEN seq % 7 = 1 THEN iif(seq % 5600 = 8, 'unreadable', 'no_spread')
  END,
  0, 0, 0.0, stored_at, iif(seq > :last - 300 OR seq % 7 = 0, NULL, stored_at), 'judge', 'rubric',
  iif(seq > :last - 900 OR seq % 7 = 0, NULL, 'run-' || (seq / 2000)), 'default', 'near',
  'opening'
FROM exchange WHERE selection = 'chosen'
"""

_ANSWER = f"""
INSERT INTO answer (group_id, "index", origin, message_body, finish_reason, token_ids, logprobs,
  temperature, score, explanation)
SELECT group_id, n.i, 'sampled', iif(n.i = 0, :message, :other), 'stop',
  iif(n.i = 0, :answer_ids, :other_ids), :logprobs,
  1.0, iif(scored_at IS NULL, NULL, n.i / 4.0), ''
FROM answer_group, (SELECT 0 AS i UNION SELECT 1 UNION SELECT 2 UNION SELECT 3) AS n
WHERE n.i < {ANSWERS} AND (status <> 'sampling' OR n.i = 0)
"""

_JUDGE_CALL = """
INSERT INTO judge_call (group_id, at, judge_model, rubric_hash, order_seed, ok, reply, seconds)
SELECT group_id, created_at, 'judge', 'rubric', n.i, 1, '{}', 0.5
FROM answer_group, (SELECT 0 AS i UNION SELECT 1) AS n WHERE status <> 'sampling'
"""

# Far more days than the groups above fill: years of them.
_JUDGE_NOISE = f"""
{_NUMBERS}
INSERT INTO judge_noise_day (rubric_hash, judge_model, day, groups, freedom, squares, by_position,
  of_position, flips)
SELECT :rubric, 'scripted', i, 50, 350, 1.0, 0.0, 90.0, 5.0 FROM n
"""

_JUDGE_REPLY = """
INSERT INTO judge_reply (digest, exchange_id, at, written_bytes, size_bytes, reply)
SELECT printf('%064x', seq), exchange_id, created_at, 300 * seq, 300, '{}'
FROM answer_group WHERE status <> 'sampling'
"""

_VERSIONS = f"""
{_NUMBERS}
INSERT INTO adapter_version (name, model, version, digest, path, parent, run_id, state, created_at)
SELECT {_adapter_sql("i")}, '{MODEL}', i, printf('%064x', i), '/adapters/' || i,
  {_adapter_sql("i - 1")}, 'run-' || i,
  CASE i WHEN :last THEN 'ramping' WHEN :last - 1 THEN 'champion' ELSE 'retired' END, {_AT}
FROM n
"""

_RUNS = f"""
{_NUMBERS}
INSERT INTO training_run (run_id, model, status, started_at, heartbeat_at, ended_at, parent,
  settings, counts, metrics, adapter)
SELECT 'run-' || i, '{MODEL}', 'finished', {_AT}, {_AT} + 60, {_AT} + 60, {_adapter_sql("i - 1")},
  '{{}}', '{{}}', '[]', {_adapter_sql("i")}
FROM n
"""

_CANARIES = f"""
{_NUMBERS}
INSERT INTO canary (canary_id, model, candidate, champion, state, paused, step, salt, created_at,
  step_started_at, ended_at, evidence, generation)
SELECT 'canary-' || i, '{MODEL}', {_adapter_sql("i")}, {_adapter_sql("i - 1")},
  iif(i = :last, 'ramping', 'promoted'), 0, 0, 'salt', {_AT},
  iif(i = :last, :step, {_AT}), iif(i = :last, NULL, {_AT} + 600), '{{"steps": [2000, 5000]}}', 3
FROM n
"""

_COMPARISONS = """
INSERT INTO gate_comparison (comparison_id, canary_id, exchange_id, status, difference, answers)
SELECT 'c-' || exchange_id || canary_id, canary_id, exchange_id, 'scored', 0.1, '[]'
FROM canary JOIN exchange ON held_out AND seq > :last - 400 AND seq % 10 = 3
WHERE canary.ended_at IS NOT NULL
"""

_AUDIT = f"""
{_NUMBERS}
INSERT INTO audit (at, actor, action, subject, before, after, reason)
SELECT {_AT}, 'control', iif(i % 20 = 0, 'adapter.registered', 'canary.moved'),
  {_adapter_sql("i / 20")}, '{{}}', '{{}}', 'because'
FROM n
"""

_ALIASES = f"""
INSERT INTO alias (model, alias, adapter, generation)
VALUES ('{MODEL}', 'champion', :champion, 1), ('{MODEL}', 'previous', :previous, 1)
"""

# Each version is tried, promoted, and the one before it kept.
_MOVES = f"""
{_NUMBERS}
INSERT INTO alias_event (at, model, alias, before, after, generation, actor, reason, prev_hash,
  hash)
SELECT {_AT}, '{MODEL}', alias, NULL, {_adapter_sql("i")}, i, 'control', 'because', '', ''
FROM n, (SELECT 'canary' AS alias UNION SELECT 'champion' UNION SELECT 'previous')
ORDER BY i
"""

_COUNTERS = """
INSERT INTO counter (stage, reason, count)
SELECT 'selection', selection, count(*) FROM exchange WHERE selection <> 'new' GROUP BY selection
"""
_STORED = (
    "INSERT INTO counter (stage, reason, count) SELECT 'consume', 'stored', count(*) FROM exchange"
)

# Half of it names its exchange, a quarter its session, a quarter an exchange that never came.
_FEEDBACK = """
INSERT INTO feedback (feedback_id, kind, target_kind, target, project, key_id, source, received_at,
  stored_at, score, label, comment, exchange_id, session_id)
SELECT 'fb_' || seq, 'feedback', iif(seq % 4 = 1, 'session', 'exchange'),
  iif(seq % 4 = 1, session_id, exchange_id || iif(seq % 4 = 3, '-gone', '')), 'default', '', '',
  stored_at, stored_at, 1.0, '', '', iif(seq % 4 = 3, NULL, exchange_id),
  iif(seq % 4 = 3, NULL, session_id)
FROM exchange
"""
_SIGNAL = """
INSERT INTO signal (exchange_id, kind, session_id, by_id, at, evidence)
SELECT exchange_id, 'retry', session_id, exchange_id, stored_at, '{}' FROM exchange
"""

_DEAD = f"""
{_NUMBERS}
INSERT INTO dead_letter (at, reason, payload) SELECT {_AT}, 'ValidationError', x'00' FROM n
"""
