"""The copies of each expert under a placement, sorted by expert, and what policies compute once per placement."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from epsim.kernels.split import Backend, Solution, SplitStructure, prepare, solve_batched
from epsim.kernels.split.solver import REFUSED
from epsim.placement.base import Placement

T = TypeVar("T")


class Copies:
    """A placement's slots sorted by expert, then by slot ("sorted order"). Empty slots come last.

    has_empty: whether any slot is empty. In `held` and `expert` an empty slot has expert E; `padded` makes a tensor of
    E values fit such indices. held [L, P] int64: the expert in each slot. slot [L, P]: the slot at each position of the
    sorted order. expert [L, P]: the expert at each position. start [L, P]: the position of that expert's first copy (of
    the first empty slot for an empty one). last [L, P] bool: whether the position is an expert's last copy; false for
    empty slots. first [L, E]: the position of each expert's first copy. number [L, E]: how many copies each expert has.
    redundant: whether any expert has several copies. rank_of_slot [P], node_of_rank [R]: as in the placement. backend:
    the backend of `epsim.kernels.split` that solves splits.
    """

    def __init__(self, placement: Placement, backend: Backend = "auto") -> None:
        self.placement = placement
        self.backend = backend
        self.number, slots = placement.copies, placement.physical_to_logical
        self.has_empty = bool((slots < 0).any())
        self.held = torch.where(slots < 0, placement.num_experts, slots) if self.has_empty else slots
        self.slot = self.held.argsort(dim=1, stable=True)
        self.expert = self.held.gather(1, self.slot)
        ends = self.number.cumsum(1)
        self.first = ends - self.number
        self.start = torch.cat([self.first, ends[:, -1:]], dim=1).gather(1, self.expert)
        after = torch.arange(1, slots.shape[1] + 1, device=slots.device)
        self.last = after == self.start + self.padded(self.number).gather(1, self.expert)
        self.redundant = bool((self.number > 1).any())
        self.rank_of_slot = placement.rank_of_slot
        self.node_of_rank = placement.node_of_rank
        self._made: dict[Callable[[Copies], object], object] = {}
        self._making = threading.RLock()  # `make` may call `once` again
        self._memory: dict[tuple[str, int], tuple[Tensor, Any]] | None = None

    def once(self, make: Callable[[Copies], T]) -> T:
        """The result of make(self). It is computed at the first call and kept. make: a function of a module."""
        with self._making:
            if make not in self._made:
                self._made[make] = make(self)
            return self._made[make]  # type: ignore[return-value]

    def padded(self, per_expert: Tensor, empty: int = 0) -> Tensor:
        """[..., E] -> [..., E + 1] with the value `empty` for expert E, or unchanged if no slot is empty."""
        return torch.nn.functional.pad(per_expert, (0, 1), value=empty) if self.has_empty else per_expert

    def remembering(self) -> Copies:
        """The same copies with a memory: results for the same tensor of counts are computed once. Drop it soon; the
        tensors must not change while it is used."""
        view = copy.copy(self)
        view._memory = {}
        return view

    def least_peak(self, counts: Tensor) -> Solution:
        """counts [..., L, E] int64 -> the exact split with the lowest peak load, and the proven bound of that peak."""
        return self._remembered("split", counts, lambda: self._solve(counts, want_split=True))

    def optimum(self, counts: Tensor) -> Tensor:
        """counts [..., L, E] int64 -> [..., L] float64: a proven lower bound of the peak load of any split.

        Raises ValueError if the counts of a layer are negative or sum to 2^53 or more.
        """
        if self._memory is not None and ("split", id(counts)) in self._memory:
            solution = self.least_peak(counts)
        else:
            solution = self._remembered("peak", counts, lambda: self._solve(counts, want_split=False))
        if solution.status.any():  # from a GPU; on the CPU the solver raises the error itself
            raise ValueError(REFUSED[int(solution.status.max())])
        return solution.bound

    def _solve(self, counts: Tensor, want_split: bool) -> Solution:
        return solve_batched(self.once(split_structure), counts, backend=self.backend, want_split=want_split)

    def per_slot(self, per_expert: Tensor, empty: int = 0) -> Tensor:
        """[..., L, E] -> [..., L, P]: the value of a slot's expert; `empty` for an empty slot."""
        slots = self.held.expand(*per_expert.shape[:-1], self.held.shape[-1])
        return self._remembered(f"slots {empty}", per_expert, lambda: self.padded(per_expert, empty).gather(-1, slots))

    def _remembered(self, what: str, tensor: Tensor, make: Callable[[], T]) -> T:
        if self._memory is None:
            return make()
        key = what, id(tensor)
        if key not in self._memory:
            self._memory[key] = tensor, make()  # keeps the tensor alive, so that no other gets its id
        value: T = self._memory[key][1]
        return value

    def shares(self, weight: Tensor) -> Tensor:
        """weight [..., L, P] float64 > 0 -> [..., L, P]: each slot's part of the weight of its expert's copies, 0 for
        an empty slot."""
        slots = self.held.expand(weight.shape)
        whole = weight.new_zeros(*weight.shape[:-1], self.placement.num_experts + 1).scatter_add_(-1, slots, weight)
        return weight / whole.gather(-1, slots) * (self.held < self.placement.num_experts)

    def per_rank(self, per_slot: Tensor) -> Tensor:
        """[..., P] -> [..., R]: the sum over a rank's slots."""
        shape = (*per_slot.shape[:-1], self.placement.num_ranks, self.placement.slots_per_rank)
        return per_slot.reshape(shape).sum(-1)


def split_structure(copies: Copies) -> SplitStructure:
    """What the split solver needs to know of the placement."""
    return prepare(copies.placement.physical_to_logical, copies.placement.num_ranks, copies.placement.num_experts)


def even_fractions(copies: Copies) -> Tensor:
    """[L, P] float64: an equal fraction for every copy of an expert."""
    return copies.per_slot(copies.number.to(torch.float64).reciprocal())
