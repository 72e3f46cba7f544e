"""Experts of small batches (decode): time linear in the experts that are read.

`decode` picks a form: the fused CUDA kernel on Hopper, Triton on other GPUs and for shapes that it does not cover,
plain PyTorch on CPUs.
"""

from epsim.kernels.experts.decode import MOST_TOKENS, decode
from epsim.kernels.experts.plain import plain

__all__ = ["MOST_TOKENS", "decode", "plain"]
