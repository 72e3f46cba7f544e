"""What the channel reader could gain from reading fewer bytes, by the roofline, and with measured times of its kernels.

    python benchmarks/reader_predicted.py [--hardware h200] [--budget 0.178] [--user-rate 100] [--out FILE]

One GPU of `--hardware` holds all experts, and tokens choose theirs uniformly. `bytes`: the bytes of the dense layer
over those of a reader. `layer`: the same for the time of the routed experts: the larger of bytes over the memory's rate
and computing, plus one launch, which takes as long in every form. `topk-channels`: each token has its own channels, as
if independent; with `quota=batch` all tokens share one set. `model` (Qwen3-30B-A3B only, whose other parts are
specified): whole steps, with the weights of attention and the fixed costs of the specification, without context. At
`--user-rate` tokens a second for each user, it gives the largest batch up to 128 whose step is fast enough.

`measured`: the same steps and users with the times of layers in `reader_speed.json` and `reader_batch_speed.json`, by
straight lines between measured batches, if they were measured on `--hardware` at `--budget`. `dense` is then the faster
of our kernel and the grouped layer.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, command, script_parser, table, write

from epsim.cost.experts_time import ExpertsTime
from epsim.cost.layer_time import LayerTiming
from epsim.machines.hardware import load_hardware
from epsim.models.spec import ModelSpec, load_model
from epsim.policies.reader import Dense, TopkChannels

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
EVERY = torch.arange(1, BATCHES[-1] + 1)
SHAPES = {
    # experts, top-k, hidden, intermediate
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "gemma-4-26b-a4b": (128, 8, 2816, 704),
    "qwen3.5-35b-a3b": (256, 8, 2048, 512),
}
MODEL = "qwen3-30b-a3b"


def readers(budget: float) -> dict[str, Dense | TopkChannels]:
    return {
        "dense": Dense(),
        "topk-channels": TopkChannels(budget),
        "topk-channels quota=batch": TopkChannels(budget, quota="batch"),
    }


def layers(
    timing: LayerTiming, reader: Dense | TopkChannels, batches: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [S] that the routed experts of a layer read, and their microseconds [S], for batches [S] of tokens on one
    GPU."""
    model, experts = timing.model, timing.experts
    tokens = model.top_k * batches.double()
    active = model.num_experts * (1 - (1 - model.top_k / model.num_experts) ** batches.double())
    shape = (model.hidden, model.intermediate, model.weight_bytes, model.top_k)
    read = reader.bytes_read(tokens, active, *shape)
    unread = active * model.expert_bytes - read if reader.acts else None
    return read, experts.roofline(tokens, active, unread)


def steps(timing: LayerTiming, reader: Dense | TopkChannels, batches: torch.Tensor) -> torch.Tensor:
    """Microseconds [S] of whole steps."""
    return timing.step_us(layers(timing, reader, batches)[1][:, None], batches.double()[:, None], 1)


def at_rate(timing: LayerTiming, reader: Dense | TopkChannels, rate: float) -> int:
    """The largest batch (up to BATCHES[-1]) that runs at least `rate` steps per second; 0 for none."""
    return largest(steps(timing, reader, EVERY), rate)


def largest(step_us: torch.Tensor, rate: float) -> int:
    """`at_rate` from the microseconds of steps at the batch sizes EVERY."""
    return int((step_us <= 1e6 / rate).long().cumprod(0).sum())


def users(batches: dict[str, int], rate: float) -> dict[str, dict[str, float]]:
    return {form: {"batch": batch, "tokens_per_second": batch * rate} for form, batch in batches.items()}


def timing_of(model: ModelSpec, hardware: str) -> LayerTiming:
    return LayerTiming(ExpertsTime(load_hardware(hardware), model))


def predicted(hardware: str, budget: float, rate: float) -> dict[str, Any]:
    sizes, rows = torch.tensor(BATCHES), []
    for name, (num_experts, top_k, hidden, intermediate) in SHAPES.items():
        shape = {"num_experts": num_experts, "top_k": top_k, "hidden": hidden, "intermediate": intermediate}
        timing = timing_of(replace(load_model(MODEL), name=name, **shape), hardware)
        found = {reader: layers(timing, policy, sizes) for reader, policy in readers(budget).items()}
        whole = {reader: steps(timing, policy, sizes) for reader, policy in readers(budget).items()}
        for at, batch in enumerate(BATCHES):
            for reader in list(found)[1:]:
                read, us = (part[at] for part in found[reader])
                row: dict[str, Any] = {"shape": name, "batch": batch, "reader": reader, "layer_us": float(us)}
                row["bytes"] = float(found["dense"][0][at] / read)
                row["layer"] = float(found["dense"][1][at] / us)
                if name == MODEL:
                    row["model"] = float(whole["dense"][at] / whole[reader][at])
                    row["tokens_per_second"] = float(batch * 1e6 / whole[reader][at])
                rows.append(row)
    timing = timing_of(load_model(MODEL), hardware)
    return {
        "predicted": "by the roofline from bytes; but for `measured` nothing is timed",
        "hardware": hardware,
        "budget": budget,
        "user_rate": rate,
        "users": users({reader: at_rate(timing, policy, rate) for reader, policy in readers(budget).items()}, rate),
        "rows": rows,
    }


def timed_layers(hardware: str, budget: float) -> dict[str, dict[int, float]]:
    """Measured microseconds of MODEL's layer by form and batch; empty if they are of other hardware or budgets."""
    alone, together = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("reader_speed", "reader_batch_speed")
    )
    if any(hardware.upper() not in found["device"].upper().split() for found in (alone, together)):
        return {}
    rows = [row for row in alone["rows"] if row["shape"] == MODEL and f"{budget:g}" in row]
    sets = {row["batch"]: row["us"] for row in together["rows"] if (row["shape"], row["budget"]) == (MODEL, budget)}
    if not rows or not sets:
        return {}
    return {
        "dense": {row["batch"]: min(row[form] for form in ("dense", "grouped layer") if form in row) for row in rows},
        "topk-channels": {row["batch"]: row[f"{budget:g}"]["us"] for row in rows},
        "topk-channels quota=batch": sets,
    }


def measured(hardware: str, budget: float, rate: float) -> dict[str, Any] | None:
    """Steps with measured times of layers: gains by batch, and users at `rate`; None without such times."""
    timing, whole = timing_of(load_model(MODEL), hardware), {}
    for form, us in timed_layers(hardware, budget).items():
        layer = torch.from_numpy(np.interp(EVERY, list(us), list(us.values())))
        whole[form] = timing.step_us(layer[:, None], EVERY[:, None].double(), 1)
    if not whole:
        return None
    return {
        "users": users({form: largest(step, rate) for form, step in whole.items()}, rate),
        "rows": [
            {"batch": batch, **{form: float(whole["dense"][batch - 1] / whole[form][batch - 1]) for form in whole}}
            for batch in BATCHES
        ],
    }


def print_users(found: dict[str, dict[str, float]], rate: float) -> None:
    rows = [{"form": form, **one} for form, one in found.items()]
    table(f"{MODEL} at {rate:g} tokens per second for each user: tokens per second of a GPU", rows)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--budget", type=float, default=0.178)
    parser.add_argument("--user-rate", type=float, default=100.0, help="tokens a second that each user is to get")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        found = predicted(options.hardware, options.budget, options.user_rate)
    except ValueError as error:
        parser.error(str(error))
    table("predicted by the roofline from bytes; nothing is timed", found["rows"])
    print_users(found["users"], options.user_rate)
    found["measured"] = measured(options.hardware, options.budget, options.user_rate)
    if found["measured"] is None:
        print("\nlayers were not measured on this hardware at this budget")
    else:
        table("with layers as measured, gain of the whole step", found["measured"]["rows"])
        print_users(found["measured"]["users"], options.user_rate)
    if options.out is not None:
        write(options.out, {**found, "command": command()})


if __name__ == "__main__":
    main()
