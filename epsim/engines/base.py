"""The base class of serving engines, and the parts that their command lines have in common."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from epsim.policies.grammar import policy_text
from epsim.policies.stack import PolicyStack

FILE = "placement-{}.json"
ON_EACH_HOST = (
    "Run the serving command on every host. Set HEAD to the address of the first host, and NODE to the number of the "
    "host, from 0."
)


@dataclass(frozen=True, slots=True)
class Deployment:
    """What to run: a stack with `redundant` redundant experts per layer. interval: steps between rebalances; None if
    the placement is planned once."""

    stack: PolicyStack
    redundant: int
    interval: int | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """Values for the command lines. model: its path or name. trace: the file that placements are planned on. reading:
    the options for reading it."""

    model: str
    trace: str
    gpus: int
    nodes: int
    groups: int
    decode: bool
    reading: tuple[str, ...] = ()


class System:
    """A serving engine. name: its name in results and in `Policy.engines`. title: its name for people. plans_itself:
    whether it plans and rebalances by itself and cannot load a placement."""

    name: ClassVar[str]
    title: ClassVar[str]
    plans_itself: ClassVar[bool] = False

    def lacks(self, deployment: Deployment) -> str:
        """What the engine lacks to run the deployment, in words; empty if it can run it."""
        stack = deployment.stack
        if self.name not in stack.router.engines:
            return f"no router policy ({stack.router.name})"
        return "" if self.name in stack.reader.engines else f"no reader of channels ({stack.reader.name})"

    def commands(self, deployment: Deployment, setup: Setup, affordable: Callable[[int], int]) -> list[str]:
        """The command lines for a deployment that the engine can run. affordable(steps): the shortest interval of at
        least `steps` steps at which rebalancing costs little."""
        raise NotImplementedError

    def remark(self, deployment: Deployment) -> str:
        """Further advice about running the deployment."""
        return ""


def plan_command(deployment: Deployment, setup: Setup, format_name: str) -> str:
    """The command that writes the placement file."""
    placement = policy_text(deployment.stack.placement)
    words = ["epsim", "plan", setup.trace, "--ranks", str(setup.gpus), "--nodes", str(setup.nodes)]
    words += ["--redundant", str(deployment.redundant), "--groups", str(setup.groups)]
    words += [*setup.reading, "--placement", placement, "--format", format_name, "-o", FILE.format(format_name)]
    return shlex.join(words)
