"""The names, units and formulas of the metrics in results.json."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """formula: of the value of a layer in a step, in words. larger_is_better: if not, a smaller value is better.
    name: in tables and in `--fail-if`; "" if it is the key. least, most: the smallest and the largest possible value.
    by_rank: whether the largest is least + R - 1 for R ranks, because the busiest rank has at most R times the mean
    load."""

    unit: str
    formula: str
    larger_is_better: bool = False
    name: str = ""
    least: float = 0.0
    most: float = math.inf
    by_rank: bool = False

    def within(self, interval: dict[str, float | None], mean: float, num_ranks: int) -> dict[str, float | None]:
        """The interval of a difference, without the part in which the metric would have an impossible value. mean: the
        mean of the metric, of which the difference is a part. num_ranks: R."""
        difference, low, high = (interval[key] for key in ("difference", "low", "high"))
        if difference is None or low is None or high is None:
            return interval
        most, base = self.least + num_ranks - 1 if self.by_rank else self.most, mean - difference
        low, high = max(low, min(self.least - base, difference, 0)), min(high, max(most - base, difference, 0))
        return interval | {"low": low, "high": high}


METRICS: Mapping[str, Metric] = {
    "peak": Metric("assignments", "largest load of a rank"),
    "mean_load": Metric("assignments", "mean load over ranks"),
    "max_over_mean": Metric("ratio", "peak / mean", name="peak/mean", least=1.0, by_rank=True),
    "balancedness": Metric("ratio", "mean / peak (SGLang)", True, most=1.0),
    "balancedness_vllm": Metric(
        "ratio", "sum over layers of means / sum over layers of peaks, per step (vLLM)", True, most=1.0
    ),
    "imbalance_ratio": Metric("ratio", "(peak - mean) / mean (TensorRT-LLM)", by_rank=True),
    "optimality_gap": Metric("ratio", "peak / optimum - 1", name="gap", by_rank=True),
    "gap_placement": Metric("ratio", "optimum / mean - 1", name="placement gap", by_rank=True),
    "gap_split": Metric("ratio", "min(real-valued peak, integer peak) / optimum - 1", name="split gap", by_rank=True),
    "gap_rounding": Metric(
        "ratio", "integer peak / min(real-valued peak, integer peak) - 1", name="rounding gap", by_rank=True
    ),
    "gap_shared": Metric(
        "ratio", "peak / lowest peak of any shared policy for this routed load - 1", name="shared gap", by_rank=True
    ),
    "active_experts": Metric("experts", "largest number of physical experts with load on one rank", name="active"),
    "active_experts_total": Metric("experts", "number of physical experts with load, on all ranks together"),
    "remote_rank_share": Metric(
        "share", "assignments that leave their source rank / all assignments", name="off rank", most=1.0
    ),
    "remote_node_share": Metric(
        "share", "assignments that leave their source node / all assignments", name="off node", most=1.0
    ),
    "kept_mass": Metric("share", "router probability of the kept experts / of the model's choice", True, "kept"),
    "bytes_read": Metric("bytes", "expert weights read by the busiest rank"),
    "layer_time_us": Metric("us", "time of the layer on its slowest rank", name="layer us"),
    "throughput_gain": Metric("ratio", "tokens per second / those of the first stack - 1", True, "gain", least=-1.0),
}


def metric_name(key: str) -> str:
    """The name of a metric in tables and in `--fail-if`: metric_name("routed_max_over_mean") is "routed peak/mean"."""
    total = key.removeprefix("routed_")
    return f"{'' if total == key else 'routed '}{METRICS[total].name or total}"


def metric_key(name: str, keys: Iterable[str]) -> str | None:
    """The metric that has this name or key; None if it is not one of `keys`."""
    return next((key for key in keys if name.lower() in (key, metric_name(key))), None)
