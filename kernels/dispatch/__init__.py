"""From a batch's top-k ids to physical experts on the GPU, without the host waiting for it.

`Rule.of(split, shared, cost, seed)` says which policies; where `Rule.uncovered()` gives a reason, or `available()` is
false, the policies' own form (epsim.policies) is the way. `Dispatcher` holds the rest.
"""

from epsim.kernels.dispatch.cuda import available
from epsim.kernels.dispatch.dispatcher import Assigned, Dispatcher
from epsim.kernels.dispatch.rule import Rule

__all__ = ["Assigned", "Dispatcher", "Rule", "available"]
