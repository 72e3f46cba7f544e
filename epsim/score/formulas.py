"""The names, units and formulas of the metrics in results.json."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """formula: of the value of a layer in a step, in words. larger_is_better: if not, a smaller value is better."""

    unit: str
    formula: str
    larger_is_better: bool = False


METRICS: Mapping[str, Metric] = {
    "peak": Metric("assignments", "largest load of a rank"),
    "mean_load": Metric("assignments", "mean load over ranks"),
    "max_over_mean": Metric("ratio", "peak / mean"),
    "balancedness": Metric("ratio", "mean / peak (SGLang)", True),
    "balancedness_vllm": Metric("ratio", "sum over layers of means / sum over layers of peaks, per step (vLLM)", True),
    "imbalance_ratio": Metric("ratio", "(peak - mean) / mean (TensorRT-LLM)"),
    "optimality_gap": Metric("ratio", "peak / optimum - 1"),
    "gap_placement": Metric("ratio", "optimum / mean - 1"),
    "gap_split": Metric("ratio", "min(real-valued peak, integer peak) / optimum - 1"),
    "gap_rounding": Metric("ratio", "integer peak / min(real-valued peak, integer peak) - 1"),
    "gap_shared": Metric("ratio", "peak / lowest peak of any shared dispatch for this routed load - 1"),
    "active_experts": Metric("experts", "largest number of physical experts with load on one rank"),
    "active_experts_total": Metric("experts", "number of physical experts with load, on all ranks together"),
    "remote_rank_share": Metric("share", "assignments that leave their source rank / all assignments"),
    "remote_node_share": Metric("share", "assignments that leave their source node / all assignments"),
    "kept_mass": Metric("share", "router probability of the kept experts / of the model's choice", True),
    "bytes_read": Metric("bytes", "expert weights read by the busiest rank"),
    "layer_time_us": Metric("us", "time of the layer on its slowest rank"),
    "throughput_gain": Metric("ratio", "tokens per second / those of the first stack - 1", True),
}
