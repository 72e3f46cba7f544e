"""What SGLang and vLLM can run of a candidate, and the options that make them.

Names as of SGLang 0.5.16 to 0.5.19 (python/sglang/srt/server_args.py) and vLLM 0.24 to 0.32 (vllm/config/parallel.py,
EPLBConfig).
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from epsim.policies.waterfill import Waterfill
from epsim.tuning.candidates import Candidate

ON_EACH_HOST = "on every host, HEAD being the first one's address and NODE the host's number from 0"
VLLM_INTERVAL = 3000
"""vLLM's own step_interval."""
SGLANG_SPLITS = {"even": "dynamic", "random": "dynamic", "static": "static", "lplb-ipm": "lp"}


@dataclass(frozen=True, slots=True)
class Setup:
    """What the options are for. model: its path or name; trace: the file that placements are planned on, reading:
    options that say how it is read."""

    model: str
    trace: str
    gpus: int
    nodes: int
    groups: int
    decode: bool
    reading: tuple[str, ...] = ()


def sglang_lacks(candidate: Candidate) -> str:
    """What of it SGLang cannot run, in words; empty where it can."""
    stack = candidate.shown_stack
    if stack.router.acts:
        return f"no router policy ({stack.router.name})"
    if stack.reader.acts:
        return f"no reader of channels ({stack.reader.name})"
    if candidate.redundant and stack.split.name not in SGLANG_SPLITS:
        return f"no split by {stack.split.name}; its LP is the published one (lplb-ipm)"
    if isinstance(stack.shared, Waterfill):
        published = stack.shared.candidates == "visited" and stack.shared.load == "routed+local"
        return "" if published else "its own form of Waterfill alone (load=routed+local, ranks a token visits)"
    if stack.shared.name != "local":
        return f"no {stack.shared.name}"
    return ""


def vllm_lacks(candidate: Candidate) -> str:
    """What of it vLLM cannot run, in words; empty where it can."""
    stack = candidate.shown_stack
    if stack.router.acts:
        return f"no router policy ({stack.router.name})"
    if stack.reader.acts:
        return f"no reader of channels ({stack.reader.name})"
    if candidate.redundant and stack.split.name not in ("even", "random"):
        return f"no choice of copies by a batch's load ({stack.split.name})"
    if stack.shared.name != "local":
        return f"no dispatch of the shared expert ({stack.shared.name})"
    if stack.placement.name not in ("contiguous", "eplb"):
        return f"no placement from a file in its releases ({stack.placement.name}); vLLM-Ascend has expert_map_path"
    if stack.placement.name == "contiguous" and candidate.redundant:
        return "no redundant experts without EPLB"
    return ""


def plan_command(candidate: Candidate, setup: Setup, system: str) -> str:
    """The command that makes the placement's file."""
    words = ["epsim", "plan", setup.trace, "--ranks", str(setup.gpus), "--nodes", str(setup.nodes)]
    words += ["--redundant", str(candidate.redundant), "--groups", str(setup.groups)]
    words += [*setup.reading, "--placement", candidate.stack.placement.name, "--format", system, "-o", _file(system)]
    return shlex.join(words)


def sglang_command(candidate: Candidate, setup: Setup) -> str:
    stack = candidate.shown_stack
    size = str(setup.gpus)
    words = ["python", "-m", "sglang.launch_server", "--model-path", setup.model, "--tp-size", size, "--dp-size", size]
    words += ["--ep-size", size, "--nnodes", str(setup.nodes), "--enable-dp-attention"]
    words += ["--moe-a2a-backend", "deepep", "--deepep-mode", "low_latency" if setup.decode else "normal"]
    if candidate.redundant:
        words += ["--ep-num-redundant-experts", str(candidate.redundant)]
        words += ["--ep-dispatch-algorithm", SGLANG_SPLITS[stack.split.name]]
    if candidate.interval is not None:
        every = str(candidate.interval)
        algorithm = {"eplb-global": "deepseek", "eplb-hierarchical": "deepseek_hierarchical"}
        words += ["--enable-eplb", "--eplb-algorithm", algorithm.get(stack.placement.name, "auto")]
        words += ["--eplb-rebalance-num-iterations", every, "--expert-distribution-recorder-mode", "stat"]
        words += ["--expert-distribution-recorder-buffer-size", every]
    elif stack.placement.name != "contiguous":
        words += ["--init-expert-location", _file("sglang")]
    if isinstance(stack.shared, Waterfill):
        words.append("--enable-waterfill")
    return shlex.join(words) + (' --dist-init-addr "$HEAD:20000" --node-rank "$NODE"' if setup.nodes > 1 else "")


def vllm_command(candidate: Candidate, setup: Setup, interval: int) -> str:
    """interval: steps between rearrangements; vLLM has no other way to a planned placement."""
    words = ["vllm", "serve", setup.model, "--tensor-parallel-size", "1", "--data-parallel-size", str(setup.gpus)]
    words += ["--enable-expert-parallel", "--all2all-backend"]
    words.append("deepep_low_latency" if setup.decode else "deepep_high_throughput")
    if candidate.stack.placement.name != "contiguous":
        config = {"num_redundant_experts": candidate.redundant, "window_size": min(interval, 1000)}
        words += ["--enable-eplb", "--eplb-config", json.dumps(config | {"step_interval": interval})]
    text = shlex.join(words)
    if setup.nodes > 1:
        own = setup.gpus // setup.nodes
        text += f' --data-parallel-size-local {own} --data-parallel-start-rank "$((NODE * {own}))"'
        text += ' --data-parallel-address "$HEAD" --data-parallel-rpc-port 13345'
        # The hosts beyond the first serve no requests of their own.
        text += ' $([ "$NODE" = 0 ] || echo --headless)'
    return text


def _file(system: str) -> str:
    return f"placement-{system}.json"
