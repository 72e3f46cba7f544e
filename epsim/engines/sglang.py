"""SGLang 0.5.16 to 0.5.19 (python/sglang/srt/server_args.py).

`Policy.engines` gives the value of --ep-dispatch-algorithm for a split, and of --eplb-algorithm for a placement that
rebalances. A placement planned once is loaded from a file.
"""

import shlex
from collections.abc import Callable
from typing import ClassVar

from epsim.engines.base import FILE, Deployment, Setup, System, plan_command

WATERFILL = "waterfill(candidates=visited,load=routed+local)"
"""The only form of Waterfill that SGLang has."""


class SGLang(System):
    name: ClassVar[str] = "sglang"
    title: ClassVar[str] = "SGLang"

    def lacks(self, deployment: Deployment) -> str:
        stack = deployment.stack
        if lacking := System.lacks(self, deployment):
            return lacking
        if deployment.redundant and self.name not in stack.split.engines:
            return f"no split by {stack.split.name}; its LP is the published one (lplb-ipm)"
        if self.name not in stack.shared.engines:
            return f"no {stack.shared.name}"
        if stack.shared.engines[self.name] not in ("", WATERFILL):
            return "no Waterfill but its own form (load=routed+local, only ranks that a token visits)"
        return ""

    def commands(self, deployment: Deployment, setup: Setup, affordable: Callable[[int], int]) -> list[str]:
        stack = deployment.stack
        loaded = deployment.interval is None and not stack.placement.trivial
        size = str(setup.gpus)
        words = ["python", "-m", "sglang.launch_server", "--model-path", setup.model, "--tp-size", size]
        words += ["--dp-size", size, "--ep-size", size, "--nnodes", str(setup.nodes), "--enable-dp-attention"]
        words += ["--moe-a2a-backend", "deepep", "--deepep-mode", "low_latency" if setup.decode else "normal"]
        if deployment.redundant:
            words += ["--ep-num-redundant-experts", str(deployment.redundant)]
            words += ["--ep-dispatch-algorithm", stack.split.engines[self.name]]
        if deployment.interval is not None:
            every = str(deployment.interval)
            words += ["--enable-eplb", "--eplb-algorithm", stack.placement.engines.get(self.name, "auto")]
            words += ["--eplb-rebalance-num-iterations", every, "--expert-distribution-recorder-mode", "stat"]
            words += ["--expert-distribution-recorder-buffer-size", every]
        elif loaded:
            words += ["--init-expert-location", FILE.format(self.name)]
        if stack.shared.engines[self.name] == WATERFILL:
            words.append("--enable-waterfill")
        hosts = ' --dist-init-addr "$HEAD:20000" --node-rank "$NODE"' if setup.nodes > 1 else ""
        return [*([plan_command(deployment, setup, self.name)] if loaded else []), shlex.join(words) + hosts]
