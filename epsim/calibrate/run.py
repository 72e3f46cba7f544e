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
    """Measures and writes the missing parts, and returns lines that describe them, on rank 0.

    Collective under torchrun. Raises ValueError with one line for errors that the user can fix.
    """
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
        there = known(out, file)
        if there is None:
            write_table(expert_table(machine, model, name, say), out / file)
        elif not isinstance(there, ExpertTable) or (there.hidden, there.intermediate) != shape:
            raise _other_table(out / file, f"{model.name}'s {model.hidden} x {model.intermediate} experts")
        elif name == "grouped" and machine.on_gpu and len(there.cells) < FEW_CELLS:
            write_table(with_cells(machine, there, model, say), out / file)
        lines.append(f"{out / file}: expert computation of {model.name} by {name}")
    return lines


def _exchange(machine: Machine, out: Path, models: Sequence[ModelSpec], say: Say) -> list[str]:
    if machine.size == 1:
        return ["exchange: not measured, there is only one rank (start it with torchrun, one process per GPU)"]
    lines = []
    every = list(itertools.product(EXCHANGES, range(2, machine.size + 1)))
    for model in models:
        paths = {one: out / exchange_file(model, *one) for one in every}
        measured = partial(_measured_exchanges, model, paths)
        there = _of_first(machine, measured)
        for table in exchange_tables(machine, model, there, say):
            one = (table.implementation, table.ranks)
            if machine.rank == 0:
                write_table(table, paths[one])
            there.append(one)
        lines += [
            f"{paths[name, ranks]}: dispatch and combine of {model.name} by {name}, {ranks} ranks"
            for name, ranks in sorted(there, key=lambda one: one[1])
        ]
    return lines


def _measured_exchanges(model: ModelSpec, paths: dict[tuple[str, int], Path]) -> list[tuple[str, int]]:
    return [one for one, path in paths.items() if _is_exchange(path, model)]


def _is_exchange(path: Path, model: ModelSpec) -> bool:
    """Whether the file holds a table of the model's rows. Raises ValueError if it holds another table."""
    table = known(path.parent, path.name)
    if table is None:
        return False
    if not isinstance(table, ExchangeTable) or (table.hidden or model.hidden) != model.hidden:
        raise _other_table(path, f"{model.name}'s rows of {model.hidden}")
    return True


def _other_table(path: Path, wanted: str) -> ValueError:
    return ValueError(f"{path} is not a table of {wanted}: give the model another name, or another --out")


def exchange_file(model: ModelSpec, implementation: str, ranks: int) -> str:
    """The name of the table of a model's exchange in a calibration's folder."""
    return f"exchange-{_plain(model.name)}-{implementation}-{ranks}.json"


def _all_reduce(machine: Machine, out: Path, say: Say) -> list[str]:
    if machine.size == 1:
        return ["all-reduce: not measured, there is only one rank"]

    def measured() -> tuple[CollectiveCost, ...]:
        found = known(out, COLLECTIVES)
        return found.collectives if isinstance(found, PolicyTable) else ()

    there = _of_first(machine, measured)
    here = machine.size, machine.nodes
    if not any((one.ranks, one.nodes) == here for one in there):
        costs = collective_costs(machine)
        for one in costs:
            say(f"{one.name}, {one.ranks} ranks: {one.us:.1f} us")
        new = {(one.name, one.ranks, one.nodes) for one in costs}
        kept = [one for one in there if (one.name, one.ranks, one.nodes) not in new]
        whole = sorted([*kept, *costs], key=lambda one: (one.nodes, one.ranks))
        table = PolicyTable(**machine.described(), collectives=tuple(whole))
        _of_first(machine, lambda: write_table(table, out / COLLECTIVES))
    return [f"{out / COLLECTIVES}: all-reduce and all-gather of counts"]


def _router(machine: Machine, out: Path, model: ModelSpec) -> list[str]:
    file = f"router-{_plain(model.name)}.json"
    there = known(out, file)
    if there is None:
        write_table(router_table(machine, model), out / file)
    elif not isinstance(there, RouterTable) or not (there.fits(model, True) or there.fits(model, False)):
        raise _other_table(out / file, f"{model.name}'s router, {model.num_experts} experts, top-{model.top_k}")
    return [f"{out / file}: the router of {model.name}"]


def _policies(machine: Machine, out: Path, model: ModelSpec, say: Say) -> list[str]:
    """Measures policies for several numbers of ranks, each into one file, which is complete after every policy."""
    from epsim.calibrate.policies import group_sizes, policy_costs  # compiles code that the other parts do not need

    lines = []
    for ranks, redundant in group_sizes(machine, model):
        path = out / f"policies-{ranks}.json"
        table = known(out, path.name)
        if not isinstance(table, PolicyTable):
            table = PolicyTable(**machine.described(), num_experts=model.num_experts, top_k=model.top_k)
        same = (table.num_experts, table.top_k) == (model.num_experts, model.top_k)
        there = [cost.policy for cost in table.costs]
        # A table of other experts stays as it is; policies are not added to it.
        for cost in policy_costs(machine, model, ranks, redundant, there, say) if same else ():
            table = dataclasses.replace(table, costs=(*table.costs, cost))
            write_table(table, path)
        lines.append(f"{path}: policies on {ranks} ranks, {table.of}")
    return lines


def _finish(machine: Machine, out: Path, base: Hardware) -> None:
    """Writes `hardware.toml` after every part, so that replay accepts the folder."""
    words = f"Measured by epsim calibrate on {machine.name}: the tables beside this file."
    write_hardware(out, base, f"{machine.name} (calibrated)", words)
    load_calibration(str(out))


def _of_first(machine: Machine, make: Callable[[], Made]) -> Made:
    """Runs `make` on rank 0 while the others wait, and returns its result on all. If it fails, all raise ValueError."""
    if machine.size == 1:
        return make()
    told: list[Any] = [None, ""]
    if machine.rank == 0:
        try:
            told[0] = make()
        except (ValueError, OSError) as error:
            told[1] = str(error)
    dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
    made, wrong = told
    if wrong:
        raise ValueError(wrong)
    found: Made = made
    return found


def _base(machine: Machine) -> Hardware:
    """The shipped hardware that matches the device's name, else H200."""
    name = machine.name.lower()
    return load_hardware(next((one for one in known_cards("machines") if one in name), "h200"))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
