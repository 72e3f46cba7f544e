"""The shared expert's tokens poured over the routed load: the least peak, whole tokens, few of them away from home."""

from epsim.kernels.water.solver import assign, pour

__all__ = ["assign", "pour"]
