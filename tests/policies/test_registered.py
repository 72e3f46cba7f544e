"""What must hold of every registered policy, those of installed packages included."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from epsim.cost.calibrated import CollectiveCost, PolicyCost, PolicyTable
from epsim.cost.policy_time import policy_us
from epsim.machines.hardware import load_hardware
from epsim.placement.base import Cluster, Placement, PlacementPolicy, Target
from epsim.placement.contiguous import Contiguous
from epsim.policies.apply import BoundStack, Setting, bind
from epsim.policies.base import Needs, RouterWork
from epsim.policies.copies import Copies, even_fractions
from epsim.policies.grammar import policy_text
from epsim.policies.load import Load
from epsim.policies.reader import Dense
from epsim.policies.registry import SHIPPED, kinds
from epsim.policies.splits import Systematic
from epsim.policies.stack import PolicyStack, parse_stack
from epsim.traces.trace import TokenBlock
from tests.policies.registered import EVERY_KIND, every, stack_of, write_example

ROOT = Path(__file__).resolve().parents[2]
DrawProblem = Callable[..., tuple[Placement, TokenBlock]]
Bound = Callable[..., BoundStack]
STACKS = [
    stack
    for split, shared in itertools.product(every("split"), every("shared"))
    if (stack := stack_of(split=split, shared=shared)) is not None
]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_policy_is_a_frozen_value_of_its_kind(kind: str) -> None:
    for name, policy in kinds()[kind].items():
        assert policy.name == name
        assert policy.kind == kind
    for policy in every(kind):
        assert hash(policy) == hash(policy)
        with pytest.raises((AttributeError, TypeError)):
            policy.anything = 1
        assert policy.complexity >= 0
        assert all(isinstance(form, str) for form in policy.engines.values())


def test_names_are_unique() -> None:
    names = [name for known in kinds().values() for one in known.values() for name in (one.name, *one.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_loads_sum_to_assignments_and_are_the_same_again(
    draw_problem: DrawProblem, bound: Bound, stack: PolicyStack
) -> None:
    placement, block = draw_problem(11, redundant=8, tokens=60, blanks=True)
    first, second = (bound(str(stack), placement).load(block) for _ in range(2))
    check_sums(first, block)
    for name in Load.__slots__:
        one, other = getattr(first, name), getattr(second, name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def check_sums(load: Load, block: TokenBlock) -> None:
    ids = torch.from_numpy(block.expert_ids.astype(np.int64))
    step = torch.from_numpy(block.token_step)
    wanted = torch.zeros_like(load.assignments).index_add_(0, step, (ids >= 0).sum(-1))
    assert torch.equal(load.routed.sum(-1), wanted)
    assert torch.equal(load.shared_tokens.sum(-1).double(), load.tokens)


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_steps_without_tokens_have_no_load(draw_problem: DrawProblem, bound: Bound, stack: PolicyStack) -> None:
    placement, block = draw_problem(12, steps=4, redundant=8, tokens=40)
    block = TokenBlock(block.steps, np.where(block.token_step == 1, 2, block.token_step), *fields_after_step(block))
    load = bound(str(stack), placement).load(block)
    assert not load.total[1].any()
    assert not load.active[1].any()
    check_sums(load, block)


def fields_after_step(block: TokenBlock) -> tuple[Any, ...]:
    return block.source_rank, block.expert_ids


@pytest.mark.parametrize("placement", every("placement"), ids=policy_text)
def test_placements_hold_every_expert_and_are_the_same_again(
    placement: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = (3, 4)
    write_example(tmp_path, monkeypatch, 16, 4, layers)
    history = torch.from_numpy(np.random.default_rng(3).integers(0, 50, (5, 2, 16)))
    history[2] = 0
    cluster = Cluster(4, 2, 8, 4)
    target = Target(cluster, layers, parse_stack("contiguous"))
    given = history if placement.needs_history else history[:0]
    first, second = (placement.plan_for(given, target) for _ in range(2))
    assert first.version == second.version
    assert (first.num_layers, first.num_experts, first.num_ranks, first.num_nodes) == (2, 16, 4, 2)
    assert first.num_physical == 16 + placement.redundant(16, cluster)
    assert all(note and "\n" not in note for note in placement.notes(16, target))


@pytest.mark.parametrize("router", every("router"), ids=policy_text)
def test_a_routers_ranks_take_their_part_of_the_whole(router: Any) -> None:
    scores = torch.randn(12, 16, generator=torch.Generator().manual_seed(1)).softmax(-1)
    weights, ids = scores.topk(4)
    ids[5] = -1
    holds = torch.eye(4, dtype=torch.bool).repeat_interleave(4, 0)
    decode = torch.arange(12) % 5 > 0

    def work(tokens: slice, **more: Any) -> RouterWork:
        return RouterWork(scores[tokens], scores[tokens], ids[tokens], weights[tokens], decode[tokens], holds, **more)

    parts = [slice(0, 3), slice(3, 4), slice(4, 12), slice(12, 12)]
    if router.whole_batch:
        whole = router.route(work(slice(0, 12)))
        barrier, sent = Barrier(len(parts)), [torch.empty(0)] * len(parts)

        def of_rank(rank: int) -> Any:
            def total(values: torch.Tensor) -> torch.Tensor:
                sent[rank] = values
                barrier.wait(60)
                summed = torch.stack(sent).sum(0)
                barrier.wait(60)
                return summed

            return router.route(work(parts[rank], total=total))

        with ThreadPoolExecutor(len(parts)) as pool:
            routed = list(pool.map(of_rank, range(len(parts))))
        assert torch.equal(torch.cat([part.expert_ids for part in routed]), whole.expert_ids)
        assert torch.equal(torch.cat([part.weights for part in routed]), whole.weights)
    again = [router.route(work(parts[2])) for _ in range(2)]
    assert torch.equal(again[0].expert_ids, again[1].expert_ids)
    assert router.route(work(parts[3])).expert_ids.shape[0] == 0


def test_readers_read_at_most_what_there_is() -> None:
    tokens, active = torch.tensor([0.0, 1.0, 64.0, 512.0]).double(), torch.tensor([0.0, 1.0, 8.0, 16.0]).double()
    paid = []
    for reader in every("reader"):
        try:
            bytes_read = reader.bytes_read(tokens, active, 2048, 768, 2.0, 8)
        except ValueError:
            continue  # a budget that does not pay for this way to choose channels
        paid.append(type(reader))
        assert float(bytes_read[0]) == 0
        assert (bytes_read >= 0).all()
        assert (bytes_read <= active * 3 * 2048 * 768 * 2.0).all()
        assert reader.resident_bytes(16, 2048, 768) >= 0
    assert set(paid) == set(kinds()["reader"].values())


@pytest.mark.parametrize("kind", ["router", "split", "shared", "reader"])
def test_no_policy_costs_less_than_nothing(kind: str) -> None:
    costs, tokens = load_hardware("h200").policy, torch.tensor([0.0, 1.0, 5000.0], dtype=torch.float64)
    for policy in every(kind):
        stack = stack_of(**{kind: policy}) or stack_of(split=parse_stack("lplb").split, **{kind: policy})
        assert stack is not None
        for redundant, (ranks, nodes) in itertools.product((True, False), ((2, 1), (64, 8))):
            assert (policy_us(costs, None, stack, redundant, ranks, nodes, tokens) >= 0).all()
        needs = getattr(policy, "needs", "none")
        assert needs in ("none", "reduced", "gathered")
        # A collective takes time.
        assert needs == "none" or (policy_us(costs, None, stack, True, 2, 1, tokens) > costs.all_reduce_us - 1e-9).all()


def test_one_copy_costs_its_collective_its_solve_and_its_assignment() -> None:
    costs, tokens = load_hardware("h200").policy, torch.ones(1, dtype=torch.float64)
    for nodes, collective in ((1, costs.all_reduce_us), (2, costs.all_reduce_nodes_us)):
        found = policy_us(costs, None, parse_stack("eplb+one-copy"), True, 16, nodes, tokens)
        assert float(found) == pytest.approx(collective + costs.solve_us + costs.assign_us)
    assert float(policy_us(costs, None, parse_stack("eplb+one-copy"), False, 16, 1, tokens)) == 0


# Nothing outside a policy decides by its name or class.

CLASSES = {policy.__name__ for policy in SHIPPED}
NAMES = {name for policy in SHIPPED for name in (policy.name, *policy.aliases)}
KINDS_OF_STACK = {"placement", "router", "split", "shared", "reader", "policy"}


def sources() -> list[Path]:
    folders = ("epsim", "runtime", "kernels", "launch", "benchmarks")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if not path.is_symlink()]
    return [path for path in found if not any((ROOT / part).is_symlink() for part in path.relative_to(ROOT).parents)]


def decisions(tree: ast.AST) -> list[int]:
    """Lines that ask for a policy's class, or compare or look up its name."""

    def names_a_policy(node: ast.AST) -> bool:
        if not (isinstance(node, ast.Attribute) and node.attr == "name"):
            return False
        owner = node.value
        return (owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")) in KINDS_OF_STACK

    def literal(node: ast.AST) -> bool:
        values = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
        return any(isinstance(value, str) and value in NAMES for value in values)

    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            asked = {getattr(one, "attr", getattr(one, "id", "")) for one in ast.walk(node.args[1])}
            lines += [node.lineno] if asked & CLASSES else []
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            named = any(isinstance(side, ast.Attribute) and side.attr == "name" for side in sides)
            lines += [node.lineno] if any(map(names_a_policy, sides)) or (named and any(map(literal, sides))) else []
        elif isinstance(node, ast.Subscript):
            lines += [node.lineno] if names_a_policy(node.slice) and isinstance(node.ctx, ast.Load) else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked_of = names_a_policy(node.func.value) and node.func.attr in ("startswith", "endswith", "partition")
            looked_up = node.func.attr in ("get", "setdefault", "pop") and any(map(names_a_policy, node.args))
            lines += [node.lineno] if asked_of or looked_up else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            owner = node.args[0]
            owner_name = getattr(owner, "attr", getattr(owner, "id", ""))
            fixed = isinstance(node.args[1], ast.Constant)
            lines += [node.lineno] if owner_name in KINDS_OF_STACK and fixed else []
    return lines


def test_nothing_decides_by_a_policys_name_or_class() -> None:
    paths = sources()
    assert len(paths) > 200
    found = []
    for path in paths:
        found += [f"{path.relative_to(ROOT)}:{line}" for line in decisions(ast.parse(path.read_text()))]
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(stack.shared, Local)",
        "isinstance(x, (int, splits.Lplb))",
        "stack.split.name == 'mine'",
        "one.name in ('even', 'random')",
        "STEPS[stack.split.name]",
        "STEPS.get(stack.placement.name, 1)",
        "stack.split.name.startswith('lplb')",
        "getattr(split, 'counts', 'reduced')",
    ],
)
def test_such_decisions_are_found(text: str) -> None:
    assert decisions(ast.parse(text)) == [1]


def test_what_is_no_decision_is_left_alone() -> None:
    for text in ("collective.name == 'peer'", "f'{stack.split.name} waits'", "isinstance(reader, SparseInputs)"):
        assert decisions(ast.parse(text)) == []


class Distribution:
    name, version = "stranger", "0.1"


class Entry:
    """What `importlib.metadata.entry_points` gives, for a package that is not installed."""

    name, value, dist = "mine", "stranger:Mine", Distribution()

    def __init__(self, loaded: Any) -> None:
        self.loaded = loaded

    def load(self) -> Any:
        if isinstance(self.loaded, BaseException):
            raise self.loaded
        return self.loaded


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(loaded: Any) -> None:
        monkeypatch.setattr("epsim.policies.registry.entry_points", lambda group: [Entry(loaded)])
        kinds.cache_clear()

    yield install
    monkeypatch.undo()
    kinds.cache_clear()


def test_a_package_adds_a_policy(installed: Any, draw_problem: DrawProblem) -> None:
    @dataclass(frozen=True, slots=True)
    class FirstCopies(Systematic):
        number: int
        name: ClassVar[str] = "first-copies"
        examples: ClassVar[tuple[str, ...]] = ("first-copies(number=2)",)

        def fractions(self, counts: torch.Tensor, copies: Copies) -> torch.Tensor:
            even = copies.once(even_fractions)
            return even.expand(*counts.shape[:-2], *even.shape)

    installed(FirstCopies)
    stack = parse_stack("eplb+first-copies(number=3)")
    assert str(stack) == "eplb+first-copies(number=3)"
    assert [str(one) for one in every("split")].count(str(FirstCopies(2))) == 1
    placement, block = draw_problem(1, tokens=30)
    load = bind(stack, placement, Setting(0, 0.0, 2, (0, 1))).load(block)
    assert torch.equal(load.routed.sum(-1), load.assignments)
    # What it declares is charged: it needs a collective and states no work of its own.
    costs, tokens = load_hardware("h200").policy, torch.ones(1, dtype=torch.float64)
    assert float(policy_us(costs, None, stack, True, 2, 1, tokens)) == costs.all_reduce_us


@pytest.mark.parametrize("text", ["True", "False"])
def test_an_argument_may_be_true_or_false(installed: Any, text: str) -> None:
    @dataclass(frozen=True, slots=True)
    class Reversed(Contiguous):
        backwards: bool
        name: ClassVar[str] = "reversed"

    installed(Reversed)
    stack = parse_stack(f"reversed(backwards={text})")
    assert stack.placement == Reversed(text == "True")
    assert str(stack) == f"reversed(backwards={text})"
    with pytest.raises(ValueError, match=r"unknown value backwards=no in .*: choose True or False"):
        parse_stack("reversed(backwards=no)")


def test_a_readers_work_and_collective_take_time(installed: Any) -> None:
    @dataclass(frozen=True, slots=True)
    class Agreed(Dense):
        name: ClassVar[str] = "agreed"
        needs: ClassVar[Needs] = "gathered"
        work: ClassVar[tuple[str, ...]] = ("assign_us",)

    installed(Agreed)
    costs, tokens = load_hardware("h200").policy, torch.ones(1, dtype=torch.float64)
    stack = parse_stack("eplb+agreed")
    assert float(policy_us(costs, None, stack, True, 2, 1, tokens)) == costs.all_reduce_us + costs.assign_us
    even = PolicyCost("even", 2, 0, (1.0, 2.0), (5.0, 5.0))
    measured = PolicyTable("GPU", "by hand", (even,), (CollectiveCost("all_gather", 2, 1, 30.0),))
    assert float(policy_us(costs, measured, stack, True, 2, 1, tokens)) == 5.0 + costs.assign_us + 30.0


class Nothing:
    pass


@dataclass
class Thawed(PlacementPolicy):
    name: ClassVar[str] = "mine"


@dataclass(frozen=True)
class Unfinished(PlacementPolicy):
    name: ClassVar[str] = "mine"


@dataclass(frozen=True)
class UnfinishedSplit(Systematic):
    name: ClassVar[str] = "mine"


@dataclass(frozen=True)
class Switched(Contiguous):
    on: bool
    either: int | str | None
    name: ClassVar[str] = "mine"


@dataclass(frozen=True)
class Untyped(Contiguous):
    what: Absent  # type: ignore[name-defined]  # noqa: F821
    name: ClassVar[str] = "mine"


def changed(**attributes: Any) -> Any:
    """A policy that has one mistake."""
    return dataclass(frozen=True)(type("Mine", (Contiguous,), {"name": "mine", **attributes}))


@pytest.mark.parametrize(
    ("loaded", "says"),
    [
        (
            ImportError("No module named\n'absent'"),
            r"cannot be loaded \(ImportError: No module named 'absent'\): repair",
        ),
        (Nothing, "is not a policy: give a frozen dataclass with a name, derived from PlacementPolicy, Router, Split"),
        (3, "is not a policy"),
        (SystemExit(3), r"cannot be loaded \(SystemExit: 3\)"),
        (Thawed, r"is not a policy: write @dataclass\(frozen=True\)"),
        (Unfinished, "is not a policy: the class does not define plan or plan_for"),
        (UnfinishedSplit, "is not a policy: the class does not define fractions"),
        (Switched, "argument either is of type int \\| str \\| None: use str, int, float, bool or a Literal of texts"),
        (Untyped, "is not a policy: name 'Absent' is not defined"),
        (SHIPPED[0], "there is another policy named 'contiguous': uninstall the package"),
        (changed(name=7), "is not a policy: give a frozen dataclass with a name"),
        (changed(name="my policy"), "its name is 'my policy': give letters, digits, - and _ only"),
        (changed(notes=("a note",)), "is not a policy: notes is no method: define it as one"),
        (changed(first="size"), "first or aliases name 'size', which is not an argument"),
        (changed(aliases={"mine-2": {"size": 1}}), "first or aliases name 'size', which is not an argument"),
    ],
)
def test_a_packages_mistake_is_told_in_one_line(installed: Any, loaded: Any, says: str) -> None:
    installed(loaded)
    with pytest.raises(ValueError, match=says) as error:
        parse_stack("contiguous")
    assert str(error.value).startswith("package stranger 0.1: entry point mine = stranger:Mine of epsim.policies")
    assert not re.search(r"\n", str(error.value))
