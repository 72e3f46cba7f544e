"""Random draws by hash: the same token draws the same number on every machine and device.

A draw is finalise(token key + slot key). All arithmetic is modulo 2^64:
    token key = chain(seed, step number, source rank, local token index)
    slot key = chain(layer number, slot), slot = index in the top-k, or k for the shared expert
    chain(a, b, ...) = finalise(... finalise(finalise(a + GOLDEN) ^ b + GOLDEN) ^ ... + GOLDEN)
    finalise: that of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)
A draw depends on nothing else in the batch, so the tokens of one rank draw the same numbers alone or among all tokens.
"""

import torch
from torch import Tensor


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask removes the copies of the sign bit.
    return (bits >> by) & ((1 << (64 - by)) - 1)


def finalise(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser of int64 [...], a bijection on 64 bits."""
    bits = (bits ^ _shift_right(bits, 30)) * MULTIPLIER_1
    bits = (bits ^ _shift_right(bits, 27)) * MULTIPLIER_2
    return bits ^ _shift_right(bits, 31)


def chain(*parts: Tensor) -> Tensor:
    """An int64 key of int64 parts, which are broadcast; their order matters."""
    key = finalise(parts[0] + GOLDEN)
    for part in parts[1:]:
        key = finalise((key ^ part) + GOLDEN)
    return key


def token_key(seed: int, step: Tensor, source_rank: Tensor, local: Tensor) -> Tensor:
    """The token key, int64 [...], of broadcast step numbers, source ranks and local token indices. seed: any int."""
    return chain(torch.full_like(local, _signed(seed)), step, source_rank, local)


def slot_key(layer: Tensor, slot: Tensor) -> Tensor:
    """The slot key, int64 [...], of the model's layer numbers and indices in the top-k, which are broadcast."""
    return chain(layer, slot)


def ordinal(group: Tensor) -> Tensor:
    """[N] int64 -> [N] int64: each element's index among those of the same group, in order."""
    ordered, order = group.sort(stable=True)
    position = torch.arange(len(group), device=group.device)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    start = torch.where(starts, position, 0).cummax(0).values if len(group) else position
    return torch.empty_like(position).scatter_(0, order, position - start)


def draw(token: Tensor, slot: Tensor, bits: int) -> Tensor:
    """The highest bits (<= 63) of the draw of these keys, which are broadcast: int64 [...] in [0, 2^bits)."""
    return _shift_right(finalise(token + slot), 64 - bits)
