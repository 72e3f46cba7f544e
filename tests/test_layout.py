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
# From the ground up; a module imports its own tier and those below.
TIERS = (
    ("epsim.traces", "epsim.kernels"),
    ("epsim.policies", "epsim.placement", "epsim.cost", "epsim.results", "epsim.verdict", "epsim.parallel"),
    (
        "epsim.runtime",
        "epsim.replay",
        "epsim.planning",
        "epsim.report",
        "epsim.quality",
        "epsim.reproduce",
        "epsim.sweep",
        "epsim.tune",
        "epsim.calibrate",
    ),
    ("epsim.cli", "epsim.launch"),
)
APART = (("epsim.runtime", ("epsim.replay", "epsim.planning")), ("epsim.replay", ("epsim.runtime",)))


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
    # epsim.cli covers epsim.cli_traces and its like.
    return module == package or module.startswith((f"{package}.", f"{package}_"))


def tier(module: str) -> int | None:
    return next((i for i, packages in enumerate(TIERS) if any(within(module, p) for p in packages)), None)


def test_every_module_has_a_tier() -> None:
    missing = [module for module in module_files() if module != "epsim" and tier(module) is None]
    assert not missing


def test_no_module_imports_up() -> None:
    files = module_files()
    assert len(files) > 20
    wrong = []
    for module, path in files.items():
        own = tier(module)
        for name in imports(module, path):
            other = tier(name)
            if own is not None and other is not None and other > own:
                wrong.append(f"{module} imports {name}")
            wrong += [
                f"{module} imports {name}"
                for here, there in APART
                if within(module, here) and any(within(name, package) for package in there)
            ]
    assert not wrong


def test_the_recorder_stands_on_traces_alone() -> None:
    path = ROOT / "traces" / "record.py"
    if not path.exists():
        pytest.skip("no recorder yet")
    for name in imports("epsim.traces.record", path):
        assert not name.startswith("epsim") or name.startswith("epsim.traces"), name


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
        "from epsim.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "heavy = {'torch', 'ray', 'numba', 'pyarrow', 'transformers', 'ortools', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "replay" in done.stdout
