"""The detail of one stack for the report, by step, layer and rank: gathered block by block, with a bounded size."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from epsim.score.metrics import Values
from epsim.score.statistics import Floats, add_in_order

MOST_STRETCHES = 200
"""If there are more steps, successive steps are joined into stretches."""
MOST_CELLS = 1 << 15
"""Limit on the values of one stack's heat map by stretch and rank."""
MOST_LAYER_CELLS = 24_000
"""Limit on the values of one stack's heat maps by layer, all layers together."""
MOST_LAYER_STRETCHES = 64
QUANTILES = np.linspace(0.0, 1.0, 201)


class StackDetail:
    """Gathers the detail of one stack over `num_steps` steps, which are added in order."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps, self._seen = num_steps, 0
        self._sums: dict[str, Floats] = {}
        self._counts: dict[str, Floats] = {}
        self._rank = self._layer = torch.zeros(0)
        self._pairs = self._layer_pairs = torch.zeros(0)
        self._by_tokens: dict[int, Floats] = {}

    @property
    def stretches(self) -> int:
        """The number of stretches that steps are joined into."""
        return len(self._rank)

    def add(self, metrics: Mapping[str, Values], total: torch.Tensor, tokens: torch.Tensor) -> None:
        """Adds a block of S steps. total [S, L, R] float64: the load of each rank. tokens [S, L] float64."""
        num_steps, num_layers, num_ranks = total.shape
        if not self._rank.numel():
            stretches = max(1, min(self._num_steps, MOST_STRETCHES, MOST_CELLS // num_ranks))
            cells = num_layers * num_ranks
            coarse = min(self._num_steps, MOST_LAYER_STRETCHES, MOST_LAYER_CELLS // cells)
            self._rank, self._pairs = _zeros(stretches, num_ranks), _zeros(stretches)
            self._layer, self._layer_pairs = _zeros(coarse, num_layers, num_ranks), _zeros(coarse, num_layers)
        over_mean = (total / total.mean(-1, keepdim=True)).nan_to_num()
        busy = (total.sum(-1) > 0).double()
        stretch = self._stretch_of(num_steps, len(self._rank))
        add_in_order(self._rank.numpy(), stretch, over_mean.numpy().sum(1))
        add_in_order(self._pairs.numpy(), stretch, busy.sum(1).numpy())
        if len(self._layer):
            coarse_stretch = self._stretch_of(num_steps, len(self._layer))
            add_in_order(self._layer.numpy(), coarse_stretch, over_mean.numpy())
            add_in_order(self._layer_pairs.numpy(), coarse_stretch, busy.numpy())
        self._add_metrics(metrics, stretch)
        self._add_tokens(metrics["max_over_mean"], tokens.amax(-1) / num_ranks)
        self._seen += num_steps

    def entry(self, values: npt.NDArray[np.float32]) -> dict[str, Any]:
        """The detail's keys in the stack's entry of results.json. values: all values of max_over_mean."""
        if not self._rank.numel():
            return {}
        entry: dict[str, Any] = {
            "by_step": {key: _means(sums, self._counts[key]) for key, sums in self._sums.items()},
            "load_over_mean_by_step": _rounded(self._rank / self._pairs[:, None]),
            "max_over_mean_by_tokens": [
                {"low": _edge(power), "high": _edge(power + 1), "steps": int(steps), "mean": total / pairs}
                for power, (steps, total, pairs) in sorted(self._by_tokens.items())
            ],
        }
        if len(self._layer):
            entry["load_over_mean_by_layer"] = _rounded((self._layer / self._layer_pairs[..., None]).transpose(0, 1))
        if len(values):
            entry["max_over_mean_quantiles"] = np.round(np.quantile(values, QUANTILES), 5).tolist()
        return entry

    def _stretch_of(self, num_steps: int, stretches: int) -> npt.NDArray[np.int64]:
        """[S]: the stretch of each of the next steps."""
        return (self._seen + np.arange(num_steps)) * stretches // max(self._num_steps, 1)

    def _add_metrics(self, metrics: Mapping[str, Values], stretch: npt.NDArray[np.int64]) -> None:
        for key, value in metrics.items():
            if isinstance(value, str) or key.startswith("routed_"):
                continue
            steps = np.ascontiguousarray(value.numpy()).reshape(len(stretch), -1)
            valid = ~np.isnan(steps)
            for sums, part in ((self._sums, np.where(valid, steps, 0.0)), (self._counts, valid)):
                np.add.at(sums.setdefault(key, np.zeros(len(self._rank))), stretch, part.sum(1))

    def _add_tokens(self, max_over_mean: Values, tokens: torch.Tensor) -> None:
        """Sums by the steps' number of tokens, in powers of two. tokens [S]: tokens per rank, mean over ranks."""
        assert isinstance(max_over_mean, torch.Tensor)
        values = np.ascontiguousarray(max_over_mean.numpy())
        number = (~np.isnan(values)).sum(1)
        powers = torch.floor(torch.log2(tokens.clamp(min=0.5))).long().tolist()
        rows = np.stack((number > 0, np.nansum(values, 1), number), 1)
        for power, row in zip(powers, rows):
            if row[0]:
                self._by_tokens[power] = self._by_tokens.get(power, np.zeros(3)) + row


def step_weights(counts: Floats, stretches: int) -> list[int]:
    """counts [S] -> [stretches]: their sums by the stretches of `StackDetail`."""
    sums = np.zeros(stretches)
    np.add.at(sums, np.arange(len(counts)) * stretches // max(len(counts), 1), counts)
    return [int(value) for value in sums]


def _edge(power: int) -> float:
    return 0.0 if power < 0 else float(2**power)


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _means(sums: Floats, counts: Floats) -> list[float | None]:
    return [float(f"{s / n:.7g}") if n else None for s, n in zip(sums.tolist(), counts.tolist(), strict=True)]


def _rounded(values: torch.Tensor) -> Any:
    """Nested lists with three decimals; None for NaN."""
    rounded = values.mul(1000).round().div(1000)
    flat = [None if value != value else value for value in rounded.flatten().tolist()]
    return np.array(flat, dtype=object).reshape(values.shape).tolist()
