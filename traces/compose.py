"""From loose tokens to steps: where a log knows its steps they are kept, sequences become decode batches, and a stream
of tokens is cut."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from epsim.traces.options import DEFAULT_BATCH, DEFAULT_RANKS, DEFAULT_STEP_TOKENS, ImportOptions
from epsim.traces.trace import Array, Ints, Origin, Phase, TokenBlock

BLOCK_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True)
class Tokens:
    """Loose tokens of a recording, in its order.

    expert_ids [T, L, k] integer, -1 for an empty slot; scores [T, L, m] or None. step, source_rank, sequence [T] int64
    or None: what the recording knows of each token; a sequence's tokens stand in its order. domain [T] of str or None.
    num_source_ranks: 0 for one more than the largest. step_phase: the phase of each step number, where they differ.
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
    """How loose tokens stand in steps: order [T] into the tokens; step and source_rank [T], in that order."""

    order: Ints
    step: Ints
    source_rank: Ints
    num_source_ranks: int
    origin: Origin
    phase: Phase | None
    notes: tuple[str, ...]


def arrange(tokens: Tokens, options: ImportOptions) -> Arrangement:
    """Steps that the recording knows are kept; sequences (several, or --batch given) are composed into decode steps;
    anything else is cut into steps of --step-tokens."""
    if tokens.step is not None:
        return _by_step(tokens.step, tokens.source_rank, tokens.num_source_ranks, options.ranks)
    sequences = 0 if tokens.sequence is None else len(np.unique(tokens.sequence))
    if tokens.sequence is not None and options.step_tokens is None and (sequences > 1 or options.batch):
        return compose(tokens.sequence, options)
    return _cut(len(tokens), options)


def blocks(tokens: Tokens, arrangement: Arrangement, block_tokens: int = BLOCK_TOKENS) -> Iterator[TokenBlock]:
    """The arranged tokens as blocks of whole steps of about block_tokens tokens."""
    steps, begin = np.unique(arrangement.step, return_index=True)
    ends = np.append(begin[1:], len(arrangement.step))
    low = 0
    while low < len(steps):
        high = max(int(np.searchsorted(ends, begin[low] + block_tokens, side="right")), low + 1)
        part = slice(int(begin[low]), int(ends[high - 1]))
        chosen = arrangement.order[part]
        yield TokenBlock(
            steps[low:high].astype(np.int64),
            np.searchsorted(steps[low:high], arrangement.step[part]).astype(np.int64),
            arrangement.source_rank[part],
            tokens.expert_ids[chosen],
            None if tokens.scores is None else tokens.scores[chosen],
            None,
            None if tokens.domain is None else tokens.domain[chosen],
            None if tokens.step_phase is None else _phases(tokens.step_phase, steps[low:high]),
        )
        low = high


def _phases(step_phase: dict[int, Phase], steps: Ints) -> npt.NDArray[np.object_]:
    return np.array([step_phase.get(int(step), "unknown") for step in steps], dtype=object)


def schedule(lengths: Ints, batch: int) -> tuple[Ints, Ints]:
    """When and where each sequence decodes. lengths [N] >= 1 -> (first step [N], place [N] in 0..batch-1).

    Place p takes its first sequence at step floor(p * min(1, mean length / batch)): one arrival a step at most, so that
    first tokens do not align, unless sequences are shorter than the batch is wide. A finished sequence's place is taken
    by the next sequence in the very next step.
    """
    pace = min(1.0, float(lengths.mean()) / batch) if len(lengths) else 1.0
    free = [(int(place * pace), place) for place in range(batch)]
    heapq.heapify(free)
    start, where = np.empty(len(lengths), dtype=np.int64), np.empty(len(lengths), dtype=np.int64)
    for index, length in enumerate(lengths.tolist()):
        step, place = heapq.heappop(free)
        start[index], where[index] = step, place
        heapq.heappush(free, (step + length, place))
    return start, where


def compose(sequence: Ints, options: ImportOptions) -> Arrangement:
    """Decode steps from sequences. sequence [T]: the sequence of each token; every token is in exactly one step."""
    _, first, index, lengths = np.unique(sequence, return_index=True, return_inverse=True, return_counts=True)
    arrival = np.argsort(first, kind="stable")
    rank_of = np.empty_like(arrival)
    rank_of[arrival] = np.arange(len(arrival))
    index, lengths = rank_of[index.reshape(-1)], lengths[arrival]
    wanted = options.batch or DEFAULT_BATCH
    batch = min(wanted, len(lengths))
    ranks = options.ranks or min(DEFAULT_RANKS, batch)
    start, place = schedule(lengths, batch)
    within = np.empty(len(sequence), dtype=np.int64)
    grouped = np.argsort(index, kind="stable")
    within[grouped] = np.arange(len(sequence)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    step = start[index] + within
    order = np.lexsort((place[index], step))
    numbers, renumbered = np.unique(step, return_inverse=True)
    notes = [
        f"composed: {len(lengths)} sequences in {len(numbers)} decode steps of at most {batch} places"
        f"{'' if options.batch else ' (default --batch)'}; arrivals staggered, a finished sequence's place taken by "
        "the next; every token kept, so the first and last steps hold fewer",
        f"source ranks by place: place * {ranks} // {batch}{'' if options.ranks else ' (default --ranks)'}",
    ]
    if batch < wanted:
        notes.append(f"only {batch} sequences for {wanted} places: batch {batch}")
    source_rank = place[index] * ranks // batch
    return Arrangement(
        order, renumbered.reshape(-1)[order], source_rank[order], ranks, "composed", "decode", tuple(notes)
    )


def deal(token_step: Ints, num_ranks: int) -> Ints:
    """Source ranks by contiguous, (nearly) equal shares of each step's tokens. token_step [T] ascending -> [T]."""
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
    note = f"the recording knows no steps: cut into steps of {size} tokens"
    return _dealt(order, order // size, options.ranks, (note + ("" if options.step_tokens else " (default)"),))


def _dealt(order: Ints, step: Ints, ranks: int | None, notes: tuple[str, ...]) -> Arrangement:
    if ranks is None:
        return Arrangement(order, step, np.zeros(len(step), dtype=np.int64), 0, "recorded", None, notes)
    dealt = f"source ranks unknown: each step's tokens dealt to {ranks} ranks in contiguous shares"
    return Arrangement(order, step, deal(step, ranks), ranks, "recorded", None, (*notes, dealt))
