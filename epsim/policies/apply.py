"""A stack applied to blocks of a trace: which rank does how much."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epsim.placement.base import Placement
from epsim.policies.copies import Copies
from epsim.policies.load import Load
from epsim.policies.stack import PolicyStack
from epsim.traces.trace import Block, CountsBlock, RankCountsBlock, TokenBlock

EXACT = 2**53
CELLS = 1 << 22
"""Elements of the largest intermediate tensor: steps are taken in parts that keep below it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a stack needs to know besides the placement.

    seed: of all draws. shared_cost: work of the shared expert in routed assignments, 0 for none.
    top_k: routed experts a token chooses. layers: the model's number of each layer, which draws depend on.
    """

    seed: int
    shared_cost: float
    top_k: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BoundStack:
    """A stack on one placement. notes: what a reader of its results should know."""

    stack: PolicyStack
    copies: Copies
    setting: Setting
    notes: tuple[str, ...]

    def load(self, block: Block) -> Load:
        """Tokens on source ranks 0..R-1 of the placement. Raises ValueError where the block is too coarse or does not
        fit.

        Works on the device of the placement.
        """
        placement, device = self.copies.placement, self.copies.slot.device
        level = {CountsBlock: "counts", RankCountsBlock: "rank_counts", TokenBlock: "tokens"}[type(block)]
        self.stack.check_level(level, self.copies.redundant, self.setting.shared_cost > 0)  # type: ignore[arg-type]
        steps = torch.as_tensor(block.steps, dtype=torch.int64, device=device)
        if isinstance(block, CountsBlock):
            counts = torch.as_tensor(block.counts, dtype=torch.int64, device=device)
            _check_shape(counts, (len(steps), placement.num_layers, placement.num_experts))
            return _joined([self._from_counts(part) for part in _parts(counts, placement.num_physical)])
        raise NotImplementedError

    def _from_counts(self, counts: torch.Tensor) -> Load:
        """counts [S, L, E] -> expected loads, with tokens evenly spread over source ranks."""
        copies, num_ranks = self.copies, self.copies.placement.num_ranks
        assignments = _check_counts(counts)
        per_slot = self.stack.split.fractions(counts, copies) * copies.per_slot(counts)
        routed = copies.per_rank(per_slot)
        tokens = assignments / self.setting.top_k
        has_shared = self.setting.shared_cost > 0
        shared_tokens = (tokens / num_ranks if has_shared else torch.zeros_like(tokens))[..., None].expand_as(routed)
        return Load(
            routed=routed,
            routed_real=routed,
            shared=shared_tokens * self.setting.shared_cost,
            shared_tokens=shared_tokens,
            tokens=tokens,
            assignments=assignments,
            active=copies.per_rank((per_slot > 0).to(torch.int64)),
            remote_rank=None,
            remote_node=None,
            shared_remote_rank=None,
            shared_remote_node=None,
            rounded=False,
        )


def bind(stack: PolicyStack, placement: Placement, setting: Setting) -> BoundStack:
    """Prepares a stack for a placement, once. Raises ValueError where the setting does not fit the placement."""
    if len(setting.layers) != placement.num_layers:
        raise ValueError(f"{len(setting.layers)} layer numbers given for a placement of {placement.num_layers} layers")
    notes: tuple[str, ...] = ()
    if setting.shared_cost == 0:
        notes = (f"the model has no shared expert: {stack.shared.name} changes nothing",)
    return BoundStack(stack, Copies(placement), setting, notes)


def _check_shape(found: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(found.shape) != expected:
        raise ValueError(f"counts of shape {list(found.shape)} do not fit the placement: expected {list(expected)}")


def _check_counts(counts: torch.Tensor) -> torch.Tensor:
    """[S, L, ...] -> [S, L] int64: sums. Raises ValueError for negative counts and for sums that float64 loses."""
    if counts.numel() and int(counts.min()) < 0:
        raise ValueError(f"counts are negative (least {int(counts.min())}): a count is 0 or more")
    if bool((counts.flatten(2).sum(-1, dtype=torch.float64) > EXACT).any()):
        raise ValueError("a step's layer has more than 2^53 assignments: scale the counts down")
    return counts.flatten(2).sum(-1)


def _parts(counts: torch.Tensor, cells_per_layer: int) -> tuple[torch.Tensor, ...]:
    """Consecutive steps with at most CELLS intermediate elements, or one step; one empty part for no steps."""
    per_step = counts.shape[1] * cells_per_layer
    return torch.split(counts, max(CELLS // max(per_step, 1), 1))


def _joined(loads: list[Load]) -> Load:
    if len(loads) == 1:
        return loads[0]

    def cat(name: str) -> torch.Tensor | None:
        parts = [getattr(load, name) for load in loads]
        return None if parts[0] is None else torch.cat(parts)

    names = [name for name in Load.__slots__ if name != "rounded"]
    return Load(**{name: cat(name) for name in names}, rounded=loads[0].rounded)  # type: ignore[arg-type]
