"""Checks that a block fits its trace. The store runs them when it writes and when it reads."""

import numpy as np

from epsim.traces.trace import PHASES, Array, Block, CountsBlock, Ints, RankCountsBlock, TokenBlock, TraceMeta

# The most assignments of a layer in a step: times 2^20, or summed over millions of steps, they still fit int64.
MAX_COUNT = 2**40


def check_block(block: Block, meta: TraceMeta, last_step: int | None) -> None:
    """Raises ValueError if a block does not fit its trace: level, shapes, step order, values (see TokenBlock)."""
    kinds = {"counts": CountsBlock, "rank_counts": RankCountsBlock, "tokens": TokenBlock}
    if not isinstance(block, kinds[meta.level]):
        raise ValueError(f"a {type(block).__name__} cannot go into a trace of level {meta.level}")
    check_steps(block.steps, last_step)
    if isinstance(block, TokenBlock):
        _check_tokens(block, meta)
    else:
        check_counts(block.counts, counts_shape(meta, len(block.steps)))


def counts_shape(meta: TraceMeta, num_steps: int) -> tuple[int, ...]:
    """The shape of a block's counts: [S, L, E], or [S, L, R, E] for counts by source rank."""
    ranks = (meta.num_source_ranks,) if meta.level == "rank_counts" else ()
    return (num_steps, meta.num_layers, *ranks, meta.num_experts)


def check_steps(steps: Ints, last_step: int | None) -> None:
    if steps.ndim != 1 or not np.issubdtype(steps.dtype, np.integer):
        raise ValueError(f"steps must be a list of whole numbers, not {list(steps.shape)} {steps.dtype}")
    if (np.diff(steps) <= 0).any():
        index = int((np.diff(steps) <= 0).argmax())
        raise ValueError(f"steps must ascend, but step {steps[index]} is followed by {steps[index + 1]}")
    if len(steps) and steps[0] < 0:
        raise ValueError(f"step {steps[0]} is negative")
    if last_step is not None and len(steps) and steps[0] <= last_step:
        raise ValueError(f"steps must ascend, but step {last_step} is followed by {steps[0]}")


def check_counts(counts: Ints, shape: tuple[int, ...]) -> None:
    if counts.shape != shape:
        raise ValueError(f"counts have shape {list(counts.shape)}, not {list(shape)}")
    if not np.issubdtype(counts.dtype, np.integer):
        raise ValueError(f"counts must be whole numbers, not {counts.dtype}")
    if not counts.size:
        return
    if counts.min() < 0:
        index = np.argwhere(counts < 0)[0]
        raise ValueError(f"negative count {counts[tuple(index)]} at step {index[0]} of the block, layer {index[1]}")
    most = int(counts.max())
    addends, axes = counts.size // (shape[0] * shape[1]), tuple(range(2, counts.ndim))
    # A sum costs a pass over the counts, so it is computed only if it could be too large.
    if most > MAX_COUNT or (most > MAX_COUNT // addends and counts.sum(axis=axes).max() > MAX_COUNT):
        raise ValueError(f"a layer has more than 2^40 assignments in one step (its largest count is {most})")


def check_ids(ids: Array | Ints, num_experts: int, what: str = "expert id") -> None:
    """Raises ValueError unless each of ids [T, L, n] is -1 or an expert."""
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{what}s must be whole numbers, not {ids.dtype}")
    if not ids.size:
        return
    low, high = int(np.min(ids)), int(np.max(ids))
    if low < -1 or high >= num_experts:
        wrong = low if low < -1 else high
        token, layer = np.argwhere(ids == wrong)[0][:2]
        raise ValueError(
            f"{what} {wrong} of token {token} in layer {layer} is outside 0..{num_experts - 1} (-1 is an empty slot)"
        )


def check_distinct(ids: Array) -> None:
    """Raises ValueError if a token of ids [T, L, k] has an expert twice in one layer."""
    ordered = np.sort(ids, axis=2)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & np.greater_equal(ordered[..., 1:], 0)
    if twice.any():
        token, layer, slot = np.argwhere(twice)[0]
        raise ValueError(f"token {token} chooses expert {ordered[token, layer, slot]} twice in layer {layer}")


def _check_tokens(block: TokenBlock, meta: TraceMeta) -> None:
    num_tokens = len(block.token_step)
    for name, array in (("token_step", block.token_step), ("source_rank", block.source_rank)):
        if array.shape != (num_tokens,) or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{name} has shape {list(array.shape)} {array.dtype}, not [{num_tokens}] whole numbers")
    step, rank = block.token_step.astype(np.int64), block.source_rank.astype(np.int64)
    if num_tokens and (step.min() < 0 or step.max() >= len(block.steps)):
        raise ValueError(f"token_step must lie in 0..{len(block.steps) - 1}, the indices of the block's steps")
    num_ranks = max(meta.num_source_ranks, 1)
    if num_tokens and (rank.min() < 0 or rank.max() >= num_ranks):
        raise ValueError(f"source rank {rank.max() if rank.min() >= 0 else rank.min()} is outside 0..{num_ranks - 1}")
    if (np.diff(step * num_ranks + rank) < 0).any():
        raise ValueError("tokens must be ordered by step, then source rank")
    shape = (num_tokens, meta.num_layers, meta.top_k)
    if block.expert_ids.shape != shape:
        raise ValueError(f"expert_ids have shape {list(block.expert_ids.shape)}, not {list(shape)}")
    check_ids(block.expert_ids, meta.num_experts)
    check_distinct(block.expert_ids)
    _check_scores(block, meta)
    if block.domain is not None and block.domain.shape != (num_tokens,):
        raise ValueError(f"domain has shape {list(block.domain.shape)}, not [{num_tokens}]")
    if block.phase is not None:
        if block.phase.shape != block.steps.shape:
            raise ValueError(f"phase has shape {list(block.phase.shape)}, not [{len(block.steps)}]")
        if wrong := set(block.phase) - set(PHASES):
            raise ValueError(f"phase {sorted(map(str, wrong))[0]!r} is not one of {', '.join(PHASES)}")


def _check_scores(block: TokenBlock, meta: TraceMeta) -> None:
    if block.scores is None:
        return
    if meta.num_scores == 0:
        raise ValueError("the trace keeps no scores, but the block has some")
    shape = (len(block.token_step), meta.num_layers, meta.num_scores)
    if block.scores.shape != shape:
        raise ValueError(f"scores have shape {list(block.scores.shape)}, not {list(shape)}")
    with np.errstate(over="ignore"):  # the error below is enough
        kept = block.scores.astype(np.float16)
    if not np.isfinite(kept).all():
        raise ValueError("a score is not a finite number within 65504 (scores are kept as float16)")
    if block.score_ids is not None:
        if block.score_ids.shape != shape:
            raise ValueError(f"score_ids have shape {list(block.score_ids.shape)}, not {list(shape)}")
        check_ids(block.score_ids, meta.num_experts, "score id")
    elif meta.num_scores not in (meta.num_experts, meta.top_k):
        raise ValueError(f"{meta.num_scores} scores per token, neither the top-k nor all experts: give score_ids")
