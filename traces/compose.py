"""Arranges the tokens of a recording in steps.

Recorded steps are kept. Sequences are composed into decode steps. Any other stream of tokens is cut into steps.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from epsim.traces.options import DEFAULT_BATCH, DEFAULT_RANKS, DEFAULT_STEP_TOKENS, ImportOptions
from epsim.traces.trace import Array, Ints, Origin, Phase, TokenBlock

BLOCK_TOKENS = 1 << 15
BLOCK_IDS = 1 << 26


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a recording, in its order, before they are arranged in steps.

    expert_ids [T, L, k] integer, -1 for an empty slot; scores [T, L, m] or None. step, source_rank, sequence [T] int64
    or None: what the recording says of each token; the tokens of a sequence are in order. domain [T] of str or None.
    num_source_ranks: 0 for the largest source rank + 1. step_phase: each step number's phase, if phases differ.
    """

    expert_ids: Array
    scores: Array | None = None
    step: Ints | None = None
    source_rank: Ints | None = None
    sequence: Ints | None = None
    domain: npt.NDArray[np.object_] | None = None
    num_source_ranks: int = 0
    step_phase: dict[int, Phase] | None = None

    def __len__(self) -> int:
        return len(self.expert_ids)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Tokens arranged in steps.

    order [T]: the indices of the tokens, step by step. step, source_rank [T]: those of the tokens in this order."""

    order: Ints
    step: Ints
    source_rank: Ints
    num_source_ranks: int
    origin: Origin
    phase: Phase | None
    notes: tuple[str, ...]


def arrange(tokens: Tokens, options: ImportOptions) -> Arrangement:
    """Arranges tokens in steps. Recorded steps are kept. Sequences (several, or with --batch) are composed into decode
    steps. Anything else is cut into steps of --step-tokens."""
    if tokens.step is not None:
        return _by_step(tokens.step, tokens.source_rank, tokens.num_source_ranks, options.ranks)
    sequences = 0 if tokens.sequence is None else len(np.unique(tokens.sequence))
    if tokens.sequence is not None and options.step_tokens is None and (sequences > 1 or options.batch):
        return compose(tokens.sequence, options)
    return _cut(len(tokens), options)


def blocks(tokens: Tokens, arrangement: Arrangement, block_tokens: int = BLOCK_TOKENS) -> Iterator[TokenBlock]:
    """The arranged tokens as blocks of whole steps of about block_tokens tokens, fewer if a token has very many ids."""
    block_tokens = min(block_tokens, BLOCK_IDS // tokens.expert_ids[0].size)
    steps, begin = np.unique(arrangement.step, return_index=True)
    ends = np.append(begin[1:], len(arrangement.step))
    low = 0
    while low < len(steps):
        high = max(int(np.searchsorted(ends, begin[low] + block_tokens, side="right")), low + 1)
        part = slice(int(begin[low]), int(ends[high - 1]))
        chosen, phases = arrangement.order[part], None
        if tokens.step_phase is not None:
            by_step = [tokens.step_phase.get(int(step), "unknown") for step in steps[low:high]]
            phases = np.array(by_step, dtype=object)
        yield TokenBlock(
            steps[low:high].astype(np.int64),
            np.searchsorted(steps[low:high], arrangement.step[part]).astype(np.int64),
            arrangement.source_rank[part],
            tokens.expert_ids[chosen],
            None if tokens.scores is None else tokens.scores[chosen],
            None,
            None if tokens.domain is None else tokens.domain[chosen],
            phases,
        )
        low = high


def schedule(lengths: Ints, batch: int) -> tuple[Ints, Ints]:
    """The first step and the batch slot of each sequence.

    lengths [N] >= 1 -> (first step [N], slot [N] in 0..batch-1). Slot p takes its first sequence at step
    floor(p * min(1, mean length / batch)), so sequences do not all start in the same step. When a sequence ends, the
    next sequence takes its slot in the following step.
    """
    pace = min(1.0, float(lengths.mean()) / batch) if len(lengths) else 1.0
    free = [(int(slot * pace), slot) for slot in range(batch)]
    heapq.heapify(free)
    start, slots = np.empty(len(lengths), dtype=np.int64), np.empty(len(lengths), dtype=np.int64)
    for index, length in enumerate(lengths.tolist()):
        step, slot = heapq.heappop(free)
        start[index], slots[index] = step, slot
        heapq.heappush(free, (step + length, slot))
    return start, slots


def compose(sequence: Ints, options: ImportOptions) -> Arrangement:
    """Composes sequences into decode steps. Every token is in exactly one step.

    sequence [T]: the sequence of each token."""
    _, first, index, lengths = np.unique(sequence, return_index=True, return_inverse=True, return_counts=True)
    arrival = np.argsort(first, kind="stable")
    rank_of = np.empty_like(arrival)
    rank_of[arrival] = np.arange(len(arrival))
    index, lengths = rank_of[index.reshape(-1)], lengths[arrival]
    wanted = options.batch or DEFAULT_BATCH
    batch = min(wanted, len(lengths))
    ranks = options.ranks or min(DEFAULT_RANKS, batch)
    start, slot = schedule(lengths, batch)
    within = np.empty(len(sequence), dtype=np.int64)
    grouped = np.argsort(index, kind="stable")
    within[grouped] = np.arange(len(sequence)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    step = start[index] + within
    order = np.lexsort((slot[index], step))
    numbers, renumbered = np.unique(step, return_inverse=True)
    notes = [
        f"composed: {len(lengths)} sequences in {len(numbers)} decode steps of at most {batch} sequences"
        f"{'' if options.batch else ' (default --batch)'}; sequences start at different steps, and when one ends, the "
        "next takes its batch slot; all tokens are kept, so the first and the last steps hold fewer sequences",
        f"source rank = batch slot * {ranks} // {batch}{'' if options.ranks else ' (default --ranks)'}",
    ]
    if batch < wanted:
        notes.append(f"the batch size is {batch}, not {wanted}: the recording has only {batch} sequences")
    source_rank = slot[index] * ranks // batch
    return Arrangement(
        order, renumbered.reshape(-1)[order], source_rank[order], ranks, "composed", "decode", tuple(notes)
    )


def deal(token_step: Ints, num_ranks: int) -> Ints:
    """Source ranks [T] in contiguous, nearly equal shares of each step's tokens. token_step [T]: ascending."""
    _, begin, counts = np.unique(token_step, return_index=True, return_counts=True)
    within = np.arange(len(token_step)) - np.repeat(begin, counts)
    dealt: Ints = within * num_ranks // np.repeat(counts, counts)
    return dealt


def _by_step(step: Ints, source_rank: Ints | None, recorded_ranks: int, ranks: int | None) -> Arrangement:
    if source_rank is not None:
        order = np.lexsort((source_rank, step))
        num_ranks = recorded_ranks or int(source_rank.max(initial=0)) + 1
        return Arrangement(order, step[order], source_rank[order], num_ranks, "recorded", None, ())
    order = np.argsort(step, kind="stable")
    return _dealt(order, step[order], ranks, ())


def _cut(num_tokens: int, options: ImportOptions) -> Arrangement:
    size = options.step_tokens or DEFAULT_STEP_TOKENS
    order = np.arange(num_tokens)
    note = f"the recording has no steps: cut into steps of {size} tokens"
    return _dealt(order, order // size, options.ranks, (note + ("" if options.step_tokens else " (default)"),))


def _dealt(order: Ints, step: Ints, ranks: int | None, notes: tuple[str, ...]) -> Arrangement:
    if ranks is None:
        return Arrangement(order, step, np.zeros(len(step), dtype=np.int64), 0, "recorded", None, notes)
    dealt = f"source ranks unknown: the tokens of each step are dealt to {ranks} ranks in contiguous shares"
    return Arrangement(order, step, deal(step, ranks), ranks, "recorded", None, (*notes, dealt))
