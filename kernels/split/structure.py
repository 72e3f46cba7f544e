"""What a placement fixes about the split problem, laid out once for all batches: who may serve what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SplitStructure:
    """The bipartite graph of experts and ranks of every layer of a placement, in flat tables.

    A *replicated* expert has copies on at least two ranks; the rest are fixed to the one rank that holds them. Physical
    experts of one expert on one rank are one *copy*. All layers' replicated experts stand in one list of K, by layer,
    then by number of copies, then by id; their copies in one list of C, by expert, then by rank.

    physical_to_logical [L, P]: the placement this was made from, on the CPU.
    fixed_start [L, R + 1]: rank r of layer l holds `fixed_expert[fixed_start[l, r] : fixed_start[l, r + 1]]`.
    layer_start [L + 1]: layer l has the replicated experts layer_start[l] .. layer_start[l + 1] - 1.
    expert [K]: logical id. copy_start [K + 1]: an expert's copies. copy_rank [C]: a copy's rank. copy_expert [C]: its
    expert's place in `expert`, counted from the layer's first.
    rank_start [L, R + 1], rank_copy [C]: the copies on a rank, counted from the layer's first.
    slot_copy [L, P]: the copy that a slot belongs to, counted from the layer's first, or -1 for a fixed expert.
    slot_place [L, P], slot_mates [L, P]: which of how many slots with the same expert on the same rank.
    """

    physical_to_logical: torch.Tensor
    num_ranks: int
    num_experts: int
    fixed_start: Ints
    fixed_expert: Ints
    layer_start: Ints
    expert: Ints
    copy_start: Ints
    copy_rank: Ints
    copy_expert: Ints
    rank_start: Ints
    rank_copy: Ints
    slot_copy: Ints
    slot_place: Ints
    slot_mates: Ints

    @property
    def num_layers(self) -> int:
        return self.physical_to_logical.shape[0]

    @property
    def num_physical(self) -> int:
        return self.physical_to_logical.shape[1]


def prepare(physical_to_logical: torch.Tensor, num_ranks: int, num_experts: int | None = None) -> SplitStructure:
    """Lays out the split problems of a placement; needed again only when the placement changes.

    physical_to_logical [L, P] int64, slot p on rank p // (P // num_ranks). num_experts: E, by default the largest id
    plus one. Raises ValueError where P does not divide, or an expert is out of range or has no slot.
    """
    slots = physical_to_logical.detach().cpu().numpy()
    if slots.ndim != 2 or slots.dtype != np.int64 or not slots.size:
        raise ValueError(f"physical_to_logical is {list(slots.shape)} {slots.dtype}, not [layers, slots] int64")
    num_layers, num_physical = slots.shape
    if num_ranks < 1 or num_physical % num_ranks:
        raise ValueError(f"{num_physical} slots do not divide among {num_ranks} ranks")
    num_experts = int(slots.max()) + 1 if num_experts is None else num_experts
    if slots.min() < 0 or slots.max() >= num_experts:
        raise ValueError(f"a slot names an expert outside 0..{num_experts - 1}")

    # One key per slot, (layer, expert, rank): equal keys are slots of one copy.
    layer = np.repeat(np.arange(num_layers), num_physical)
    rank = np.tile(np.arange(num_physical) // (num_physical // num_ranks), num_layers)
    key = (layer * num_experts + slots.ravel()) * num_ranks + rank
    copies, copy_of_slot, mates = np.unique(key, return_inverse=True, return_counts=True)
    owner, on_rank = np.divmod(copies, num_ranks)
    num_copies = np.bincount(owner, minlength=num_layers * num_experts)
    if (num_copies == 0).any():
        absent = divmod(int((num_copies == 0).argmax()), num_experts)
        raise ValueError(f"layer {absent[0]} has no slot for expert {absent[1]}")

    fixed = num_copies[owner] == 1
    fixed_layer, fixed_expert = np.divmod(owner[fixed], num_experts)
    fixed_place = fixed_layer * num_ranks + on_rank[fixed]

    # Experts with few copies first: the sweep then ends with those that can still even things out.
    owners = np.flatnonzero(num_copies > 1)
    owners = owners[np.lexsort((owners, num_copies[owners], owners // num_experts))]
    place = np.full(num_layers * num_experts, -1)
    place[owners] = np.arange(len(owners))
    moved = np.flatnonzero(~fixed)
    moved = moved[np.lexsort((on_rank[moved], place[owner[moved]]))]
    copy_layer = owner[moved] // num_experts
    layer_start = _starts(owners // num_experts, num_layers)
    layer_copies = _starts(copy_layer, num_layers)
    by_rank = np.lexsort((on_rank[moved], copy_layer))
    new_copy = np.full(len(copies), -1)
    new_copy[moved] = np.arange(len(moved)) - layer_copies[copy_layer]

    slot_order = np.argsort(copy_of_slot, kind="stable")
    slot_place = np.empty(len(key), dtype=np.int64)
    slot_place[slot_order] = np.arange(len(key)) - _starts(copy_of_slot, len(copies))[copy_of_slot[slot_order]]
    shape = (num_layers, num_physical)
    return SplitStructure(
        physical_to_logical=torch.from_numpy(slots.copy()),
        num_ranks=num_ranks,
        num_experts=num_experts,
        fixed_start=_starts_by_rank(fixed_place, num_layers, num_ranks),
        fixed_expert=fixed_expert[np.argsort(fixed_place, kind="stable")],
        layer_start=layer_start,
        expert=owners % num_experts,
        copy_start=_starts(place[owner[moved]], len(owners)),
        copy_rank=on_rank[moved],
        copy_expert=place[owner[moved]] - layer_start[copy_layer],
        rank_start=_starts_by_rank(copy_layer * num_ranks + on_rank[moved], num_layers, num_ranks),
        rank_copy=by_rank - layer_copies[copy_layer[by_rank]],
        slot_copy=new_copy[copy_of_slot].reshape(shape),
        slot_place=slot_place.reshape(shape),
        slot_mates=mates[copy_of_slot].reshape(shape),
    )


def _starts(group: Ints, num_groups: int) -> Ints:
    """[num_groups + 1]: where each group's members begin once sorted by group."""
    return np.concatenate(([0], np.bincount(group, minlength=num_groups).cumsum())).astype(np.int64)


def _starts_by_rank(place: Ints, num_layers: int, num_ranks: int) -> Ints:
    """[L, R + 1]: where each (layer, rank)'s members begin, with the end of the layer's last rank."""
    starts = _starts(place, num_layers * num_ranks)
    index = np.arange(num_layers)[:, None] * num_ranks + np.arange(num_ranks + 1)
    return np.ascontiguousarray(starts[index])
