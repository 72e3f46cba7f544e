"""Builds a layer's sketch, once, from its weights: ternary codes of gate and up rows, and a low-rank map."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from epsim.kernels.reader.codes import BLOCK, LARGEST, code_rows, codes_of_rows, in_blocks, row_bytes, ternary
from epsim.kernels.reader.rotate import random_signs, rotated

RANK = 32


@dataclass(frozen=True, slots=True, eq=False)
class LayerSketch:
    """The sketch of E experts with I channels and H inputs; B = H / 128 blocks.

    codes [E, H, row_bytes(I)] uint8: ternary codes in the rotated basis; a row has the codes of one coordinate
    (`code_rows`). scales [E, B, 2, I] float16: of gate (0) and up (1). errors [E, B, 2, I] float16: lengths of the
    errors, rounded up; reads do not need them. norms [E, I] bfloat16: lengths of the down columns d. signs [H] int8: of
    the rotation. basis [H, r] bfloat16: U, the first left singular vectors of all down columns of the layer.
    coefficients [E, I, r] bfloat16: b = U^T d.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    errors: torch.Tensor
    norms: torch.Tensor
    signs: torch.Tensor
    basis: torch.Tensor
    coefficients: torch.Tensor

    @property
    def num_experts(self) -> int:
        return self.codes.shape[0]

    @property
    def hidden(self) -> int:
        return self.codes.shape[1]

    @property
    def intermediate(self) -> int:
        return self.norms.shape[1]

    @property
    def rank(self) -> int:
        return self.basis.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and type that each tensor must have. E, H, I and r are those of `codes`, `norms` and `basis`."""
        experts, hidden, inter, rank = self.num_experts, self.hidden, self.intermediate, self.rank
        tables = ((experts, hidden // BLOCK, 2, inter), torch.float16)
        return {
            "codes": ((experts, hidden, row_bytes(inter)), torch.uint8),
            "scales": tables,
            "errors": tables,
            "norms": ((experts, inter), torch.bfloat16),
            "signs": ((hidden,), torch.int8),
            "basis": ((hidden, rank), torch.bfloat16),
            "coefficients": ((experts, inter, rank), torch.bfloat16),
        }

    def to(self, device: Any) -> LayerSketch:
        return LayerSketch(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def decoded(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """scale * code, [E, 2I, H], of gate rows, then up rows, in the rotated basis."""
        pair = torch.stack(codes_of_rows(self.codes, self.intermediate), 1)  # [E, 2, H, I]
        rows = in_blocks(pair.transpose(2, 3).to(dtype))  # [E, 2, I, B, 128]
        blocks = rows * self.scales.permute(0, 2, 3, 1)[..., None].to(dtype)
        return blocks.flatten(3).flatten(1, 2)

    def resident_bytes(self) -> dict[str, int]:
        """Bytes kept in memory: `sketch` (codes, scales, errors, norms, signs) and `map` (basis, coefficients)."""
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in self.tensors().items()}
        map_bytes = sizes["basis"] + sizes["coefficients"]
        return {"sketch": sum(sizes.values()) - map_bytes, "map": map_bytes}


def build_layer(gate_up: torch.Tensor, down: torch.Tensor, seed: int = 0, rank: int = RANK) -> LayerSketch:
    """The sketch of a layer, on the device of its weights gate_up [E, 2I, H] (gate rows, then up rows), down [E, H, I].

    It needs the weights only. Rotation, codes and map are computed in float64. Raises ValueError for weights that are
    not finite or too large for float16 scales, and for shapes that do not match.
    """
    num_experts, double, hidden = gate_up.shape if gate_up.ndim == 3 else (0, 0, 0)
    intermediate = double // 2
    fit = tuple(down.shape) == (num_experts, hidden, intermediate) and double % 2 == 0 and hidden % BLOCK == 0
    if not fit or min(num_experts, intermediate, hidden) < 1:
        raise ValueError(
            f"experts of gate_up {list(gate_up.shape)} and down {list(down.shape)}: a sketch needs [E, 2I, H] and "
            f"[E, H, I] with H a multiple of {BLOCK}"
        )
    if not 1 <= rank <= hidden:
        raise ValueError(f"rank {rank} of the map: give 1 to {hidden}, the hidden size")
    device = gate_up.device
    signs = random_signs(hidden, seed).to(device)
    sketch = LayerSketch(
        codes=torch.empty(num_experts, hidden, row_bytes(intermediate), dtype=torch.uint8, device=device),
        scales=torch.empty(num_experts, hidden // BLOCK, 2, intermediate, dtype=torch.float16, device=device),
        errors=torch.empty(num_experts, hidden // BLOCK, 2, intermediate, dtype=torch.float16, device=device),
        norms=torch.empty(num_experts, intermediate, dtype=torch.bfloat16, device=device),
        signs=signs,
        basis=main_directions(down, rank).to(torch.bfloat16),
        coefficients=torch.empty(num_experts, intermediate, rank, dtype=torch.bfloat16, device=device),
    )
    for expert in range(num_experts):
        blocks = rotated(gate_up[expert].double(), signs).view(2, intermediate, -1, BLOCK)
        longest = float(blocks.norm(dim=-1).amax())
        if not longest <= LARGEST:
            _refuse(expert, longest)
        coded = ternary(blocks)
        gate, up = coded.codes.flatten(2).transpose(1, 2)
        sketch.codes[expert] = code_rows(gate, up)
        sketch.scales[expert] = coded.scale.permute(2, 0, 1)
        sketch.errors[expert] = coded.error.permute(2, 0, 1)
        columns = down[expert].double()
        sketch.norms[expert] = columns.norm(dim=0).to(torch.bfloat16)
        sketch.coefficients[expert] = (columns.T @ sketch.basis.double()).to(torch.bfloat16)
        if not bool(torch.isfinite(sketch.norms[expert]).all() and torch.isfinite(sketch.coefficients[expert]).all()):
            raise ValueError(f"expert {expert} has a down column whose length exceeds bfloat16: it cannot be restored")
    return sketch


def main_directions(down: torch.Tensor, rank: int) -> torch.Tensor:
    """The first `rank` left singular vectors [H, rank] float64 of the columns of all experts of down [E, H, I], each
    with its largest entry positive. Raises ValueError for weights that are not finite."""
    square = down.new_zeros(down.shape[1], down.shape[1], dtype=torch.float64)
    for expert, columns in enumerate(down):
        if not bool(torch.isfinite(columns).all()):
            _refuse(expert, float("nan"))
        square += columns.double() @ columns.double().T
    vectors = torch.linalg.eigh(square).eigenvectors[:, -rank:].flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    oriented: torch.Tensor = vectors * largest.sign()
    return oriented


def _refuse(expert: int, longest: float) -> NoReturn:
    if longest < float("inf"):
        raise ValueError(
            f"expert {expert} has a block of {BLOCK} weights of length {longest:.3g}, beyond {LARGEST:g}: its sketch's "
            "16-bit scales cannot hold it"
        )
    raise ValueError(f"expert {expert} has weights that are not finite: it cannot be sketched")
