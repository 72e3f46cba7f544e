"""Runs a router policy with kernels instead of tensor operations."""

from epsim.kernels import router
from epsim.kernels.router import passes
from epsim.policies.base import Routed, RouterWork, alone


def by_kernel(work: RouterWork, plan: router.Plan) -> Routed | None:
    """The same experts as the tensor operations, and weights equal up to rounding. None if the kernels cannot run: on a
    CPU, without CuPy, or for sizes that they do not cover.

    A settled plan, and `union` with all tokens on this rank, take one launch. Other plans take two, with one call of
    `work.total` between them. It sums the same numbers as the tensor operations, so some ranks may use kernels and
    others not.
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
