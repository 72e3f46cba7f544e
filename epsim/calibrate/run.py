"""`epsim calibrate`: measures the parts in order and writes each as soon as it is complete."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from epsim.calibrate.exchange import EXCHANGES, collective_costs, exchange_tables
from epsim.calibrate.experts import FEW_CELLS, expert_table, implementations, with_cells
from epsim.calibrate.folder import check_folder, known, write_hardware, write_table
from epsim.calibrate.machine import Machine
from epsim.calibrate.options import PARTS, Request
from epsim.calibrate.router import router_table
from epsim.cards import known_cards
from epsim.cost.calibrated import CollectiveCost, ExchangeTable, PolicyTable, load_calibration
from epsim.cost.experts_time import ExpertTable
from epsim.cost.router_time import RouterTable
from epsim.machines.hardware import Hardware, load_hardware
from epsim.models.spec import ModelSpec, load_model

MODELS = {"cuda": ("deepseek-v3-bf16", "qwen3-30b-a3b"), "cpu": ("epsim-small",)}
COLLECTIVES = "collectives.json"
Say = Callable[[str], None]
Made = TypeVar("Made")


def calibrate(request: Request, say: Say, machine: Machine | None = None) -> list[str]:
    """Measures the missing parts and writes them, on rank 0. Returns lines that describe all parts. Collective under
    torchrun. Raises ValueError with one line for errors that the user can fix."""
    machine = Machine.here(request.device) if machine is None else machine
    base = load_hardware(request.base, "--base") if request.base else _base(machine)
    models = [load_model(name) for name in request.models or MODELS[machine.device.type]]
    other = next((model for model in models if model.compute != "bf16"), None)
    if other is not None:
        raise ValueError(
            f"--model {other.name} computes in {other.compute}, but the runtime computes in bf16: give a bf16 model "
            "(deepseek-v3-bf16), or a .toml file with compute and dispatch = 'bf16'"
        )
    parts = request.parts or PARTS
    finish = partial(_of_first, machine, partial(_finish, machine, request.out, base))
    _of_first(machine, lambda: check_folder(request.out, machine.name))
    lines: list[str] = []
    if "experts" in parts:
        for model in models:
            lines += _of_first(machine, partial(_experts, machine, request.out, model, say))
            finish()
    if "exchange" in parts:
        lines += _exchange(machine, request.out, models, say)
        finish()
    if "all-reduce" in parts:
        lines += _all_reduce(machine, request.out, say)
        finish()
    if "router" in parts:
        for model in models:
            lines += _of_first(machine, partial(_router, machine, request.out, model))
        finish()
    if "policies" in parts:
        lines += _of_first(machine, partial(_policies, machine, request.out, models[0], say))
    finish()
    return lines


def _experts(machine: Machine, out: Path, model: ModelSpec, say: Say) -> list[str]:
    lines, shape = [], (model.hidden, model.intermediate)
    for name in implementations(machine):
        file = f"experts-{_plain(model.name)}{'' if name == 'grouped' else '-' + _plain(name)}.json"
        table = known(out, file)
        if table is None:
            write_table(expert_table(machine, model, name, say), out / file)
        elif not isinstance(table, ExpertTable) or (table.hidden, table.intermediate) != shape:
            raise _other_table(out / file, f"{model.name}'s {model.hidden} x {model.intermediate} experts")
        elif name == "grouped" and machine.on_gpu and len(table.cells) < FEW_CELLS:
            write_table(with_cells(machine, table, model, say), out / file)
        lines.append(f"{out / file}: expert computation of {model.name} by {name}")
    return lines


def _exchange(machine: Machine, out: Path, models: Sequence[ModelSpec], say: Say) -> list[str]:
    if machine.size == 1:
        return ["exchange: not measured, there is only one rank (start it with torchrun, one process per GPU)"]
    lines = []
    every = list(itertools.product(EXCHANGES, range(2, machine.size + 1)))
    for model in models:
        paths = {key: out / exchange_file(model, *key) for key in every}
        measured_keys = _of_first(machine, partial(_measured_exchanges, model, paths))
        for table in exchange_tables(machine, model, measured_keys, say):
            key = (table.implementation, table.ranks)
            if machine.rank == 0:
                write_table(table, paths[key])
            measured_keys.append(key)
        lines += [
            f"{paths[name, ranks]}: dispatch and combine of {model.name} by {name}, {ranks} ranks"
            for name, ranks in sorted(measured_keys, key=lambda key: key[1])
        ]
    return lines


def _measured_exchanges(model: ModelSpec, paths: dict[tuple[str, int], Path]) -> list[tuple[str, int]]:
    """The keys whose file holds a table of the model's rows. Raises ValueError if a file holds another table."""
    tables = {key: table for key, path in paths.items() if (table := known(path.parent, path.name)) is not None}
    for key, table in tables.items():
        if not isinstance(table, ExchangeTable) or (table.hidden or model.hidden) != model.hidden:
            raise _other_table(paths[key], f"{model.name}'s rows of {model.hidden}")
    return list(tables)


def _other_table(path: Path, wanted: str) -> ValueError:
    return ValueError(f"{path} is not a table of {wanted}: give the model another name, or another --out")


def exchange_file(model: ModelSpec, implementation: str, ranks: int) -> str:
    """The name of the table of a model's exchange in a calibration's folder."""
    return f"exchange-{_plain(model.name)}-{implementation}-{ranks}.json"


def _all_reduce(machine: Machine, out: Path, say: Say) -> list[str]:
    if machine.size == 1:
        return ["all-reduce: not measured, there is only one rank"]

    def measured() -> tuple[CollectiveCost, ...]:
        table = known(out, COLLECTIVES)
        return table.collectives if isinstance(table, PolicyTable) else ()

    known_costs = _of_first(machine, measured)
    group = machine.size, machine.nodes
    if not any((cost.ranks, cost.nodes) == group for cost in known_costs):
        costs = collective_costs(machine)
        for cost in costs:
            say(f"{cost.name}, {cost.ranks} ranks: {cost.us:.1f} us")
        new = {(cost.name, cost.ranks, cost.nodes) for cost in costs}
        kept = [cost for cost in known_costs if (cost.name, cost.ranks, cost.nodes) not in new]
        whole = sorted([*kept, *costs], key=lambda cost: (cost.nodes, cost.ranks))
        table = PolicyTable(**machine.described(), collectives=tuple(whole))
        _of_first(machine, lambda: write_table(table, out / COLLECTIVES))
    return [f"{out / COLLECTIVES}: all-reduce and all-gather of counts"]


def _router(machine: Machine, out: Path, model: ModelSpec) -> list[str]:
    file = f"router-{_plain(model.name)}.json"
    table = known(out, file)
    if table is None:
        write_table(router_table(machine, model), out / file)
    elif not isinstance(table, RouterTable) or not (table.fits(model, True) or table.fits(model, False)):
        raise _other_table(out / file, f"{model.name}'s router, {model.num_experts} experts, top-{model.top_k}")
    return [f"{out / file}: the router of {model.name}"]


def _policies(machine: Machine, out: Path, model: ModelSpec, say: Say) -> list[str]:
    """Measures policies for several numbers of ranks, with one file for each, which is rewritten after every policy."""
    from epsim.calibrate.policies import group_sizes, policy_costs  # compiles code that the other parts do not need

    lines = []
    for ranks, redundant in group_sizes(machine, model):
        path = out / f"policies-{ranks}.json"
        table = known(out, path.name)
        if not isinstance(table, PolicyTable):
            table = PolicyTable(**machine.described(), num_experts=model.num_experts, top_k=model.top_k)
        same = (table.num_experts, table.top_k) == (model.num_experts, model.top_k)
        measured = [cost.policy for cost in table.costs]
        # A table of other experts stays as it is; policies are not added to it.
        for cost in policy_costs(machine, model, ranks, redundant, measured, say) if same else ():
            table = dataclasses.replace(table, costs=(*table.costs, cost))
            write_table(table, path)
        lines.append(f"{path}: policies on {ranks} ranks, {table.of}")
    return lines


def _finish(machine: Machine, out: Path, base: Hardware) -> None:
    """Writes `hardware.toml`. It is written after every part, so that replay accepts the folder from then on."""
    words = f"Measured by epsim calibrate on {machine.name}: the tables beside this file."
    write_hardware(out, base, f"{machine.name} (calibrated)", words)
    load_calibration(str(out))


def _of_first(machine: Machine, make: Callable[[], Made]) -> Made:
    """Runs `make` on rank 0 while the others wait, and returns its result on all ranks. If it fails, all raise
    ValueError."""
    if machine.size == 1:
        return make()
    outcome: list[Any] = [None, ""]
    if machine.rank == 0:
        try:
            outcome[0] = make()
        except (ValueError, OSError) as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
    made, wrong = outcome
    if wrong:
        raise ValueError(wrong)
    result: Made = made
    return result


def _base(machine: Machine) -> Hardware:
    """The shipped hardware that matches the device's name, or H200."""
    name = machine.name.lower()
    return load_hardware(next((card for card in known_cards("machines") if card in name), "h200"))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
