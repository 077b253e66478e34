"""Whatever stands in a folder: it is taken, or refused by the one error that says so."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from deploy.engine.validation import Registered, ServingLimits, validate_folder
from deploy.errors import InvalidAdapterError, error_line
from learner.adapter_folder import CONFIG, WEIGHTS, folder_digest

LIMITS = ServingLimits(max_rank=8, bases=frozenset({"/models/m"}))
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([0, 1, 4, 8, 9, 16, -1, 2**63, 10**30, 0.5, 1e308]),
)
texts = st.one_of(
    st.text(max_size=8),
    st.text(st.characters(categories=["Cs", "Cc", "Lu"]), max_size=4),
    st.sampled_from(["LORA", "q_proj", "BF16", "F64", "none", "(a+)+$", "\ud800", "\0", "."]),
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=6,
)


Good = tuple[Path, bytes, dict[str, Any], dict[str, Any], bytes]


@pytest.fixture
def good(adapter_folder: Callable[..., tuple[Path, str]]) -> Good:
    """(folder, its config's bytes, its config, its header, its tensors' bytes)."""
    folder, _ = adapter_folder()
    config, weights = (folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", weights[:8])
    return (
        folder,
        config,
        json.loads(config),
        json.loads(weights[8 : 8 + length]),
        weights[8 + length :],
    )


def verdict(folder: Path) -> str | None:
    """Why it is refused, or None. Any error but the one fails the test."""
    try:
        validate_folder(folder, Registered(digest=folder_digest(folder)), LIMITS)
    except InvalidAdapterError as error:
        refused = error
    else:
        return None
    line = error_line(refused)
    line.encode("utf-8")
    assert line.isprintable()
    assert len(str(refused)) < 2_000
    return line


def write_header(folder: Path, header: bytes, data: bytes) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + data)


@settings(max_examples=60, suppress_health_check=QUIET)
@given(data=st.data())
def test_any_value_at_any_key_of_the_config(good: Good, data: st.DataObject) -> None:
    folder, _, config, _, _ = good
    keys = st.one_of(
        st.sampled_from(sorted(config)),
        st.sampled_from(["rank_pattern", "alpha_pattern", "modules_to_save", "use_rslora"]),
        texts,
    )
    changes = data.draw(st.dictionaries(keys, json_values, min_size=1, max_size=3))
    gone = data.draw(st.sets(st.sampled_from(sorted(config)), max_size=1))
    kept = {key: value for key, value in config.items() if key not in gone}
    (folder / CONFIG).write_text(json.dumps({**kept, **changes}))

    verdict(folder)


@settings(max_examples=60, suppress_health_check=QUIET)
@given(data=st.data())
def test_any_value_at_any_place_of_the_header(good: Good, data: st.DataObject) -> None:
    folder, config, _, header, tensors = good
    (folder / CONFIG).write_bytes(config)
    name = data.draw(st.sampled_from(sorted(header)))
    what = data.draw(st.sampled_from(["entry", "name", "dtype", "shape", "data_offsets"]))
    changed = json.loads(json.dumps(header))
    if what == "entry":
        changed[name] = data.draw(json_values)
    elif what == "name":
        changed[data.draw(texts)] = changed.pop(name)
    else:
        changed[name][what] = data.draw(json_values)
    write_header(folder, json.dumps(changed).encode(), tensors)

    verdict(folder)


@settings(max_examples=60, suppress_health_check=QUIET)
@given(data=st.data())
def test_any_bytes_anywhere_in_both_files(good: Good, data: st.DataObject) -> None:
    folder, config, _, header, tensors = good
    (folder / CONFIG).write_bytes(config)
    write_header(folder, json.dumps(header).encode(), tensors)
    path = folder / data.draw(st.sampled_from([CONFIG, WEIGHTS]))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, min(len(content), start + 8)))
        content[start:end] = data.draw(st.binary(max_size=8))
    path.write_bytes(content)

    verdict(folder)


def test_the_folder_that_is_mutated_is_good(good: Good) -> None:
    assert verdict(good[0]) is None
