"""What the fractions of each split are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.kernels.split.reference import solve_reference
from epsim.placement.base import Placement
from epsim.policies.copies import Copies
from epsim.policies.ipm import LplbIpm
from epsim.policies.splits import Even, Lplb, LplbSampled, Random
from epsim.traces.trace import TokenBlock

DrawProblem = Callable[..., tuple[Placement, TokenBlock]]
POLICIES = (Even(), Random(), Lplb(), LplbSampled(), LplbIpm())


def peak(fractions: torch.Tensor, counts: torch.Tensor, copies: Copies) -> torch.Tensor:
    """[..., L]"""
    return copies.per_rank(fractions * copies.per_slot(counts)).amax(-1)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 12), st.integers(0, 20), st.sampled_from([0, 3, 10**6]))
def test_fractions_conserve_and_the_peak_of_lplb_is_never_above_evens(
    draw_problem: DrawProblem, seed: int, ranks: int, experts: int, redundant: int, most: int
) -> None:
    placement, _ = draw_problem(seed, experts=experts, ranks=ranks, nodes=1, redundant=redundant, top_k=1)
    copies = Copies(placement)
    counts = torch.from_numpy(np.random.default_rng(seed).integers(0, most + 1, (4, 2, experts)))
    for policy in POLICIES:
        fractions = policy.fractions(counts, copies)
        assert fractions.shape == (4, 2, placement.num_physical)
        assert float(fractions.min()) >= 0
        index = placement.physical_to_logical.expand(fractions.shape) + 1  # 0: empty
        whole = torch.zeros(4, 2, experts + 1, dtype=torch.float64).scatter_add_(-1, index, fractions)
        assert torch.equal(whole[..., 0], torch.zeros(4, 2, dtype=torch.float64))
        assert torch.allclose(whole[..., 1:], torch.ones(4, 2, experts, dtype=torch.float64), atol=1e-9)
    even = peak(Even().fractions(counts, copies), counts, copies)
    assert bool((peak(Lplb().fractions(counts, copies), counts, copies) <= even * (1 + 1e-12)).all())


def test_even_divides_by_the_number_of_copies() -> None:
    copies = Copies(Placement(torch.tensor([[0, 1, 0, 2, 0, 2]]), 3, 2))
    expected = [[[1 / 3, 1, 1 / 3, 1 / 2, 1 / 3, 1 / 2]]]
    assert torch.allclose(Even().fractions(torch.ones(1, 1, 3).long(), copies), torch.tensor(expected).double())


def test_lplb_reaches_the_optimum_of_the_linear_program(draw_problem: DrawProblem) -> None:
    placement, block = draw_problem(1, steps=5, experts=24, ranks=6, nodes=1, redundant=12, top_k=4, tokens=200)
    copies, counts = Copies(placement), torch.from_numpy(block.to_counts(24).counts)
    layer = torch.arange(2).repeat(5)
    found = peak(Lplb().fractions(counts, copies), counts, copies).flatten()
    for i, load in enumerate(counts.reshape(10, 24)):
        optimum, _ = solve_reference(placement.physical_to_logical[layer[i]], 6, load)
        assert float(found[i]) <= optimum * (1 + 1e-4)
