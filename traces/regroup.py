"""Maps the source ranks of a recording to the ranks of a replay."""

import dataclasses

import numpy as np

from epsim.traces.compose import deal
from epsim.traces.trace import Block, CountsBlock, RankCountsBlock, TokenBlock, TraceMeta


def regroup(block: Block, meta: TraceMeta, num_ranks: int) -> Block:
    """The block with its tokens on num_ranks source ranks; `regroup_note` describes the change in words.

    A recording from num_ranks ranks is not changed. A multiple of num_ranks is folded: adjacent ranks become one.
    Otherwise the tokens of each step are dealt in contiguous equal shares, and counts by source rank become a
    CountsBlock, because their tokens are unknown.
    """
    if isinstance(block, CountsBlock) or meta.num_source_ranks == num_ranks:
        return block
    folds = _folds(meta, num_ranks)
    if isinstance(block, TokenBlock):
        folded = block.source_rank // max(meta.num_source_ranks // num_ranks, 1)
        return dataclasses.replace(block, source_rank=folded if folds else deal(block.token_step, num_ranks))
    if not folds:
        return block.to_counts()
    num_steps, num_layers, _, num_experts = block.counts.shape
    parts = block.counts.reshape(num_steps, num_layers, num_ranks, -1, num_experts)
    return RankCountsBlock(block.steps, np.sum(parts, axis=3))


def regroup_note(meta: TraceMeta, num_ranks: int) -> str:
    """What `regroup` does to blocks of this trace, in words; empty if it does not change them."""
    recorded = meta.num_source_ranks
    if meta.level == "counts":
        return "source ranks unknown: counts level"
    if recorded == num_ranks:
        return ""
    if _folds(meta, num_ranks):
        return f"{recorded} source ranks folded to {num_ranks}: {recorded // num_ranks} adjacent ranks become one"
    if meta.level == "rank_counts":
        return f"{recorded} source ranks cannot be folded to {num_ranks}: source ranks dropped, counts level"
    why = "source ranks unknown" if recorded == 0 else f"{recorded} source ranks cannot be folded to {num_ranks}"
    return f"{why}: the tokens of each step are dealt to {num_ranks} ranks in contiguous equal shares"


def regrouped_meta(meta: TraceMeta, num_ranks: int) -> TraceMeta:
    """The meta of the trace after `regroup`, whose note is added."""
    if meta.level == "counts":
        return meta
    done = regroup_note(meta, num_ranks)
    notes = (*meta.notes, done) if done else meta.notes
    if meta.level == "rank_counts" and meta.num_source_ranks != num_ranks and not _folds(meta, num_ranks):
        return dataclasses.replace(meta, level="counts", num_source_ranks=0, notes=notes)
    return dataclasses.replace(meta, num_source_ranks=num_ranks, notes=notes)


def _folds(meta: TraceMeta, num_ranks: int) -> bool:
    return meta.num_source_ranks > num_ranks and meta.num_source_ranks % num_ranks == 0
