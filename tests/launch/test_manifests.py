"""The files for Slurm and Kubernetes name commands and options that exist."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from epsim.cli_run import parse_arguments

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def test_slurm_file_is_sound() -> None:
    batch = LAUNCH / "slurm.sbatch"
    subprocess.run(["bash", "-n", batch], check=True)
    options = [line.split()[1] for line in batch.read_text().splitlines() if line.startswith("#SBATCH")]
    names = [option.split("=")[0] for option in options]
    assert names == ["--job-name", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--time", "--output"]


def test_slurm_takes_the_file() -> None:
    if shutil.which("sbatch") is None:
        pytest.skip("no Slurm here")
    subprocess.run(["sbatch", "--test-only", LAUNCH / "slurm.sbatch"], check=True)


def test_ray_job_asks_for_as_many_gpus_as_ranks() -> None:
    manifest: dict[str, Any] = yaml.safe_load((LAUNCH / "rayjob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    cluster = manifest["spec"]["rayClusterSpec"]
    gpus = 0
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        gpus += group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
    program, command, *arguments = shlex.split(manifest["spec"]["entrypoint"])
    assert (program, command) == ("epsim", "run")
    parse_arguments(arguments)
    assert arguments[arguments.index("--gpus") + 1] == str(gpus)
    assert arguments[arguments.index("--launcher") + 1] == "ray"
