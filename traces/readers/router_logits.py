"""Router logits of Hugging Face models: `output_router_logits` as npz or pt, a tuple of L arrays [tokens, E]."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from epsim.models.known import ScoreRule, find_model
from epsim.traces.compose import deal
from epsim.traces.options import DEFAULT_STEP_TOKENS, ImportOptions
from epsim.traces.readers.base import BLOCK_NUMBERS, Recording, TraceReader, natural, settle, to_numpy
from epsim.traces.readers.document import Document, naming
from epsim.traces.trace import Array, Block, TokenBlock

NAMES = ("router_logits", "output_router_logits", "router_probs")


def _layers_of(document: Document) -> list[Any] | None:
    """The L arrays of a file that looks like router logits, else None."""
    content = document.content
    if document.kind == "pt" and isinstance(content, dict):
        content = next((content[name] for name in NAMES if name in content), None)
    elif document.kind == "npz":
        content = [content[name] for name in sorted(content, key=lambda n: natural(document.path / n))]
        content = content[0] if len(content) == 1 and content[0].ndim == 3 else content
    elif document.kind not in ("pt", "npy"):
        return None
    if hasattr(content, "ndim") and content.ndim == 3:
        content = list(content)
    if not isinstance(content, list | tuple) or not content:
        return None
    fits = all(
        getattr(a, "ndim", 0) == 2 and str(a.dtype).split(".")[-1].lstrip("b").startswith("float") for a in content
    )
    return list(content) if fits else None


def _is_logits(document: Document) -> bool:
    return _layers_of(document) is not None


def _read_logits(documents: Sequence[Document], options: ImportOptions) -> Recording:
    """Joins the files into one stream of tokens, cuts it into steps, and keeps the scores of all experts.

    Under every rule the chosen experts are the top-k of the logits: DeepSeek's bias and groups are not in the file.
    """
    files: list[list[Array]] = []
    for document in documents:
        with naming(document.path, "router logits"):
            arrays = [to_numpy(a) for a in _layers_of(document) or ()]
            first = files[0] if files else arrays
            if any(len(a) != len(arrays[0]) or a.shape[1] != first[0].shape[1] for a in arrays):
                shapes = sorted({str(list(a.shape)) for a in arrays})
                raise ValueError(f"ragged: layers have shapes {' and '.join(shapes[:3])}")
            if len(arrays) != len(first):
                raise ValueError(f"{len(arrays)} layers, but {documents[0].path.name} has {len(first)}")
            files.append(arrays)
    num_tokens, num_experts = sum(len(f[0]) for f in files), files[0][0].shape[1]
    if not num_tokens or not num_experts:
        raise ValueError(f"{documents[0].path}: no tokens in it")
    known = find_model(options.model or "")
    rule: ScoreRule = options.score_rule or (known.score_rule if known else "softmax")
    size = options.step_tokens or DEFAULT_STEP_TOKENS
    notes = [
        f"scores by rule {rule}{'' if options.score_rule or known else ' (default --score-rule)'}, all experts kept"
    ]
    if rule == "sigmoid":
        notes.append("experts are chosen by scores only: the router's bias and groups are not in the file")
    default = "" if options.step_tokens else " (default)"
    notes.append(f"the recording has no steps: cut into steps of {size} tokens{default}")
    if options.ranks:
        notes.append(f"source ranks unknown: tokens dealt to {options.ranks} ranks in contiguous shares of each step")
    meta = settle(
        options,
        documents,
        level="tokens",
        num_layers=len(files[0]),
        num_experts=num_experts,
        num_source_ranks=options.ranks or 0,
        num_scores=num_experts,
        notes=notes,
    )
    starts = np.cumsum([0] + [len(f[0]) for f in files])

    def logits(low: int, high: int) -> Array:
        parts = []
        for index, arrays in enumerate(files):
            a, b = max(low - starts[index], 0), min(high, starts[index + 1]) - starts[index]
            if a < b:
                with np.errstate(over="ignore"):  # the error below is enough
                    part = np.stack([array[a:b] for array in arrays], axis=1).astype(np.float32)
                if not np.isfinite(part).all():
                    token, layer, expert = np.argwhere(~np.isfinite(part))[0]
                    where = f"token {token + a}, layer {layer}, expert {expert}"
                    raise ValueError(f"{documents[index].path}: the logit of {where} is not a finite number")
                parts.append(part)
        return np.concatenate(parts)

    # Sorting takes several times the memory of the logits, so it is done for some tokens at a time.
    part = max(1, BLOCK_NUMBERS // (meta.num_layers * num_experts))

    def blocks() -> Iterator[Block]:
        for step, low in enumerate(range(0, num_tokens, size)):
            high = min(low + size, num_tokens)
            token_step = np.zeros(high - low, dtype=np.int64)
            parts = (logits(begin, min(begin + part, high)) for begin in range(low, high, part))
            pairs = [(choose(values, meta.top_k), scores_of(values, rule).astype(np.float16)) for values in parts]
            yield TokenBlock(
                np.array([step]),
                token_step,
                deal(token_step, options.ranks or 1),
                np.concatenate([ids for ids, _ in pairs]),
                np.concatenate([scores for _, scores in pairs]),
            )

    return Recording(meta, blocks, may_have_dense=False)


def choose(logits: Any, top_k: int) -> Array:
    """The top-k expert ids [T, L, k] int16 of logits [T, L, E], largest first, the lower id first on ties."""
    ids: Array = np.argsort(-logits, axis=2, kind="stable")[..., :top_k].astype(np.int16)
    return ids


def scores_of(logits: Any, rule: ScoreRule) -> Any:
    """The router's score of every expert, [T, L, E], from logits of that shape. softmax and topk-softmax differ only in
    the divisor of a token's weights, so both give the same scores."""
    if rule == "sigmoid":
        return 0.5 * (1.0 + np.tanh(0.5 * logits))
    with np.errstate(over="ignore"):  # a difference of -inf gives the right score, 0
        shifted = np.exp(logits - logits.max(axis=2, keepdims=True))
    return shifted / shifted.sum(axis=2, keepdims=True)


READERS = (TraceReader("router logits", _is_logits, _read_logits),)
