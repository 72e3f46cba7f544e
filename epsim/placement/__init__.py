"""Where experts live: the placements by name."""

from __future__ import annotations

from epsim.placement.base import PlacementPolicy
from epsim.placement.contiguous import Contiguous
from epsim.placement.eplb import Eplb
from epsim.placement.searched import Searched

_POLICIES: tuple[PlacementPolicy, ...] = (Contiguous(), Eplb(), Eplb("global"), Eplb("hierarchical"), Searched())
PLACEMENTS: dict[str, PlacementPolicy] = {policy.name: policy for policy in _POLICIES}


def placement_policy(name: str) -> PlacementPolicy:
    """The placement of that name. Raises ValueError for an unknown one."""
    if name not in PLACEMENTS:
        raise ValueError(f"unknown placement {name!r}: choose one of {', '.join(PLACEMENTS)}")
    return PLACEMENTS[name]
