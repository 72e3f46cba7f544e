"""decode.cu, compiled for the host, gives the outputs of the plain PyTorch implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from epsim.kernels.experts import cuda, plain


def inputs(
    tokens: int, columns: int, experts: int, hidden: int, inter: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, hidden, generator=source).bfloat16()
    ids = torch.rand(tokens, experts, generator=source).topk(columns, dim=1).indices
    ids[torch.rand(tokens, columns, generator=source) < 0.2] = -1
    weights = torch.rand(tokens, columns, generator=source)
    gate_up = torch.randn(experts, 2 * inter, hidden, generator=source).bfloat16()
    down = torch.randn(experts, hidden, inter, generator=source).bfloat16()
    return rows, ids, weights, gate_up / hidden**0.5, down / inter**0.5


def run_on_host(
    on_host: Callable[..., Callable[..., None]],
    tensors: tuple[torch.Tensor, ...],
    rows: torch.Tensor | None = None,
    blocks: int = 3,
    order: int = 0,
    launches: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, ids, weights, gate_up, down = tensors
    (tokens, columns), (_, size, inter) = ids.shape, down.shape
    slots = len(gate_up) if rows is None else len(rows)
    sizes = cuda.sizes_of(tokens, columns, slots, size, inter, 200_000)
    source = cuda.source().replace((Path(cuda.__file__).parent / "hopper.cuh").read_text(), "")
    run = on_host(source, "hopper.h", "experts", sizes.definitions)
    output = torch.full((tokens, size), torch.nan, dtype=torch.bfloat16)
    activated = torch.full((sizes.pairs, inter), torch.nan, dtype=torch.bfloat16)
    counts, arrived = torch.full((slots,), -1), torch.zeros(2, dtype=torch.int64)
    pointers = [
        0 if tensor is None else tensor.data_ptr()
        for tensor in (hidden, ids, weights, gate_up, down, rows, activated, output, counts, arrived)
    ]
    argument = np.array([(*pointers, hidden.stride(0), tokens, slots, columns)], cuda.ARGUMENTS)
    for _ in range(launches):
        run(argument, blocks, cuda.THREADS, sizes.shared, order)
    return output, counts


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize(
    ("tokens", "columns", "experts", "hidden", "inter"),
    [
        (3, 2, 5, 64, 32),
        (16, 2, 4, 96, 64),
        (33, 2, 3, 64, 32),
        (64, 1, 2, 64, 32),
        (1, 2, 33, 1056, 32),
        (2, 1, 3, 32, 1056),
    ],
)
@pytest.mark.parametrize("order", [0, 1, 7])
def test_equals_the_plain_form(
    on_host: Callable[..., Callable[..., None]],
    tokens: int,
    columns: int,
    experts: int,
    hidden: int,
    inter: int,
    order: int,
) -> None:
    tensors = inputs(tokens, columns, experts, hidden, inter)
    found, counts = run_on_host(on_host, tensors, order=order)
    assert far(found, plain(*(tensor.double() if i != 1 else tensor for i, tensor in enumerate(tensors)))) < 4e-3
    assert torch.equal(counts, torch.bincount(tensors[1][tensors[1] >= 0], minlength=experts))
