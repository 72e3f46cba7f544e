"""Router policies in the layer: loads as simulated from the model's choices and scores, outputs as in one process."""

from __future__ import annotations

import numpy as np
import torch

from epsim.policies.apply import Setting, bind
from epsim.policies.registry import kinds
from epsim.policies.stack import parse_stack
from epsim.traces.trace import TokenBlock
from tests.runtime import programs
from tests.runtime.test_layer import placed
from tests.runtime.worlds import launch

STACKS = {
    "eplb+pruned(k0=2)+lplb": 1,
    "eplb+pruned(k0=3@4/2@16)+lplb": 2,
    "eplb+oea(k0=2)+lplb+waterfill": 3,
    "eplb+oea(k0=2,kmax=6)+even": 1,
    "eplb+oea(k0=2,union=rank)+even": 0,
    "eplb+oea-ep(k0=2)+one-copy": 2,
    "eplb+lynx(keep=12)+lplb(counts=gathered)": 2,
    "eplb+mask-low-demand(least=3)+random": 1,
}
"""And the collectives a step takes: the router policy's sum, then the balance's."""


def test_router_policies_give_the_simulators_loads() -> None:
    size, nodes, shape = 4, 2, programs.ROUTED
    texts = list(STACKS)
    placements = [placed(parse_stack(text), size, nodes) for text in texts]
    given = [(text, placement.physical_to_logical.numpy()) for text, placement in zip(texts, placements)]
    ran = launch(size, programs.rerouted, size, nodes, given)
    changed = 0
    for place, (text, placement) in enumerate(zip(texts, placements)):
        steps = [one[place][0] for one in ran]  # [rank][step]
        assert max(step[0] for one in steps for step in one) < 1e-5, text
        parts = [(at, rank, steps[rank][at]) for at in range(3) for rank in range(size)]
        block = TokenBlock(
            np.array([8, 9, 10]),
            np.concatenate([np.full(len(part[1]), at) for at, _, part in parts]),
            np.concatenate([np.full(len(part[1]), rank) for _, rank, part in parts]),
            np.concatenate([part[1] for _, _, part in parts])[:, None],
            scores=np.concatenate([part[2] for _, _, part in parts])[:, None],
        )
        setting = Setting(programs.SEED, shape.shared_cost, shape.top_k, (programs.LAYER,), num_scores=32)
        load = bind(parse_stack(text), placement, setting).load(block)
        served = torch.tensor([[step[3] for step in one] for one in steps]).T
        assert torch.equal(served, load.routed[:, 0]), text
        changed += int(int(load.routed.sum()) != 4 * len(block.token_step))
        calls = ran[0][place][1]
        assert sum(calls.values()) == 3 * STACKS[text], (text, calls)
    assert changed, "some policy gives tokens fewer or more experts"
    assert {parse_stack(text).router.name for text in texts} == set(kinds()["router"]) - {"topk"}
