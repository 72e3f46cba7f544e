"""Compiles and launches router.cu: its arguments and sizes. NVRTC compiles at first use; CuPy caches on disk."""

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from epsim.kernels.split.launch import compiled, launch, with_headers

WARPS, MOST_STEPS, MOST_EXPERTS, MOST_TOKENS, LANES = 16, 8, 512, 512, 32
POINTERS = (
    "scores", "weight_basis", "choice", "choice_weights", "selected", "ids", "weights", "active", "message", "summed",
    "holds",
)  # fmt: skip
SIZES = ("renormalise", "tokens", "experts", "top_k", "width", "most", "maxp", "steps")
NUMBERS = (*SIZES, "kind", "number", "ranks", "held_each", "blocks")
ARGUMENTS = np.dtype(
    [(name, np.uint64) for name in POINTERS]
    + [("p", np.float32), ("scaling", np.float32)]
    + [(name, np.int32) for name in NUMBERS]
    + [("size", np.int32, MOST_STEPS), ("k0", np.int32, MOST_STEPS)],
    align=True,
)
"""The struct Arguments of token.cuh."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The arguments of `oea(k0, p, kmax, maxp)` (epsim/policies/routing/oea.py).

    steps: pairs (smallest batch size, k0), ascending. Batches below the first step keep the model's choice. kmax: None
    for k. maxp: None for all experts.
    """

    steps: tuple[tuple[int, int], ...]
    p: float = 1.0
    kmax: int | None = None
    maxp: int | None = None


@functools.cache
def available(device: int) -> bool:
    """Whether CuPy is installed and the device supports clusters of thread blocks (compute capability 9.0)."""
    return importlib.util.find_spec("cupy") is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def uncovered(rule: Rule, tokens: int, experts: int, top_k: int) -> str | None:
    """The reason why router.cu cannot run this rule on these sizes, or None if it can."""
    if experts > MOST_EXPERTS or tokens > MOST_TOKENS or not tokens:
        return f"{experts} experts and {tokens} tokens, not up to {MOST_EXPERTS} and 1 to {MOST_TOKENS}"
    if max(top_k, rule.kmax or 0) > LANES or len(rule.steps) > MOST_STEPS:
        return f"k {top_k}, kmax {rule.kmax} and {len(rule.steps)} steps, more than {LANES}, {LANES} and {MOST_STEPS}"
    if rule.kmax is not None and rule.kmax < top_k:
        return f"kmax {rule.kmax} is less than k {top_k}, the experts per token of batches below the first step"
    return None


def source(name: str = "router.cu") -> str:
    """A source file with its headers inlined."""
    return with_headers(Path(__file__).with_name(name))


def definitions(tokens: int, experts: int) -> dict[str, int]:
    """The constants of router.cu. A cluster has enough blocks to give each token a warp, but at most 8."""
    blocks = next(size for size in (1, 2, 4, 8) if size == 8 or tokens <= size * WARPS)
    return {"EXPERTS": -(-experts // 32) * 32, "CLUSTER": blocks, "ONE": int(tokens <= blocks * WARPS)}


def threads_of(tokens: int) -> int:
    """Threads per block: one warp per token, at most WARPS warps."""
    return 32 * min(tokens, WARPS)


@functools.cache
def _kernel(device: int, wanted: tuple[tuple[str, int], ...]) -> int:
    return compiled(device, source(), dict(wanted), "oea")


def arguments_of(
    rule: Rule,
    scores: torch.Tensor,
    top_k: int,
    scaling: float,
    renormalise: bool,
    tensors: dict[str, torch.Tensor],
    further: tuple[int, ...] = (0, 0, 0, 0, 0),
) -> Any:
    """The struct Arguments of a kernel. tensors: by the names in POINTERS. further: the numbers for passes.cu only."""
    tokens, experts = scores.shape[-2:]
    width = tensors["ids"].shape[-1] if "ids" in tensors else 0
    sizes, k0 = np.zeros(MOST_STEPS, np.int32), np.zeros(MOST_STEPS, np.int32)
    for index, step in enumerate(rule.steps):
        sizes[index], k0[index] = step
    pointers = [tensors[name].data_ptr() if name in tensors else 0 for name in POINTERS]
    most = top_k if rule.kmax is None else rule.kmax
    maxp = experts if rule.maxp is None else rule.maxp
    numbers = (renormalise, tokens, experts, top_k, width, most, maxp, len(rule.steps), *further)
    return np.array([(*pointers, rule.p, scaling, *numbers, sizes, k0)], ARGUMENTS)


def check(rule: Rule, scores: torch.Tensor, top_k: int, given: dict[str, torch.Tensor]) -> None:
    """Raises ValueError for tensors that router.cu would misread, because it does not check shapes and types."""
    if scores.ndim < 2:
        raise ValueError(f"scores are {list(scores.shape)}, not [..., B, E]")
    *_, tokens, experts = scores.shape
    if (reason := uncovered(rule, tokens, experts, top_k)) is not None:
        raise ValueError(f"the router kernel does not cover this: {reason}")
    sizes, k0 = zip(*rule.steps, strict=True) if rule.steps else ((), ())
    if not k0 or list(sizes) != sorted(set(sizes)) or not 1 <= min(k0) <= max(k0) <= top_k <= experts:
        raise ValueError(f"steps {rule.steps}: give ascending batch sizes, each with a k0 from 1 to k ({top_k})")
    if rule.maxp is not None and rule.maxp < max(k0):
        raise ValueError(f"maxp {rule.maxp} is less than k0 {max(k0)}, the number of experts that each token keeps")
    if rule.kmax is not None and rule.kmax > experts:
        raise ValueError(f"kmax {rule.kmax}, but there are {experts} experts")
    wide = (*scores.shape[:-1], top_k)
    shapes = {"scores": scores.shape, "weight_basis": scores.shape, "choice": wide, "choice_weights": wide}
    dtypes = {"choice": torch.int64, "selected": torch.bool}
    for name, tensor in ({"scores": scores} | given).items():
        shape, dtype = shapes.get(name, scores.shape[:-1]), dtypes.get(name, torch.float32)
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or tensor.device != scores.device:
            raise ValueError(
                f"{name}: {list(tensor.shape)} {tensor.dtype} on {tensor.device}, not {list(shape)} {dtype} "
                f"on {scores.device}"
            )


def _run(
    rule: Rule, scores: torch.Tensor, top_k: int, scaling: float, renormalise: bool, given: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check(rule, scores, top_k, given)
    *lead, tokens, experts = scores.shape
    width = min(max(rule.kmax or 0, top_k), experts)
    ids = torch.empty(*lead, tokens, width, dtype=torch.int64, device=scores.device)
    weights = torch.empty(*lead, tokens, width, dtype=torch.float32, device=scores.device)
    active = torch.empty(lead, dtype=torch.int64, device=scores.device)
    tensors = {name: tensor.contiguous() for name, tensor in ({"scores": scores} | given).items()}
    tensors |= {"ids": ids, "weights": weights, "active": active}
    argument = arguments_of(rule, scores, top_k, scaling, renormalise, tensors)
    wanted = definitions(tokens, experts)
    function = _kernel(scores.device.index, tuple(wanted.items()))
    batches = active.numel()
    if batches:
        stream = torch.cuda.current_stream().cuda_stream
        blocks, threads = batches * wanted["CLUSTER"], threads_of(tokens)
        launch(function, (blocks,), threads, 256, stream, argument, early=True)
    return ids, weights, active


def reroute(
    rule: Rule,
    scores: torch.Tensor,
    weight_basis: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    decode: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reroutes a batch like `Oea.route`, from the tensors of RouterWork for all tokens of the batch.

    Returns expert_ids [..., B, k'] int64, the same as on the CPU; weights [..., B, k'] float32, the same as on the CPU
    up to rounding; and active [...] int64, the number of active experts.
    """
    choice = {"choice": expert_ids, "choice_weights": weights.float(), "selected": decode}
    return _run(rule, scores.float(), expert_ids.shape[-1], 1.0, True, choice | {"weight_basis": weight_basis.float()})


def route_logits(
    rule: Rule,
    logits: torch.Tensor,
    top_k: int,
    renormalise: bool = True,
    scaling: float = 1.0,
    live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reroute` from the logits [..., B, E] float32 of a softmax router, in one launch.

    Experts are ordered by logit, ties by id. Weights are proportional to the softmax probabilities of the kept experts.
    They sum to `scaling` or, without renormalise, to `scaling` times the sum of the k largest probabilities.
    live [..., B] bool: rows that are not padding; None for all rows.
    """
    return _run(rule, logits, top_k, scaling, renormalise, {} if live is None else {"selected": live})
