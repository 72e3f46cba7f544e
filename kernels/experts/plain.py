"""The experts of a batch in plain PyTorch, on any device: the slow reference."""

import torch
import torch.nn.functional as F


def plain(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode` in the precision of its inputs; activated values are weighted before they are rounded."""
    output = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
    for expert in sorted(set(ids[ids >= 0].tolist())):
        row = expert if rows is None else int(rows[expert])
        token, column = (ids == expert).nonzero(as_tuple=True)
        wide = output.dtype
        gate, up = F.linear(hidden[token].to(wide), gate_up[row].to(wide)).chunk(2, dim=-1)
        activated = (F.silu(gate) * up * weights[token, column, None]).to(hidden.dtype)
        output.index_add_(0, token, F.linear(activated.to(wide), down[row].to(wide)))
    return output.to(hidden.dtype)
