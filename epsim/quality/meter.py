"""Measures a router policy while a model runs: active experts, and the probability of the experts that it keeps."""

import torch

from epsim.quality.hook import Reroute, contiguous_ranks


class Meter:
    """A `Reroute` that calls another one and measures it. Sums stay on the device until they are read. num_ranks:
    numbers of ranks for which to count the active experts of the busiest rank; experts are in contiguous shares."""

    def __init__(self, reroute: Reroute, num_ranks: tuple[int, ...] = (1,)) -> None:
        self.reroute, self.num_ranks = reroute, num_ranks
        self._sums: torch.Tensor | None = None
        self._batches = 0

    def __call__(
        self, scores: torch.Tensor, weight_basis: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, new_weights = self.reroute(scores, weight_basis, expert_ids, weights)
        num_experts = scores.shape[-1]
        active = torch.zeros(len(ids), num_experts + 1, dtype=torch.bool, device=ids.device)
        active.scatter_(1, torch.where(ids >= 0, ids, num_experts).flatten(1), True)
        most_active = [
            (active[:, :num_experts, None] & contiguous_ranks(num_experts, r, ids.device)).sum(1).amax(-1).sum()
            for r in self.num_ranks
        ]
        mass = [
            weight_basis.gather(-1, i.clamp(min=0)).masked_fill(i < 0, 0.0).sum(dtype=torch.float64)
            for i in (ids, expert_ids)
        ]
        sums = torch.stack([*(count.double() for count in most_active), *mass])
        self._sums = sums if self._sums is None else self._sums + sums
        self._batches += len(ids)
        return ids, new_weights

    def active_experts(self) -> dict[int, float]:
        """{number of ranks: active experts of the busiest rank}, means over batches and layers."""
        assert self._sums is not None
        return dict(zip(self.num_ranks, (self._sums[: len(self.num_ranks)] / self._batches).tolist(), strict=True))

    def kept_mass(self) -> float:
        """The sum of the weight basis (in most models the probability) of the experts that tokens took, over the sum
        for the model's choice."""
        assert self._sums is not None
        return float(self._sums[-2] / self._sums[-1])
