"""Measures the expert-parallel runtime on all GPUs of a host, in one command.

    python benchmarks/whole_host.py [--ranks N] [--minutes 9] [--recordings FOLDER] [--part NAME ...] --out FOLDER

It starts one process per GPU. Without GPUs it starts two processes on the CPU, with tiny shapes. The parts are:

calibrate       measures the exchange and the collectives on 2, 4, ... N ranks, as `epsim calibrate` does
layers-deep_ep  times DeepSeek-V3's layer with DeepEP's exchange under six stacks of policies, with 32, 16, 8 and 0
                redundant experts, and with 4,096, 1,024 and 128 tokens per rank
layers-torch    does the same with NCCL's exchange
oea             times router policies on Qwen3-30B-A3B's layer, with 1 to 16 tokens per rank
relocation      moves experts between ranks while the layer runs
kill            kills the last rank of `epsim run` inside a dispatch, and checks what the other ranks report

Times are microseconds, measured with CUDA events. The parts that time layers also compare the layer's outputs with a
float64 reference, and its loads with those that a replay computes. At the end, the predictions of the time model are
compared with the measured layers, which were not used to fit it.

The report FOLDER/whole_host.json is written again after every row, and the measured tables go to
FOLDER/calibrated.tar.gz. If a part fails, one line says why, its output goes to FOLDER/PART.log, and the remaining
parts run. The folder of --recordings holds deepseek-v3-sglang/ and gpt-oss-20b/. Without it, the experts of tokens are
drawn at random, and the report says so.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import command, script_parser, table, write
from runtime_run import STEPS, draw

from epsim.files import message_line, whole_file
from epsim.runtime.telemetry import read_telemetry
from whole_host.gates import gates_of
from whole_host.worker import SHARES, share

GRACE = 20.0
"""Seconds beyond its share after which a part is ended."""
START = 150.0
"""Seconds until the first part must have begun."""
MOST_SECONDS = 30.0
"""The most seconds from a rank's death to the end of all others."""
KILLED_AT = STEPS * 3 // 4


class Run:
    """The report as it grows."""

    def __init__(self, options: argparse.Namespace, ranks: int) -> None:
        self.out, self.ranks, self.recordings = options.out, ranks, options.recordings
        self.end = time.monotonic() + 60 * options.minutes
        self.work = Path(tempfile.mkdtemp())
        self.found: dict[str, Any] = {"command": command()}
        words = "as given" if self.recordings else "none given: experts are drawn, and the sample's tokens"
        self.found |= {"recordings": words, "parts": {}}

    def left(self) -> float:
        return self.end - time.monotonic()

    def written(self) -> float:
        """The time of the last row that was written."""
        return max((path.stat().st_mtime for path in self.work.glob("*.json")), default=0.0)

    def save(self) -> None:
        machine = self.work / "machine.json"
        if machine.is_file():
            self.found |= json.loads(machine.read_text())
        for path in self.work.glob("*.json"):
            if path.stem in SHARES:
                self.found["parts"].setdefault(path.stem, {}).update(json.loads(path.read_text()))
        self.found["gates"] = gates_of(self.found["parts"])
        write(self.out / "whole_host.json", self.found)
        archive = self.out / "calibrated.tar.gz"
        if self.found["parts"].get("calibrate", {}).get("done") and not archive.exists():
            with whole_file(archive) as temporary, tarfile.open(temporary, "w:gz") as tar:
                tar.add(self.work / "calibrated", "calibrated")

    def failed(self, part: str, reason: str, log: str) -> None:
        self.found["parts"].setdefault(part, {})["failed"] = reason
        (self.out / f"{part}.log").write_text(log[-(1 << 20) :])
        print(f"{part} failed: {reason}", flush=True)

    def words(self, parts: list[str], seconds: float) -> list[str]:
        """The command that launches the ranks."""
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        words += ["-m", "whole_host.worker", *parts, "--seconds", f"{seconds:.0f}", "--work", str(self.work)]
        return words if self.recordings is None else [*words, "--recordings", str(self.recordings)]

    def together(self, parts: list[str], reserve: float) -> str | None:
        """Runs all parts in one launch. Returns the part in which it stopped, or None. reserve: seconds to leave at the
        end."""
        now, log = self.work / "now", self.work / "log"
        now.unlink(missing_ok=True)
        begun, late, saved = time.time(), False, self.written()
        with log.open("w") as file:
            process = subprocess.Popen(
                self.words(parts, self.left() - reserve), stdout=file, stderr=file, env=environment()
            )
            while process.poll() is None:
                time.sleep(0.5)
                at = json.loads(now.read_text()) if now.is_file() else {"begun": begun, "seconds": START - GRACE}
                late = time.time() > at["begun"] + at["seconds"] + GRACE or self.left() < reserve - GRACE
                if late:
                    end(process)
                elif self.written() != saved:
                    saved = self.written()
                    self.save()
        self.save()
        if process.returncode == 0:
            return None
        broken = json.loads(now.read_text())["part"] if now.is_file() else parts[0]
        said = log.read_text(errors="replace")
        lines = [line for line in said.splitlines() if line.startswith("rank ")]
        reason = lines[0] if lines else f"its processes ended with code {process.returncode}"
        self.failed(broken, "took longer than its time, and was ended" if late else reason, said)
        self.save()
        return broken

    def kill(self) -> None:
        """Kills the last rank inside a dispatch, and checks the message and the steps that are kept."""
        on_gpu = torch.cuda.is_available()
        shape, tokens = ("deepseek-v3-layer", 128 * self.ranks) if on_gpu else ("tiny", 4 * self.ranks)
        trace, out = self.work / "trace.parquet", self.work / "killed"
        draw(trace, shape, 1, tokens)
        where = f"kill:rank={self.ranks - 1},step={KILLED_AT},layer=0,phase=dispatch"
        words = [sys.executable, "-m", "epsim.cli", "run", str(trace), "--model", shape, "--policy", "eplb+lplb"]
        words += ["--redundant", str(2 * self.ranks), "--launcher", "torchrun", "--ranks", str(self.ranks)]
        process = subprocess.Popen(
            [*words, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment() | {"EPSIM_TRIAL_FAULT": where},
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=max(self.left(), 1.0))
        except subprocess.TimeoutExpired:
            end(process)
            self.failed("kill", "the job did not end in time", process.communicate()[1])
            return
        ended = time.time()
        said = [line for line in errors.splitlines() if line.startswith("epsim: ")]
        if not said or process.returncode != 1:
            last = errors.strip().splitlines()
            self.failed("kill", f"exit code {process.returncode}: {message_line(last[-1]) if last else ''}", errors)
            return
        written = max(path.stat().st_mtime for path in (out / "telemetry").glob("rank-*.arrows"))
        kept = sorted(set(read_telemetry(out / "telemetry")["step"].to_pylist()))
        row = {"fault": where, "said": said[-1].removeprefix("epsim: "), "ended_after_s": round(ended - written, 1)}
        row["right"] = f"rank {self.ranks - 1} " in row["said"] and ended - written < MOST_SECONDS
        self.found["parts"]["kill"] = {"rows": [row | {"steps_kept": kept}], "done": True}


def end(process: subprocess.Popen[Any]) -> None:
    """Terminates the launcher, which then ends its ranks. The ranks run in sessions of their own."""
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def environment() -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(cores // 16, 1)))}
    scripts = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    return {**os.environ, **threads, "PYTHONPATH": scripts, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}


def shown(part: str, found: dict[str, Any]) -> None:
    rows = []
    for row in found.get("rows", []):
        head = {key: value for key, value in row.items() if key not in ("what", "stacks", "timing")}
        rows += [] if "stacks" in row else [head]
        for stack in row.get("stacks", []):
            gain = stack.get("graph_gain", stack["gain"])
            flat = {"stack": stack["stack"], "error": stack["error"], "layer": stack["layer_us"]["p50"]}
            flat |= {"graph": stack.get("graph_us", ""), **stack["phases_us"]}
            rows.append(head | flat | {f"gain {key}": value for key, value in gain.items()})
    table(part + (f" FAILED: {found['failed']}" if "failed" in found else ""), rows)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--ranks", type=int, help="all GPUs where there are any, else 2")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--recordings", type=Path)
    parser.add_argument("--part", action="append", choices=list(SHARES), help="repeatable; else all")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.recordings is not None and not options.recordings.is_dir():
        parser.error(f"--recordings {options.recordings}: no such folder")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "calibrated.tar.gz").unlink(missing_ok=True)
    run = Run(options, options.ranks or torch.cuda.device_count() or 2)
    parts = [part for part in SHARES if part in (options.part or SHARES)]
    together = [part for part in parts if part != "kill"]
    reserve = share("kill", parts, run.left()) if "kill" in parts else 0.0
    while together and run.left() - reserve > GRACE:
        broken = run.together(together, reserve)
        together = [] if broken is None else together[together.index(broken) + 1 :]
    for part in together:
        run.failed(part, "no time left", "")
    if "kill" in parts:
        run.kill()
    run.save()
    for part in parts:
        shown(part, run.found["parts"].get(part, {}))
    table("gates of the time model, on layers that were not fitted", run.found["gates"])
    print(f"\n{run.found['command']}: {run.found.get('num_devices')} x {run.found.get('device')}")
    if any("failed" in found for found in run.found["parts"].values()):
        sys.exit(1)
