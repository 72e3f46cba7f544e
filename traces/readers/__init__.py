"""Readers for other systems' recordings. A file's content decides which reader takes it, never its name."""

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
from epsim.traces.readers.base import Recording, TraceReader, natural
from epsim.traces.readers.document import Document, load_document, naming
from epsim.traces.store import StoredTrace

MODULES = (sglang, gpt_oss, smartmoe, vllm, trtllm, megatron, token_log, harmoeny, flame_moe, router_logits)
READERS: tuple[TraceReader, ...] = tuple(reader for module in MODULES for reader in module.READERS)
"""All readers, in the order in which they are tried."""


def find_reader(document: Document) -> TraceReader | None:
    with naming(document.path, "recording"):
        return next((reader for reader in READERS if reader.matches(document)), None)


def read_recording(paths: Sequence[str | os.PathLike[str]], options: ImportOptions) -> Recording:
    """Reads one recording from files, or from the files of folders.

    Raises FileNotFoundError or ValueError with one line: what is wrong, in which file, which option helps.
    """
    sources = [Path(path) for path in paths]
    if not sources:
        raise ValueError("no source given: name the files of a recording, or their folder")
    files: list[tuple[Document, TraceReader]] = []
    for path in sources:
        if path.is_dir():
            files.extend(_read_folder(path))
            continue
        document = load_document(path)
        if document.kind == "parquet":
            StoredTrace(path)
            raise ValueError(f"{path}: this is an epsim trace already: use it without import, and by itself")
        reader = find_reader(document)
        if reader is None:
            raise ValueError(f"{path}: {_unknown(document)}")
        files.append((document, reader))
    names = list(dict.fromkeys(reader.name for _, reader in files))
    if len(names) > 1:
        others = [document.path for document, reader in files if reader.name == names[1]]
        raise ValueError(
            f"{files[0][0].path} is {names[0]}, but {others[0]} is {names[1]}: import one format at a time; name its "
            f"files instead of the folder, for example {files[0][0].path}"
        )
    with naming(sources[0], names[0]):
        return files[0][1].read([document for document, _ in files], options)


def _read_folder(folder: Path) -> Iterable[tuple[Document, TraceReader]]:
    """The readable files of a folder, in order of the numbers in their names; others are skipped."""
    files = []
    refused: list[str] = []
    for path in sorted((p for p in folder.iterdir() if p.is_file() and p.name[:1] != "."), key=natural):
        try:
            document = load_document(path)
        except ValueError as error:
            refused.append(str(error))
            continue
        reader = find_reader(document)
        if reader is not None:
            files.append((document, reader))
        else:
            refused.append(f"{path}: {_unknown(document)}")
    if not files:
        why = f" ({refused[0]})" if refused else ": it has no files"
        raise ValueError(f"{folder}: no readable recording in this folder{why}")
    return files


def _unknown(document: Document) -> str:
    content = document.content
    named = isinstance(content, dict) or document.kind == "csv"
    keys = [" ".join(str(key)[:30].split()) for key in content][:6] if named else []
    shown = f" with {', '.join(keys)}" if keys else ""
    return f"a {document.kind} file{shown}: none of the known recording formats"
