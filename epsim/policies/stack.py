"""A policy stack and its text form (docs/contract.md section 3): item+item+..., item = name or name(key=value,...);
a policy that has a `first` argument takes it without its key too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from epsim.placement.base import PlacementPolicy
from epsim.policies.base import Reader, Router, SharedDispatch, Split
from epsim.policies.joint import WaterfillJoint
from epsim.policies.registry import KINDS
from epsim.policies.splits import Lplb
from epsim.traces.trace import LEVELS, Level

MAX_NAME = 60


@dataclass(frozen=True, slots=True)
class PolicyStack:
    """One policy of each kind. `str` gives the canonical text, which `parse_stack` reads back.

    Raises ValueError where one does not go with another.
    """

    placement: PlacementPolicy
    router: Router
    split: Split
    shared: SharedDispatch
    reader: Reader

    def __post_init__(self) -> None:
        if isinstance(self.shared, WaterfillJoint) and not isinstance(self.split, Lplb):
            raise ValueError(
                f"{self.shared.name} fills up what an exact split leaves, {self.split.name} in {str(self)!r} is none: "
                "write lplb(counts=gathered)+waterfill-joint, or waterfill"
            )

    def __str__(self) -> str:
        shown = []
        for kind, known in KINDS.items():
            policy = getattr(self, kind)
            if kind == "placement" or policy != next(iter(known.values())):
                shown.append(_item_text(kind, policy))
        return "+".join(shown)

    def required_level(self, redundancy: bool = True, shared_expert: bool = True) -> Level:
        """The coarsest trace level that the stack can work on.

        redundancy: whether any expert has several copies; shared_expert: whether it costs anything. Where there is
        none, the split and the shared expert's policy have nothing to decide.
        """
        return max((level for _, level in self._levels(redundancy, shared_expert)), key=LEVELS.index)

    def check_level(self, level: Level, redundancy: bool = True, shared_expert: bool = True) -> None:
        """Raises ValueError where a trace of that level is too coarse; arguments as for `required_level`."""
        needed = self.required_level(redundancy, shared_expert)
        if LEVELS.index(level) < LEVELS.index(needed):
            kind = next(kind for kind, own in self._levels(redundancy, shared_expert) if own == needed)
            item = _item_text(kind, getattr(self, kind))
            what = {"rank_counts": "counts by source rank", "tokens": "tokens"}[needed]
            raise ValueError(
                f"{item} in {str(self)!r} works on {what}, the trace holds {level.replace('_', ' ')} only: "
                "draw tokens with the recorded marginals by `epsim traces synthesize`"
            )

    def _levels(self, redundancy: bool, shared_expert: bool) -> list[tuple[str, Level]]:
        levels = [("router", self.router.level), ("reader", self.reader.level)]
        levels += [("split", self.split.level)] if redundancy else []
        return levels + ([("shared", self.shared.level)] if shared_expert else [])


def parse_stack(text: str) -> PolicyStack:
    """The stack that a text describes. Raises ValueError: one line with what is wrong, where, and what is known."""
    chosen: dict[str, Any] = {}
    for item in _items(text):
        name, arguments = _name_and_arguments(item, text)
        kind = next((kind for kind, known in KINDS.items() if name in known), None)
        if kind is None:
            listing = "; ".join(f"{kind}: {', '.join(known)}" for kind, known in KINDS.items())
            raise ValueError(f"unknown policy {name!r} in {text!r}, known are {listing}")
        if kind in chosen:
            raise ValueError(f"{text!r} has two policies for {kind}, {chosen[kind].name!r} and {name!r}: give one")
        chosen[kind] = _with_arguments(kind, KINDS[kind][name], arguments, item)
    return PolicyStack(**{kind: chosen.get(kind, next(iter(known.values()))) for kind, known in KINDS.items()})


def _items(text: str) -> list[str]:
    """The parts between the + signs that stand outside parentheses (values may hold a +)."""
    items, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth not in (0, 1):
            break
        if letter == "+" and depth == 0:
            items.append("")
        else:
            items[-1] += letter
    if depth:
        raise ValueError(f"parentheses do not match in {text!r}: write name or name(key=value,...)")
    items = [item.strip() for item in items]
    if "" in items:
        raise ValueError(f"an item is empty in {text!r}: write name+name(key=value,...)+...")
    return items


def _name_and_arguments(item: str, text: str) -> tuple[str, dict[str, str]]:
    name, bracket, rest = item.partition("(")
    if bracket and not rest.endswith(")"):
        raise ValueError(f"{item!r} in {text!r} goes on after its parentheses: put + between items")
    arguments: dict[str, str] = {}
    inner = rest[:-1]
    for number, part in enumerate(inner.split(",") if inner.strip() else []):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if number == 0 and key and not equals:  # a policy's first argument may go unnamed
            key, equals, value = "", "=", key
        elif not equals or not key or not value:
            raise ValueError(f"{part.strip()!r} in {item!r} is not key=value")
        if key in arguments:
            raise ValueError(f"argument {key!r} is given twice in {item!r}")
        arguments[key] = value
    return name.strip(), arguments


def _parameters(kind: str, policy: Any) -> dict[str, Any]:
    """The arguments that the grammar gives a policy: its dataclass fields and their types. Placements take none."""
    if kind == "placement":
        return {}
    hints = get_type_hints(type(policy))
    return {field.name: _when_given(hints[field.name]) for field in dataclasses.fields(policy)}


def _when_given(hint: Any) -> Any:
    """T of T | None: None is an argument left out."""
    return next(part for part in get_args(hint) if part is not NoneType) if NoneType in get_args(hint) else hint


def _with_arguments(kind: str, policy: Any, arguments: dict[str, str], item: str) -> Any:
    parameters = _parameters(kind, policy)
    if "" in arguments:
        if not hasattr(policy, "first") or policy.first in arguments:
            raise ValueError(f"{arguments['']!r} in {item!r} is not key=value")
        arguments = {policy.first: arguments[""], **{key: text for key, text in arguments.items() if key}}
    if missing := [key for key in getattr(policy, "needed", ()) if key not in arguments]:
        raise ValueError(f"{item!r} needs {missing[0]}=: write {policy.name}({missing[0]}=...)")
    values: dict[str, Any] = {}
    for key, text in arguments.items():
        if key not in parameters:
            known = f"its arguments are {', '.join(parameters)}" if parameters else "it takes none"
            raise ValueError(f"unknown argument {key!r} in {item!r}: {known}")
        hint = parameters[key]
        if get_origin(hint) is Literal:
            if text not in get_args(hint):
                raise ValueError(f"unknown value {key}={text} in {item!r}: choose {' or '.join(get_args(hint))}")
            values[key] = text
        else:
            try:
                values[key] = hint(text)
            except ValueError:
                raise ValueError(f"{key}={text} in {item!r} is not of type {hint.__name__}") from None
    return type(policy)(**values) if values else policy


def _item_text(kind: str, policy: Any) -> str:
    default = KINDS[kind][policy.name]
    values = {key: getattr(policy, key) for key in _parameters(kind, policy)}
    given = [f"{key}={value}" for key, value in values.items() if value != getattr(default, key)]
    return f"{policy.name}({','.join(given)})" if given else policy.name


def named_stacks(policies: str | PolicyStack | Sequence[str | PolicyStack]) -> tuple[tuple[str, PolicyStack], ...]:
    """One or several policies as (name, stack); the name is "" if none is given."""
    given = (policies,) if isinstance(policies, str | PolicyStack) else policies
    return tuple(("", policy) if isinstance(policy, PolicyStack) else named_stack(policy) for policy in given)


def named_stack(text: str) -> tuple[str, PolicyStack]:
    """`NAME=STACK` or `STACK` -> (name or "", stack). An equals sign inside parentheses belongs to the stack."""
    head, equals, tail = text.partition("=")
    if not equals or "(" in head:
        return "", parse_stack(text)
    name = head.strip()
    if not name or set(name) & set("+.,") or not name.isprintable() or len(name) > MAX_NAME:
        raise ValueError(f"--policy {text!r}: a name has 1 to {MAX_NAME} printable characters, without + . and ,")
    return name, parse_stack(tail)
