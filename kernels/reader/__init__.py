"""The channel reader: of each routed expert only the channels that matter to a token are read.

One file a stage, each with its reference in plain torch on any device: codes, rotate, build, store; then, every step,
screen, select, read, restore; bytes counts what is read, rivals is what it is compared with.
"""

from epsim.kernels.reader.build import RANK, LayerSketch, build_layer
from epsim.kernels.reader.bytes import ReadBytes, token_bytes, union_bytes
from epsim.kernels.reader.read import Experts, read_output
from epsim.kernels.reader.screen import COORDINATES, Batches, Screen, batch_coordinates, coordinates
from epsim.kernels.reader.select import keep_above, keep_by_rank, keep_for_batch, keep_top, output_scores, rank_quotas

__all__ = [
    "COORDINATES",
    "RANK",
    "Batches",
    "Experts",
    "LayerSketch",
    "ReadBytes",
    "Screen",
    "batch_coordinates",
    "build_layer",
    "coordinates",
    "keep_above",
    "keep_by_rank",
    "keep_for_batch",
    "keep_top",
    "output_scores",
    "rank_quotas",
    "read_output",
    "token_bytes",
    "union_bytes",
]
