"""C++ libraries of kernels, built by g++ once per session. The test processes of a session share them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

OPTIONS = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]


def compiled(factory: pytest.TempPathFactory, source: str, header: Path, options: Sequence[str] = ()) -> ctypes.CDLL:
    """header: the C++ file that includes SOURCE, a file with the text `source`. Skips the test without g++."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    name = hashlib.sha256(repr((source, str(header), options)).encode()).hexdigest()[:24]
    code, library = folder / f"{name}.cu", folder / f"{name}.so"
    if not library.exists():
        # Another process may build the same library. Each writes its own files and renames them when complete.
        written, built = (folder / f"{name}.{os.getpid()}{end}" for end in (".cu", ".so"))
        written.write_text(source)
        written.replace(code)
        command = ["g++", *OPTIONS, *options, f'-DSOURCE="{code}"', "-x", "c++", str(header), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        built.replace(library)
    return ctypes.CDLL(str(library))
