"""What all readers share: the recording they return, checks of numbers, and the meta from file, model and options."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from epsim.models.known import find_model, unknown_model
from epsim.traces.check import MAX_COUNT
from epsim.traces.limits import check_size
from epsim.traces.options import ImportOptions
from epsim.traces.readers.document import Document
from epsim.traces.trace import Array, Block, CountsBlock, Ints, Level, Phase, TraceMeta

MAX_DEPTH = 16
MAX_CELLS = 1 << 22
BLOCK_NUMBERS = 1 << 23


@dataclass(frozen=True, slots=True)
class Recording:
    """What a reader returns for a recording.

    blocks: starts a new pass over the blocks; it is called at most twice. unfilled_end: steps of zeros at the end are
    the unused part of a buffer. may_have_dense: layers without any token are dense layers and are dropped.
    """

    meta: TraceMeta
    blocks: Callable[[], Iterator[Block]]
    unfilled_end: bool = False
    may_have_dense: bool = True


@dataclass(frozen=True, slots=True)
class TraceReader:
    """One recording format. matches: whether a document has it; read: reads all documents of one recording."""

    name: str
    matches: Callable[[Document], bool]
    read: Callable[[Sequence[Document], ImportOptions], Recording]


def has_key(key: str, *kinds: str, holding: type = object) -> Callable[[Document], bool]:
    """A `TraceReader.matches` for documents of these kinds that are a dictionary with this key.

    holding: the type of its value."""

    def matches(document: Document) -> bool:
        content = document.content
        is_dict = document.kind in kinds and isinstance(content, dict)
        return is_dict and key in content and isinstance(content[key], holding)

    return matches


def placement_reader(name: str, matches: Callable[[Document], bool], key: str, wanted: str) -> TraceReader:
    """A reader that refuses a placement. key: what identifies the file; wanted: the file to give instead."""

    def refuse(documents: Sequence[Document], options: ImportOptions) -> Recording:
        raise ValueError(
            f"{documents[0].path}: a placement ({key}), not a load: it says where experts live, not how many tokens "
            f"they got; give the {wanted} that it was planned from"
        )

    return TraceReader(name, matches, refuse)


def natural(path: Path) -> tuple[tuple[int, str], ...]:
    """A sort key that compares numbers in names by value: iter2 before iter11."""
    parts = re.split(r"(\d+)", str(path))
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


def number_in_name(path: Path, word: str) -> int | None:
    match = re.search(rf"{word}[_-]?(\d{{1,9}})", path.name, re.I)
    return int(match.group(1)) if match else None


def settle(
    options: ImportOptions,
    documents: Sequence[Document],
    *,
    level: Level,
    num_layers: int,
    num_experts: int | None = None,
    top_k: int | None = None,
    least_experts: int = 1,
    model: str | None = None,
    phase: Phase = "unknown",
    notes: Sequence[str] = (),
    layers: Sequence[int] = (),
    num_source_ranks: int = 0,
    num_scores: int = 0,
) -> TraceMeta:
    """The meta of a trace, from the file (the arguments), the options and the model.

    Raises ValueError, which names the option, if a value is missing or the sources contradict each other.
    least_experts: the largest expert id seen + 1.
    """
    where = str(documents[0].path)
    known = find_model(options.model or model or "")
    if (
        known
        and not options.model
        and (num_experts or known.num_experts, top_k or known.top_k) != (known.num_experts, known.top_k)
    ):
        known = None
    if num_experts is not None and options.num_experts not in (None, num_experts):
        raise ValueError(f"{where}: --experts {options.num_experts}, but the file has {num_experts} experts a layer")
    experts = num_experts or options.num_experts or (known.num_experts if known else None)
    if experts is None:
        raise ValueError(
            f"{where}: the file does not say how many experts a layer has (the largest id is {least_experts - 1}): "
            f"give --experts, or a known --model{unknown_model(options.model)}"
        )
    if experts < least_experts:
        raise ValueError(f"{where}: expert id {least_experts - 1} is outside 0..{experts - 1} (--experts {experts})")
    if known and options.model and known.num_experts != experts:
        raise ValueError(
            f"{where}: --model {options.model} has {known.num_experts} experts a layer, the file has {experts}"
        )
    if top_k is not None and options.top_k not in (None, top_k):
        raise ValueError(f"{where}: --top-k {options.top_k}, but the file has {top_k} experts a token")
    chosen = top_k or options.top_k or (known.top_k if known else None)
    if chosen is None:
        hint = " (256 experts: DeepSeek-V3? then --model deepseek-v3)" if experts == 256 and num_layers >= 58 else ""
        raise ValueError(
            f"{where}: the file does not say how many experts a token chooses: "
            f"give --top-k, or a known --model{unknown_model(options.model)}{hint}"
        )
    if chosen > experts:
        raise ValueError(f"{where}: --top-k {chosen} is larger than the {experts} experts of a layer")
    shared = options.shared_cost if options.shared_cost is not None else known.shared_cost if known else None
    all_notes = list(notes)
    if options.phase is None and phase == "unknown":
        named = {p for d in documents for p in ("prefill", "decode") if p in d.path.name.lower()}
        if len(named) == 1 and all(next(iter(named)) in d.path.name.lower() for d in documents):
            phase = "prefill" if "prefill" in named else "decode"
            all_notes.append(f"phase {phase}: from the file name")
    names = [document.path.name for document in documents]
    source = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return TraceMeta(
        level=level,
        num_layers=num_layers,
        num_experts=experts,
        top_k=chosen,
        num_source_ranks=num_source_ranks,
        shared_cost=shared,
        model=options.model or model or "unknown",
        phase=options.phase or phase,
        layers=tuple(int(layer) for layer in layers),
        num_scores=num_scores,
        source=source,
        notes=tuple(all_notes),
    )


def experts_at_least(least: int, options: ImportOptions) -> tuple[int, list[str]]:
    """The number of experts, and notes, for a file that lists counts by expert id. least: the largest id + 1."""
    known = find_model(options.model or "")
    if options.num_experts is not None:
        return options.num_experts, []
    if known is not None and known.num_experts >= least:
        return known.num_experts, []
    return least, [f"{least} experts a layer: the largest id in the file + 1"]


AXES = {1: ("expert",), 2: ("layer", "expert"), 3: ("step", "layer", "expert"), 4: ("step", "rank", "layer", "expert")}


def to_numpy(value: Any) -> Array:
    """Converts a tensor, an array or nested lists to an array of numbers; otherwise raises ValueError."""
    if hasattr(value, "detach"):
        value = _plain(value)
    if isinstance(value, list | tuple) and _has_bool(value):
        raise ValueError("expected numbers, found true or false (bool)")
    try:
        array: Array = np.asarray(value)
    except (ValueError, OverflowError):
        raise ValueError(ragged(value)) from None
    if array.dtype.kind not in "iuf":
        raise ValueError(f"expected numbers, found something else ({array.dtype}) or a whole number beyond 64 bits")
    return array


def _plain(tensor: Any) -> Any:
    """Converts a tensor to an array. No recorder writes tensors that are sparse, quantized or without data, so these
    raise ValueError."""
    text = f"{str(tensor.layout).removeprefix('torch.')} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
    strided = str(tensor.layout) == "torch.strided" and not tensor.is_quantized and not tensor.is_meta
    if not strided or tensor.dtype.is_complex:
        raise ValueError(f"a tensor that does not hold plain numbers ({text}): save a dense one")
    tensor = tensor.detach().to("cpu")
    narrow = tensor.dtype.is_floating_point and tensor.dtype.itemsize <= 2
    return (tensor.float() if narrow else tensor).numpy()


def _has_bool(value: Any, depth: int = 0) -> bool:
    """Whether nested lists hold true or false, which NumPy would convert to 1 and 0."""
    if depth > MAX_DEPTH:
        return False
    if value and isinstance(value[0], list | tuple):
        return any(_has_bool(item, depth + 1) for item in value if isinstance(item, list | tuple))
    return bool in set(map(type, value))


def half(scores: Any) -> Array:
    """Scores as float16, the type that traces keep. Too large scores become infinite, and the store refuses them."""
    with np.errstate(over="ignore"):
        kept: Array = np.asarray(scores).astype(np.float16)
    return kept


def check_filled(listed: int, shape: tuple[int, ...], what: str, documents: Sequence[Document]) -> None:
    """Raises ValueError if the table of a log, shape [T, L, k], would be huge, or large and nearly empty.

    listed: the number of entries in the log; what: what they are called in the message."""
    cells = shape[0] * shape[1]
    if cells > max(50 * listed, MAX_CELLS):
        raise ValueError(
            f"{shape[0]} tokens x {shape[1]} layers, but only {listed} {what}: check the token and layer numbers, "
            "which do not belong together"
        )
    table = f"{shape[0]:,} tokens x {shape[1]:,} layers x {shape[2]:,} experts"
    check_size(table, cells * shape[2], *(document.path for document in documents))


def whole(value: Any, *, first: int = 0, axes: Sequence[str] | None = None) -> Ints:
    """Converts counts to int64. Raises ValueError, which says where, if a count is NaN, negative, fractional or huge,
    or if the lists are ragged. first: the number of the first step, for the message."""
    array: Any = to_numpy(value)
    if array.dtype.kind == "f" and array.dtype.itemsize < 8:
        array = array.astype(np.float64)
    bad: Any = ~np.isfinite(array) if array.dtype.kind == "f" else np.zeros(0, dtype=bool)
    problem = "not a finite number"
    if not bad.any():
        bad, problem = array < 0, "negative"
    if not bad.any():
        bad, problem = array > MAX_COUNT, "larger than 2^40"
    if not bad.any() and array.dtype.kind == "f":
        bad, problem = array != np.floor(array), "not a whole number"
    if bad.any():
        index = [int(i) for i in np.argwhere(bad)[0]]
        names = axes or AXES.get(len(index), ())
        text = ", ".join(f"{n} {i + (first if n == 'step' else 0)}" for n, i in zip(names, index, strict=False))
        raise ValueError(f"the count at {text} is {problem} ({array[tuple(index)]})")
    counts: Ints = array.astype(np.int64)
    return counts


def ragged(value: Any) -> str:
    """A message that says which of the nested lists differs in length from the first list of its depth."""
    level: list[Any] = [value]
    shape: tuple[int, ...] = ()
    while level and len(shape) < MAX_DEPTH and all(isinstance(item, list | tuple) for item in level):
        expected = len(level[0])
        wrong = next((i for i, item in enumerate(level) if len(item) != expected), None)
        if wrong is not None:
            index, size = [int(i) for i in np.unravel_index(wrong, shape)], len(level[wrong])
            return f"ragged: the list at {index} has {size} entries, the first of its depth has {expected}"
        shape = (*shape, expected)
        level = [inner for item in level for inner in item]
    return "ragged: lists of unequal depth, or a value that is not a number"


def count_recording(
    counts: Sequence[Ints], documents: Sequence[Document], options: ImportOptions, **known: Any
) -> Recording:
    """The recording of S >= 1 steps' counts [L, E] in memory. known: further arguments of `settle`."""
    num_layers, num_experts = counts[0].shape
    meta = settle(options, documents, level="counts", num_layers=num_layers, num_experts=num_experts, **known)
    return Recording(meta, lambda: count_blocks(counts))


def sparse_recording(
    steps: Sequence[Mapping[tuple[int, int], float]],
    layers: Sequence[int],
    documents: Sequence[Document],
    options: ImportOptions,
    notes: Sequence[str],
    top_k: int | None = None,
) -> Recording:
    """The recording of each step's counts by (layer number, expert), rounded. A pair that is not listed has no tokens.
    layers: the numbers of all layers."""
    least = max((expert for counts in steps for _, expert in counts), default=0) + 1
    num_experts, more_notes = experts_at_least(least, options)
    meta = settle(
        options,
        documents,
        level="counts",
        num_layers=max(len(layers), 1),
        num_experts=num_experts,
        least_experts=least,
        top_k=top_k,
        layers=layers,
        notes=[*notes, *more_notes],
    )
    layer_index = {layer: index for index, layer in enumerate(layers)}
    step_numbers = meta.num_layers * num_experts
    dense = f"{len(steps):,} steps x {meta.num_layers:,} layers x {num_experts:,} experts"
    check_size(dense, len(steps) * step_numbers, *(document.path for document in documents))

    def blocks() -> Iterator[Block]:
        size = _steps_a_block(step_numbers)
        for low in range(0, len(steps), size):
            part = steps[low : low + size]
            table = np.zeros((len(part), meta.num_layers, num_experts))
            for step, counts in enumerate(part):
                for (layer, expert), count in counts.items():
                    table[step, layer_index[layer], expert] = count
            yield from count_blocks(whole(np.rint(table, out=table), first=low), low)

    return Recording(meta, blocks)


def _steps_a_block(step_numbers: int) -> int:
    return min(256, max(1, BLOCK_NUMBERS // max(step_numbers, 1)))


def one_step_per_file(documents: Sequence[Document]) -> str:
    files = f"each of the {len(documents)} files" if len(documents) > 1 else "the file"
    return f"{files} is one step: it holds the counts of a whole recording"


def count_blocks(counts: Sequence[Ints] | Ints, first: int = 0) -> Iterator[Block]:
    """Cuts the counts of S >= 1 steps, each [L, E], into blocks; the steps are numbered from `first`."""
    size = _steps_a_block(counts[0].size)
    for low in range(0, len(counts), size):
        part = np.asarray(counts[low : low + size])
        yield CountsBlock(np.arange(first + low, first + low + len(part)), part)
