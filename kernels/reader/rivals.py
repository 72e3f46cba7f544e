"""Methods for comparison with the sketch: an int4 copy of the gate rows, and the sparse inputs of TEAL and WINA.

TEAL (arXiv 2408.14690) chooses inputs of each matrix by absolute value, WINA (arXiv 2505.19427) by absolute value times
the length of the matrix column. CATS (arXiv 2404.08763) chooses channels by the activation of the gate:
`ReadBytes.source` "cats".
"""

from typing import Literal

import torch

from epsim.kernels.reader.codes import SECTOR, in_blocks
from epsim.kernels.reader.read import Experts
from epsim.kernels.reader.select import top_mask
from epsim.kernels.reader.slots import slot_products

Inputs = Literal["teal", "wina"]


def int4_gate(gate: torch.Tensor) -> torch.Tensor:
    """gate [E, I, H] rounded to 4-bit integers -7..7 with a float16 scale per 128 weights, as float32."""
    blocks = in_blocks(gate.float())
    scale = (blocks.abs().amax(-1, keepdim=True) / 7).to(torch.float16).float()
    whole = torch.where(scale > 0, blocks / scale, 0.0).round().clamp(-7, 7)
    decoded: torch.Tensor = whole * scale
    return decoded.flatten(-2)


def sparse_inputs_share(budget: float, hidden: int, intermediate: int, which: Inputs, weight_bytes: float = 2) -> float:
    """The largest fraction of each matrix's inputs for which the bytes read per expert stay within the budget.

    The gate and up weights of an input together, and the down weights of a channel, are counted in whole sectors. WINA
    also reads the lengths of the columns.
    """
    whole = [-(-n * weight_bytes // SECTOR) * SECTOR for n in (2 * intermediate, hidden)]
    dense = 3 * intermediate * -(-hidden * weight_bytes // SECTOR) * SECTOR
    beside = 2 * (hidden + intermediate) if which == "wina" else 0
    return min(max((budget * dense - beside) / (hidden * whole[0] + intermediate * whole[1]), 0.0), 1.0)


def sparse_inputs_output(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Experts, share: float, which: Inputs
) -> torch.Tensor:
    """The output [T, H] for x [T, H], ids and weights [T, k]. gate and up use the floor(share H) inputs with the
    highest scores, and down the floor(share I) activations with the highest scores of each expert."""
    expert = ids.clamp(min=0)
    sizes = x.float().abs()[:, None].expand(-1, ids.shape[1], -1)
    if which == "wina":
        sizes = sizes * experts.gate_up.float().norm(dim=1)[expert]
    inputs = torch.where(top_mask(sizes, int(share * x.shape[1])), x[:, None], 0.0)
    gate, up = slot_products(inputs, ids, experts.gate_up).chunk(2, -1)
    hidden = experts.activation(gate) * up
    amounts = hidden.float().abs()
    if which == "wina":
        amounts = amounts * experts.down.float().norm(dim=1)[expert]
    return experts.outputs(torch.where(top_mask(amounts, int(share * hidden.shape[-1])), hidden, 0.0), ids, weights)
