"""The names, units and formulas of the metrics in results.json."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """formula: of the value of a layer in a step, in words. larger_is_better: if not, a smaller value is better.
    name: in tables and in `--fail-if`; "" if it is the key."""

    unit: str
    formula: str
    larger_is_better: bool = False
    name: str = ""


METRICS: Mapping[str, Metric] = {
    "peak": Metric("assignments", "largest load of a rank"),
    "mean_load": Metric("assignments", "mean load over ranks"),
    "max_over_mean": Metric("ratio", "peak / mean", name="peak/mean"),
    "balancedness": Metric("ratio", "mean / peak (SGLang)", True),
    "balancedness_vllm": Metric("ratio", "sum over layers of means / sum over layers of peaks, per step (vLLM)", True),
    "imbalance_ratio": Metric("ratio", "(peak - mean) / mean (TensorRT-LLM)"),
    "optimality_gap": Metric("ratio", "peak / optimum - 1", name="gap"),
    "gap_placement": Metric("ratio", "optimum / mean - 1", name="placement gap"),
    "gap_split": Metric("ratio", "min(real-valued peak, integer peak) / optimum - 1", name="split gap"),
    "gap_rounding": Metric("ratio", "integer peak / min(real-valued peak, integer peak) - 1", name="rounding gap"),
    "gap_shared": Metric(
        "ratio", "peak / lowest peak of any shared dispatch for this routed load - 1", name="shared gap"
    ),
    "active_experts": Metric("experts", "largest number of physical experts with load on one rank", name="active"),
    "active_experts_total": Metric("experts", "number of physical experts with load, on all ranks together"),
    "remote_rank_share": Metric("share", "assignments that leave their source rank / all assignments", name="off rank"),
    "remote_node_share": Metric("share", "assignments that leave their source node / all assignments", name="off node"),
    "kept_mass": Metric("share", "router probability of the kept experts / of the model's choice", True, "kept"),
    "bytes_read": Metric("bytes", "expert weights read by the busiest rank"),
    "layer_time_us": Metric("us", "time of the layer on its slowest rank", name="layer us"),
    "throughput_gain": Metric("ratio", "tokens per second / those of the first stack - 1", True, "gain"),
}


def metric_name(key: str) -> str:
    """The name of a metric in tables and in `--fail-if`: metric_name("routed_max_over_mean") is "routed peak/mean"."""
    total = key.removeprefix("routed_")
    return f"{'' if total == key else 'routed '}{METRICS[total].name or total}"


def metric_key(name: str, keys: Iterable[str]) -> str | None:
    """The metric that has this name or key; None if it is not one of `keys`."""
    return next((key for key in keys if name.lower() in (key, metric_name(key))), None)
