"""The solvers that benchmarks/split.py compares. Each answers the same problems and measures its time."""

import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import split_baselines as baselines
import torch
from common import least_seconds
from split_baselines import Flags, Floats, GlopProgram, HighsProgram, Ints, solve_by
from split_problems import ProblemSet

from epsim.kernels.split import SplitStructure, cuda, solve, solve_batched, solve_gathered
from epsim.placement.base import Placement
from epsim.policies.copies import Copies
from epsim.policies.ipm import LplbIpm

ALONE = 30
"""The most problems for the median time of a single problem."""
REPEATS, LARGE_BATCH = 10, 50_000
"""Problems in a batch on a GPU; a tenth for the largest problems."""


@dataclass(frozen=True, eq=False)
class Asked:
    """The problems of a set that every solver gets. pick [B]: their indices among the set's (step, layer) pairs."""

    problems: ProblemSet
    pick: Ints
    rng: np.random.Generator

    @property
    def structure(self) -> SplitStructure:
        return self.problems.structure

    @property
    def num_problems(self) -> int:
        """The number of problems in the whole set."""
        return self.problems.counts.shape[0] * self.problems.counts.shape[1]

    @cached_property
    def loads(self) -> Ints:
        """[B, E]"""
        return self.of_steps(self.problems.counts)

    @cached_property
    def layer(self) -> Ints:
        """[B]"""
        return self.pick % self.structure.num_layers

    @cached_property
    def slots(self) -> Ints:
        """[B, P]: the expert of each slot."""
        return self.structure.physical_to_logical.numpy()[self.layer]

    @cached_property
    def copies(self) -> Copies:
        structure = self.structure
        return Copies(Placement(structure.physical_to_logical, structure.num_experts, structure.num_ranks))

    @property
    def few(self) -> int:
        """The number of problems for methods whose work grows with the cube of the problem size."""
        return len(self.pick) if self.structure.num_physical < 512 else min(4, len(self.pick))

    @cached_property
    def ipm(self) -> tuple[Floats, float]:
        """Fractions of `lplb-ipm` [B, P], NaN beyond the first few problems, and seconds per problem."""
        counts, copies = self.problems.counts, self.copies
        fractions = np.full(self.slots.shape, np.nan)
        if self.few < len(self.pick):
            counts = counts[self.pick[: self.few]]  # a set of one layer
        LplbIpm().fractions(counts[:1], copies)
        start = time.perf_counter()
        found = LplbIpm().fractions(counts, copies)
        seconds = time.perf_counter() - start
        fractions[: self.few] = found[:, 0].numpy() if self.few < len(self.pick) else self.of_steps(found)
        return fractions, seconds / (found.shape[0] * found.shape[1])

    def of_steps(self, values: torch.Tensor) -> Any:
        """[S, L, ...] -> [B, ...]"""
        return values.flatten(0, 1)[torch.from_numpy(self.pick)].numpy()

    def of_fractions(self, fractions: Floats) -> Floats:
        """[B, P] -> the loads of the slots."""
        return fractions * np.take_along_axis(self.loads, self.slots, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """split [B, P]; answered [B]: false if the method does not take the problem. times: microseconds per problem, by
    name: alone (alone_p99: its 99th percentile; with_model: with building the model), batch (one thread, or one
    launch), batch_two (two threads), layers (one launch for all layers of a step). whole: the split is of whole tokens
    and is compared with the optimum rounded up."""

    split: Floats
    answered: Flags
    times: dict[str, float] = field(default_factory=dict)
    unproven: int | None = None
    whole: bool = False


Solver = Callable[[Asked], Answer]


def _all(asked: Asked) -> Flags:
    return np.ones(len(asked.pick), dtype=bool)


def _few(asked: Asked) -> Flags:
    return np.arange(len(asked.pick)) < asked.few


def _alone(run: Callable[[int], object], num: int) -> float:
    """Microseconds of a single problem: the median over problems of the faster of two calls."""
    return 1e6 * float(np.median([least_seconds(partial(run, i), 2) for i in range(min(num, ALONE))]))


def _ours(asked: Asked) -> Answer:
    structure, counts = asked.structure, asked.problems.counts
    loads, layer = torch.from_numpy(asked.loads), torch.from_numpy(asked.layer)
    found = solve(structure, loads, layer)
    times = {"alone": _alone(lambda i: solve(structure, loads[i : i + 1], layer[i : i + 1]), len(loads))}
    per_problem = 1e6 / asked.num_problems
    for name, threads in (("batch_two", 2), ("batch", 1)):
        torch.set_num_threads(threads)
        times[name] = per_problem * least_seconds(lambda: solve_batched(structure, counts), 7)
    return Answer(found.split.numpy(), _all(asked), times, int(found.unproven.sum()))


def _ours_whole(asked: Asked) -> Answer:
    structure, counts = asked.structure, asked.problems.counts
    split = asked.of_steps(solve_gathered(structure, counts).split).astype(np.float64)
    seconds = least_seconds(lambda: solve_gathered(structure, counts), 5)
    return Answer(split, _all(asked), {"batch": 1e6 * seconds / asked.num_problems}, whole=True)


def _ours_gpu(asked: Asked) -> Answer:
    from device_times import buffers_of, graph, times_by_input

    structure, counts = asked.structure, asked.problems.counts.cuda()
    loads, layer = torch.from_numpy(asked.loads).cuda(), torch.from_numpy(asked.layer).cuda()
    found = solve(structure, loads, layer)
    (one, its_layer), feed = buffers_of(loads, layer)
    alone = times_by_input(graph(lambda: solve(structure, one, its_layer), REPEATS), feed, len(loads), 3) / REPEATS
    every = torch.arange(structure.num_layers, device="cuda")
    step = counts[0].clone()
    together = times_by_input(graph(lambda: solve(structure, step, every), REPEATS), lambda i: None, 1, 5) / REPEATS
    size = LARGE_BATCH if structure.num_physical < 512 else LARGE_BATCH // 10
    many = counts.repeat(-(-size // asked.num_problems), 1, 1)
    batch = times_by_input(graph(lambda: solve_batched(structure, many)), lambda i: None, 1, 5)
    times = {
        "alone": float(np.median(alone)),
        "alone_p99": float(np.quantile(alone, 0.99)),
        "layers": float(together[0]),
        "batch": float(batch[0]) / (many.shape[0] * many.shape[1]),
    }
    return Answer(found.split.cpu().numpy(), _all(asked), times, int(found.unproven.sum()))


def _programs(solve_all: Callable[[Ints, int, Ints], tuple[Floats, float, float]], asked: Asked) -> Answer:
    """The answer of a `solve_by`, which solves one problem after the other."""
    split, solving, building = solve_all(asked.slots, asked.structure.num_ranks, asked.loads)
    per_problem = 1e6 / len(split)
    times = {"alone": solving * per_problem, "with_model": (solving + building) * per_problem}
    return Answer(split, _all(asked), times)


def _lplb(true_maximum: bool, asked: Asked) -> Answer:
    slots, loads, num_ranks = torch.from_numpy(asked.slots), torch.from_numpy(asked.loads), asked.structure.num_ranks

    def run(i: int) -> Floats:
        return baselines.lplb_fractions(slots[i], num_ranks, loads[i : i + 1], true_maximum)[0].numpy()

    fractions = np.full(asked.slots.shape, np.nan)
    for i in range(asked.few):
        fractions[i] = run(i)
    times = {"alone": _alone(run, min(asked.few, 10))}
    return Answer(asked.of_fractions(fractions), _few(asked), times)


def _ipm(asked: Asked) -> Answer:
    fractions, seconds = asked.ipm
    return Answer(asked.of_fractions(fractions), _few(asked), {"batch": 1e6 * seconds})


def _edges(asked: Asked) -> Answer:
    structure = asked.structure
    slots, num_ranks = structure.physical_to_logical.numpy(), structure.num_ranks
    pairs = [baselines.pairs_of(row, num_ranks) for row in slots]
    split = np.zeros(asked.slots.shape)
    answered = np.array([pairs[layer] is not None for layer in asked.layer])

    def run(i: int) -> Floats:
        found = pairs[asked.layer[i]]
        assert found is not None
        return baselines.split_pairs(found, slots[asked.layer[i]], num_ranks, asked.loads[i : i + 1])

    for i in np.flatnonzero(answered):
        split[i] = run(i)
    if not answered.any():
        return Answer(split, answered)
    taken = np.flatnonzero(answered)
    times = {"alone": _alone(lambda i: run(taken[i]), len(taken))}
    counts, layers = asked.problems.counts.numpy(), [at for at, found in enumerate(pairs) if found is not None]

    def batch() -> None:
        for at in layers:
            baselines.split_pairs(pairs[at], slots[at], num_ranks, counts[:, at])  # type: ignore[arg-type]

    times["batch"] = 1e6 * least_seconds(batch, 5) / (len(counts) * len(layers))
    return Answer(split, answered, times)


def _even_fractions(asked: Asked) -> Floats:
    number = asked.copies.number.numpy()[asked.layer]
    return 1 / np.take_along_axis(number, asked.slots, 1)


def _even(asked: Asked) -> Answer:
    return Answer(asked.of_fractions(_even_fractions(asked)), _all(asked))


def _exact_fractions(asked: Asked) -> Floats:
    split = solve(asked.structure, torch.from_numpy(asked.loads), torch.from_numpy(asked.layer)).split.numpy()
    own = np.take_along_axis(asked.loads, asked.slots, 1)
    return np.where(own > 0, split / np.maximum(own, 1), _even_fractions(asked))


def _sampled(fractions: Callable[[Asked], Floats], asked: Asked) -> Answer:
    part = fractions(asked)
    answered = np.isfinite(part).all(1)
    split = baselines.sampled(asked.copies, asked.layer, asked.loads, np.nan_to_num(part), asked.rng)
    return Answer(split, answered, whole=True)


OURS, GLOP, HIGHS = "ours, CPU", "OR-Tools GLOP", "HiGHS"


@contextmanager
def solvers() -> Iterator[dict[str, Solver]]:
    """The solvers that this machine has, by their names in the table."""
    found: dict[str, Any] = {}
    if cuda.available():
        found["ours, GPU"] = _ours_gpu
    found |= {OURS: _ours, "ours, whole tokens, CPU": _ours_whole}
    if importlib.util.find_spec("ortools"):
        found[GLOP] = partial(_programs, partial(solve_by, GlopProgram))
    # HiGHS has its own process, because OR-Tools brings another HiGHS, and the two cannot be loaded together.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        if importlib.util.find_spec("highspy"):
            highs = partial(process.submit, solve_by, HighsProgram)
            found[HIGHS] = partial(_programs, lambda *given: highs(*given).result())
        yield found | {
            "LPLB as published": partial(_lplb, False),
            "LPLB, true maximum": partial(_lplb, True),
            "lplb-ipm (SGLang's form)": _ipm,
            "pairwise edges": _edges,
            "even": _even,
            "even, sampled per token": partial(_sampled, _even_fractions),
            "lplb-ipm, sampled per token": partial(_sampled, lambda asked: asked.ipm[0]),
            "ours, sampled per token": partial(_sampled, _exact_fractions),
        }
