"""Opportunistic expert activation of a batch on a GPU in one launch: `reroute`, and `route_logits` from logits on."""

from epsim.kernels.router.cuda import Rule, available, reroute, route_logits, uncovered

__all__ = ["Rule", "available", "reroute", "route_logits", "uncovered"]
