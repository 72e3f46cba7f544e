"""Checks the keys and values of a grid file, with one clear line for each error."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from epsim.files import printable

Values: TypeAlias = tuple[Any, ...]

MAX_SEED = 2**63 - 1
MOST_SLOTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Field:
    """A key of a grid file. words: what a value must be, for messages. fits: tells whether a value is valid. crossed:
    whether the key may have a list of values, which is combined with the lists of other keys."""

    words: str
    fits: Callable[[Any], bool]
    crossed: bool = True


def whole(low: int, high: int = MOST_SLOTS, *, crossed: bool = True, words: tuple[str, ...] = ()) -> Field:
    """A whole number from low to high, or one of some words."""
    expected = f"a whole number from {low} to {high}" + "".join(f' or "{word}"' for word in words)
    return Field(expected, lambda value: (type(value) is int and low <= value <= high) or value in words, crossed)


def number(low: float, high: float = math.inf, *, crossed: bool = True, open_ends: bool = False) -> Field:
    expected = f"a number from {low:g}" + (f" to {high:g}" if high < math.inf else "")

    def fits(value: Any) -> bool:
        if type(value) not in (int, float) or not math.isfinite(value):
            return False
        return bool(low < value < high if open_ends else low <= value <= high)

    return Field(expected + (", both excluded" if open_ends else ""), fits, crossed)


def text(*, crossed: bool = True, known: tuple[str, ...] = ()) -> Field:
    if known:
        return Field(f"one of {', '.join(known)}", lambda value: value in known, crossed)
    return Field("a text", lambda value: isinstance(value, str) and value.strip() != "" and "\0" not in value, crossed)


FLAG = Field("true or false", lambda value: isinstance(value, bool))


def check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = tuple(known)
    unknown = next((key for key in table if key not in known), None)
    if unknown is not None:
        raise ValueError(f"{where}: unknown key {unknown!r}: known are {', '.join(known)}")


def values_of(
    table: Mapping[str, Any], key: str, field: Field, where: str, default: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The values of a key, given as a single value or a list. Raises ValueError for an invalid value, an empty list, or
    a repeated value."""
    if key not in table:
        return default
    given = table[key]
    if isinstance(given, list):
        if not field.crossed:
            raise ValueError(f"{where}: {key} takes one value, not a list: give {field.words}")
        if not given:
            raise ValueError(f"{where}: {key} is an empty list: give at least one value, or omit {key}")
    values = tuple(given) if isinstance(given, list) else (given,)
    seen = set()
    for value in values:
        if not field.fits(value):
            raise ValueError(f"{where}: {key} {_shown(value)}: give {field.words}")
        if (type(value), value) in seen:
            raise ValueError(f"{where}: {key} {_shown(value)} is in its list twice: give it once")
        seen.add((type(value), value))
    return values


def texts_of(table: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """The texts of a key, given as a single text or a list. They are not combined with other keys."""
    given = table.get(key)
    if given is None:
        raise ValueError(f"{where}: key {key!r} is missing: give a list of texts")
    field = text()
    return tuple(str(value) for value in values_of({key: given}, key, field, where, ()))


def _shown(value: Any) -> str:
    shown = printable(repr(value))
    return shown if len(shown) <= 60 else shown[:57] + "..."
