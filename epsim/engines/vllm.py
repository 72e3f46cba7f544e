"""vLLM 0.24 to 0.32 (vllm/config/parallel.py, EPLBConfig).

It needs no option for a split. A policy that names vLLM in `Policy.engines` is what vLLM does by default.
"""

import json
import shlex
from collections.abc import Callable
from typing import ClassVar

from epsim.engines.base import Deployment, Setup, System
from epsim.policies.grammar import policy_text

INTERVAL = 3000
"""vLLM's own step_interval."""


class VLLM(System):
    name: ClassVar[str] = "vllm"
    title: ClassVar[str] = "vLLM"
    plans_itself: ClassVar[bool] = True

    def lacks(self, deployment: Deployment) -> str:
        stack = deployment.stack
        if lacking := System.lacks(self, deployment):
            return lacking
        if deployment.redundant and self.name not in stack.split.engines:
            return f"no choice of copies by a batch's load ({stack.split.name})"
        if self.name not in stack.shared.engines:
            return f"no dispatch of the shared expert ({stack.shared.name})"
        if self.name not in stack.placement.engines:
            placement = policy_text(stack.placement)
            return f"no placement from a file in its releases ({placement}); vLLM-Ascend has expert_map_path"
        if stack.placement.trivial and deployment.redundant:
            return "no redundant experts without EPLB"
        return ""

    def commands(self, deployment: Deployment, setup: Setup, affordable: Callable[[int], int]) -> list[str]:
        words = ["vllm", "serve", setup.model, "--tensor-parallel-size", "1", "--data-parallel-size", str(setup.gpus)]
        words += ["--enable-expert-parallel", "--all2all-backend"]
        words.append("deepep_low_latency" if setup.decode else "deepep_high_throughput")
        if not deployment.stack.placement.trivial:
            interval = deployment.interval or affordable(INTERVAL)
            config = {"num_redundant_experts": deployment.redundant, "window_size": min(interval, 1000)}
            words += ["--enable-eplb", "--eplb-config", json.dumps(config | {"step_interval": interval})]
        text = shlex.join(words)
        if setup.nodes > 1:
            per_node = setup.gpus // setup.nodes
            text += f' --data-parallel-size-local {per_node} --data-parallel-start-rank "$((NODE * {per_node}))"'
            text += ' --data-parallel-address "$HEAD" --data-parallel-rpc-port 13345'
            # Only the first host accepts requests.
            text += ' $([ "$NODE" = 0 ] || echo --headless)'
        return [text]

    def remark(self, deployment: Deployment) -> str:
        if deployment.interval is not None:
            return ""
        return (
            " vLLM cannot load a placement from a file (pull requests 41141 and 49572 are open). It plans a placement "
            "after its first interval. The interval is so long that moving weights costs at most a tenth of the gain."
        )
