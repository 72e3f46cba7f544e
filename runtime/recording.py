"""What a run routed, as a trace's tokens: it replays to the load that the run had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from epsim.runtime.layer import ExpertParallelMoE, LayerRecord
from epsim.traces.trace import Ints, TokenBlock


class RoutingRecorder:
    """Keeps the routed ids of every call of `layers`, in their order, on this rank; on CPUs at `block`, not before."""

    def __init__(self, layers: Sequence[ExpertParallelMoE]) -> None:
        self.layers = [layer.layer for layer in layers]
        self._seen: dict[tuple[int, int], torch.Tensor] = {}
        for layer in layers:
            layer.observers.append(self._see)

    def _see(self, record: LayerRecord) -> None:
        # Copied: a captured graph writes the same tensor again in the next step.
        self._seen[record.step, record.layer] = record.ids.to(torch.int16, copy=True)

    def steps(self) -> list[int]:
        """Whole steps seen so far, ascending."""
        numbers = sorted({step for step, _ in self._seen})
        return [step for step in numbers if all((step, layer) in self._seen for layer in self.layers)]

    def own(self) -> dict[int, Ints]:
        """Of this rank: step -> ids [T, L, k]."""
        return {
            step: torch.stack([self._seen[step, layer] for layer in self.layers], dim=1).cpu().numpy()
            for step in self.steps()
        }

    def block(self, group: dist.ProcessGroup | None = None) -> TokenBlock | None:
        """All ranks' tokens, on rank 0; None elsewhere. Collective. Raises ValueError where ranks saw other steps."""
        own = self.own()
        if not dist.is_initialized():
            return joined([own])
        gathered: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
        dist.gather_object(own, gathered, group=group, group_dst=0)
        return None if gathered is None else joined(gathered)


def joined(by_rank: list[dict[int, Ints]]) -> TokenBlock:
    """Each rank's step -> ids [T, L, k], ranks in order."""
    steps = sorted(by_rank[0])
    for rank, seen in enumerate(by_rank):
        if sorted(seen) != steps:
            raise ValueError(f"rank {rank} recorded {len(seen)} steps, rank 0 {len(steps)}: ranks ran different steps")
    parts = [(place, rank, by_rank[rank][step]) for place, step in enumerate(steps) for rank in range(len(by_rank))]
    sizes = [len(ids) for _, _, ids in parts]
    if not parts:
        raise ValueError("nothing recorded: no step was run")
    return TokenBlock(
        np.array(steps, dtype=np.int64),
        np.repeat(np.array([place for place, _, _ in parts], dtype=np.int64), sizes),
        np.repeat(np.array([rank for _, rank, _ in parts], dtype=np.int64), sizes),
        np.concatenate([ids for _, _, ids in parts]),
    )
