"""Planning placements on recorded steps: one pass over a history, in bounded memory."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from epsim.placement.base import Cluster, Placement, Stack, Target
from epsim.placement.formats import write_placement
from epsim.score.steps import step_keys
from epsim.traces.store import SMALL_BLOCK, StoredTrace
from epsim.traces.trace import Block, CountsBlock, Ints, RankCountsBlock, TraceMeta

MAX_HISTORY_BYTES = 256 * 2**20
BLOCK_BYTES = SMALL_BLOCK

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of steps just finished."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan(Placement):
    """A placement for the layers of a trace, which can be written to a file. layers [L]: their numbers in the model."""

    layers: tuple[int, ...] = ()

    def write(self, path: str | os.PathLike[str], format: str = "epsim") -> None:
        """Writes the placement as epsim, sglang, vllm or trtllm. Raises ValueError if the format cannot hold it."""
        write_placement(self, path, format, self.layers)


def to_counts(block: Block, num_experts: int) -> CountsBlock:
    """Converts a block of any level to counts."""
    if isinstance(block, CountsBlock):
        return block
    if isinstance(block, RankCountsBlock):
        return block.to_counts()
    return block.to_counts(num_experts)


def plan_placements(
    stacks: Sequence[Stack],
    history: StoredTrace,
    num_steps: int,
    meta: TraceMeta,
    cluster: Cluster,
    progress: Progress,
    keys: list[Ints] | None = None,
) -> list[Placement]:
    """Plans the placement of each stack for the layers of `meta`, on the first `num_steps` steps of `history`.

    Stacks with equal placement policies share one placement, unless the policy plans for the whole stack.

    keys: a list to which the `step_keys` of the steps planned on are added.
    Raises ValueError if the history is of another model, or if a policy has no placement that fits the cluster.
    """
    policies = {stack.placement for stack in stacks}
    shape = (meta.num_layers, meta.num_experts)
    total = np.zeros(shape, dtype=np.int64)
    steps: list[Ints] = []
    if any(policy.needs_history for policy in policies):
        pick = _matching_layers(history.meta, meta)
        # Policies that need single steps get evenly spaced steps, as many as fit in MAX_HISTORY_BYTES.
        stride = max(1, -(-num_steps * total.nbytes // MAX_HISTORY_BYTES))
        seen = 0
        for block in history.blocks(0, num_steps, max_bytes=BLOCK_BYTES):
            counts = to_counts(block, meta.num_experts).counts
            if history.meta.layers != meta.layers:
                counts = counts[:, pick]
            total += counts.sum(axis=0)
            if keys is not None:
                keys.append(step_keys(counts))
            if any(policy.needs_steps for policy in policies):
                steps.append(counts[-seen % stride :: stride].copy())
            seen += len(counts)
            progress(len(counts))
    whole = torch.from_numpy(total)[None]
    single = torch.from_numpy(np.concatenate(steps)) if steps else whole
    planned: dict[object, Placement] = {}
    for stack in stacks:
        policy, key = stack.placement, planned_as(stack)
        if key not in planned:
            seen_steps = single if policy.needs_steps else whole
            planned[key] = policy.plan_for(seen_steps, Target(cluster, meta.layers, stack))
            _check_planned(stack, planned[key], meta, cluster)
    return [planned[planned_as(stack)] for stack in stacks]


def _check_planned(stack: Stack, planned: Any, meta: TraceMeta, cluster: Cluster) -> None:
    """Raises ValueError if a policy returns no placement, or one for other layers, experts, ranks or nodes."""
    name = stack.placement.name
    if not isinstance(planned, Placement):
        raise ValueError(f"{name}: its plan is of type {type(planned).__name__}: return a Placement")
    given = (planned.num_layers, planned.num_experts, planned.num_ranks, planned.num_nodes)
    wanted = (meta.num_layers, meta.num_experts, cluster.num_ranks, cluster.num_nodes)
    for what, number, needed in zip(("layers", "experts", "ranks", "nodes"), given, wanted, strict=True):
        if number != needed:
            raise ValueError(f"{name}: its plan has {number} {what}: return a Placement of {needed} {what}")


def planned_as(stack: Stack) -> object:
    """A key that is equal for stacks that share a placement."""
    return stack if stack.placement.plans_for_stack else stack.placement


def _matching_layers(history: TraceMeta, meta: TraceMeta) -> list[int]:
    """The indices, in the history, of the trace's layers."""
    if history.num_experts != meta.num_experts:
        raise ValueError(
            f"--history has {history.num_experts} experts per layer and the trace has {meta.num_experts}: "
            "give a history of the same model"
        )
    index = {layer: i for i, layer in enumerate(history.layers)}
    missing = [layer for layer in meta.layers if layer not in index]
    if missing:
        raise ValueError(f"--history lacks layer {missing[0]} of the trace: give a history of the same model")
    return [index[layer] for layer in meta.layers]
