"""Opportunistic expert activation of a batch on a GPU.

`reroute` reroutes in one launch, `route_logits` starts from logits, and `Passes` needs two launches with a sum over
ranks between them; it also serves the other routers."""

from epsim.kernels.router.cuda import Rule, available, reroute, route_logits, uncovered
from epsim.kernels.router.passes import Passes, Plan

__all__ = ["Passes", "Plan", "Rule", "available", "reroute", "route_logits", "uncovered"]
