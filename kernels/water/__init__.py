"""Assigns shared-expert tokens to ranks so that the peak load is lowest and few tokens leave their rank."""

from epsim.kernels.water.solver import assign, pour

__all__ = ["assign", "pour"]
