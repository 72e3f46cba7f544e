"""The wheel holds everything, and works where the sources are not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import epsim

ROOT = Path(__file__).resolve().parents[1]
MAX_WHEEL_BYTES = 8 * 2**20


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if not (ROOT / name).exists():
            continue
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        "epsim/py.typed",
        "epsim/results/schemas/definitions.json",
        "epsim/report/page.css",
        "epsim/report/page.html",
        "epsim/report/page.js",
        "epsim/kernels/split/__init__.py",
    }
    for folder in ("traces", "kernels", "runtime", "launch"):
        wanted |= {f"epsim/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
    assert wanted <= names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"epsim", f"epsim-{epsim.__version__}.dist-info"}
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


@pytest.mark.slow
def test_wheel_runs_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    """A fresh environment with the wheel in it; its dependencies are those already installed for the tests."""
    home = tmp_path / "fresh"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    site = next((home / "lib").glob("python*/site-packages"))
    assert (site / "epsim" / "kernels" / "split").is_dir()
    dependencies = os.path.dirname(os.path.dirname(pytest.__file__))
    # Behind the fresh environment's own folder, so that its epsim is the one found.
    (site / "dependencies.pth").write_text(dependencies + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(str(home / "bin" / "epsim"), "--version") == f"epsim {epsim.__version__}\n"
    where = (
        "import epsim, epsim.traces.trace as t, epsim.kernels.split as k; print(epsim.__file__, t.__file__, k.__file__)"
    )
    assert run(str(python), "-c", where).count(str(site)) == 3
