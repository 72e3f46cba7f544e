"""Draws token-level steps from recorded marginals, with a mixture of topics that drifts from step to step.

Each source recording is a topic. Its counts, summed over steps, give for each layer the probability p_e that a token's
top-k holds expert e (its share of the assignments x k, at most 1). The mixture weights are the softmax of a stationary
autoregressive walk z_s = (1 - drift) z_{s-1} + sqrt(1 - (1 - drift)^2) spread n_s, where n_s is standard normal and
z_0 = spread n_0 (a logistic-normal walk on the simplex). Each token draws a topic from the weights and then, in each
layer independently, k distinct experts by systematic sampling: the experts are shuffled, their probabilities are laid
end to end, and k points at distance 1 after one uniform start choose them. So expert e is chosen with probability
exactly p_e (Madow 1949, "On the theory of systematic sampling, II").
"""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from epsim.traces.compose import deal
from epsim.traces.options import SynthesisOptions
from epsim.traces.store import SMALL_BLOCK, StoredTrace, TraceWriter
from epsim.traces.trace import Ints, TokenBlock, TraceMeta

MAX_STEP_IDS = 1 << 29

Floats = npt.NDArray[np.float64]


def synthesize(
    sources: Sequence[StoredTrace], target: str | os.PathLike[str], options: SynthesisOptions | None = None
) -> StoredTrace:
    """Writes a token-level trace drawn from the sources (origin `drawn`, domain = topic) and returns it.

    Raises ValueError if sources differ in layers, experts or top-k, or if one has a layer without tokens.
    """
    options = options or SynthesisOptions()
    if not sources:
        raise ValueError("no source given: name at least one trace with recorded counts")
    first = sources[0].meta
    for source in sources[1:]:
        for name in ("layers", "num_experts", "top_k"):
            if getattr(source.meta, name) != getattr(first, name):
                raise ValueError(
                    f"{source.path}: {name} {_short(getattr(source.meta, name))} differs from "
                    f"{_short(getattr(first, name))} of {sources[0].path}: give sources of one model"
                )
    if options.tokens_per_step * first.num_layers * first.top_k > MAX_STEP_IDS:
        raise ValueError(
            f"--step-tokens {options.tokens_per_step} x {first.num_layers} layers x top-{first.top_k}: a step does not "
            f"fit in memory: give at most {max(MAX_STEP_IDS // (first.num_layers * first.top_k), 1)}"
        )
    if any(Path(target).exists() and Path(target).samefile(source.path) for source in sources):
        raise ValueError(f"{target} is also a source: write the trace to another file")
    topics, capped = [], 0
    for source in sources:
        probabilities, num_capped = inclusion(marginals(source), first.top_k, source.path)
        topics.append(probabilities)
        capped += num_capped
    names = _names(sources)
    notes = [
        f"drawn from the marginals of {', '.join(names)}: {options.num_steps} steps of {options.tokens_per_step} "
        f"tokens, seed {options.seed}; given its topic, a token's experts are independent between layers",
        f"topics are mixed by a logistic-normal walk, drift {options.drift:g}, spread {options.spread:g}",
        f"the tokens of each step are dealt to {options.num_ranks} source ranks in contiguous shares",
    ]
    if capped:
        notes.append(f"{capped} (topic, layer, expert) marginals above 1/top-k are capped, the others raised")
    meta = TraceMeta(
        level="tokens",
        num_layers=first.num_layers,
        num_experts=first.num_experts,
        top_k=first.top_k,
        num_source_ranks=options.num_ranks,
        shared_cost=first.shared_cost,
        model=first.model,
        phase=options.phase or (first.phase if all(s.meta.phase == first.phase for s in sources) else "mixed"),
        origin="drawn",
        layers=first.layers,
        source=", ".join(dict.fromkeys(s.meta.source for s in sources)),
        notes=tuple(notes),
    )
    with TraceWriter(target, meta) as writer:
        for block in draw_steps(np.stack(topics), names, first.top_k, options):
            writer.append(block)
    return StoredTrace(target)


def marginals(source: StoredTrace) -> Ints:
    """Assignments summed over all steps and source ranks, [L, E]."""
    total = np.zeros((source.meta.num_layers, source.meta.num_experts), dtype=np.int64)
    for block in source.blocks(max_bytes=SMALL_BLOCK):
        counts = block.to_counts(source.meta.num_experts).counts if isinstance(block, TokenBlock) else block.counts
        total += counts.sum(axis=tuple(i for i in range(counts.ndim) if i not in (1, counts.ndim - 1)))
    return total


def inclusion(counts: Ints, top_k: int, where: Path | str = "marginals") -> tuple[Floats, int]:
    """Inclusion probabilities from counts [L, E]: (p [L, E] in 0..1, summing to top_k per layer; experts capped at 1).

    An expert with a share above 1 / top_k is in every token; the others divide the rest in proportion to their counts.
    If fewer than top_k experts of a layer have counts, those without divide the rest evenly.
    """
    empty = np.flatnonzero(counts.sum(axis=1) == 0)
    if empty.size:
        raise ValueError(f"{where}: layer {empty[0]} has no tokens to draw from: leave this source out")
    result = np.zeros(counts.shape)
    num_capped = 0
    for layer, row in enumerate(counts.astype(np.float64)):
        full = np.zeros(len(row), dtype=bool)
        while True:
            free = ~full
            left = top_k - int(full.sum())
            mass = row[free].sum()
            p = row * (left / mass) if mass > 0 else np.full(len(row), left / max(int(free.sum()), 1))
            over = free & (p > 1.0)
            if not over.any() or left == 0:
                break
            full |= over
            num_capped += int(over.sum())
        result[layer] = np.where(full, 1.0, p if left else 0.0)
    return result, num_capped


def mixture_walk(num_steps: int, num_topics: int, drift: float, spread: float, rng: np.random.Generator) -> Floats:
    """The mixture weights of each step, [steps, topics], as the module describes them."""
    noise = rng.standard_normal((num_steps, num_topics)) * spread
    keep = 1.0 - drift
    walk = np.empty_like(noise)
    walk[0] = noise[0]
    for step in range(1, num_steps):
        walk[step] = keep * walk[step - 1] + math.sqrt(1.0 - keep * keep) * noise[step]
    weights = np.exp(walk - walk.max(axis=1, keepdims=True))
    mixed: Floats = weights / weights.sum(axis=1, keepdims=True)
    return mixed


def draw_steps(topics: Floats, names: Sequence[str], top_k: int, options: SynthesisOptions) -> Iterator[TokenBlock]:
    """One block per step, drawn from topics [M, L, E]: inclusion probabilities."""
    rng = np.random.default_rng(options.seed)
    weights = mixture_walk(options.num_steps, len(topics), options.drift, options.spread, rng)
    labels = np.array(names, dtype=object)
    token_step = np.zeros(options.tokens_per_step, dtype=np.int64)
    source_rank = deal(token_step, options.num_ranks)
    for step in range(options.num_steps):
        topic = rng.choice(len(topics), size=options.tokens_per_step, p=weights[step])
        ids = np.empty((options.tokens_per_step, topics.shape[1], top_k), dtype=np.int16)
        draw_tokens(topics, topic, np.uint64(rng.integers(2**63)), ids)
        yield TokenBlock(np.array([step]), token_step, source_rank, ids, domain=labels[topic])


@numba.njit(cache=True)
def draw_tokens(topics: Any, topic: Any, seed: Any, ids: Any) -> None:
    """Fills ids [T, L, k] by systematic sampling. topics [M, L, E] float64, each layer summing to k; topic [T]."""
    num_tokens, num_layers, top_k = ids.shape
    num_experts = topics.shape[2]
    order = np.arange(num_experts)
    state = seed
    for token in range(num_tokens):
        for layer in range(num_layers):
            p = topics[topic[token], layer]
            # Shuffling the order of the last token is as uniform as shuffling a sorted list.
            for i in range(num_experts - 1, 0, -1):
                state, bits = _next(state)
                j = np.int64((bits >> np.uint64(32)) * np.uint64(i + 1) >> np.uint64(32))
                order[i], order[j] = order[j], order[i]
            state, bits = _next(state)
            point = np.float64(bits >> np.uint64(11)) * 2.0**-53
            total, chosen, spare = 0.0, 0, -1
            for i in range(num_experts):
                expert = order[i]
                total += p[expert]
                if total > point and p[expert] > 0.0 and chosen < top_k:
                    ids[token, layer, chosen] = expert
                    chosen += 1
                    point += 1.0
                elif p[expert] > 0.0:
                    spare = expert
            # The probabilities sum to k only up to rounding, so the last point may lie beyond their end.
            if chosen < top_k:
                ids[token, layer, chosen] = spare


@numba.njit(cache=True, inline="always")
def _next(state: Any) -> Any:
    """splitmix64 (Steele, Lea, Flood 2014): (next state, 64 random bits)."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state, z ^ (z >> np.uint64(31))


def _names(sources: Sequence[StoredTrace]) -> list[str]:
    """The name of each topic: that of its source, with a number if two are equal."""
    names = [Path(s.meta.source or s.path.name).stem[:60] for s in sources]
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else text[:57] + "..."
