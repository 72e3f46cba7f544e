"""Computes the experts of small batches (decode). The time grows with the number of active experts.

`decode` chooses the implementation: the fused CUDA kernel on Hopper; Triton on other GPUs and for shapes that the CUDA
kernel does not support; plain PyTorch on CPUs.
"""

from epsim.kernels.experts.decode import MOST_TOKENS, decode
from epsim.kernels.experts.plain import plain

__all__ = ["MOST_TOKENS", "decode", "plain"]
