"""Summarizes a trace: its description and the skew of its layers, in one streaming pass."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from epsim.traces.store import SMALL_BLOCK, StoredTrace
from epsim.traces.trace import Ints, TokenBlock, TraceMeta

MOST_COUNTS = 1 << 22


@dataclass(frozen=True, slots=True)
class LayerSkew:
    """How uneven the load of the experts of one layer is.

    layer: the number that the model gives the layer.
    overall: max / mean over experts of the assignments in all steps together.
    per_step: max / mean over experts in one step, averaged over the steps with tokens.
    hottest: the expert with most assignments. idle: the number of experts without assignments.
    """

    layer: int
    assignments: int
    overall: float
    per_step: float
    hottest: int
    idle: int


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What `traces show` prints.

    tokens_per_step: the least, median and most tokens in a step. The number of tokens of a step is the number of
        assignments in the layer that has most of them, divided by top-k.
    domains: (label, number of tokens), most tokens first. Empty if the tokens have no labels.
    phases: (phase, number of steps). Empty if the steps have no phases."""

    meta: TraceMeta
    num_steps: int
    first_step: int | None
    last_step: int | None
    tokens_per_step: tuple[float, float, float]
    total_tokens: float
    file_bytes: int
    skew: tuple[LayerSkew, ...]
    domains: tuple[tuple[str, int], ...]
    phases: tuple[tuple[str, int], ...]

    def lines(self) -> list[tuple[str, str]]:
        """(name, value) pairs to print, notes last."""
        meta = self.meta
        low, median, high = self.tokens_per_step
        steps = f"{self.num_steps:,}"
        if self.first_step is not None:
            steps += f" (numbers {self.first_step}..{self.last_step})"
        shared = "unknown" if meta.shared_cost is None else f"{meta.shared_cost:g} x a routed expert's work"
        rows = [
            ("model", meta.model),
            ("source", f"{meta.source or 'unknown'} ({meta.origin})"),
            ("phase", meta.phase + "".join(f", {count:,} {name} steps" for name, count in self.phases)),
            ("level", meta.level),
            ("steps", steps),
            ("layers", f"{meta.num_layers} ({_spans(meta.layers)})"),
            ("experts", f"{meta.num_experts}, top-{meta.top_k}"),
            ("shared expert", "none" if meta.shared_cost == 0 else shared),
            ("source ranks", str(meta.num_source_ranks or "unknown")),
            (
                "tokens",
                f"{self.total_tokens:,.0f}; per step {low:,.0f} / {median:,.0f} / {high:,.0f} (min / p50 / max)",
            ),
            ("file", f"{self.file_bytes / 1e6:,.2f} MB"),
        ]
        if meta.num_scores:
            rows.insert(8, ("router scores", f"{meta.num_scores} per token and layer"))
        if self.domains:
            rows.append(("domains", ", ".join(f"{name} {count:,}" for name, count in self.domains[:8])))
        return rows + [("note", note) for note in meta.notes]


def summarize(trace: StoredTrace) -> TraceSummary:
    """Summarizes a trace in one pass and bounded memory."""
    meta = trace.meta
    total = np.zeros((meta.num_layers, meta.num_experts), dtype=np.int64)
    ratio_sum = np.zeros(meta.num_layers)
    ratio_steps = np.zeros(meta.num_layers, dtype=np.int64)
    tokens: list[Ints] = []
    domains: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    first = last = None
    # The counts of a step of tokens may be much larger than the tokens.
    most_steps = max(1, MOST_COUNTS // total.size) if meta.level == "tokens" else None
    for block in trace.blocks(max_bytes=SMALL_BLOCK, max_steps=most_steps):
        if isinstance(block, TokenBlock):
            counts = block.to_counts(meta.num_experts).counts
            if block.domain is not None:
                domains.update(str(name) for name in block.domain)
            if block.phase is not None:
                phases.update(str(name) for name in block.phase)
        else:
            counts = block.counts.sum(axis=2) if block.counts.ndim == 4 else block.counts
        total += counts.sum(axis=0)
        sums = counts.sum(axis=2)
        busy = sums > 0
        peak = counts.max(axis=2) * meta.num_experts
        ratio_sum += np.divide(peak, sums, out=np.zeros(sums.shape), where=busy).sum(axis=0)
        ratio_steps += busy.sum(axis=0)
        tokens.append(sums.max(axis=1))
        first = int(block.steps[0]) if first is None else first
        last = int(block.steps[-1])
    a_step = np.concatenate(tokens) / meta.top_k if tokens else np.zeros(1)
    return TraceSummary(
        meta,
        trace.num_steps,
        first,
        last,
        (float(a_step.min()), float(np.median(a_step)), float(a_step.max())),
        float(a_step.sum()),
        trace.path.stat().st_size,
        tuple(
            LayerSkew(
                layer,
                int(row.sum()),
                float(row.max() * meta.num_experts / max(row.sum(), 1)),
                float(ratio_sum[i] / max(ratio_steps[i], 1)),
                int(row.argmax()),
                int((row == 0).sum()),
            )
            for i, (layer, row) in enumerate(zip(meta.layers, total))
        ),
        tuple(domains.most_common()),
        tuple(phases.most_common()),
    )


def _spans(numbers: tuple[int, ...]) -> str:
    whole = numbers == tuple(range(numbers[0], numbers[0] + len(numbers)))
    return f"{numbers[0]}-{numbers[-1]}" if whole and len(numbers) > 1 else ", ".join(map(str, numbers))
