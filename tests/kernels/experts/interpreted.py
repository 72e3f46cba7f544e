"""A program for TRITON_INTERPRET=1: prints the errors of the Triton form on small shapes, one JSON line per case.

Float16, since the interpreter's products of bfloat16 are wrong; its loop bounds need a whole number where NumPy 2.4 no
longer makes one of an array of one element.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from triton.runtime import interpreter

from epsim.kernels.experts.plain import plain

CASES = [(3, 2, 5, 64, 32, 1), (16, 2, 4, 96, 64, 3), (33, 2, 3, 64, 32, 2), (1, 4, 40, 160, 96, 4)]
"""Tokens, k, experts, hidden, intermediate, parts."""


def mend_loop_bounds() -> None:
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def case(tokens: int, columns: int, experts: int, hidden: int, inter: int, parts: int) -> dict[str, Any]:
    from epsim.kernels.experts.tiles import Tiling, tiled

    source = torch.Generator().manual_seed(tokens)
    rows = torch.randn(tokens, hidden, generator=source).half()
    ids = torch.rand(tokens, experts, generator=source).topk(columns, dim=1).indices
    ids[torch.rand(tokens, columns, generator=source) < 0.2] = -1
    weights = torch.rand(tokens, columns, generator=source)
    gate_up = torch.randn(experts, 2 * inter, hidden, generator=source) / hidden**0.5
    down = torch.randn(experts, hidden, inter, generator=source) / inter**0.5
    given = (rows, ids, weights, gate_up.half(), down.half())
    wanted = plain(*(tensor.double() if tensor is not ids else tensor for tensor in given))
    counts = torch.full((experts,), -1)
    tiling = Tiling((32, 32, 4, 2), (16, 32, 4, 2), parts)
    found = tiled(*given, counts=counts, tiling=tiling)
    order = torch.randperm(experts, generator=source)
    moved = tiled(rows, ids, weights, given[3][order], given[4][order], order.argsort(), tiling=tiling)
    return {
        "error": float((found.double() - wanted).norm() / wanted.norm()),
        "counted": torch.equal(counts, torch.bincount(ids[ids >= 0], minlength=experts)),
        "moved": torch.equal(found, moved),
        "padding": not bool(found[(ids < 0).all(1)].any()),
    }


if __name__ == "__main__":
    mend_loop_bounds()
    for values in CASES:
        print(json.dumps(case(*values)))
