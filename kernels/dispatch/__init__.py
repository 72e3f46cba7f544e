"""Maps a batch's top-k ids to physical experts on the GPU. The host does not wait for the device.

`Rule.of(split, shared, cost, seed)` selects the policies. `Dispatcher` runs the kernels. If
`Rule.uncovered()` returns a reason, or if `available()` is false, use the PyTorch code of the policies instead.
"""

from epsim.kernels.dispatch.cuda import available
from epsim.kernels.dispatch.dispatcher import Assigned, Dispatcher
from epsim.kernels.dispatch.rule import Rule

__all__ = ["Assigned", "Dispatcher", "Rule", "available"]
