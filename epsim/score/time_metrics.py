"""The metrics that need a hardware and a model: layer_time_us, bytes_read and throughput_gain."""

import torch

from epsim.cost.layer_time import LayerTiming, Phases
from epsim.policies.load import Load
from epsim.policies.stack import PolicyStack
from epsim.score.metrics import Values
from epsim.score.statistics import Floats

LONGEST_PASS_US = 5e6
"""A step that takes longer is not one forward pass."""
TOGETHER = "routed and shared experts are timed together"


def timed_metrics(
    timing: LayerTiming, load: Load, stack: PolicyStack, redundant: bool, shared: bool, first: torch.Tensor | None
) -> tuple[dict[str, Values], torch.Tensor, dict[str, torch.Tensor]]:
    """The metrics of a load under its stack, the time of each step [S] in microseconds, and `busy_phases`.

    redundant: whether any expert has several copies. shared: whether the load includes a shared expert.
    first [S]: the times of the same steps under the first stack; None if this is the first.
    """
    busy = load.assignments > 0
    phases = timing.phases(load, stack, redundant)
    layer_us = timing.layer_us(load, stack, redundant, phases)
    step_us = timing.step_us(layer_us, load.tokens, load.routed.shape[-1])
    shared_read = (load.shared_tokens > 0) * (timing.model.expert_bytes * timing.model.shared_cost)
    read = (timing.routed_bytes(load, stack) + shared_read).amax(-1)
    nan = torch.nan
    values: dict[str, Values] = {
        "layer_time_us": torch.where(busy, layer_us, nan),
        "bytes_read": torch.where(busy, read, nan),
        "throughput_gain": torch.where(busy.any(-1), (step_us if first is None else first) / step_us - 1, nan),
    }
    if shared:
        values |= {f"routed_{key}": TOGETHER for key in list(values)}
    return values, step_us, busy_phases(timing, load, phases)


def busy_phases(timing: LayerTiming, load: Load, phases: Phases) -> dict[str, torch.Tensor]:
    """Microseconds of a layer by phase, [S, L] each, NaN where the layer has no tokens. Times are of the whole batch,
    without overlap. `route` is present if the model's router was measured."""
    named = ({} if timing.router is None else {"route": phases.route}) | {
        "balance": phases.policy,
        "dispatch": phases.dispatch,
        "experts": phases.experts,
        "combine": phases.combine,
    }
    busy = load.assignments > 0
    return {name: torch.where(busy, us, torch.nan) for name, us in named.items()}


def about_long_steps(step_us: Floats, tokens: Floats) -> str:
    """A warning about steps that take too long to be one forward pass; "" if there are none. step_us [S]: predicted
    microseconds of each step; tokens [S]: tokens of each step."""
    long = step_us > LONGEST_PASS_US
    if not long.any():
        return ""
    number, most, seconds = int(long.sum()), float(tokens[long].max()), float(step_us[long].max()) / 1e6
    return (
        f"{number} of {len(long)} scored steps {'is' if number == 1 else 'are'} too long for one forward pass: up to "
        f"{most:,.0f} tokens and {seconds:,.0f} s. Such a step is probably the sum of many passes, such as a whole "
        "benchmark. A sum hides the imbalance of single passes and counts fixed costs only once, so the gains are "
        "those of the average load. Record single passes to learn what serving gains."
    )
