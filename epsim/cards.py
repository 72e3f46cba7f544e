"""Reads cards into frozen dataclasses. A card is a small TOML file, shipped or the user's."""

import dataclasses
import math
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from epsim.files import check_source

if sys.version_info >= (3, 11):
    import tomllib as tomllib
else:
    import tomli as tomllib

LARGEST = 2**53
"""Float64 holds every whole number up to this exactly."""
T = TypeVar("T")


def known_cards(room: str) -> tuple[str, ...]:
    """The names of the shipped cards in `epsim/ROOM/cards`. room: `models` or `machines`."""
    folder = resources.files(f"epsim.{room}").joinpath("cards")
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml")))


def read_card(room: str, option: str, name: str) -> tuple[dict[str, Any], str]:
    """Reads a shipped card by name (in any case), or a file by path. Returns the content, and the file for messages.

    Raises ValueError in one line for an unknown name, with the known names, and for a file that is not TOML.
    """
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
        check_source(path)
        try:
            where, text = str(path), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path}: not TOML: not in UTF-8") from None
    else:
        known, file = known_cards(room), f"{name.lower()}.toml"
        if name.lower() not in known:
            raise ValueError(f"{option} {name}: give one of {', '.join(known)}, or a .toml file")
        where = f"{room}/cards/{file}"
        text = resources.files(f"epsim.{room}").joinpath("cards", file).read_text(encoding="utf-8")
    try:
        return tomllib.loads(text), where
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where}: not TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{where}: not TOML: nested too deeply") from None


def build(kind: type[T], content: Mapping[str, Any], where: str) -> T:
    """Builds a dataclass from a TOML table. Inner tables become dataclasses. A float may be given as an integer.

    Raises ValueError that names the key, if a key is unknown or missing, or a value has the wrong type or is refused by
    the dataclass. where: the file, for messages.
    """
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = next((key for key in content if key not in fields), None)
    if unknown is not None:
        raise ValueError(f"{where}: unknown key {unknown!r}, known are {', '.join(fields)}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in content:
            values[name] = _value(hints[name], content[name], f"{where}: {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}: key {name!r} is missing")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _value(hint: Any, value: Any, where: str) -> Any:
    options = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}: {value!r} is not a list")
        return tuple(_value(options[0], part, where) for part in value)
    if type(None) in get_args(hint):
        return None if value is None else _value(options[0], value, where)
    if options and all(isinstance(part, str) for part in options):
        if value not in options:
            raise ValueError(f"{where}: {value!r} is not one of {', '.join(options)}")
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: {value!r} is not a table")
        assert isinstance(hint, type)
        return build(hint, value, where)
    kinds = (int, float) if hint is float else (hint,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{where}: {value!r} is not of type {hint.__name__}")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{where}: a whole number of {len(str(abs(value)))} digits is too large")
    if hint is float and not math.isfinite(value):
        raise ValueError(f"{where}: {value!r} is not finite")
    return hint(value)
