"""The files of a grid: digests of their content, and the traces that are made from them in the sweep's folder."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epsim.traces.importing import SAMPLE, import_trace, open_trace, sample_path
from epsim.traces.options import ImportOptions, SynthesisOptions
from epsim.traces.select import select_steps
from epsim.traces.store import StoredTrace
from epsim.traces.synthesize import synthesize
from epsim.traces.trace import Phase
from epsim.version import VERSION

CHUNK = 1 << 22
TRACES = "traces"


@dataclass(frozen=True, slots=True)
class Source:
    """A file or folder. name: as written in the grid. digest: hash of the content. ours: True for an epsim trace, False
    for another system's recording."""

    name: str
    path: Path
    digest: str
    ours: bool


@dataclass(frozen=True, slots=True)
class Opening:
    """An epsim trace, and the options to open it with."""

    path: Path
    reading: ImportOptions | None = None

    def open(self) -> StoredTrace:
        return open_trace([self.path], self.reading)


@dataclass(frozen=True, slots=True)
class Making:
    """A trace to make. It is drawn from the sources, or holds selected steps of a single source."""

    target: Path
    sources: tuple[Opening, ...]
    drawing: SynthesisOptions | None = None
    only: Phase | None = None
    min_tokens: int = 1

    def make(self) -> None:
        """Writes the target, completely or not at all. Raises ValueError or OSError with one line."""
        traces = [source.open() for source in self.sources]
        if self.drawing is not None:
            synthesize(traces, self.target, self.drawing)
        else:
            select_steps(traces[0], self.target, self.only, self.min_tokens)


def find_source(name: str, path: Path) -> Source:
    """The source at a path. Raises FileNotFoundError or ValueError with one line."""
    if name == SAMPLE and not path.exists():
        path = sample_path()
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    path = path.absolute()
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    whole = hashlib.sha256()
    for file in files:
        if path.is_dir():
            whole.update(file.name.encode() + b"\0")
        whole.update(_file_digest(file))
    return Source(name, path, whole.hexdigest(), not path.is_dir() and _is_ours(path))


def content_key(content: Any) -> str:
    """A short hash of plain values."""
    text = json.dumps(content, sort_keys=True, default=_plain, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def imported(source: Source, reading: ImportOptions, out: Path) -> Opening:
    """The source as an epsim trace. A recording of another system is imported once into the sweep's folder `out`."""
    if source.ours:
        return Opening(source.path, reading)
    key = content_key({"digest": source.digest, "reading": asdict(reading), "version": VERSION})
    target = out / TRACES / f"{key}.parquet"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        import_trace([source.path], target, reading)
    return Opening(target)


def _file_digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.digest()


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _plain(value: Any) -> Any:
    """Converts arrays and tensors to lists, and paths to strings."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
