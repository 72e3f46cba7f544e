"""A router policy's rule by kernels, in place of its tensor operations."""

from __future__ import annotations

from epsim.kernels import router
from epsim.kernels.router import passes
from epsim.policies.base import Routed, RouterWork, alone


def by_kernel(work: RouterWork, plan: router.Plan) -> Routed | None:
    """The same experts, weights to rounding; None where the kernels do not serve: on a CPU, without CuPy, for sizes
    that they do not cover.

    `union` with all tokens here is one launch. Any other plan is two, with one call of `work.total` between, of the
    same numbers that the policy's tensor operations sum, so that ranks may differ in the form that they take; a settled
    plan is one, and calls nothing.
    """
    if not work.scores.is_cuda or not router.available(work.scores.device.index):
        return None
    tokens, experts = work.scores.shape[-2:]
    top_k = work.expert_ids.shape[-1]
    tensors = (work.scores, work.weight_basis, work.expert_ids, work.weights, work.decode)
    if plan.kind == "union" and work.total is alone and router.uncovered(plan.rule, tokens, experts, top_k) is None:
        return Routed(*router.reroute(plan.rule, *tensors)[:2])
    if passes.uncovered(plan, experts, top_k, 0 if work.holds is None else work.holds.shape[-1]) is not None:
        return None
    run = router.Passes.of(plan, *tensors, work.holds)
    return Routed(*run.answer(None if plan.settled else work.total(run.demand())))
