"""Parts `layers-*` and `oea` of benchmarks/whole_host.py. A case is a routing, a redundancy and a number of tokens.

A case runs every stack in turn on the same steps with `epsim.runtime.job`, and compares the loads with a replay's.
Before the first case, the outputs of every stack are compared with a float64 reference. An eager layer of few tokens
takes as long as the host needs to launch it. So layers are also timed as CUDA graphs, if the exchange can be captured.
The host's time for the experts (`host_us`) is measured too. If it is less than half of a phase, the phase's time counts
as the device's.
"""

import dataclasses
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from runtime_common import SEED
from runtime_parts import like

from epsim.calibrate.run import exchange_file
from epsim.cost.calibrated import HARDWARE, ExchangeTable, read_table
from epsim.cost.layer_time import LayerTiming
from epsim.launch.measured import Measured, measure
from epsim.launch.prepare import layer_timing
from epsim.models.shapes import LayerShape
from epsim.models.spec import load_model
from epsim.placement.base import Cluster
from epsim.policies.stack import parse_stack
from epsim.runtime.balance_cuda import KernelBalancer
from epsim.runtime.beats import JobClock
from epsim.runtime.exchange.base import Exchange
from epsim.runtime.exchange.choose import choose_exchange
from epsim.runtime.exchange.deep_ep import obstacle
from epsim.runtime.faults import Watch
from epsim.runtime.job import Job, JobStack, RandomLayers, run_job, tokens_of
from epsim.runtime.reference import reference_output
from epsim.runtime.telemetry import TelemetryWriter, joined, read_rank
from epsim.runtime.weights import RandomWeights
from epsim.score.statistics import paired_difference
from epsim.traces.trace import TraceMeta
from whole_host.host import Host
from whole_host.sources import Source, scored, sources

STACKS = (
    "contiguous", "eplb+even", "eplb+random", "eplb+lplb", "eplb+even+waterfill", "eplb+lplb+waterfill",
)  # fmt: skip
ROUTED = ("eplb+even", "eplb+even+pruned(k0=3)", "eplb+even+oea(k0=3)", "eplb+even+oea-ep(k0=3)")
GAIN = "throughput_gain"
GRAPHED, HOSTED = 8, 7


def layers(host: Host, exchange: str, until: float) -> Iterator[dict[str, Any]]:
    """Measures the first routing with all numbers of redundant experts, the others with the most and with none.
    Collective."""
    sizes, most = host.sizes, max(host.sizes.tokens)
    per_step = host.bench.size * most
    routings = sources(host.recordings, sizes.wide, per_step, max(sizes.tokens.values()), host.bench.device)
    for number, source in enumerate(map(same, routings)):
        for redundant in sizes.redundant if number == 0 else sizes.redundant[:: len(sizes.redundant) - 1]:
            yield from cases(host, source, STACKS, exchange, redundant, sizes.tokens, sizes.models[0], until)


def routed(host: Host, until: float) -> Iterator[dict[str, Any]]:
    """Measures router policies on decode steps of a few tokens per rank. Collective."""
    sizes = host.sizes
    number = host.bench.size * max(tokens * steps for tokens, steps in sizes.decode.items())
    source = same(scored(sizes.small, number, host.bench.device))
    for exchange in ("deep_ep", "torch"):
        given = (ROUTED, exchange, sizes.routed_redundant, sizes.decode, sizes.models[1])
        yield from cases(host, source, *given, until)


def same(source: Source) -> Source:
    """Broadcasts rank 0's source, because generators on other devices may draw other values. Collective."""
    sent: list[Any] = [source if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent, 0)
    return sent[0]


def cases(
    host: Host, source: Source, texts: Sequence[str], exchange: str, redundant: int, tokens: dict[int, int],
    model_name: str, until: float,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Measures every number of tokens with the same layers. Collective. Only rank 0's rows are complete."""
    head: dict[str, Any] = {"source": source.name, "what": source.what, "num_experts": source.shape.num_experts}
    head |= {"top_k": source.shape.top_k, "exchange": exchange, "redundant": redundant}
    if not host.goes_on(until):
        yield head | {"skipped": "no time left"}
        return
    try:
        model, job, clock = made(host, source, texts, exchange, redundant, tokens)
    except ValueError as error:  # all ranks raise it before they communicate
        yield head | {"skipped": str(error)}
        return
    timing, why = _timing(host, source.shape, exchange, model_name)
    checked = _outputs(host, source, job, model)
    for number, steps in tokens.items():
        if not host.goes_on(until):
            yield head | {"tokens": number, "skipped": "no time left"}
            continue
        begun = time.monotonic()
        block = source.block(host.bench.size, number, steps)
        run = dataclasses.replace(job, blocks=lambda first, block=block: iter([block]), num_steps=steps)
        measured = _measured(host, run, model, clock, [block] * len(texts), timing)
        graphs = _graphs(host, run, model, number) if number in host.sizes.tokens else None
        host_us = _host_us(host, run, model)
        if measured is None:
            continue
        row = head | {"tokens": number, "steps": steps, "equals_replay": not measured.differing, **why}
        row |= {"host_us": {"experts": host_us}, "seconds": round(time.monotonic() - begun, 2)}
        row["stacks"] = _of_stacks(texts, measured, checked, graphs)
        row["right"] = row["equals_replay"] and max(checked) < host.sizes.tolerance
        yield row
    if host.on_gpu:
        torch.cuda.synchronize()
    model.layers[0][0].exchange.close()
    model.layers[0][0].balancer.collective.close()
    del model
    if host.on_gpu:
        torch.cuda.empty_cache()


def made(
    host: Host, source: Source, texts: Sequence[str], exchange: str, redundant: int, tokens: dict[int, int]
) -> tuple[RandomLayers, Job, JobClock]:
    shape, cluster = source.shape, Cluster(host.bench.size, 1, redundant, 1)
    slots = cluster.num_physical(shape.num_experts) // cluster.num_ranks + shape.has_shared
    given = (host.bench.device, host.dtype, host.bench.size, shape.hidden, slots, shape.top_k + shape.has_shared)
    if exchange == "deep_ep" and (why := obstacle(*given)) is not None:
        raise ValueError(why)
    if host.on_gpu:
        wanted = len(texts) * (slots * shape.expert_bytes)
        free = -host.bench.slowest(-float(torch.cuda.mem_get_info()[0]))
        if wanted > 0.8 * free:
            raise ValueError(f"weights of {wanted / 1e9:.0f} GB a rank, {free / 1e9:.0f} GB are free: more ranks")
    stacks = []
    for text in texts:
        stack = parse_stack(text)
        stacks.append(JobStack("", stack, stack.placement.plan(source.history[None, None], cluster)))
    job = Job(
        source.shape, (3,), tuple(stacks), lambda first: iter(()), 0, max(tokens), SEED, exchange, 1, source.phase,
        0 if source.scores is None else source.shape.num_experts,
    )  # fmt: skip
    clock = JobClock(host.bench.rank, host.bench.device, timed=True)
    return RandomLayers(job, host.place, clock), job, clock


def _measured(
    host: Host, job: Job, model: RandomLayers, clock: JobClock, blocks: list[Any], timing: LayerTiming | None
) -> Measured | None:
    """The run's measurement, on rank 0; None on the others. Every rank writes into its own folder."""
    bench = host.bench
    folder = Path(tempfile.mkdtemp())
    telemetry = TelemetryWriter(folder, bench.rank, bench.size, {})
    run_job(job, host.place, model, clock, Watch(None, bench.rank, bench.size, clock, folder), telemetry)
    telemetry.close()
    telemetry_of_rank = read_rank(folder, bench.rank)
    shutil.rmtree(folder)
    tables: list[Any] = [None] * bench.size
    dist.gather_object(telemetry_of_rank, tables if bench.rank == 0 else None)
    if bench.rank:
        return None
    return measure(joined(tables), job, iter([blocks]), host.dtype.itemsize, SEED, timing)


def _outputs(host: Host, source: Source, job: Job, model: RandomLayers) -> list[float]:
    """The relative error of each stack's output on the worst rank: the norm of the difference from the reference, over
    the norm of the reference. For a router policy the reference uses the experts that the policy chose. Collective."""
    number, shape = min(host.sizes.checked, job.max_tokens), source.shape
    block = source.block(host.bench.size, number, 1)
    generator = torch.Generator().manual_seed(SEED + host.bench.rank)
    hidden = torch.randn(number, shape.hidden, generator=generator).to(host.bench.device, host.dtype)
    weights = RandomWeights(shape, SEED, host.bench.device, host.dtype)
    tokens = tokens_of(block, 0, job, host.place)
    known: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    errors = []
    for (layer,) in model.layers:
        acts = layer.balancer.bound.stack.router.acts
        scores = tokens.scores[:, 0] if acts and tokens.scores is not None else None
        output = layer(hidden, step=0, forced_ids=tokens.ids[:, 0], forced_scores=scores, decode=tokens.decode)
        record = layer.record
        assert record is not None
        wanted = next(
            (w for ids, ws, w in known if torch.equal(ids, record.ids) and torch.equal(ws, record.weights)), None
        )
        if wanted is None:
            given = (record.ids, record.weights, record.shared_weight)
            wanted = reference_output(shape, weights, 3, hidden, *given)
            known.append((record.ids.clone(), record.weights.clone(), wanted))
        far = float((output.double() - wanted).norm() / wanted.norm())
        errors.append(host.bench.slowest(far if far == far else float("inf")))
    return errors


def _graphs(host: Host, job: Job, model: RandomLayers, tokens: int) -> list[list[float] | None] | None:
    """Microseconds of each stack's layer as a CUDA graph, for each of GRAPHED steps, on the slowest rank. None for a
    stack that cannot be captured. Collective."""
    if job.exchange != "deep_ep":
        return None
    bench, shape, (block,) = host.bench, job.shape, job.blocks(0)
    batches = [tokens_of(block, step, job, host.place).ids[:, 0] for step in range(min(GRAPHED, job.num_steps))]
    ids, hidden = torch.empty_like(batches[0]), torch.randn(tokens, shape.hidden, device=bench.device).to(host.dtype)
    fixed = exchange_of(host, "deep_ep", shape, model, tokens)
    ids.copy_(batches[0])
    captured: list[tuple[list[float], KernelBalancer, torch.cuda.CUDAGraph]] = []
    times_of_stacks: list[list[float] | None] = []
    for (layer,) in model.layers:
        times_of_stacks.append(None)
        if isinstance(layer.balancer, KernelBalancer) and not layer.balancer.bound.stack.router.acts:
            times_of_stacks[-1] = times = list[float]()
            graph = bench.capture(like(layer, fixed), hidden, step=0, forced_ids=ids)
            captured.append((times, layer.balancer, graph))
    for step, batch in zip(block.steps.tolist(), batches, strict=False):
        ids.copy_(batch)
        for _, balancer, _ in captured:
            balancer.begin(step)  # sets the step for random draws, as a replay does
        for times, _, graph in captured:
            times.append(bench.time(graph.replay, inner=3, repeats=3))
    for _, _, graph in captured:
        graph.reset()
    fixed.close()
    return times_of_stacks


def exchange_of(host: Host, name: str, shape: LayerShape, model: RandomLayers, tokens: int) -> Exchange:
    """An exchange for `tokens` tokens per rank; on a GPU of fixed size, so that a layer with it can be captured."""
    return choose_exchange(
        name, group=None, device=host.bench.device, dtype=host.dtype, hidden=shape.hidden,
        slots_per_rank=model.layers[0][0].balancer.slots_per_rank, columns=shape.top_k + shape.has_shared,
        max_tokens=tokens, fixed_size=host.on_gpu,
    )  # fmt: skip


def _host_us(host: Host, job: Job, model: RandomLayers) -> float:
    """Microseconds that the slowest rank's host needs to launch the first stack's experts on the first step, while the
    device is idle. Collective."""
    (layer,), (block,) = model.layers[0], job.blocks(0)
    tokens = tokens_of(block, 0, job, host.place)
    hidden = torch.zeros(len(tokens.ids), job.shape.hidden, device=host.bench.device, dtype=host.dtype)
    ids = tokens.ids[:, 0].contiguous()
    slots = layer.balancer.assign(ids, 0).slots
    received = layer.exchange.dispatch(hidden, slots, torch.ones(slots.shape, device=host.bench.device))
    times = []
    for _ in range(HOSTED):
        if host.on_gpu:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        outputs, _ = layer.experts(received)
        times.append((time.perf_counter() - begun) * 1e6)
    layer.exchange.combine(outputs, received)
    return host.bench.slowest(statistics.median(times))


def _timing(host: Host, shape: LayerShape, exchange: str, model_name: str) -> tuple[LayerTiming | None, dict[str, str]]:
    """The time model with the tables of this host, and the source of its exchange times."""
    if not (host.calibration / HARDWARE).is_file():
        return None, {"timing": "no tables of this host: nothing is predicted"}
    size = host.bench.size
    meta = TraceMeta("tokens", 1, shape.num_experts, shape.top_k, size, shape.shared_cost, shape.name)
    timing = layer_timing(str(host.calibration), shape, meta, Cluster(size, 1, 0, 1))
    path = host.calibration / exchange_file(load_model(model_name), exchange, size)
    table = read_table(path) if path.is_file() else None
    assert timing.measured is not None
    tables = (table,) if isinstance(table, ExchangeTable) else ()
    measured = dataclasses.replace(timing.measured, exchange=tables)
    words = f"exchange by {path.name}" if tables else "exchange as published: no table of it here"
    return dataclasses.replace(timing, measured=measured), {"timing": words}


def _of_stacks(
    texts: Sequence[str], measured: Measured, checked: list[float], graphs: list[list[float] | None] | None
) -> list[dict[str, Any]]:
    """The figures of each stack. phases_us, predicted_us: medians over steps. layer_us: of the slowest rank. gain: over
    the first stack, mean and 95% interval over steps."""
    rows = []
    for number, text in enumerate(texts):
        entry, replayed = measured.measured["stacks"][number], measured.predicted["stacks"][number]
        metrics = entry["metrics"]
        row: dict[str, Any] = {"stack": text, "error": checked[number]}
        row["layer_us"] = {key: metrics["layer_time_us"][key] for key in ("mean", "p50", "p95")}
        row["phases_us"] = {phase: value["p50"] for phase, value in entry["phases_us"].items()}
        row["gain"] = entry["versus_first"][GAIN]
        row["max_over_mean"] = metrics["max_over_mean"]["mean"]
        row["bytes_read"] = metrics["bytes_read"]["mean"]
        if "phases_us" in replayed:
            row["predicted_us"] = {phase: value["p50"] for phase, value in replayed["phases_us"].items()}
        times = None if graphs is None else graphs[number]
        if times is not None:
            row["graph_us"] = statistics.median(times)
        if times is not None and graphs is not None and graphs[0] is not None:
            gains = np.array(graphs[0]) / np.array(times) - 1
            row["graph_gain"] = paired_difference(gains, np.ones(len(gains)), SEED)
        rows.append(row)
    return rows
