"""Policy stacks and their text form, policies joined by + (docs/contract.md section 3)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from epsim.placement.base import PlacementPolicy
from epsim.policies.base import BatchPolicy
from epsim.policies.grammar import build_policy, name_and_arguments, policy_text, split_outside
from epsim.policies.registry import OneOfEachKind, default_policy, kinds
from epsim.traces.trace import LEVELS, Level

MAX_NAME = 60


@dataclass(frozen=True, slots=True)
class PolicyStack(OneOfEachKind):
    """One policy of each kind. `str` gives the canonical text, which `parse_stack` reads back.

    Raises ValueError if two policies do not work together.
    """

    def __post_init__(self) -> None:
        for policy in self.batch_policies:
            policy.check(self)

    @property
    def batch_policies(self) -> list[BatchPolicy]:
        """All but the placement, in the order of the kinds."""
        return [policy for kind in kinds() if isinstance(policy := getattr(self, kind), BatchPolicy)]

    def __str__(self) -> str:
        shown = []
        for kind in kinds():
            policy = getattr(self, kind)
            if kind == "placement" or policy != default_policy(kind):
                shown.append(policy_text(policy))
        return "+".join(shown)

    def required_level(self, redundancy: bool = True, shared_expert: bool = True) -> Level:
        """The coarsest trace level that the stack can work on.

        redundancy: whether any expert has several copies; if not, the split does not matter. shared_expert: whether it
        costs anything; if not, the shared policy does not matter.
        """
        return max((policy.level for policy in self.deciding(redundancy, shared_expert)), key=LEVELS.index)

    def check_level(self, level: Level, redundancy: bool = True, shared_expert: bool = True) -> None:
        """Raises ValueError if a trace of that level is too coarse. Arguments as for `required_level`."""
        needed = self.required_level(redundancy, shared_expert)
        if LEVELS.index(level) < LEVELS.index(needed):
            deciding = self.deciding(redundancy, shared_expert)
            item = policy_text(next(policy for policy in deciding if policy.level == needed))
            what = {"rank_counts": "counts by source rank", "tokens": "tokens"}[needed]
            raise ValueError(
                f"{item} in {str(self)!r} works on {what}, but the trace holds only {level.replace('_', ' ')}: "
                "draw a trace of tokens with `epsim traces synthesize`"
            )

    def deciding(self, redundancy: bool, shared_expert: bool) -> list[BatchPolicy]:
        """The policies that matter. Arguments as for `required_level`."""
        return [policy for policy in self.batch_policies if policy.decides(redundancy, shared_expert)]


def parse_stack(text: str) -> PolicyStack:
    """The stack that a text describes. Raises ValueError in one line that says what is wrong, where, and what
    exists."""
    chosen: dict[str, Any] = {}
    for item in _items(text):
        name, arguments = name_and_arguments(item, text)
        policies = (policy for known in kinds().values() for policy in known.values())
        policy = next((policy for policy in policies if name in (policy.name, *policy.aliases)), None)
        if policy is None:
            listing = "; ".join(f"{kind}: {', '.join(_names(kind))}" for kind in kinds())
            raise ValueError(f"unknown policy {name!r} in {text!r}: {_advice(name, kinds(), listing)}")
        if policy.kind in chosen:
            first = chosen[policy.kind].name
            raise ValueError(f"{text!r} has two policies for {policy.kind}, {first!r} and {name!r}: give one")
        chosen[policy.kind] = build_policy(policy, name, arguments, item)
    return PolicyStack(**{kind: chosen[kind] if kind in chosen else default_policy(kind) for kind in kinds()})


def placement_policy(text: str) -> PlacementPolicy:
    """The placement that a text such as `searched(seconds=10)` describes. Raises ValueError if it describes none."""
    for item in _items(text):
        if name_and_arguments(item, text)[0] in _names("placement"):
            return parse_stack(item).placement
    name, _ = name_and_arguments(_items(text)[0], text)
    raise ValueError(f"unknown placement {text!r}: {_advice(name, ('placement',), ', '.join(_names('placement')))}")


def _items(text: str) -> list[str]:
    items = split_outside(text, "+")
    if "" in items:
        raise ValueError(f"an item is empty in {text!r}: write name+name(key=value,...)+...")
    return items


def named_stacks(policies: str | PolicyStack | Sequence[str | PolicyStack]) -> tuple[tuple[str, PolicyStack], ...]:
    """One or several policies as (name, stack); the name is "" if none is given."""
    given = (policies,) if isinstance(policies, str | PolicyStack) else tuple(policies)
    for policy in given:
        if not isinstance(policy, str | PolicyStack):
            raise ValueError(f"{policy!r} is not a policy stack: give a text or a PolicyStack")
    return tuple(("", policy) if isinstance(policy, PolicyStack) else named_stack(policy) for policy in given)


def named_stack(text: str) -> tuple[str, PolicyStack]:
    """`NAME=STACK` or `STACK` -> (name or "", stack). An equals sign in parentheses belongs to the stack."""
    head, equals, tail = text.partition("=")
    if not equals or "(" in head:
        return "", parse_stack(text)
    name = head.strip()
    if not name or set(name) & set("+.,") or not name.isprintable() or len(name) > MAX_NAME:
        raise ValueError(f"--policy {text!r}: a name has 1 to {MAX_NAME} printable characters, without + . and ,")
    return name, parse_stack(tail)


def _advice(name: str, of_kinds: Iterable[str], listing: str) -> str:
    """What to write for an unknown name: the policies that it stands for in a serving engine, or the nearest names and
    all names."""
    name = name.lower().replace("_", "-")
    policies = [policy for kind in of_kinds for policy in kinds()[kind].values()]
    meant = [f"{policy.name} ({policy.other_names[name]})" for policy in policies if name in policy.other_names]
    near = get_close_matches(name, [known for policy in policies for known in (policy.name, *policy.aliases)])
    if meant:
        return f"write {' or '.join(meant)}"
    return f"did you mean {' or '.join(near)}? Known are {listing}" if near else f"known are {listing}"


def _names(kind: str) -> list[str]:
    return [name for policy in kinds()[kind].values() for name in (policy.name, *policy.aliases)]
