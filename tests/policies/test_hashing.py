"""Draws against the published generator, a plain-integer reading, and what random numbers must look like."""

from __future__ import annotations

import pytest
import torch

from epsim.policies.hashing import GOLDEN, chain, draw, finalise, slot_key, token_key

MASK = (1 << 64) - 1


def plain_finalise(bits: int) -> int:
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK
    return bits ^ bits >> 31


def plain_chain(*parts: int) -> int:
    key = plain_finalise(parts[0] + 0x9E3779B97F4A7C15 & MASK)
    for part in parts[1:]:
        key = plain_finalise((key ^ part & MASK) + 0x9E3779B97F4A7C15 & MASK)
    return key


def test_finaliser_gives_the_published_outputs_of_splitmix64() -> None:
    # The first three outputs of SplitMix64 from state 1234567 (rosettacode.org, Pseudo-random numbers/Splitmix64).
    states = torch.tensor([1234567]) + GOLDEN * torch.arange(1, 4)
    assert [int(x) & MASK for x in finalise(states)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63, 2**64 - 1])
def test_draws_are_the_documented_function(seed: int) -> None:
    local = torch.tensor([0, 1, 2, 70_000])
    found = draw(
        token_key(seed, torch.tensor(12), torch.tensor(3), local)[:, None],
        slot_key(torch.tensor(60), torch.arange(9)),
        20,
    )
    for i, index in enumerate(local.tolist()):
        for slot in range(9):
            key = plain_chain(seed & MASK, 12, 3, index) + plain_chain(60, slot) & MASK
            assert int(found[i, slot]) == plain_finalise(key) >> 44


def test_draws_are_uniform_and_unrelated_to_their_neighbours() -> None:
    tokens = token_key(0, torch.arange(8)[:, None, None], torch.arange(16)[:, None], torch.arange(64)).flatten()
    points = draw(tokens[:, None, None], slot_key(torch.arange(4)[:, None], torch.arange(8)), 20)
    bins = torch.bincount((points >> 14).flatten(), minlength=64).double()
    expected = points.numel() / 64
    # Chi-square with 63 degrees of freedom: above 125 once in 200,000 times.
    assert float(((bins - expected) ** 2 / expected).sum()) < 125
    unit = points.double() / 2**20 - 0.5
    for other in (unit.roll(1, 0), unit.roll(64, 0), unit.roll(1024, 0), unit.roll(1, 1), unit.roll(1, 2)):
        correlation = float((unit * other).mean() * 12)
        assert abs(correlation) < 5 / points.numel() ** 0.5
    assert len(set(tokens.tolist())) == len(tokens)


def test_order_of_parts_matters() -> None:
    one, two = torch.tensor(1), torch.tensor(2)
    assert int(chain(one, two)) != int(chain(two, one))
    assert int(draw(one, two, 63)) >= 0
