"""A table: rows by number. Others read it; only the table's own methods add and remove rows."""

from collections.abc import Iterator, Mapping, ValuesView
from typing import TypeVar

Row = TypeVar("Row")


class Table(Mapping[int, Row]):
    """Base of the tables, which add methods for the life of a row."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}

    def __getitem__(self, number: int) -> Row:
        return self._rows[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, number: int, default: Row | None = None) -> Row | None:  # type: ignore[override]
        return self._rows.get(number, default)

    def values(self) -> ValuesView[Row]:
        return self._rows.values()
