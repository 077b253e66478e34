"""Metric families: their names, how the values of the workers are merged, and the exposition."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec
from prometheus_client.core import Metric

Labels = tuple[str | bytes, ...]
"""Values of the labels, in the order of the metric's label names; bytes are read as UTF-8."""
Kind = Literal["counter", "gauge", "histogram"]
Merge = Literal["sum", "min"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Name, labels and kind of a metric, and how the values of the workers are merged."""

    kind: Kind
    name: str
    help: str
    label_names: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending, without infinity."""
    merge: Merge = "sum"

    @property
    def cells(self) -> int:
        """Floats a row. Counter: value, created; gauge: value; histogram: buckets, sum, created."""
        return {"counter": 2, "gauge": 1, "histogram": len(self.bounds) + 3}[self.kind]

    def key(self, labels: Labels) -> bytes:
        assert len(labels) == len(self.label_names), f"{self.name} has labels {self.label_names}"
        return self.kind.encode() + b" " + msgspec.json.encode([self.name, *map(_text, labels)])


Merged = dict[str, dict[tuple[str, ...], tuple[float, ...]]]
"""Name of a family -> label values -> cells."""


def merge_tables(
    families: Iterable[Family], tables: Iterable[dict[bytes, tuple[float, ...]]]
) -> Merged:
    """Merge the tables of all processes. Pure.

    Counters and histograms are added cell by cell; `created` is the earliest. Gauges are added, or
    the least is taken, as `Family.merge` says; gauges that are not set are left out.
    """
    known = {family.name: family for family in families}
    merged: Merged = {name: {} for name in known}
    for table in tables:
        for key, cells in table.items():
            name, *labels = msgspec.json.decode(key.partition(b" ")[2], type=list[str])
            family = known.get(name)
            # A row of another length was written by another release.
            if family is None or len(cells) != family.cells or math.isnan(cells[0]):
                continue
            values = merged[name]
            before = values.get(tuple(labels))
            values[tuple(labels)] = cells if before is None else _joined(family, before, cells)
    return merged


def _joined(family: Family, left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    if family.kind == "gauge":
        return (min(left[0], right[0]) if family.merge == "min" else left[0] + right[0],)
    added = tuple(a + b for a, b in zip(left[:-1], right[:-1], strict=True))
    return (*added, min(left[-1], right[-1]))


def exposition(
    family: Family, values: dict[tuple[str, ...], tuple[float, ...]], *, show_created: bool
) -> Metric:
    metric = Metric(family.name, family.help, family.kind)
    for label_values, cells in values.items():
        labels = dict(zip(family.label_names, label_values, strict=True))
        if family.kind == "gauge":
            metric.add_sample(family.name, labels, cells[0])
            continue
        if family.kind == "counter":
            metric.add_sample(f"{family.name}_total", labels, cells[0])
        else:
            _histogram_samples(metric, family, labels, cells)
        if show_created:
            metric.add_sample(f"{family.name}_created", labels, cells[-1])
    return metric


def _histogram_samples(
    metric: Metric, family: Family, labels: dict[str, str], cells: tuple[float, ...]
) -> None:
    count = 0.0
    for bound, value in zip((*family.bounds, math.inf), cells, strict=False):
        count += value
        metric.add_sample(f"{family.name}_bucket", {**labels, "le": _bound_text(bound)}, count)
    metric.add_sample(f"{family.name}_count", labels, count)
    metric.add_sample(f"{family.name}_sum", labels, cells[-2])


def _bound_text(bound: float) -> str:
    return "+Inf" if math.isinf(bound) else repr(bound)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
