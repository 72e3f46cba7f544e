"""The kinds of policies, and the class of every policy by kind and name.

A new policy is a file and a line in SHIPPED. A policy of another package is an entry point of the group
`epsim.policies` that names its class. A new kind is a file with its base class and a field of `OneOfEachKind`.
"""

import dataclasses
import inspect
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_type_hints

from epsim.placement.base import PlacementPolicy, Policy
from epsim.placement.contiguous import Contiguous
from epsim.placement.eplb import Eplb
from epsim.placement.file import File
from epsim.placement.searched import Searched
from epsim.policies.base import Reader, Router, SharedDispatch, Split
from epsim.policies.grammar import check_arguments
from epsim.policies.ipm import LplbIpm
from epsim.policies.joint import WaterfillJoint
from epsim.policies.nearest import Static
from epsim.policies.one_copy import OneCopy
from epsim.policies.reader import Dense, ThresholdChannels, TopkChannels
from epsim.policies.routing.oea import Oea, Pruned
from epsim.policies.routing.ranks import OeaEp
from epsim.policies.routing.rivals import Lynx, MaskLowDemand
from epsim.policies.routing.topk import TopK
from epsim.policies.shared import Local
from epsim.policies.splits import Even, Lplb, LplbSampled, Random
from epsim.policies.waterfill import Waterfill

GROUP = "epsim.policies"


@dataclass(frozen=True, slots=True)
class OneOfEachKind:
    """A policy of each kind, under the name of the kind. This is the only list of kinds."""

    placement: PlacementPolicy
    router: Router
    split: Split
    shared: SharedDispatch
    reader: Reader


BASES = tuple(get_type_hints(OneOfEachKind).values())
SHIPPED: tuple[type[Policy], ...] = (
    Contiguous, Eplb, Searched, File,
    TopK, Pruned, Oea, OeaEp, Lynx, MaskLowDemand,
    Even, Random, Static, OneCopy, Lplb, LplbSampled, LplbIpm,
    Local, Waterfill, WaterfillJoint,
    Dense, TopkChannels, ThresholdChannels,
)  # fmt: skip
"""The first policy of each kind is its default."""


@cache
def kinds() -> dict[str, dict[str, type[Policy]]]:
    """The class of every policy by kind and name, including the policies of installed packages.

    Raises ValueError in one line if a package's entry point cannot be loaded, is not a policy, or has a name that
    another policy has.
    """
    policies: dict[str, dict[str, type[Policy]]] = {base.kind: {} for base in BASES}
    names: set[str] = set()
    for policy in SHIPPED:
        policies[policy.kind][policy.name] = policy
        names.update((policy.name, *policy.aliases))
    for entry in entry_points(group=GROUP):
        policy = _loaded(entry)
        if twice := names & {policy.name, *policy.aliases}:
            raise ValueError(f"{_told(entry)}: there is another policy named {min(twice)!r}: uninstall the package")
        policies[policy.kind][policy.name] = policy
        names.update((policy.name, *policy.aliases))
    return policies


def default_policy(kind: str) -> Any:
    """The policy of a kind that a stack has if its text names none."""
    return next(iter(kinds()[kind].values()))()


def examples(kind: str) -> list[str]:
    """At least one text of the stack grammar for every policy of a kind, for tests that run all policies."""
    return [text for policy in kinds()[kind].values() for text in policy.examples or (policy.name, *policy.aliases)]


def _loaded(entry: EntryPoint) -> type[Policy]:
    try:
        policy = entry.load()
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{_told(entry)} cannot be loaded ({reason}): repair or uninstall the package") from error
    try:
        _check_class(policy)
    except (ValueError, TypeError, NameError, AttributeError) as error:  # of type hints that cannot be resolved
        raise ValueError(f"{_told(entry)} is not a policy: {' '.join(str(error).split())}") from error
    return policy  # type: ignore[no-any-return]


def _check_class(policy: Any) -> None:
    """Raises ValueError where a class cannot be a policy."""
    is_policy = isinstance(policy, type) and issubclass(policy, BASES) and dataclasses.is_dataclass(policy)
    if not is_policy or not hasattr(policy, "name") or not isinstance(policy.name, str):
        bases = ", ".join(base.__name__ for base in BASES)
        raise ValueError(f"give a frozen dataclass with a name, derived from {bases}")
    if not re.fullmatch(r"[\w-]+", policy.name):
        raise ValueError(f"its name is {policy.name!r}: give letters, digits, - and _ only")
    if not policy.__dataclass_params__.frozen:
        raise ValueError("write @dataclass(frozen=True)")
    base = {base.kind: base for base in BASES}[policy.kind]
    for methods in base.must_define:
        if all(getattr(policy, method) is getattr(base, method) for method in methods.split(" or ")):
            raise ValueError(f"the class does not define {methods}")
    for method in dir(base):
        if inspect.isfunction(getattr(base, method)) and not callable(getattr(policy, method)):
            raise ValueError(f"{method} is no method: define it as one")
    check_arguments(policy)


def _told(entry: EntryPoint) -> str:
    package = "an unknown package" if entry.dist is None else f"package {entry.dist.name} {entry.dist.version}"
    return f"{package}: entry point {entry.name} = {entry.value} of {GROUP}"
