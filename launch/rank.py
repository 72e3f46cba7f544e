"""Runs one rank of a job, under every launcher."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from epsim.files import check_out, folder_for_results
from epsim.launch.folder import PREDICTED, RESULTS, TELEMETRY, clear, phases_of_steps, write_routed
from epsim.launch.measured import measure
from epsim.launch.member import Member, choose_device, choose_dtype
from epsim.launch.options import RunOptions
from epsim.launch.outcome import description, results_of
from epsim.launch.prepare import Prepared, prepare
from epsim.launch.store import for_group, for_watch
from epsim.placement.base import Placement
from epsim.policies.apply import bind
from epsim.policies.registry import default_policy
from epsim.results import ResultsData, write_results
from epsim.runtime.beats import JobClock, place_file
from epsim.runtime.faults import Watch
from epsim.runtime.job import Job, Model, Place, RandomLayers, run_job
from epsim.runtime.recording import RoutingRecorder
from epsim.runtime.telemetry import TelemetryWriter, joined, read_rank
from epsim.runtime.trial import Trial, TrialClock
from epsim.traces.store import slice_steps
from epsim.traces.trace import TokenBlock

Progress = Callable[[int], None]


def run_rank(options: RunOptions, member: Member, progress: Progress = lambda steps: None) -> ResultsData | None:
    """Runs one rank's part of the job. Rank 0 writes results.json and predicted.json, and returns the content of the
    first.

    In a job of several processes, an error ends the process with one line (runtime/faults.py). Otherwise it is raised.
    """
    device = choose_device(options.device, member)
    clock = TrialClock(member.rank, device, timed=True)
    clock.phase = "setup"
    served = member.store(member.serves_store)
    store = for_watch(member.store(), member.attempt) if member.num_ranks > 1 else None
    watch = Watch(store, member.rank, member.num_ranks, clock, options.folder / TELEMETRY, options.timeout)
    watch.start()
    with contextlib.closing(watch), watch.answering_stops():
        try:
            with folder_for_results(options.out) if member.reserves_folder else contextlib.nullcontext():
                results = _run(options, member, device, clock, watch, served, progress)
            watch.state = "finished"
            watch.finish(member.serves_store)
            return results
        except Exception as error:
            watch.fail(error)


def _run(
    options: RunOptions,
    member: Member,
    device: torch.device,
    clock: TrialClock,
    watch: Watch,
    served: Any,
    progress: Progress,
) -> ResultsData | None:
    text = os.environ.get("EPSIM_TRIAL_FAULT")
    trial = Trial.from_text(text) if text and member.attempt == 0 else None
    prepared = prepare(options, member.num_ranks)
    check_out(options.out)
    if member.local_rank == 0 and member.attempt == 0:
        clear(options)  # before the other ranks write, which wait for the process group below
    group = None
    if member.num_ranks > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            store=for_group(served, member.attempt),
            rank=member.rank,
            world_size=member.num_ranks,
            timeout=timedelta(hours=1),  # the watch notices sooner
        )
        group = dist.group.WORLD
        _check_alike(prepared, member)
    place = Place(member.rank, member.num_ranks, group, device, choose_dtype(options.dtype, device))
    job = prepared.job(_placements(prepared, member))
    _compile(prepared, job, member)
    _check_memory(job, place, member)
    model, recorders = _model(prepared, job, place, clock)
    exchange = model.layers[0][0].exchange
    watch.holds = exchange.holds_interpreter
    described = description(prepared, job, place, exchange.name, exchange.why)
    folder = options.folder / TELEMETRY
    described["input"] = model.text
    # A restart loses what a model's own router chose before, so all steps are run again.
    first = _resume_at(prepared, member, folder) if recorders is None else 0
    first_step = None if first == 0 else _step_at(prepared, first)
    telemetry = TelemetryWriter(folder, member.rank, member.num_ranks, described, first_step)
    clock.leave_place(folder)
    clock.trial = trial
    progress(first)
    run_job(job, place, model, clock, watch, telemetry, first=first, trial=trial, progress=progress)
    watch.state = "closing"
    clock.enter("results", clock.step, -1)
    telemetry.close()
    place_file(folder, member.rank).unlink()
    results = _finish(prepared, job, place, member, described, recorders)
    _close(model, place)
    return results


def _close(model: Model, place: Place) -> None:
    """Frees what uses the memory of other ranks while all ranks still run, then the process group. Collective."""
    layer = model.layers[0][0]
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    for exchange in {id(layers[0].exchange): layers[0].exchange for layers in model.layers}.values():
        exchange.close()
    layer.balancer.collective.close()
    if place.group is not None:
        dist.barrier()
        dist.destroy_process_group()


def _check_memory(job: Job, place: Place, member: Member) -> None:
    """Raises ValueError if the weights do not fit in memory. Otherwise the process would be killed without a
    message."""
    shape = job.shape
    widths = [stack.placement.slots_per_rank * shape.intermediate for stack in job.stacks]
    numbers = 3 * shape.hidden * (sum(widths) + len(widths) * shape.shared_intermediate)
    wanted = len(job.layers) * numbers * place.dtype.itemsize
    if place.device.type == "cuda":
        free = torch.cuda.mem_get_info(place.device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // member.local_size
    if wanted > 0.9 * free:
        raise ValueError(
            f"the experts of {len(job.stacks)} stacks x {len(job.layers)} layers take {wanted / 2**30:.1f} GiB a rank "
            f"of {free / 2**30:.1f} GiB free: give --layers N, fewer stacks, or more ranks"
        )


def _model(prepared: Prepared, job: Job, place: Place, clock: JobClock) -> tuple[Model, list[RoutingRecorder] | None]:
    """The layers of each stack, and a recorder for each stack if the model's own router chooses the experts."""
    options = prepared.options
    if not prepared.own_router:
        return RandomLayers(job, place, clock), None
    from epsim.runtime.trained import Reading, TrainedModel  # imports transformers

    reading = Reading(None if options.text is None else Path(options.text), options.sequence, options.context)
    model = TrainedModel(Path(options.model), job, place, clock, reading)
    stacks = zip(job.stacks, model.layers, strict=True)
    return model, [RoutingRecorder(layers, entry.stack.router.acts) for entry, layers in stacks]


def _check_alike(prepared: Prepared, member: Member) -> None:
    """Raises ValueError if ranks have different traces or options. They would wait for ever, or compute wrong
    outputs."""
    all_work: list[Any] = [None] * member.num_ranks
    dist.all_gather_object(all_work, work_of(prepared))
    if difference := first_difference(all_work):
        raise ValueError(difference)


def work_of(prepared: Prepared) -> dict[str, Any]:
    """Everything that must be the same on all ranks, by description. Paths may differ between machines."""
    options, steps = prepared.options, prepared.last - prepared.first
    named = ("seed", "nodes", "redundant", "groups", "exchange", "dtype", "sequence", "context")
    return {
        f"{steps} steps to run": steps,
        "another trace, or other layers of it": prepared.fingerprint,
        "other policies": [str(stack) for _, stack in prepared.policies],
        **{f"--{name} {getattr(options, name)}": getattr(options, name) for name in named},
        "another model": dataclasses.replace(prepared.shape, name=""),
    }


def first_difference(all_work: Sequence[dict[str, Any]]) -> str:
    """What is wrong and what to do; empty if all ranks have the same. all_work: `work_of` of each rank."""
    for rank, theirs in enumerate(all_work):
        for (words, value), (first_words, first) in zip(theirs.items(), all_work[0].items(), strict=True):
            if value != first:
                than = "than rank 0" if words == first_words else f"and rank 0 {first_words}"
                return f"rank {rank} has {words} {than}: give every rank the same trace and the same options"
    return ""


def _placements(prepared: Prepared, member: Member) -> list[Placement]:
    """The placement of each stack. Rank 0 plans them, and the other ranks receive them."""
    if member.num_ranks == 1:
        return prepared.plan()
    sent: list[Any] = [None]
    if member.rank == 0:
        sent = [[placement.physical_to_logical for placement in prepared.plan()]]
    dist.broadcast_object_list(sent, src=0)
    cluster, num_experts = prepared.cluster, prepared.meta.num_experts
    return [Placement(slots, num_experts, cluster.num_ranks, cluster.num_nodes) for slots in sent[0]]


def _compile(prepared: Prepared, job: Job, member: Member) -> None:
    """Compiles what the job needs. One process of each machine compiles, and the others read its cache on disk."""
    block = next(iter(prepared.blocks()), None)
    if member.local_rank == 0 and block is not None:
        for entry in job.stacks:
            stack = entry.stack
            if prepared.own_router:  # its scores are not known yet
                stack = dataclasses.replace(stack, router=default_policy("router"))
            bind(stack, entry.placement, job.setting).load(slice_steps(block, 0, 1))
    if member.num_ranks > 1:
        dist.barrier()


def _resume_at(prepared: Prepared, member: Member, folder: Path) -> int:
    """The index of the first step that not all ranks had finished before the restart."""
    if member.attempt == 0:
        return 0
    try:
        done = len(set(read_rank(folder, member.rank)["step"].to_pylist()))
    except (FileNotFoundError, ValueError):
        done = 0
    all_done: list[Any] = [done] * member.num_ranks
    if member.num_ranks > 1:
        dist.all_gather_object(all_done, done)
    return int(min(all_done))


def _step_at(prepared: Prepared, index: int) -> int:
    block = next(iter(prepared.blocks(index)), None)
    return int(block.steps[0]) if block is not None and len(block.steps) else 1 << 62


def _finish(
    prepared: Prepared,
    job: Job,
    place: Place,
    member: Member,
    described: dict[str, Any],
    recorders: list[RoutingRecorder] | None,
) -> ResultsData | None:
    """Rank 0 gathers the telemetry of all ranks and writes the results, results.json last. If the model's own router
    chose the experts, rank 0 also writes them as one trace per stack."""
    table = read_rank(prepared.options.folder / TELEMETRY, member.rank)
    tables: list[Any] = [table] * member.num_ranks
    if member.num_ranks > 1:
        dist.gather_object(table, tables if member.rank == 0 else None, dst=0)
    # The recorders also hold the warm-up step, which is the same as the first step.
    phase_of = phases_of_steps(prepared)
    routed = [recorder.block(place.group, phase_of) for recorder in recorders or ()]
    if member.rank:
        return None
    blocks: Iterator[list[TokenBlock]] = ([block] * len(job.stacks) for block in prepared.blocks())
    if recorders is not None:
        chosen = [block for block in routed if block is not None]
        write_routed(prepared, chosen, described["input"])
        blocks = iter([chosen])
    measured = measure(joined(tables), job, blocks, place.dtype.itemsize, job.seed, prepared.timing)
    results = results_of(prepared, measured, described, predicted=False)
    write_results(results_of(prepared, measured, described, predicted=True), prepared.options.folder / PREDICTED)
    write_results(results, prepared.options.folder / RESULTS)
    return results
