"""Readers for other systems' recordings, chosen by what is in a file, never by its name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from epsim.traces.options import ImportOptions
from epsim.traces.readers import (
    flame_moe,
    gpt_oss,
    harmoeny,
    megatron,
    router_logits,
    sglang,
    smartmoe,
    token_log,
    trtllm,
    vllm,
)
from epsim.traces.readers.base import Reader, Recording, natural
from epsim.traces.readers.document import Document, load_document, naming
from epsim.traces.store import StoredTrace

READERS: tuple[Reader, ...] = (
    *sglang.READERS,
    *gpt_oss.READERS,
    *smartmoe.READERS,
    *vllm.READERS,
    *trtllm.READERS,
    *megatron.READERS,
    *token_log.READERS,
    *harmoeny.READERS,
    *flame_moe.READERS,
    *router_logits.READERS,
)


def find_reader(document: Document) -> Reader | None:
    with naming(document.path, "recording"):
        return next((reader for reader in READERS if reader.matches(document)), None)


def read_recording(paths: Sequence[str | os.PathLike[str]], options: ImportOptions) -> Recording:
    """The recording that files, or the files of folders, hold together.

    Raises FileNotFoundError or ValueError in one line: what is wrong, in which file, which option helps.
    """
    sources = [Path(path) for path in paths]
    if not sources:
        raise ValueError("no source given: name the files of a recording, or their folder")
    found: list[tuple[Document, Reader]] = []
    for path in sources:
        if path.is_dir():
            found.extend(_read_folder(path))
            continue
        document = load_document(path)
        if document.kind == "parquet":
            StoredTrace(path)
            raise ValueError(f"{path}: a trace of epsim already: use it as it is, by itself")
        reader = find_reader(document)
        if reader is None:
            raise ValueError(f"{path}: {_unknown(document)}")
        found.append((document, reader))
    names = list(dict.fromkeys(reader.name for _, reader in found))
    if len(names) > 1:
        others = [document.path for document, reader in found if reader.name == names[1]]
        raise ValueError(
            f"{found[0][0].path} is {names[0]}, {others[0]} is {names[1]}: import one kind at a time, naming its files "
            f"in place of the folder, such as {found[0][0].path}"
        )
    with naming(sources[0], names[0]):
        return found[0][1].read([document for document, _ in found], options)


def _read_folder(folder: Path) -> Iterable[tuple[Document, Reader]]:
    """The readable files of a folder, in order of the numbers in their names; the rest is passed over."""
    found = []
    refused: list[str] = []
    for path in sorted((p for p in folder.iterdir() if p.is_file() and p.name[:1] != "."), key=natural):
        try:
            document = load_document(path)
        except ValueError as error:
            refused.append(str(error))
            continue
        reader = find_reader(document)
        if reader is not None:
            found.append((document, reader))
    if not found:
        why = f" ({refused[0]})" if refused else ""
        raise ValueError(f"{folder}: no readable recording in this folder{why}")
    return found


def _unknown(document: Document) -> str:
    content = document.content
    named = isinstance(content, dict) or document.kind == "csv"
    keys = [" ".join(str(key)[:30].split()) for key in content][:6] if named else []
    shown = f" with {', '.join(keys)}" if keys else ""
    return f"a {document.kind} file{shown}, but no recording that any reader knows"
