"""Records routing from a live Hugging Face transformers model, one forward hook on each router.

    with record(model, "run.parquet", num_scores="all", num_source_ranks=16) as recorder:
        recorder.domains = ["python", "german"]      # of the next passes' sequences, one each
        model.generate(**inputs)

A forward pass of the model is a step. Padding, by the attention mask, is left out, and so are the tokens that
generate() feeds to a sequence after its end. A hook that changes the routing must be registered before the recorder,
which then sees what it returns. The file is written by a thread, beside the next passes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from epsim.traces.passes import Pass
from epsim.traces.routers import Router, find_routers, shared_cost
from epsim.traces.store import TraceWriter
from epsim.traces.trace import Phase, TraceMeta

FLUSH_BYTES = 32 << 20


class Recorder:
    """What a recording can be told while it runs, by setting these between passes.

    domains: the label of each sequence of the batch ("" where not given).
    source_ranks: the rank of each sequence; None deals them out in order, sequence b of B to rank b * R // B.
    phase: of the next passes; None calls passes of one token a sequence decode, others prefill (training in training).
    scored_phases: passes of these phases keep their scores; None for all.
    step: the number of the next pass. seconds_writing: time that the writing thread has been at work.
    """

    def __init__(
        self,
        routers: list[Router],
        num_scores: int | Literal["all"],
        num_ranks: int,
        stop_ids: set[int],
        open_writer: Callable[[Recorder], TraceWriter],
    ) -> None:
        self.domains: Sequence[str] | None = None
        self.source_ranks: Sequence[int] | None = None
        self.phase: Phase | None = None
        self.scored_phases: tuple[Phase, ...] | None = None
        self.step = 0
        self.num_experts = self.top_k = 0
        self._finished: list[Pass] = []
        self._finished_bytes = 0
        self._writer: TraceWriter | None = None
        self._open_writer = open_writer
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[None] | None = None
        self.seconds_writing = 0.0
        self._routers = routers
        self._num_scores = num_scores
        self._num_ranks = num_ranks
        self._stop_ids = stop_ids
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._shape = (0, 0)
        self._valid: torch.Tensor | None = None
        self._ended: torch.Tensor | None = None

    def begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: notes which tokens of the pass are real."""
        self._seen.clear()
        ids = kwargs.get("input_ids", args[0] if args else None)
        tokens = kwargs.get("inputs_embeds") if ids is None else ids
        if tokens is None:
            raise ValueError("record: the model was called without input_ids and without inputs_embeds")
        batch, length = self._shape = (int(tokens.shape[0]), int(tokens.shape[1]))
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.shape[1] < length):
            shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise ValueError(f"record: attention_mask {shape} does not tell padding: give [sequences, tokens]")
        self._valid = None if mask is None else mask[:, -length:].bool()
        if length > 1 or ids is None or not self._stop_ids:
            self._ended = None
            return
        fed_end = torch.isin(ids[:, 0], torch.tensor(sorted(self._stop_ids), device=ids.device))
        same = self._ended is not None and len(self._ended) == batch
        self._ended = fed_end | self._ended if same and self._ended is not None else fed_end
        running = ~self._ended[:, None]
        self._valid = running if self._valid is None else self._valid & running

    def see(self, place: int) -> Callable[[Any, Any, Any], None]:
        """Forward hook of the router at this place."""

        def hook(module: Any, inputs: Any, output: Any) -> None:
            if place in self._seen:
                raise ValueError(f"record: router {place} ran twice in one pass (gradient checkpointing?)")
            self._seen[place] = (output[0].detach(), output[-1].detach())

        return hook

    def end(self, model: Any, args: Any, output: Any) -> None:
        """Forward hook of the model: the pass is a finished step."""
        if len(self._seen) < len(self._routers):
            raise ValueError(f"record: {len(self._seen)} of {len(self._routers)} routers ran in this pass")
        batch, length = self._shape
        first = [self._seen[place][0] for place in range(len(self._routers))]
        ids = torch.stack([self._seen[place][1] for place in range(len(self._routers))])
        self._seen.clear()
        self.num_experts, self.top_k = int(first[0].shape[-1]), int(ids.shape[-1])
        phase = self.phase or ("training" if model.training else "decode" if length == 1 else "prefill")
        scores = score_ids = None
        if self._num_scores and (self.scored_phases is None or phase in self.scored_phases):
            scores = self._scores(first)
            if self._num_scores != "all" and self._num_scores < self.num_experts:
                scores, score_ids = scores.topk(self._num_scores, dim=-1)
            scores = scores.to(torch.float16)
        self._finished.append(
            Pass(
                self.step,
                batch,
                length,
                self._valid,
                ids.to(torch.int16),
                scores,
                None if score_ids is None else score_ids.to(torch.int16),
                self._per_sequence("domains", self.domains, ("",) * batch),
                self._per_sequence(
                    "source_ranks", self.source_ranks, tuple(b * self._num_ranks // batch for b in range(batch))
                ),
                phase,
            )
        )
        self.step += 1
        self._finished_bytes += self._finished[-1].num_bytes()
        if self._finished_bytes > FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hands the finished steps to the writing thread, once it is done with those before."""
        done, self._finished, self._finished_bytes = [p.to_cpu() for p in self._finished], [], 0
        if self._writing is not None:
            self._writing.result()
        self._writing = self._thread.submit(self._write, done)

    def close(self) -> None:
        """Writes what is left."""
        try:
            self.flush()
            assert self._writing is not None
            self._writing.result()
        finally:
            self._thread.shutdown()

    def _write(self, done: list[Pass]) -> None:
        begun = time.perf_counter()
        if done and self._writer is None:
            self._writer = self._open_writer(self)
        for finished in done:
            assert self._writer is not None
            self._writer.append(finished.to_block())
        self.seconds_writing += time.perf_counter() - begun

    def _scores(self, first: list[torch.Tensor]) -> torch.Tensor:
        """[L, T, E] float32."""
        return torch.stack([router.scores(output) for router, output in zip(self._routers, first, strict=True)])

    def _per_sequence(self, name: str, given: Sequence[Any] | None, default: tuple[Any, ...]) -> tuple[Any, ...]:
        if given is None:
            return default
        if len(given) != len(default):
            raise ValueError(f"record: {len(given)} {name} given for a batch of {len(default)} sequences")
        return tuple(given)


@contextmanager
def record(
    model: Any,
    path: str | os.PathLike[str],
    *,
    num_scores: int | Literal["all"] = 0,
    num_source_ranks: int = 1,
    model_name: str | None = None,
    phase: Phase = "mixed",
    source: str = "",
    notes: tuple[str, ...] = (),
    stop_ids: Sequence[int] | None = None,
) -> Iterator[Recorder]:
    """Writes a token-level trace of every forward pass of `model` inside the `with`.

    num_scores: scores a token and layer, the highest m with their expert ids, or all. num_source_ranks: R.
    phase: of the trace as a whole; each step has its own. stop_ids: tokens that end a sequence under generate(); by
    default those of the model's generation config.
    An interruption or error leaves a readable trace of the finished steps. Raises ValueError where the model has no
    routers, where their scores are asked for but unknown, and where no pass was recorded.
    """
    if num_source_ranks < 1:
        raise ValueError(f"num_source_ranks {num_source_ranks}: give at least 1")
    if num_scores != "all" and num_scores < 0:
        raise ValueError(f"num_scores {num_scores}: give 0, a number of scores, or 'all'")
    target = Path(path)
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ValueError(f"{target}: cannot write a trace there")
    routers = find_routers(model)
    with ExitStack() as files:

        def open_writer(recorder: Recorder) -> TraceWriter:
            kept = recorder.num_experts if num_scores == "all" else min(num_scores, recorder.num_experts)
            meta = TraceMeta(
                level="tokens",
                num_layers=len(routers),
                num_experts=recorder.num_experts,
                top_k=recorder.top_k,
                num_source_ranks=num_source_ranks,
                shared_cost=shared_cost(model),
                model=model_name or type(model).__name__,
                phase=phase,
                layers=tuple(router.layer for router in routers),
                num_scores=kept,
                source=source,
                notes=notes,
            )
            return files.enter_context(TraceWriter(target, meta, keep_on_interrupt=True))

        recorder = Recorder(routers, num_scores, num_source_ranks, _stop_ids(model, stop_ids), open_writer)
        handles = [
            model.register_forward_pre_hook(recorder.begin, with_kwargs=True),
            *(router.module.register_forward_hook(recorder.see(i)) for i, router in enumerate(routers)),
            model.register_forward_hook(recorder.end),
        ]
        try:
            yield recorder
        finally:
            for handle in handles:
                handle.remove()
            recorder.close()
    if not recorder.step:
        raise ValueError(f"nothing recorded for {target}: {type(model).__name__} made no forward pass")


def _stop_ids(model: Any, given: Sequence[int] | None) -> set[int]:
    if given is None:
        given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if given is None:
        return set()
    return {given} if isinstance(given, int) else set(given)
