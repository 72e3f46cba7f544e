"""All policies by kind and name: adding one is a file and an entry here. The first of a kind is its default."""

from __future__ import annotations

from typing import Any

from epsim.placement import PLACEMENTS
from epsim.policies.base import Dense, TopK
from epsim.policies.ipm import LplbIpm
from epsim.policies.joint import WaterfillJoint
from epsim.policies.nearest import Static
from epsim.policies.one_copy import OneCopy
from epsim.policies.reader import ThresholdChannels, TopkChannels
from epsim.policies.routing.oea import Oea, Pruned
from epsim.policies.routing.ranks import OeaEp
from epsim.policies.routing.rivals import Lynx, MaskLowDemand
from epsim.policies.shared import Local
from epsim.policies.splits import Even, Lplb, LplbSampled, Random
from epsim.policies.waterfill import Waterfill

KINDS: dict[str, dict[str, Any]] = {
    "placement": dict(PLACEMENTS),
    "router": {policy.name: policy for policy in (TopK(), Pruned(), Oea(), OeaEp(), Lynx(), MaskLowDemand())},
    "split": {
        policy.name: policy for policy in (Even(), Random(), Static(), OneCopy(), Lplb(), LplbSampled(), LplbIpm())
    },
    "shared": {policy.name: policy for policy in (Local(), Waterfill(), WaterfillJoint())},
    "reader": {policy.name: policy for policy in (Dense(), TopkChannels(), ThresholdChannels())},
}
