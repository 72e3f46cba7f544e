"""The published method: what its arithmetic gives, and that it cannot do harm."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from epsim.placement.base import Cluster, Placement
from epsim.policies.copies import Copies, even_fractions
from epsim.policies.ipm import DAMPING, LplbIpm, interior_point, program
from epsim.policies.splits import Even, Lplb
from epsim.policies.stack import placement_policy


def plain_interior_point(
    matrix: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    target: np.ndarray[tuple[int], np.dtype[np.float64]],
    cost: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """One problem in float64 by least squares: x[i] shrinks by its reduced cost over the largest one."""
    columns = np.concatenate([matrix, (target - matrix.sum(1))[:, None]], axis=1)
    x = np.ones(columns.shape[1])
    for _ in range(5):
        dual = np.linalg.lstsq((columns * x).T, x * cost, rcond=None)[0]
        reduced = x * (cost - columns.T @ dual)
        x = x * (1 - DAMPING * reduced / reduced.max())
    return x


def test_steps_are_those_of_affine_scaling() -> None:
    # Ranks 0..2; expert 0 on ranks 0 and 1, expert 1 on ranks 1 and 2; others fixed.
    placement = Placement(torch.tensor([[0, 2, 0, 1, 1, 3]]), 4, 3)
    copies = Copies(placement)
    lp = program(copies)
    assert lp.matrix[0].tolist() == [
        [1, 0, 0, 0, 1, 0, 0, -1],
        [0, 1, 1, 0, 0, 1, 0, -1],
        [0, 0, 0, 1, 0, 0, 1, -1],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 0],
    ]
    target = torch.tensor([[-0.3, 0.0, -0.6, 1.3, 0.8]])
    found = interior_point(lp.matrix, lp.unused, target, lp.cost)[0]
    expected = plain_interior_point(lp.matrix[0].double().numpy(), target[0].double().numpy(), lp.cost.double().numpy())
    assert found.numpy() == pytest.approx(expected, abs=1e-3)
    # The optimum: all ranks at 1, hence x = 0.7, 0.6, 0.4, 0.4.
    assert found[:4].tolist() == pytest.approx([0.7, 0.6, 0.4, 0.4], abs=0.05)
    assert float(found[-1]) < 0.01


def skewed(tokens: int, steps: int = 30, layers: int = 4) -> tuple[Copies, torch.Tensor]:
    """256 experts on 16 ranks with 32 redundant, planned on a skew from which the steps have drifted."""
    rng = np.random.default_rng(0)
    popular = rng.gamma(0.7, size=(layers, 256)) + 1e-3
    drifted = popular * np.exp(0.5 * rng.normal(size=popular.shape))
    drifted /= drifted.sum(1, keepdims=True)
    placement = placement_policy("eplb").plan(torch.from_numpy(popular * 1e4).long()[None], Cluster(16, 2, 32))
    counts = np.stack([[rng.multinomial(8 * tokens, share) for share in drifted] for _ in range(steps)])
    return Copies(placement), torch.from_numpy(counts)


@pytest.mark.parametrize("tokens", [64, 1024, 16384])
def test_between_the_even_split_and_the_optimum(tokens: int) -> None:
    copies, counts = skewed(tokens)

    def peak(fractions: torch.Tensor) -> torch.Tensor:
        assert bool(fractions.isfinite().all())
        return copies.per_rank(fractions * copies.per_slot(counts)).amax(-1)

    optimum = peak(Lplb().fractions(counts, copies))
    ratio = peak(LplbIpm().fractions(counts, copies)) / optimum
    even = peak(Even().fractions(counts, copies)) / optimum
    print(f"{tokens} tokens: even {float(even.mean()):.3f}, interior point {float(ratio.mean()):.3f} x the optimum")
    assert float(ratio.min()) > 1 - 2e-4
    assert float((ratio <= even + 1e-3).double().mean()) > 0.9
    assert float(ratio.mean()) < 1 + 0.7 * float(even.mean() - 1)


def test_no_tokens_give_the_even_split() -> None:
    copies, counts = skewed(16, steps=2)
    counts[1] = 0
    fractions = LplbIpm().fractions(counts, copies)
    assert torch.equal(fractions[1], even_fractions(copies))


def test_an_answer_that_is_not_feasible_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, counts = skewed(64, steps=2)
    monkeypatch.setattr("epsim.policies.ipm.MOST_INFEASIBLE", 0.0)
    assert torch.equal(LplbIpm().fractions(counts, copies), Even().fractions(counts, copies))
    monkeypatch.setattr("epsim.policies.ipm.interior_point", lambda *_: torch.full((8, 200), torch.nan))
    assert torch.equal(LplbIpm().fractions(counts, copies), Even().fractions(counts, copies))


def test_layers_with_different_numbers_of_copies_do_not_touch_each_other() -> None:
    slots = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 2]])
    counts = torch.tensor([[50, 20, 30], [90, 40, 10], [100, 1, 7]])
    together = LplbIpm().fractions(counts, Copies(Placement(slots, 3, 3)))
    for layer in range(3):
        alone = LplbIpm().fractions(counts[layer : layer + 1], Copies(Placement(slots[layer : layer + 1], 3, 3)))
        assert torch.allclose(together[layer], alone[0], atol=1e-4)
