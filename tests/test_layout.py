"""Who may import whom, links, and what must not load early."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("traces", "kernels", "runtime", "launch")
# From the ground up; a module imports its own room and those before it.
ORDER = (
    "epsim.version",
    "epsim.stops",
    "epsim.files",
    "epsim.options",
    "epsim.parallel",
    "epsim.cards",
    "epsim.models",
    "epsim.machines",
    "epsim.traces",
    "epsim.kernels",
    "epsim.placement",
    "epsim.policies",
    "epsim.cost",
    "epsim.engines",
    "epsim.results",
    "epsim.score",
    "epsim.planning",
    "epsim.replaying",
    "epsim.report",
    "epsim.quality",
    "epsim.reproduce",
    "epsim.runtime",
    "epsim.calibrate",
    "epsim.sweep",
    "epsim.tuning",
    "epsim.launch",
    "epsim.requests",
    "epsim.front",
    "epsim.cli",
)


def module_files() -> dict[str, Path]:
    """Every module of the package by name, links followed."""
    found = {}
    for folder, _, names in os.walk(ROOT / "epsim", followlinks=True):
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found[module.removesuffix(".__init__")] = path
    return found


def imports(module: str, path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def room(module: str) -> int | None:
    return next((place for place, name in enumerate(ORDER) if within(module, name)), None)


def edges() -> dict[str, set[str]]:
    """Each module with the modules of this project that it imports, also inside functions."""
    files = module_files()
    assert len(files) > 20
    return {
        module: {name if name in files else name.rpartition(".")[0] for name in imports(module, path)} & set(files)
        for module, path in files.items()
    }


def test_every_module_has_a_room() -> None:
    assert not [module for module in module_files() if module != "epsim" and room(module) is None]


def test_imports_run_one_way() -> None:
    wrong = []
    for module, names in edges().items():
        own = room(module)
        for name in names - {"epsim"}:
            other = room(name)
            if own is not None and other is not None and other > own:
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_no_file_stands_in_a_circle() -> None:
    """Files whose imports are all sorted already are taken away until none is left."""
    left = edges()
    while free := [module for module, names in left.items() if not names & set(left) - {module}]:
        for module in free:
            del left[module]
    assert not left, sorted(left)


def test_the_recorder_stands_on_traces_alone() -> None:
    path = ROOT / "traces" / "record.py"
    for name in imports("epsim.traces.record", path):
        assert not name.startswith("epsim") or name.startswith(("epsim.traces", "epsim.files")), name


def test_linked_folders_are_imported_only_through_epsim() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        if any(part.startswith(".") or part in ("build", "out") for part in path.relative_to(ROOT).parts):
            continue
        wrong += [f"{path}: {n}" for n in imports(str(path), path) if n.split(".")[0] in LINKED]
    assert not wrong


@pytest.mark.parametrize("folder", LINKED)
def test_links_are_relative_and_folders_bare(folder: str) -> None:
    link = ROOT / "epsim" / folder
    assert os.readlink(link) == f"../{folder}"
    assert link.resolve() == ROOT / folder
    assert not (ROOT / folder / "__init__.py").exists(), "a top-level package would hide others of its name"
    assert not (ROOT / "epsim" / f"{folder}.py").exists(), "a file would hide the linked folder"


def test_help_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; sys.argv = ['epsim', '--help']\n"
        "from epsim.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "heavy = {'torch', 'ray', 'numba', 'pyarrow', 'transformers', 'ortools', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "replay" in done.stdout
