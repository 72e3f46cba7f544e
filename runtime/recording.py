"""Records the routing of a run as tokens of a trace. A replay of this trace gives the same load as the run."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from epsim.runtime.layer import ExpertParallelMoE, LayerRecord
from epsim.traces.trace import Array, Phase, TokenBlock

Seen: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
RankRecording: TypeAlias = tuple[Array, Array | None]


class RoutingRecorder:
    """Keeps the routed ids of every call of `layers`, in order, on this rank; `block` moves them to the CPU.

    scores: keep the model's choice and its scores instead, for a stack with a router policy. In a replay the policy
    computes the same routing from them.
    """

    def __init__(self, layers: Sequence[ExpertParallelMoE], scores: bool = False) -> None:
        self.layers, self.scores = [layer.layer for layer in layers], scores
        self._seen: dict[tuple[int, int], Seen] = {}
        for layer in layers:
            layer.observers.append(self._see)

    def _see(self, record: LayerRecord) -> None:
        # A copy, because a captured graph overwrites the tensor in the next step.
        ids = (record.chosen if self.scores else record.ids).to(torch.int16, copy=True)
        self._seen[record.step, record.layer] = (ids, record.scores.clone() if self.scores else None)

    def steps(self) -> list[int]:
        """Complete steps recorded so far, ascending."""
        numbers = sorted({step for step, _ in self._seen})
        return [step for step in numbers if all((step, layer) in self._seen for layer in self.layers)]

    def recorded(self) -> dict[int, RankRecording]:
        """This rank's recording: step -> ids [T, L, k], scores [T, L, E] float32 or None."""
        result: dict[int, RankRecording] = {}
        for step in self.steps():
            ids, scores = zip(*(self._seen[step, layer] for layer in self.layers))
            kept = torch.stack(scores, dim=1).cpu().numpy() if self.scores else None
            result[step] = (torch.stack(ids, dim=1).cpu().numpy(), kept)
        return result

    def block(
        self, group: dist.ProcessGroup | None = None, phase_of: Mapping[int, Phase] | None = None
    ) -> TokenBlock | None:
        """The tokens of all ranks on rank 0, None on others. Collective. Raises ValueError if recorded steps differ.
        phase_of: the phase of each step, to be stored in the block."""
        recorded = self.recorded()
        if not dist.is_initialized():
            return joined([recorded], phase_of)
        gathered: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
        dist.gather_object(recorded, gathered, group=group, group_dst=0)
        return None if gathered is None else joined(gathered, phase_of)


def joined(by_rank: list[dict[int, RankRecording]], phase_of: Mapping[int, Phase] | None = None) -> TokenBlock:
    """Joins each rank's `RoutingRecorder.recorded` into a block, ranks in order."""
    steps = sorted(by_rank[0])
    for rank, seen in enumerate(by_rank):
        if sorted(seen) != steps:
            raise ValueError(f"rank {rank} recorded {len(seen)} steps, rank 0 {len(steps)}: ranks ran different steps")
    parts = [(rank, *recorded[step]) for step in steps for rank, recorded in enumerate(by_rank)]
    sizes = [len(ids) for _, ids, _ in parts]
    if not parts:
        raise ValueError("nothing recorded: run at least one step")
    scores = [part for _, _, part in parts if part is not None]
    return TokenBlock(
        np.array(steps, dtype=np.int64),
        np.repeat(np.repeat(np.arange(len(steps)), len(by_rank)), sizes),
        np.repeat(np.array([rank for rank, _, _ in parts], dtype=np.int64), sizes),
        np.concatenate([ids for _, ids, _ in parts]),
        np.concatenate(scores) if scores else None,
        phase=None if phase_of is None else np.array([phase_of[step] for step in steps], dtype=object),
    )
