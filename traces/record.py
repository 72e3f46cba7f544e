"""Records routing from a live Hugging Face transformers model, with a forward hook on each router.

    with record(model, "run.parquet", num_scores="all", num_source_ranks=16) as recorder:
        recorder.domains = ["python", "german"]      # one label per sequence of the next passes
        model.generate(**inputs)

Each forward pass of the model is a step. The recorder leaves out padding (from the attention mask) and, with a cache,
the tokens that generate() feeds to a sequence after its end. Register a hook that changes the routing before the
recorder, so that the recorder sees its result. A thread writes the file while the next passes run.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from epsim.files import check_target, temporary_beside
from epsim.traces.passes import Pass, blocks_of, cache_of, real_tokens
from epsim.traces.routers import Router, find_routers, shared_cost
from epsim.traces.store import TraceWriter
from epsim.traces.trace import PHASES, Phase, TraceMeta

FLUSH_BYTES = 32 << 20


class Recorder:
    """A running recording. Set these attributes between passes to describe the next ones.

    domains: the label of each sequence of the batch. None means that every label is empty.
    source_ranks: the rank of each sequence. None puts sequence b of B on rank b * R // B.
    phase: the phase of the pass. None: `training` if the model is in training mode, `decode` if the pass has one token
        per sequence, and `prefill` otherwise.
    scored_phases: the phases whose passes keep scores; None for all.
    step: the number of the next pass. seconds_writing: how long the writing thread has worked.
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
        self._last_step = -1
        self._inside = False
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._shape = (0, 0)
        self._valid: torch.Tensor | None = None
        self._ended: torch.Tensor | None = None

    def begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: finds the tokens of the pass that are not padding."""
        self._seen.clear()
        ids = kwargs.get("input_ids", args[0] if args else None)
        tokens = kwargs.get("inputs_embeds") if ids is None else ids
        if tokens is None:
            raise ValueError("record: the model was called without input_ids and without inputs_embeds")
        batch, length = self._shape = (int(tokens.shape[0]), int(tokens.shape[1]))
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        cache = cache_of(kwargs)
        self._valid = real_tokens(mask, batch, length, cache)
        self._inside = True
        # The first pass that fills a cache is a prompt, even if it has one token.
        if length > 1 or ids is None or not self._stop_ids or cache is None or not int(cache.get_seq_length()):
            self._ended = None
            return
        fed_end = torch.isin(ids[:, 0], torch.tensor(sorted(self._stop_ids), device=ids.device))
        same = self._ended is not None and len(self._ended) == batch
        self._ended = fed_end | self._ended if same and self._ended is not None else fed_end
        running = ~self._ended[:, None]
        self._valid = running if self._valid is None else self._valid & running

    def see(self, router: int) -> Callable[[Any, Any, Any], None]:
        """The forward hook of the router with this index."""

        def hook(module: Any, inputs: Any, output: Any) -> None:
            if not self._inside:  # Gradient checkpointing, or a part of the model was called by itself.
                return
            if router in self._seen:
                raise ValueError(f"record: router {router} ran twice in one pass: record one forward pass at a time")
            first, ids = self._routers[router].choice(output)
            self._seen[router] = (first.detach(), ids.detach())

        return hook

    def end(self, model: Any, args: Any, output: Any) -> None:
        """Forward hook of the model: stores the pass as a finished step."""
        self._inside = False
        if len(self._seen) < len(self._routers):
            raise ValueError(
                f"record: {len(self._seen)} of {len(self._routers)} routers ran in this pass "
                "(if the model was compiled and called before, compile it again inside the recording)"
            )
        batch, length = self._shape
        first = [self._seen[router][0] for router in range(len(self._routers))]
        device = first[0].device  # The layers of a large model may be on several devices.
        ids = torch.stack([self._seen[router][1].to(device) for router in range(len(self._routers))])
        self._seen.clear()
        self.num_experts, self.top_k = int(first[0].shape[-1]), int(ids.shape[-1])
        phase = self.phase or ("training" if model.training else "decode" if length == 1 else "prefill")
        domains = self._per_sequence("domains", self.domains, ("",) * batch)
        ranks = self._per_sequence(
            "source_ranks", self.source_ranks, tuple(b * self._num_ranks // batch for b in range(batch))
        )
        self._check(phase, domains, ranks)
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
                domains,
                ranks,
                phase,
            )
        )
        self._last_step = self.step
        self.step += 1
        self._finished_bytes += self._finished[-1].num_bytes()
        if self._finished_bytes > FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hands the finished steps to the writing thread, after it has written those before."""
        # Wait before clearing the list: an interruption during the wait then loses no steps.
        if self._writing is not None:
            self._writing.result()
        done = [p.to_cpu() for p in self._finished]
        self._finished, self._finished_bytes = [], 0
        self._writing = self._thread.submit(self._write, done)

    def close(self) -> None:
        """Writes the remaining steps."""
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
        for block in blocks_of(done):
            assert self._writer is not None
            self._writer.append(block)
        self.seconds_writing += time.perf_counter() - begun

    def _scores(self, first: list[torch.Tensor]) -> torch.Tensor:
        """[L, T, E] float32."""
        device = first[0].device
        each = zip(self._routers, first, strict=True)
        return torch.stack([router.scores(output).to(device) for router, output in each])

    def _check(self, phase: Phase, domains: tuple[Any, ...], ranks: tuple[Any, ...]) -> None:
        """Checks what the user has set, so that an error stops this pass and not a later one."""
        if phase not in PHASES:
            raise ValueError(f"record: phase {phase!r} is not one of {', '.join(PHASES)}")
        if self.step <= self._last_step:
            raise ValueError(f"record: step {self.step} follows step {self._last_step}: numbers must ascend from 0")
        if wrong := [label for label in domains if not isinstance(label, str)]:
            raise ValueError(f"record: domain {wrong[0]!r} is not a string")
        if wrong := [rank for rank in ranks if not 0 <= rank < self._num_ranks]:
            raise ValueError(f"record: source rank {wrong[0]} is outside 0..{self._num_ranks - 1} (num_source_ranks)")

    def _per_sequence(self, name: str, given: Sequence[Any] | None, default: tuple[Any, ...]) -> tuple[Any, ...]:
        if given is None:
            return default
        if len(given) != len(default):
            raise ValueError(
                f"record: {len(given)} {name} given for a batch of {len(default)} sequences (each beam is a sequence)"
            )
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
    """Writes a token-level trace of every forward pass of `model` inside the `with` block.

    num_scores: scores to keep per token and layer: the m highest with their expert ids, or "all". num_source_ranks: R.
    phase: the phase of the whole trace. Each step also has a phase of its own. stop_ids: tokens that end a sequence in
    generate(); None means those of the model's generation config.
    After an interruption, SIGTERM or an error, the file is a readable trace of the finished steps. Raises
    FileNotFoundError or ValueError if `path` cannot be written, and ValueError if the model has no routers, if their
    score rule is unknown and scores are wanted, or if no pass was recorded.
    """
    if num_source_ranks < 1:
        raise ValueError(f"num_source_ranks {num_source_ranks}: give at least 1")
    if num_scores != "all" and num_scores < 0:
        raise ValueError(f"num_scores {num_scores}: give 0, a number of scores, or 'all'")
    if phase not in PHASES:
        raise ValueError(f"phase {phase!r} is not one of {', '.join(PHASES)}")
    target = Path(path)
    temporary_beside(check_target(path)).unlink()  # Fails now, not after hours of recording.
    routers = find_routers(model)
    with _termination_unwinds(), ExitStack() as files:

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
            named = 0 < kept < recorder.num_experts
            return files.enter_context(TraceWriter(target, meta, keep_on_interrupt=True, score_ids=named))

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


@contextmanager
def _termination_unwinds() -> Iterator[None]:
    """Turns SIGTERM (from Slurm, Kubernetes, timeout) into SystemExit, unless the program handles it itself."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop_ids(model: Any, given: Sequence[int] | None) -> set[int]:
    if given is None:
        given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if given is None:
        return set()
    return {given} if isinstance(given, int) else set(given)
