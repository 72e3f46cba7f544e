"""The linear program on problems with known answers."""

from __future__ import annotations

import pytest
import torch

from epsim.kernels.split.reference import solve_reference


def test_peak_and_split() -> None:
    slots = torch.tensor([0, 1, 1, 2, 2, 3])
    peak, split = solve_reference(slots, 3, torch.tensor([1, 10, 10, 9]))
    assert peak == pytest.approx(10)
    assert split.tolist() == pytest.approx([1, 9, 1, 9, 1, 9])


def test_captive_pair_of_ranks() -> None:
    """Experts 1 and 2 live on ranks 0 and 1 alone: rank 2 cannot help."""
    peak, _ = solve_reference(torch.tensor([1, 2, 1, 2, 0, 3]), 3, torch.tensor([5, 50, 30, 1]))
    assert peak == pytest.approx(40)


def test_no_load() -> None:
    peak, split = solve_reference(torch.tensor([0, 1]), 2, torch.zeros(2))
    assert peak == 0
    assert split.tolist() == [0, 0]
