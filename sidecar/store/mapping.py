"""Turn records into rows and back, by the fields of the record. Pure.

A field is stored in the column of its name, encoded by its type:

| type of the field | column | stored as |
|---|---|---|
| `bytes`, a JSON body | `<field>_body` | compressed |
| `tuple[int, ...]`, token ids | `<field>` | packed int32 |
| `tuple[float, ...]`, log-probabilities | `<field>` | packed float32 |
| a msgspec Struct | `<field>` | JSON object; a member that is null is left out |
| any other | `<field>` | as it is |

So a new field needs a column and no line of code here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import msgspec

from sidecar.store.codec import pack_floats, pack_ids, unpack_floats, unpack_ids
from sidecar.store.database import compress, decompress
from sidecar.store.models import Base

Record = TypeVar("Record")
Codec = Callable[[Any], Any]  # Any: one side is the field's value, the other the column's
Seal = Callable[[str, bytes, int], bytes]
"""Encrypts what a column says: its name, the stored bytes, and their length once decoded."""
Unseal = Callable[[str, bytes], bytes]
"""Undoes it."""


class _Stored(NamedTuple):
    """One field and its column; None encodes or decodes nothing."""

    field: str
    column: str
    encode: Codec | None = None
    decode: Codec | None = None
    is_content: bool = False
    """It says what users or the model said, and is encrypted when the store has a key."""


class RowMapping(Generic[Record]):
    """The mapping of one record type to one table."""

    def __init__(
        self, record: type[Record], row: type[Base], *, other_tables: Collection[str] = ()
    ) -> None:
        """record: a msgspec Struct or a dataclass.
        other_tables: fields that the caller stores itself, as the rows of another table.

        Raises: TypeError when another field has no column.
        """
        self._record = record
        kinds = get_type_hints(record)
        self.fields = [_stored(name, kinds[name]) for name in kinds if name not in other_tables]
        columns = row.__table__.columns
        if lost := [one.field for one in self.fields if one.column not in columns]:
            raise TypeError(f"{row.__name__} has no column for {record.__name__}.{', '.join(lost)}")

    def to_row(self, record: Record) -> dict[str, object]:
        """The values of the record's columns, by name.

        Raises: OverflowError for a token id of 2**31 or more.
        """
        return {
            column: getattr(record, field) if encode is None else encode(getattr(record, field))
            for field, column, encode, _, _ in self.fields
        }

    def sealed(self, row: dict[str, Any], record: Record, seal: Seal) -> dict[str, Any]:
        """Return a copy of `to_row`'s row with the columns encrypted that say what was said."""
        sealed = dict(row)
        for one in self.fields:
            if one.is_content:
                said = getattr(record, one.field)
                size = len(said) if isinstance(said, bytes) else len(row[one.column])
                sealed[one.column] = seal(one.column, row[one.column], size)
        return sealed

    def to_record(self, row: Base, **others: object) -> Record:
        """Read a row that is not encrypted; else as `open_record`."""
        return self.open_record(row, None, **others)

    def open_record(self, row: Base, unseal: Unseal | None, **others: object) -> Record:
        """Read a row. unseal: None: nothing is encrypted. others: fields that are not read from
        it: they have rows of their own, or the caller knows that their columns are damaged.

        Raises: one of `sidecar.store.database.DAMAGE` when a value is not what its field holds.
        """
        values: dict[str, object] = {}
        for field, column, _, decode, is_content in self.fields:
            if field in others:
                continue
            value = getattr(row, column)
            if is_content and unseal is not None:
                value = unseal(column, value)
            values[field] = value if decode is None else decode(value)
        # Checked, not trusted: a column holds any text where the field allows only a few words.
        return msgspec.convert(values | others, self._record)


def _stated(value: msgspec.Struct) -> dict[str, Any]:  # Any: JSON
    """The members that are not None: most are None, and their names would take 150 bytes a row."""
    return {name: one for name, one in msgspec.to_builtins(value).items() if one is not None}


def _stored(name: str, kind: Any) -> _Stored:  # Any: an annotation
    if kind is bytes:
        return _Stored(name, f"{name}_body", compress, decompress, True)
    if kind == tuple[int, ...]:
        return _Stored(name, name, pack_ids, unpack_ids, True)
    if kind == tuple[float, ...]:
        return _Stored(name, name, pack_floats, unpack_floats)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _Stored(name, name, _stated)
    return _Stored(name, name)
