"""Every file works with the oldest Python that pyproject.toml promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OLDEST = re.findall(r'requires-python = ">=(3\.\d+)"', (ROOT / "pyproject.toml").read_text())[0]


def least_version(*files: str) -> tuple[int, str]:
    """What vermin says of the files, whose syntax and standard library it looks at."""
    # `long` is taken for Python 2's type where it is a method of tensors.
    options = [f"--target={OLDEST}-", "--violations", "--no-tips", "--no-parse-comments", "--exclude", "long"]
    code = "import vermin; vermin.main()"
    done = subprocess.run([sys.executable, "-c", code, *options, *files], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_every_file_works_with_the_oldest_python() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True)
    files = listed.stdout.split()
    assert len(files) > 400
    code, found = least_version(*files)
    assert code == 0, found
    assert f"Minimum required versions: {OLDEST}" in found


def test_newer_python_is_found(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text("from datetime import UTC\n")
    code, found = least_version(str(tmp_path / "new.py"))
    assert code == 1
    assert "'datetime.UTC' member requires !2, 3.11" in found
