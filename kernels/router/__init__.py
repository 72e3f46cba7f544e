"""Opportunistic expert activation of a batch on a GPU: `reroute` in one launch, `route_logits` from logits, and
`Passes` in two launches with a sum over ranks between them, which also serve the other routers."""

from epsim.kernels.router.cuda import Rule, available, reroute, route_logits, uncovered
from epsim.kernels.router.passes import Passes, Plan

__all__ = ["Passes", "Plan", "Rule", "available", "reroute", "route_logits", "uncovered"]
