"""Every registered policy with its arguments, for properties that must hold of all of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from epsim.placement.base import Placement
from epsim.placement.formats import write_placement
from epsim.policies.grammar import build_policy, name_and_arguments
from epsim.policies.registry import examples, kinds
from epsim.policies.stack import PolicyStack, parse_stack

EVERY_KIND = tuple(kinds())


def every(kind: str) -> list[Any]:
    """The policies of a kind: each of its examples, with every combination of arguments that have a few named values
    and go together."""
    found = []
    for text in examples(kind):
        found += _variants(_of_kind(text, kind))
    return list(dict.fromkeys(found))


def stack_of(**policies: Any) -> PolicyStack | None:
    """The default stack with these policies; None where they do not go together."""
    try:
        return dataclasses.replace(parse_stack("contiguous"), **policies)
    except ValueError:
        return None


def _of_kind(text: str, kind: str) -> Any:
    """A policy that needs another kind beside it is not parsed alone."""
    name, arguments = name_and_arguments(text, text)
    policy = next(one for one in kinds()[kind].values() if name in (one.name, *one.aliases))
    return build_policy(policy, name, arguments, text)


def _variants(policy: Any) -> list[Any]:
    hints = get_type_hints(type(policy))
    named = {field.name: _choices(hints[field.name]) for field in dataclasses.fields(policy)}
    named = {name: values for name, values in named.items() if values}
    found = [policy]
    for values in itertools.product(*named.values()):
        try:
            found.append(dataclasses.replace(policy, **dict(zip(named, values, strict=True))))
        except ValueError:
            continue  # arguments that do not go together
    return found


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values of a Literal, or of one that may be left out."""
    parts = [hint, *get_args(hint)]
    return next((get_args(part) for part in parts if get_origin(part) is Literal), ())


def write_example(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_experts: int, num_ranks: int, layers: Sequence[int]
) -> None:
    """Makes `folder` the current one, with the placement.json that the example of `file` names."""
    monkeypatch.chdir(folder)
    slots = torch.arange(-(-(num_experts + num_ranks) // num_ranks) * num_ranks).flip(0) % num_experts
    placement = Placement(slots.repeat(len(layers), 1), num_experts, num_ranks)
    write_placement(placement, folder / "placement.json", "epsim", layers)
