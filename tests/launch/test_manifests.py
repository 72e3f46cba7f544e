"""The files for Slurm and Kubernetes name commands and options that exist."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from epsim.launch.options import LaunchOptions
from epsim.options import parse_words

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def test_slurm_file_is_sound() -> None:
    batch = LAUNCH / "slurm.sbatch"
    subprocess.run(["bash", "-n", batch], check=True)
    options = [line.split()[1] for line in batch.read_text().splitlines() if line.startswith("#SBATCH")]
    names = [option.split("=")[0] for option in options]
    assert names == ["--job-name", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--time", "--output"]

    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", batch], check=True)


CONTROLLER = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/pgid
SelectType=select/cons_tres
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=600
NodeName=n[1-2] CPUs=64 Gres=gpu:8 State=CLOUD
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def controller() -> Iterator[dict[str, str]]:
    """A Slurm controller of this machine's, with two nodes of eight GPUs on paper -> the environment that finds it."""
    tools = ("munged", "slurmctld", "sbatch", "scontrol")
    paths = f"{os.environ['PATH']}:/usr/sbin"
    missing = [tool for tool in tools if shutil.which(tool, path=paths) is None]
    if missing or os.geteuid():
        pytest.skip(f"needs root and Slurm with a controller (Debian: slurm-wlm, munge); missing: {missing}")
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        folder = Path(name)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        folder.chmod(0o755)  # munge's socket is to be reached through it
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        host = socket.gethostname().split(".")[0]
        (folder / "slurm.conf").write_text(CONTROLLER.format(host=host, port=port, folder=folder))
        (folder / "gres.conf").write_text("NodeName=n[1-2] Name=gpu Count=8\n")
        environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": paths}
        files = ("key", "socket", "pid", "log", "seed")
        options = [f"--{file}{'-file' if file != 'socket' else ''}={folder}/munge.{file}" for file in files]
        commands = [["munged", "--force", "--foreground", *options], ["slurmctld", "-D", "-c"]]
        quiet = subprocess.DEVNULL
        running = []
        try:
            for command in commands:
                running.append(subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet))
                deadline = time.monotonic() + 30
                socket_there = ["test", "-S", str(folder / "munge.socket")]
                ready = socket_there if command[0] == "munged" else ["scontrol", "ping"]
                while subprocess.run(ready, env=environment, capture_output=True).returncode:
                    assert time.monotonic() < deadline, f"{command[0]} does not come up"
                    time.sleep(0.1)
            yield environment
        finally:
            for process in reversed(running):
                process.terminate()
                process.wait()


@pytest.mark.slow
def test_slurm_would_run_the_file(controller: dict[str, str]) -> None:
    """By its own dry run, which refuses what its nodes have not and what it does not know."""

    def tried(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = ["sbatch", "--test-only", *map(str, arguments)]
        return subprocess.run(command, env=controller, capture_output=True, text=True)

    batch = LAUNCH / "slurm.sbatch"
    taken = tried(batch, "TRACE", "--model", "tiny")
    assert taken.returncode == 0, taken.stderr
    assert "on nodes n[1-2]" in taken.stderr
    assert tried("--nodes", "3", batch).returncode
    assert tried("--gpus-per-node", "9", batch).returncode
    assert tried("--nonsense", batch).returncode


def test_ray_job_says_what_kuberay_knows() -> None:
    """Fields by KubeRay's API reference (ray.io/v1), which has no checker; its pods by Kubernetes' schemas."""
    manifest: dict[str, Any] = yaml.safe_load((LAUNCH / "rayjob.yaml").read_text())
    spec = manifest["spec"]
    assert set(spec) <= {
        "entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit", "activeDeadlineSeconds",
        "submissionMode", "runtimeEnvYAML", "suspend", "rayClusterSpec",
    }  # fmt: skip
    cluster = spec["rayClusterSpec"]
    assert set(cluster) <= {"headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling"}
    assert set(cluster["headGroupSpec"]) <= {"rayStartParams", "template", "serviceType"}
    groups = cluster["workerGroupSpecs"]
    known = {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template"}
    assert all(set(group) <= known for group in groups)
    assert all(isinstance(value, str) for value in cluster["headGroupSpec"]["rayStartParams"].values())
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs the schemas of kubernetes-validate")
    for group in (cluster["headGroupSpec"], *groups):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "epsim"}} | group["template"]
        kubernetes.validate(pod, kubernetes.latest_version(), strict=True)
    pod["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(pod, kubernetes.latest_version(), strict=True)


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
    parse_words(LaunchOptions, arguments)
    assert arguments[arguments.index("--gpus") + 1] == str(gpus)
    assert arguments[arguments.index("--launcher") + 1] == "ray"
