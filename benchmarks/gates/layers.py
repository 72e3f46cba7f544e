"""Times of whole layers in CUDA graphs on the GPUs of a host, which no fit of `epsim calibrate` has seen.

    torchrun --nproc-per-node 2 benchmarks/gates.py layers --recordings FOLDER --out FILE.json [--seconds 100]

FOLDER holds deepseek-v3-sglang/ and gpt-oss-20b/ (benchmarks/whole_host/sources.py); the sample needs no folder. A case
is a source, a layer, a number of redundant experts and a number of tokens a rank. The layer of every stack is captured,
and all of them run in turn on the same batches, PASSES times, so that a drift of the machine affects all alike. A time
is the slowest rank's, of several replays in a row between device events. The file also holds what each stack gives each
rank, so that predictions need this file and a calibration only. `parts` are the phases of one stack, each captured by
itself. FILE is written again after every case.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import command, script_parser, write
from runtime_common import SEED, Bench, versions
from runtime_parts import like
from whole_host.cases import STACKS, exchange_of, made, same
from whole_host.host import ON_CPU, ON_GPU, Host
from whole_host.sources import Source, deepseek, gpt_oss, sample

from epsim.calibrate.experts import shape_for
from epsim.files import message_line
from epsim.models.shapes import LayerShape
from epsim.models.spec import load_model
from epsim.policies.apply import bind
from epsim.policies.stack import parse_stack
from epsim.runtime.job import Job, tokens_of
from epsim.runtime.layer import ExpertParallelMoE
from epsim.traces.trace import TokenBlock

TILES = (64, 128, 256)
BATCHES, PASSES = 4, 5
ROW_US = 6000.0
"""The approximate time of the replays in a row."""
TOKENS = (4096, 1024, 128)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """The tokens of a source in a layer of `shape`, under the stacks `texts`."""

    source: Source
    shape: LayerShape
    redundant: int
    texts: tuple[str, ...]


def cases(folder: Path | None, wide: LayerShape, size: int, most: int) -> Iterator[Case]:
    """The cases, the most important ones first. On two ranks, deep_ep has enough slots for DeepSeek-V3's 256 experts,
    but not for redundant experts or the shared expert."""
    own = tuple(text for text in STACKS if not parse_stack(text).shared.dispatches)
    tokens = sample(wide)
    yield Case(tokens, tokens.shape, 16, STACKS)
    if folder is not None:
        v3 = deepseek(folder / "deepseek-v3-sglang", wide, size * most, BATCHES, torch.device("cpu"))
        yield Case(v3, dataclasses.replace(v3.shape, name="deepseek-v3-routed", shared_intermediate=0), 0, own[:2])
        real = gpt_oss(folder / "gpt-oss-20b" / "gptoss20b_decode_ids_256seq.npz", wide)
        yield Case(real, real.shape, 8, STACKS)
        yield Case(real, shape_for(load_model("gpt-oss-20b")), 8, own)
    yield Case(tokens, tokens.shape, 0, (STACKS[0], *STACKS[3:]))


def measured(host: Host, case: Case, tokens: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """One row for each number of tokens. Collective."""
    bench, source = host.bench, dataclasses.replace(case.source, shape=case.shape)
    exchange = "deep_ep" if host.on_gpu else "torch"
    model, job, _ = made(host, source, case.texts, exchange, case.redundant, {max(tokens): 1})
    for number in tokens:
        begun = time.monotonic()
        block = source.block(bench.size, number, BATCHES)
        fixed = exchange_of(host, exchange, case.shape, model, number)
        layers = [like(layer, fixed) for (layer,) in model.layers]
        times, parts = _times(host, job, layers, block, number)
        fixed.close()
        row: dict[str, Any] = {"source": source.name, "what": source.what, "shape": dataclasses.asdict(case.shape)}
        row |= {"redundant": case.redundant, "tokens": number, "exchange": exchange, "batches": BATCHES}
        row |= {"parts_of": case.texts[-1], "parts": parts}
        row["stacks"] = [
            {"stack": text, "us": us, **loads(job, place, block)}
            for place, (text, us) in enumerate(zip(case.texts, times, strict=True))
        ]
        row["seconds"] = round(time.monotonic() - begun, 1)
        yield row
    model.layers[0][0].exchange.close()
    model.layers[0][0].balancer.collective.close()
    del model, layers
    if host.on_gpu:
        torch.cuda.empty_cache()


def _times(
    host: Host, job: Job, layers: list[ExpertParallelMoE], block: TokenBlock, number: int
) -> tuple[list[list[list[float]]], dict[str, float]]:
    """Microseconds of the slowest rank, [stack][batch][pass], and those of the last stack's phases on the first
    batch."""
    bench, shape = host.bench, job.shape
    batches = [tokens_of(block, step, job, host.place).ids[:, 0].contiguous() for step in range(BATCHES)]
    ids, hidden = batches[0].clone(), torch.randn(number, shape.hidden, device=bench.device).to(host.dtype)
    graphs = [_captured(host, partial(layer, hidden, step=0, forced_ids=ids)) for layer in layers]
    inner = [max(round(ROW_US / _row_us(host, graph, 3)), 1) for graph in graphs]
    inner = [int(bench.slowest(one)) for one in inner]  # as many on every rank
    found: list[list[list[float]]] = [[[] for _ in batches] for _ in graphs]
    for turn in range(PASSES):
        for place, batch in enumerate(batches):
            ids.copy_(batch)
            for which in range(len(graphs)):
                one = (which + turn) % len(graphs)
                found[one][place].append(round(bench.slowest(_row_us(host, graphs[one], inner[one])), 2))
    parts = {name: _part(host, call) for name, call in _phases(layers[-1], hidden, batches[0])}
    for graph in graphs:
        _release(graph)
    return found, parts


def _phases(
    layer: ExpertParallelMoE, hidden: torch.Tensor, ids: torch.Tensor
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The phases, each with its real input. `exchange` is dispatch and combine."""
    layer(hidden, step=0, forced_ids=ids)
    assert layer.record is not None
    weights = layer.record.weights
    if layer.shape.has_shared:
        weights = torch.cat([weights, layer.record.shared_weight[:, None]], dim=1)
    slots = layer.balancer.assign(ids, 0).slots.clone()
    received = layer.exchange.dispatch(hidden, slots, weights)
    back = torch.zeros(received.hidden.shape, dtype=hidden.dtype, device=hidden.device)

    def exchange() -> object:
        return layer.exchange.combine(back, layer.exchange.dispatch(hidden, slots, weights))

    yield "route", lambda: layer._route(hidden, None, ids, None)
    yield "balance", lambda: layer.balancer.assign(ids, 0)
    yield "dispatch", lambda: layer.exchange.dispatch(hidden, slots, weights)
    yield "exchange", exchange
    yield "experts", lambda: layer.experts(received)


def _part(host: Host, call: Callable[[], Any]) -> float:
    graph = _captured(host, call)
    times = [host.bench.slowest(_row_us(host, graph, 5)) for _ in range(PASSES)]
    _release(graph)
    return round(statistics.median(times), 2)


def _captured(host: Host, call: Callable[[], Any]) -> Any:
    """A CUDA graph of one call; on a CPU the call itself."""
    return host.bench.capture(call) if host.on_gpu else call


def _release(graph: Any) -> None:
    if isinstance(graph, torch.cuda.CUDAGraph):
        graph.reset()


def _row_us(host: Host, graph: Any, calls: int) -> float:
    """Microseconds per call on this rank, of `calls` in a row. Collective."""
    run = graph.replay if host.on_gpu else graph
    dist.barrier()
    return host.bench.in_a_row_us([run] * calls) / calls


def loads(job: Job, place: int, block: TokenBlock) -> dict[str, Any]:
    """For each batch and rank: assignments, active experts, tokens of the shared expert, rows between ranks, and tiles
    of routed experts by the rows of a tile. Random draws are those of step 0, with which graphs are captured."""
    of_job = job.stacks[place]
    names = ("routed", "active", "shared_tokens", "rank_rows")
    found: dict[str, Any] = {"tiles": {str(tile): [] for tile in TILES}} | {name: [] for name in names}
    for tile in TILES:
        setting = dataclasses.replace(job.setting, rows=True, tile=tile)
        bound = bind(of_job.stack, of_job.placement, setting)
        found["copies"] = bound.copies.redundant
        for number in range(len(block.steps)):
            load = bound.load(_alone(block, number))
            assert load.tiles is not None
            found["tiles"][str(tile)] += load.tiles[:, 0].int().tolist()
            for name in names if tile == TILES[0] else ():
                found[name] += getattr(load, name)[:, 0].int().tolist()
    return found


def _alone(block: TokenBlock, number: int) -> TokenBlock:
    """One batch of the block, as step 0."""
    there = block.token_step == number
    step = np.zeros(int(there.sum()), dtype=block.token_step.dtype)
    return TokenBlock(np.zeros(1, dtype=block.steps.dtype), step, block.source_rank[there], block.expert_ids[there])


def main(words: list[str]) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--recordings", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100.0, help="after which no case is begun")
    options = parser.parse_args(words)
    bench = Bench.here("auto")
    sizes = ON_GPU if bench.on_gpu else ON_CPU
    host = Host(bench, sizes, options.recordings, Path())
    tokens = TOKENS if bench.on_gpu else tuple(sizes.tokens)
    until = time.monotonic() + options.seconds
    report = bench.described() | (versions() if bench.on_gpu else {})
    report |= {"command": command(), "num_devices": bench.size, "seed": SEED, "rows": []}
    for case in cases(options.recordings, sizes.wide, bench.size, max(tokens)):
        if not host.goes_on(until):
            break
        case = dataclasses.replace(case, source=same(case.source))
        what = f"{case.source.name}, {case.shape.name}, {case.redundant} redundant"
        try:
            for row in measured(host, case, tokens):
                report["rows"].append(row)
                if bench.rank == 0:
                    print(f"{what}, {row['tokens']} tokens: {row['seconds']} s", flush=True)
                    write(options.out, report, row_a_line=True)
        except (ValueError, RuntimeError) as error:  # on every rank alike, or the others time out
            print(f"{what}: rank {bench.rank}: {message_line(str(error))}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
