"""Reads and writes the text of a policy: `name` or `name(key=value,...)` (docs/contract.md section 3)."""

import dataclasses
import inspect
import json
import re
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from epsim.files import printable
from epsim.placement.base import Policy

PLAIN = r"[\w./@:~-]+"
"""Values that need no quotation marks."""


def split_outside(text: str, separator: str) -> list[str]:
    """Splits a text at the separators outside parentheses and quotation marks, and strips the parts. Raises ValueError
    if a parenthesis or a quotation mark is missing."""
    parts, depth, quoted, escaped = [""], 0, False, False
    for letter in text:
        if quoted:
            quoted, escaped = escaped or letter != '"', letter == "\\" and not escaped
        else:
            quoted = letter == '"'
            depth += (letter == "(") - (letter == ")")
            if depth not in (0, 1):
                break
        if letter == separator and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    if depth or quoted:
        what = "a quotation mark is missing" if quoted else "parentheses do not match"
        raise ValueError(f"{what} in {text!r}: write name or name(key=value,...)")
    return [part.strip() for part in parts]


def name_and_arguments(item: str, text: str) -> tuple[str, dict[str, str]]:
    """The name of an item of the stack `text`, and the text of each argument by its key. An argument without a key has
    the key ""."""
    name, bracket, rest = item.partition("(")
    if bracket and not rest.endswith(")"):
        raise ValueError(f"{item!r} in {text!r} continues after its parentheses: put + between items")
    arguments: dict[str, str] = {}
    inner = rest[:-1]
    for number, part in enumerate(split_outside(inner, ",") if inner.strip() else []):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if number == 0 and part and (not equals or part.startswith('"')):  # the first argument may go without its key
            key, equals, value = "", "=", part
        elif not equals or not key or not value:
            raise ValueError(f"{part!r} in {item!r} is not key=value")
        if key in arguments:
            raise ValueError(f"argument {key!r} is given twice in {item!r}")
        arguments[key] = value
    return name.strip(), arguments


def build_policy(policy: type[Policy], name: str, arguments: dict[str, str], item: str) -> Any:
    """The policy with its arguments. name: the policy's name or an alias. Raises ValueError in one line."""
    parameters = _parameters(policy)
    if "" in arguments:
        if not policy.first or policy.first in arguments:
            raise ValueError(f"{arguments['']!r} in {item!r} is not key=value")
        arguments = {policy.first: arguments[""], **{key: text for key, text in arguments.items() if key}}
    for key in _required(policy):
        if key not in arguments:
            raise ValueError(f"{item!r} needs {key}=: write {policy.name}({key}=...)")
    preset = policy.aliases.get(name, {})
    values: dict[str, Any] = {}
    for key, text in arguments.items():
        if key not in parameters or key in preset:
            left = [parameter for parameter in parameters if parameter not in preset]
            known = f"its arguments are {', '.join(left)}" if left else "it takes none"
            raise ValueError(f"unknown argument {key!r} in {item!r}: {known}")
        values[key] = _value(parameters[key], key, text, item)
    return policy(**preset, **values)


def policy_text(policy: Any) -> str:
    """The canonical text of a policy: without arguments that have their default, and with an alias if one fits."""
    for alias, preset in policy.aliases.items():
        if policy == type(policy)(**preset):
            return str(alias)
    required = {key: getattr(policy, key) for key in _required(type(policy))}
    default = type(policy)(**required)
    given = []
    for key, hint in _parameters(type(policy)).items():
        value = getattr(policy, key)
        if key in required or value != getattr(default, key):
            quoted = hint is str and not re.fullmatch(PLAIN, value)
            given.append(f"{key}={json.dumps(value, ensure_ascii=False) if quoted else value}")
    return f"{policy.name}({','.join(given)})" if given else str(policy.name)


def _value(hint: Any, key: str, text: str, item: str) -> Any:
    choices = ("True", "False") if hint is bool else get_args(hint)
    kind = str if choices else hint
    try:
        value = kind(json.loads(text) if text.startswith('"') else text)
    except ValueError:
        raise ValueError(f"{key}={printable(text)} in {item!r} is not of type {kind.__name__}") from None
    if choices and value not in choices:
        raise ValueError(f"unknown value {key}={printable(text)} in {item!r}: choose {' or '.join(choices)}")
    return value == "True" if hint is bool else value


def check_arguments(policy: type[Policy]) -> None:
    """Raises ValueError if an argument has a type that the grammar cannot read and write, or if `first` or an alias
    names an argument that is missing."""
    for key, hint in _parameters(policy).items():
        named = get_origin(hint) is Literal and all(isinstance(value, str) for value in get_args(hint))
        if hint not in (str, int, float, bool) and not named:
            kind = inspect.formatannotation(hint)
            raise ValueError(f"argument {key} is of type {kind}: use str, int, float, bool or a Literal of texts")
    for key in (policy.first, *(key for preset in policy.aliases.values() for key in preset)):
        if key and key not in _parameters(policy):
            raise ValueError(f"first or aliases name {key!r}, which is not an argument")


def _parameters(policy: Any) -> dict[str, Any]:
    """A policy's arguments and their types, from its dataclass fields; the type T for a field of type T | None."""
    types, hints = {}, get_type_hints(policy)
    for key in (field.name for field in dataclasses.fields(policy)):
        hint = hints[key]
        parts = [part for part in get_args(hint) if part is not NoneType]
        types[key] = parts[0] if NoneType in get_args(hint) and len(parts) == 1 else hint
    return types


def _required(policy: Any) -> list[str]:
    """Arguments without a default."""
    missing = dataclasses.MISSING
    fields = dataclasses.fields(policy)
    return [field.name for field in fields if field.default is missing and field.default_factory is missing]
