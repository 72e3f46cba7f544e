"""Prepares the part of the split problem that depends on the placement alone: which rank may serve which expert."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Ints: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


class Tables(NamedTuple):
    """The graph of experts and ranks of all layers, as flat arrays: float64 for copy_share and copy_until, else int32.

    The slots of one expert on one rank are one *copy*. A *replicated* expert has copies on at least two ranks; all
    other experts are *fixed* to their rank. Experts of one *colour* share no rank. Empty slots are in no list.
    The replicated experts of a layer are sorted: those with two copies first, then by colour. Its copies are sorted by
    expert in this order, then by rank. Positions are relative to the layer's first expert or copy.

    fixed_start [L, R + 1], fixed_expert: rank r of layer l holds the fixed experts
        fixed_expert[fixed_start[l, r] : fixed_start[l, r + 1]].
    expert_start [L + 1], expert: layer l has the replicated experts expert[expert_start[l] : expert_start[l + 1]].
    copy_start: the copies of the k-th replicated expert of layer l are copy_start[i] .. copy_start[i + 1] - 1 with
        i = expert_start[l] + l + k. (A layer has one entry more than replicated experts.)
    num_paired [L]: the number of copies of experts with two copies. They are the first copies of the layer.
    layer_copies [L + 1]: the index at which each layer begins in copy_rank, copy_expert and rank_copy.
    copy_rank, copy_expert: the rank of a copy and the position of its expert.
    copy_share: the copy's share of the expert's slots. copy_until: the sum of the shares up to this copy.
    rank_start [L, R + 1], rank_copy: the copies on each rank.
    source [L, P]: the index of a slot's load in the list of the E experts' loads followed by the layer's copies' loads.
        -1 for an empty slot.
    twin_start [L + 1], twin [_, 3]: the slots of copies that have several slots. A row is the slot, its index among the
        slots of the copy, and the number of slots of the copy.
    """

    fixed_start: Ints
    fixed_expert: Ints
    expert_start: Ints
    expert: Ints
    copy_start: Ints
    num_paired: Ints
    layer_copies: Ints
    copy_rank: Ints
    copy_expert: Ints
    copy_share: Floats
    copy_until: Floats
    rank_start: Ints
    rank_copy: Ints
    source: Ints
    twin_start: Ints
    twin: Ints


@dataclass(frozen=True, slots=True, eq=False)
class SplitStructure:
    """A placement prepared for `solve`: physical_to_logical [L, P] int64 (on the CPU) and its tables.

    on_device: the tables on CUDA devices.
    """

    physical_to_logical: torch.Tensor
    num_ranks: int
    num_experts: int
    tables: Tables
    on_device: dict[torch.device, Any] = field(default_factory=dict, repr=False)

    @property
    def num_layers(self) -> int:
        return self.physical_to_logical.shape[0]

    @property
    def num_physical(self) -> int:
        return self.physical_to_logical.shape[1]


def prepare(physical_to_logical: torch.Tensor, num_ranks: int, num_experts: int | None = None) -> SplitStructure:
    """Prepares the split problems of a placement. Needed once per placement.

    physical_to_logical [L, P] int64: the expert in each slot, -1 for an empty slot; slot p is on rank
    p // (P // num_ranks). num_experts: by default the largest id plus 1.
    Raises ValueError if P is not a multiple of num_ranks, or if an expert is out of range or has no slot.
    """
    slots = physical_to_logical.detach().cpu().numpy()
    if slots.ndim != 2 or slots.dtype != np.int64 or not slots.size:
        raise ValueError(f"physical_to_logical is {list(slots.shape)} {slots.dtype}, not [layers, slots] int64")
    num_layers, num_physical = slots.shape
    if num_ranks < 1 or num_physical % num_ranks:
        raise ValueError(f"{num_physical} slots do not divide among {num_ranks} ranks")
    num_experts = max(int(slots.max()) + 1, 1) if num_experts is None else num_experts
    if slots.min() < -1 or slots.max() >= num_experts:
        raise ValueError(f"a slot names an expert outside 0..{num_experts - 1} (or -1 for an empty slot)")
    if num_experts > num_physical:
        raise ValueError(f"{num_experts} experts, with ids up to {num_experts - 1}, do not fit {num_physical} slots")

    # One key (layer, expert, rank) per filled slot. Slots with equal keys are one copy.
    filled = np.flatnonzero(slots.ravel() >= 0)
    held, (layer, slot) = slots.ravel()[filled], np.divmod(filled, num_physical)
    key = (layer * num_experts + held) * num_ranks + slot // (num_physical // num_ranks)
    copies, copy_of_slot, mates = np.unique(key, return_inverse=True, return_counts=True)
    owner, on_rank = np.divmod(copies, num_ranks)
    num_copies = np.bincount(owner, minlength=num_layers * num_experts)
    if (num_copies == 0).any():
        absent = divmod(int((num_copies == 0).argmax()), num_experts)
        raise ValueError(f"layer {absent[0]} has no slot for expert {absent[1]}")

    fixed = num_copies[owner] == 1
    fixed_layer, fixed_expert = np.divmod(owner[fixed], num_experts)
    fixed_group = fixed_layer * num_ranks + on_rank[fixed]

    # Experts with few copies come first, so that a sweep ends with experts that can balance more ranks.
    experts = np.flatnonzero(num_copies > 1)
    expert_layer = experts // num_experts
    experts = experts[np.lexsort((experts, num_copies[experts], expert_layer))]
    experts = experts[_by_colour(experts, num_copies[experts], owner, on_rank, expert_layer)]
    expert_start = _starts(expert_layer, num_layers)
    position = np.full(num_layers * num_experts, -1)
    position[experts] = np.arange(len(experts))

    moved = np.flatnonzero(~fixed)
    moved = moved[np.lexsort((on_rank[moved], position[owner[moved]]))]
    copy_layer, copy_rank = owner[moved] // num_experts, on_rank[moved]
    layer_copies = _starts(copy_layer, num_layers)
    by_rank = np.lexsort((copy_rank, copy_layer))
    new_copy = np.full(len(copies), -1)
    new_copy[moved] = np.arange(len(moved)) - layer_copies[copy_layer]
    # Each layer has a 0 before its first expert. Ends are relative to the layer's first copy.
    ends = num_copies[experts].cumsum() - layer_copies[expert_layer]
    copy_start = np.insert(ends, expert_start[:-1], 0)

    # For each copy, the number of the expert's slots up to and including it: running sums, restarted at each expert.
    upto = mates[moved].cumsum()
    first_of_expert = np.concatenate(([0], num_copies[experts].cumsum()[:-1]))[position[owner[moved]]]
    upto -= (upto - mates[moved])[first_of_expert]
    num_slots = np.bincount(held + layer * num_experts)[owner[moved]]

    slot_order = np.argsort(copy_of_slot, kind="stable")
    slot_index = np.empty(len(key), dtype=np.int64)
    slot_index[slot_order] = np.arange(len(key)) - _starts(copy_of_slot, len(copies))[copy_of_slot[slot_order]]
    slot_mates = mates[copy_of_slot]
    twins = np.flatnonzero(slot_mates > 1)
    slot_copy = new_copy[copy_of_slot]
    source = np.full(slots.shape, -1)
    source.ravel()[filled] = np.where(slot_copy < 0, held, num_experts + slot_copy)
    tables = Tables(
        fixed_start=_narrow(_starts_by_rank(fixed_group, num_layers, num_ranks)),
        fixed_expert=_narrow(fixed_expert[np.argsort(fixed_group, kind="stable")]),
        expert_start=_narrow(expert_start),
        expert=_narrow(experts % num_experts),
        copy_start=_narrow(copy_start),
        num_paired=_narrow(2 * np.bincount(expert_layer[num_copies[experts] == 2], minlength=num_layers)),
        layer_copies=_narrow(layer_copies),
        copy_rank=_narrow(copy_rank),
        copy_expert=_narrow(position[owner[moved]] - expert_start[copy_layer]),
        copy_share=mates[moved] / num_slots,
        copy_until=upto / num_slots,
        rank_start=_narrow(
            _starts_by_rank(copy_layer * num_ranks + copy_rank, num_layers, num_ranks) - layer_copies[:-1, None]
        ),
        rank_copy=_narrow(by_rank - layer_copies[copy_layer[by_rank]]),
        source=_narrow(source),
        twin_start=_narrow(_starts(layer[twins], num_layers)),
        twin=_narrow(np.stack((slot[twins], slot_index[twins], slot_mates[twins]), axis=1)),
    )
    return SplitStructure(torch.from_numpy(slots.copy()), num_ranks, num_experts, tables)


def _by_colour(experts: Longs, num_copies: Longs, owner: Longs, on_rank: Longs, layer: Longs) -> Longs:
    """The order of the experts by layer, two copies before more, then colour. Input order: layer, number of copies.

    An expert gets the lowest colour that no earlier expert has on any of its ranks, separately for experts with two
    copies and with more. Experts of one colour are processed at the same time. owner, on_rank: the expert and the rank
    of each copy, sorted by owner.
    """
    colours = np.empty(len(experts), dtype=np.int64)
    first = np.searchsorted(owner, experts)
    taken: dict[tuple[int, bool, int], int] = {}  # the colours in use, as bits, by (layer, two copies, rank)
    for i, (start, num, in_layer) in enumerate(zip(first.tolist(), num_copies.tolist(), layer.tolist())):
        keys = [(in_layer, num == 2, rank) for rank in on_rank[start : start + num].tolist()]
        union = 0
        for key in keys:
            union |= taken.get(key, 0)
        colour = ~union & (union + 1)
        colours[i] = colour.bit_length()
        for key in keys:
            taken[key] = taken.get(key, 0) | colour
    return np.lexsort((colours, num_copies > 2, layer))


def _narrow(values: npt.NDArray[Any]) -> Ints:
    return np.ascontiguousarray(values, dtype=np.int32)


def _starts(group: Longs, num_groups: int) -> Longs:
    """[num_groups + 1]: the index of each group's first member after sorting by group, then the number of members."""
    return np.concatenate(([0], np.bincount(group, minlength=num_groups).cumsum()))


def _starts_by_rank(group: Longs, num_layers: int, num_ranks: int) -> Longs:
    """[L, R + 1]: the index of the first member of each (layer, rank), then the end of the layer's last rank."""
    index: Longs = np.arange(num_layers)[:, None] * num_ranks + np.arange(num_ranks + 1)
    starts: Longs = _starts(group, num_layers * num_ranks)[index]
    return starts
