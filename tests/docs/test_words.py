"""The worked example of docs/concepts.md is what the policies do; docs/design.md has the rooms as they are."""

from __future__ import annotations

import re

import torch

from epsim.kernels.split import prepare, solve_peak
from epsim.placement.base import Cluster
from epsim.policies.stack import placement_policy
from tests.docs.blocks import ROOT
from tests.test_layout import ORDER

CLUSTER = Cluster(num_ranks=2, num_nodes=1, num_redundant=2)
LOADS = torch.tensor([10, 3, 2, 1])


def test_the_example_of_concepts() -> None:
    planned = placement_policy("eplb").plan(torch.tensor([[[10.0, 2.0, 6.0, 1.0]]]), CLUSTER)
    slots = planned.physical_to_logical[0].reshape(2, 3)
    assert [sorted(rank) for rank in slots.tolist()] == [[0, 1, 2], [0, 2, 3]]
    copies = torch.bincount(slots.flatten())
    assert (LOADS / copies)[slots].sum(-1).tolist() == [9, 7]
    structure = prepare(planned.physical_to_logical, num_ranks=2)
    for loads, optimum in ((LOADS, 8.0), (LOADS + torch.tensor([1, 0, 0, 0]), 8.5)):
        peak = solve_peak(structure, loads[None], torch.zeros(1, dtype=torch.int64)).peak
        assert abs(float(peak[0]) - optimum) < 1e-3


def test_the_rooms_of_design() -> None:
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    table = text.split("| room | holds |")[1].split("\n\n")[0]
    names = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert tuple(f"epsim.{name}" for name in names) == ORDER
