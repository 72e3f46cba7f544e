"""Distributes shared-expert tokens over the routed load: lowest peak, whole tokens, few of them off their own rank."""

from epsim.kernels.water.solver import assign, pour

__all__ = ["assign", "pour"]
