"""The process from which test processes are forked imports this, so that compiled code is loaded only once.

Run as a program it also compiles what only placements need, so that the tests find all of it on disk.
"""

from __future__ import annotations

import numpy as np
import torch

from epsim.placement.base import Cluster, Placement
from epsim.policies.apply import Setting, bind
from epsim.policies.stack import parse_stack
from epsim.traces.trace import TokenBlock

STACKS = (
    "eplb+lplb+waterfill",
    "eplb+one-copy+waterfill(candidates=all)",
    "eplb+lplb(counts=gathered)+waterfill-joint(candidates=visited)",
    "eplb+lplb(objective=time,a=1,b=20)+waterfill-joint",
    "eplb+lplb-ipm",
    "eplb+lplb-sampled",
    "eplb+oea-ep(k0=1)",
)


def warm() -> None:
    torch.set_num_threads(1)  # Threads do not survive a fork.
    rng = np.random.default_rng(0)
    ids = rng.permuted(np.tile(np.arange(8), (40, 1)), axis=1)[:, None, :2]
    place = np.arange(40)
    block = TokenBlock(np.arange(1), place * 0, place % 2, ids, scores=rng.random((40, 1, 8)))
    placement = Placement(torch.tensor([[*range(8), *range(4)]]), 8, 2)
    for text in STACKS:
        bind(parse_stack(text), placement, Setting(0, 1.0, 2, (0,), num_scores=8)).load(block)


def warm_placements() -> None:
    history = torch.from_numpy(np.random.default_rng(0).integers(1, 99, (4, 2, 16)))
    for name in ("eplb", "searched"):
        parse_stack(name).placement.plan(history, Cluster(4, 2, 4))


warm()
if __name__ == "__main__":
    warm_placements()
