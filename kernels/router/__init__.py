"""Runs router policies for a batch on a GPU, such as opportunistic expert activation (oea).

`reroute` reroutes a batch of one rank in one launch; `route_logits` does the same from logits. `Passes` reroutes a
batch whose tokens are on several ranks: two launches and a sum over ranks between them. It runs all router policies."""

from epsim.kernels.router.cuda import Rule, available, reroute, route_logits, uncovered
from epsim.kernels.router.passes import Passes, Plan

__all__ = ["Passes", "Plan", "Rule", "available", "reroute", "route_logits", "uncovered"]
