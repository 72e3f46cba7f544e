"""Makes a recording of tokens: the last stage of every reader of expert ids."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from epsim.traces import compose
from epsim.traces.compose import Tokens
from epsim.traces.limits import check_size
from epsim.traces.options import ImportOptions
from epsim.traces.readers.base import Recording, settle
from epsim.traces.readers.document import Document
from epsim.traces.trace import Phase

NUMBERS_PER_TOKEN = 8


def check_tokens(num_tokens: int, numbers: int, documents: Sequence[Document]) -> None:
    """Raises ValueError if these tokens are too large in memory. numbers: how many ids they have in all.

    Call it before making arrays of the tokens."""
    paths = [document.path for document in documents]
    check_size(f"{num_tokens:,} tokens", numbers + NUMBERS_PER_TOKEN * num_tokens, *paths)


def token_recording(
    tokens: Tokens,
    documents: Sequence[Document],
    options: ImportOptions,
    *,
    phase: Phase = "unknown",
    notes: Sequence[str] = (),
    **known: Any,
) -> Recording:
    """Arranges tokens in steps and returns their recording. known: further arguments of `settle`.

    Raises ValueError if there are no tokens, or if neither the file nor the options give the number of experts."""
    if not len(tokens):
        raise ValueError(f"{documents[0].path}: it has no tokens")
    ids = tokens.expert_ids
    check_tokens(len(ids), ids.size, documents)
    arrangement = compose.arrange(tokens, options)
    meta = settle(
        options,
        documents,
        level="tokens",
        num_layers=ids.shape[1],
        top_k=ids.shape[2],
        least_experts=int(ids.max()) + 1,
        phase=arrangement.phase or phase,
        notes=(*notes, *arrangement.notes),
        num_source_ranks=arrangement.num_source_ranks,
        num_scores=0 if tokens.scores is None else tokens.scores.shape[2],
        **known,
    )
    meta = dataclasses.replace(meta, origin=arrangement.origin)
    return Recording(meta, lambda: compose.blocks(tokens, arrangement))
