"""The channel reader reads only those channels of each routed expert that matter to a token.

Each stage has a file with a reference in plain PyTorch for any device. codes, rotate, build and store run once; screen,
select and read run in each step. `bytes` counts the bytes that are read; `rivals` has other methods for comparison.
"""

from epsim.kernels.reader.build import RANK, LayerSketch, build_layer
from epsim.kernels.reader.bytes import ReadBytes, token_bytes, union_bytes
from epsim.kernels.reader.read import Experts, read_output
from epsim.kernels.reader.screen import COORDINATES, Batches, Screen, batch_coordinates, coordinates
from epsim.kernels.reader.select import keep_above, keep_by_rank, keep_for_batch, keep_top, output_scores, rank_quotas

__all__ = [
    "COORDINATES", "RANK", "Batches", "Experts", "LayerSketch", "ReadBytes", "Screen", "batch_coordinates",
    "build_layer", "coordinates", "keep_above", "keep_by_rank", "keep_for_batch", "keep_top", "output_scores",
    "rank_quotas", "read_output", "token_bytes", "union_bytes",
]  # fmt: skip
