"""What a serving engine answers about a stack, and the parts that their command lines have in common."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from epsim.policies.grammar import policy_text
from epsim.policies.stack import PolicyStack

FILE = "placement-{}.json"
ON_EACH_HOST = "on every host, HEAD being the first one's address and NODE the host's number from 0"


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is to run: a stack on `redundant` physical experts a layer more than logical ones. interval: steps between
    rebalances, None where the placement is planned once."""

    stack: PolicyStack
    redundant: int
    interval: int | None = None


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


class System:
    """A serving engine. name: in results and in `Policy.engines`; title: as people write it. plans_itself: it loads no
    placement, but plans by itself and rebalances."""

    name: ClassVar[str]
    title: ClassVar[str]
    plans_itself: ClassVar[bool] = False

    def lacks(self, deployment: Deployment) -> str:
        """What of it the engine cannot run, in words; empty where it can."""
        stack = deployment.stack
        if self.name not in stack.router.engines:
            return f"no router policy ({stack.router.name})"
        return "" if self.name in stack.reader.engines else f"no reader of channels ({stack.reader.name})"

    def commands(self, deployment: Deployment, setup: Setup, affordable: Callable[[int], int]) -> list[str]:
        """The command lines that run what the engine does not lack. affordable: a least interval -> that, or the longer
        one at which rebalances that only keep a placement cost little."""
        raise NotImplementedError

    def remark(self, deployment: Deployment) -> str:
        """What else to know of running it so."""
        return ""


def plan_command(deployment: Deployment, setup: Setup, format_name: str) -> str:
    """The command that makes the placement's file."""
    placement = policy_text(deployment.stack.placement)
    words = ["epsim", "plan", setup.trace, "--ranks", str(setup.gpus), "--nodes", str(setup.nodes)]
    words += ["--redundant", str(deployment.redundant), "--groups", str(setup.groups)]
    words += [*setup.reading, "--placement", placement, "--format", format_name, "-o", FILE.format(format_name)]
    return shlex.join(words)
