"""The collectives that balancing needs, with counters of calls."""

from collections import Counter

import torch
import torch.distributed as dist


class Collective:
    """Sums and gathers small int64 tensors over the expert-parallel group, or over this process alone without a group.
    calls: the number of calls of each collective. Tests check with it that policies make no needless calls."""

    name = "torch"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.calls: Counter[str] = Counter()

    def close(self) -> None:
        """Releases shared memory. Collective. Call it before the process group is destroyed."""

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of int64 [...] over ranks, in place if possible."""
        self.calls["all_reduce"] += 1
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def loads_and_tokens(self, loads: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The load of each rank [R], summed over source ranks, and the number of tokens of each source rank [R], by one
        all-reduce. loads [R] int64: the load of each rank from this rank's tokens. tokens []: their number."""
        both = loads.new_zeros(2, self.size)
        both[0], both[1, self.rank] = loads, tokens
        both = self.all_reduce(both)
        return both[0], both[1]

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """The values [...] int64 of all ranks, [R, ...]."""
        self.calls["all_gather"] += 1
        gathered = values.new_empty(self.size, *values.shape)
        if self.size > 1:
            dist.all_gather_into_tensor(gathered.view(-1), values.contiguous().view(-1), group=self.group)
        else:
            gathered[0] = values
        return gathered
