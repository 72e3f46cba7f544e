"""The metrics of a load: one value per (step, layer), by the formulas of epsim/score/formulas.py."""

from typing import TypeAlias

import torch

from epsim.policies.load import Load

Values: TypeAlias = "torch.Tensor | str"
"""[S, L] float64, or [S] for a metric of whole steps; NaN where a layer has no tokens. A string says why there is
no value."""


NO_ROUTER = "the stack has no router policy: every token keeps the experts that the model chose"
NO_MODEL = "no bytes are counted without --hardware"
NO_TIME = "no times are predicted without --hardware"
NO_SHARED = "this load has no shared-expert tokens"
NO_SOURCE = "a trace at counts level has no source ranks"
NOT_ROUNDED = "loads are real-valued at counts level: nothing is rounded"


def layer_metrics(load: Load, optimum: torch.Tensor, shared: bool) -> dict[str, Values]:
    """The metrics of METRICS on total load. If the model has a shared expert (`shared`), also with the prefix `routed_`
    on routed load. optimum [S, L] float64: a proven lower bound of the routed peak of any split of the placement."""
    routed = load.routed.double()
    of_routed = _metrics(load, routed, routed, optimum, shared=False)
    if not shared:
        return of_routed
    of_total = _metrics(load, routed + load.shared, routed, optimum, shared=True)
    return of_total | {f"routed_{key}": value for key, value in of_routed.items()}


def _metrics(
    load: Load, total: torch.Tensor, routed: torch.Tensor, optimum: torch.Tensor, shared: bool
) -> dict[str, Values]:
    nan = torch.full_like(optimum, torch.nan)
    busy = load.assignments > 0
    peak = torch.where(busy, total.amax(-1), nan)
    mean = torch.where(busy, total.mean(-1), nan)
    # The shared expert can be served on any rank, so the lowest total peak is the larger of the routed optimum and the
    # mean. Floating-point noise must not make a gap negative.
    optimum = torch.maximum(optimum, mean)
    routed_real = load.routed_real.double().amax(-1)
    routed_best = torch.minimum(routed_real, routed.amax(-1)) if load.rounded else routed_real
    after_split = torch.maximum(torch.maximum(routed_best, mean), optimum)
    after_rounding = torch.maximum(routed.amax(-1), after_split)
    peak = torch.maximum(peak, after_rounding)
    values: dict[str, Values] = {
        "peak": peak,
        "mean_load": mean,
        "max_over_mean": peak / mean,
        "balancedness": mean / peak,
        "balancedness_vllm": mean.nansum(-1) / torch.where(busy.any(-1), peak.nansum(-1), torch.nan),
        "imbalance_ratio": (peak - mean) / mean,
        "optimality_gap": peak / optimum - 1,
        "gap_placement": optimum / mean - 1,
        "gap_split": after_split / optimum - 1,
        "gap_rounding": after_rounding / after_split - 1 if load.rounded else NOT_ROUNDED,
        "gap_shared": peak / after_rounding - 1 if shared else NO_SHARED,
    }
    active = (load.active + (load.shared_tokens > 0)).double() if shared else load.active.double()
    values["active_experts"] = torch.where(busy, active.amax(-1), nan)
    values["active_experts_total"] = torch.where(busy, active.sum(-1), nan)
    served = load.assignments + load.tokens if shared else load.assignments
    for key, routed_remote, shared_remote in (
        ("remote_rank_share", load.remote_rank, load.shared_remote_rank),
        ("remote_node_share", load.remote_node, load.shared_remote_node),
    ):
        if routed_remote is None:
            values[key] = NO_SOURCE
        else:
            remote = routed_remote + shared_remote if shared and shared_remote is not None else routed_remote
            values[key] = torch.where(busy, remote.double() / served, nan)
    values |= {"kept_mass": NO_ROUTER, "bytes_read": NO_MODEL, "layer_time_us": NO_TIME, "throughput_gain": NO_TIME}
    if load.kept_mass is not None:
        values["kept_mass"] = torch.where(busy, load.kept_mass, nan)
    return values
