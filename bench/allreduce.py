"""All-reduce of float32 between two processes, and between four hosts, against gloo and Open MPI.

On one host (both processes at once, one thread each, the same tensors for all):
  speedup_25mb, speedup_100mb   gloo's time / ours
  speedup_mpi_25mb              Open MPI's time / ours; where mpirun and mpi4py are found (see --mpi-python).
                                Both in huge pages: numpy asks for them, `paceline run` has malloc ask
  bucket_mpi_25mb               Open MPI's time / ours for a gradient bucket, which lies in shared memory already
  share_of_copy_limit           time in which both processes at once copy 25 MB twice with memmove / our time
                                for 25 MB. A reduction that starts and ends in the user's own tensor has to
                                bring every byte into memory that the other can see, and every byte of the
                                result back: two copies. 1: arithmetic and waiting cost nothing.

Between four network namespaces (needs root; see `python -m bench._ring_hosts`):
  ring_link_share               ideal time 2(n-1)/n * bytes / rate at 1 Gbit/s / ours, 25 MB
  ring_over_gloo                gloo's time / ours there
  latency_speedup_small/_large  gloo's time / ours with 20 ms round trip, 0.1 MB and 25 MB
  ..._tls                       the same with ours encrypted, as it is off loopback by itself;
                                gloo is not
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from bench.harness import Figure, Report, arguments, compare, interleave, short
from bench.team import ROOT, Team

MB = 1_000_000
GOALS = {
    "ring_link_share": ">= 0.93",
    "ring_over_gloo": ">= 1",
    "latency_speedup_small": ">= 2",
    "latency_speedup_large": ">= 1.3",
}


def main() -> None:
    options = arguments(__doc__, _options)
    if options.worker:
        return _worker()
    report = Report("bench.allreduce")
    _one_host(report, options)
    if options.hosts:
        _four_hosts(report, options.quick)
    return report.finish(options.json)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mpi-python", metavar="PATH", default="", help="a Python with mpi4py and numpy")
    parser.add_argument("--no-hosts", dest="hosts", action="store_false", help="leave out the part between hosts")


def _one_host(report: Report, options: argparse.Namespace) -> None:
    repeats, block_s, limit_s = (9, 0.1, 4.0) if options.quick else (31, 0.4, 60.0)
    mpi = _mpi_command(options.mpi_python)
    if isinstance(mpi, str):
        report.note(f"speedup_mpi_25mb skipped: {mpi}")
    with Team.of(2, "bench.allreduce") as team:
        team.call("start")
        for megabytes in (25, 100):

            def side(name: str, size: int = megabytes, team: Team = team) -> Any:
                return lambda k: team.slowest("block", name=name, elements=size * MB // 4, iterations=k)

            sides = {"ours": side("ours"), "gloo": side("gloo")}
            if megabytes == 25:
                sides |= {"copy": side("copy"), "bucket": side("bucket")}
            if megabytes == 25 and not isinstance(mpi, str):
                with Team(2, [mpi], limit_s=60) as peers:
                    sides["mpi"] = lambda k, peers=peers: peers.slowest("block", elements=25 * MB // 4, iterations=k)
                    times = interleave(sides, repeats=repeats, block_s=block_s, limit_s=limit_s)
            else:
                times = interleave(sides, repeats=repeats, block_s=block_s, limit_s=limit_s)
            ours = times["ours"]
            report.add(compare(f"speedup_{megabytes}mb", ours, times["gloo"], goal=">= 3"))
            if "mpi" in times:
                report.add(compare("speedup_mpi_25mb", ours, times["mpi"], goal=">= 1"))
                report.add(compare("bucket_mpi_25mb", times["bucket"], times["mpi"]))
            if "copy" in times:
                report.add(compare("share_of_copy_limit", ours, times["copy"]))
        team.call("finish")


def _mpi_command(python: str) -> tuple[list[str], dict[str, str]] | str:
    """How to start Open MPI's two workers, or why that cannot be done."""
    if not shutil.which("mpirun"):
        return "no mpirun here; try: apt-get install openmpi-bin libopenmpi-dev"
    if not python:
        if importlib.util.find_spec("mpi4py") is None:
            return "no mpi4py here; install bench/peers/openmpi.txt into an environment and pass --mpi-python"
        python = sys.executable
    found = subprocess.run([python, "-c", "import mpi4py, numpy"], capture_output=True)
    if found.returncode:
        return f"{python} cannot import mpi4py and numpy; install bench/peers/openmpi.txt there"
    # Waiting ranks must not be bound to the cores that ours runs on, nor to one and the same.
    command = [
        "mpirun",
        "-n",
        "2",
        "--bind-to",
        "none",
        python,
        "-m",
        "bench.peers.openmpi",
    ]
    return command, {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _four_hosts(report: Report, quick: bool) -> None:
    if os.geteuid() != 0:
        report.note("figures between hosts skipped: network namespaces need root")
        return
    if importlib.util.find_spec("bench._ring_hosts") is None:
        report.note("figures between hosts skipped: bench/_ring_hosts.py is not here")
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hosts.json"
        command = [
            sys.executable,
            "-m",
            "bench._ring_hosts",
            "--json",
            str(file),
            *(["--quick"] if quick else []),
        ]
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=120 if quick else 900)
        except subprocess.TimeoutExpired:
            report.note("figures between hosts skipped: python -m bench._ring_hosts did not end in time")
            return
        if done.returncode or not file.exists():
            report.note(f"figures between hosts skipped: python -m bench._ring_hosts ended with {done.returncode}")
            return
        values: dict[str, float] = json.loads(file.read_text())
    for name, value in values.items():
        if name.endswith(("_ms", "_low", "_high")):
            report.extra[name] = value
            continue
        low, high = (values.get(f"{name}_{end}") for end in ("low", "high"))
        size = name.removeprefix("latency_speedup_").removesuffix("_tls")
        ours, peer = (values.get(f"latency_{size}_{side}_ms") for side in ("plain", "gloo"))
        report.add(
            Figure(
                name=name,
                value=value,
                ours=f"{short(ours)} ms" if ours and not name.endswith("_tls") else "",
                peer=f"{short(peer)} ms" if peer else "",
                spread=f"{short(low)} .. {short(high)}" if low and high else "",
                goal=GOALS.get(name, ""),
            )
        )
    for name in GOALS.keys() - values.keys():
        report.note(f"{name} skipped: python -m bench._ring_hosts did not measure it")


def _worker() -> None:
    import torch
    import torch.distributed as dist

    from bench import workers
    from bench.team import serve

    torch.set_num_threads(1)
    tensors: dict[int, list[torch.Tensor]] = {}

    @cache
    def bucket(nbytes: int) -> tuple[Any, torch.Tensor]:
        arena = workers.run().group.arena(nbytes)
        return arena, arena.memory[:nbytes].view(torch.float32)

    def start() -> None:
        workers.gloo()
        for all_reduce in dist.all_reduce, workers.run().group.all_reduce:
            probe = torch.full((MB,), float(1 + workers.RANK))
            all_reduce(probe)
            assert bool((probe == 3.0).all()), "an all-reduce did not give the sum"

    def block(name: str, elements: int, iterations: int) -> float:
        if elements not in tensors:
            tensors.clear()  # one size at a time
            tensors[elements] = [torch.full((elements,), 0.0), torch.full((elements,), 0.0)]
        x, y = tensors[elements]  # zeros stay zeros, however often they are summed
        group, num_bytes = workers.run().group, x.nbytes
        dist.barrier()
        begin = time.perf_counter()
        if name == "ours":
            for _ in range(iterations):
                group.all_reduce(x)
        elif name == "bucket":
            arena, flat = bucket(num_bytes)
            for _ in range(iterations):
                arena.post(flat)
                arena.wait()
        elif name == "gloo":
            for _ in range(iterations):
                dist.all_reduce(x)
        else:
            for _ in range(iterations):
                ctypes.memmove(y.data_ptr(), x.data_ptr(), num_bytes)
                ctypes.memmove(x.data_ptr(), y.data_ptr(), num_bytes)
        return time.perf_counter() - begin

    serve({"start": start, "block": block, "finish": workers.finish})


if __name__ == "__main__":
    main()
