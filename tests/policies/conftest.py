"""Random placements and tokens for the tests of policies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from epsim.placement.base import Placement
from epsim.policies.apply import BoundStack, Setting, bind
from epsim.policies.stack import parse_stack
from epsim.traces.trace import TokenBlock

Problem = tuple[Placement, TokenBlock]


def random_placement(
    rng: np.random.Generator, layers: int, experts: int, redundant: int, ranks: int, nodes: int
) -> Placement:
    """Every expert once, then copies of random experts, or empty slots, until at least `redundant` and ranks divide the
    slots."""
    physical = -(-(experts + redundant) // ranks) * ranks
    slots = np.tile(np.arange(experts), (layers, 1))
    slots = np.concatenate([slots, rng.integers(-1, experts, (layers, physical - experts))], axis=1)
    return Placement(torch.from_numpy(rng.permuted(slots, axis=1)), experts, ranks, nodes)


@pytest.fixture(scope="session")
def draw_problem() -> Callable[..., Problem]:
    """draw_problem(seed, ...) -> a random placement and tokens of skewed popularity; blanks: some slots hold -1."""

    def draw(
        seed: int,
        *,
        steps: int = 3,
        layers: int = 2,
        experts: int = 16,
        top_k: int = 2,
        ranks: int = 4,
        nodes: int = 2,
        redundant: int = 6,
        tokens: int = 100,
        blanks: bool = False,
    ) -> Problem:
        rng = np.random.default_rng(seed)
        placement = random_placement(rng, layers, experts, redundant, ranks, nodes)
        keys = 2 * rng.gumbel(size=(layers, experts)) + rng.gumbel(size=(tokens * steps, layers, experts))
        ids = np.argsort(-keys, axis=2)[:, :, :top_k]
        if blanks:
            ids = np.where(rng.random(ids.shape) < 0.2, -1, ids)
        token_step = np.sort(rng.integers(0, max(steps, 1), tokens * steps))
        source = rng.integers(0, ranks, tokens * steps)
        order = np.lexsort((source, token_step))
        return placement, TokenBlock(5 + 3 * np.arange(steps), token_step, source[order], ids)

    return draw


@pytest.fixture(scope="session")
def bound() -> Callable[..., BoundStack]:
    """bound(text, placement, ...) -> the stack on the placement, layers numbered 3, 5, 7, ..."""

    def make(text: str, placement: Placement, top_k: int = 2, shared_cost: float = 1.0, seed: int = 7) -> BoundStack:
        layers = tuple(3 + 2 * layer for layer in range(placement.num_layers))
        return bind(parse_stack(text), placement, Setting(seed, shared_cost, top_k, layers))

    return make
