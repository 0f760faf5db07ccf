"""The checks of `paceline doctor` that need torch: its version, its GPUs, and whether bfloat16 works.

torch is asked in a child process: it may be missing, broken, or die of an instruction that the processor claims
to know, which happens in virtual machines that hide part of it, and none of that may end the doctor.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.cli.checks import Check
from paceline.cli.ending import exit_text

_LIMIT_S = 120.0
_OLDEST = (2, 11)
_ASK = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # dying here is an answer, not worth a core file
try:
    import torch, torch.distributed as dist
except (ImportError, OSError) as error:
    sys.exit(str(error))
there = dist.is_available()
gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "gloo": there and dist.is_gloo_available(),
    "nccl": there and dist.is_nccl_available(),
    "gpus": [torch.cuda.get_device_name(i) for i in gpus],
}), flush=True)
many = torch.ones(64, 64, dtype=torch.bfloat16)  # smaller ones do not reach the instructions in question
print(float((many @ many)[0, 0]))
"""


def all_of() -> Iterator[Check]:
    """The checks, in the order in which they are shown."""
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        yield Check("torch", "warning", f"importing it takes more than {_LIMIT_S:g} s", "is the disk slow?")
        return
    lines = asked.stdout.splitlines()
    if not lines:
        why = (asked.stderr.strip().splitlines() or [exit_text(asked.returncode)])[-1]
        yield Check("torch", "error", f"cannot be imported ({why})", "pip install torch")
        return
    told = json.loads(lines[0])
    yield _torch(told)
    yield _gpus(told)
    yield _bfloat16(asked.returncode, lines[1:])


def _torch(told: dict[str, Any]) -> Check:
    found = f"{told['version']}, built for {'CUDA ' + told['cuda'] if told['cuda'] else 'CPU only'}"
    if tuple(int(x) for x in told["version"].split(".")[:2]) < _OLDEST:
        means = f"Paceline needs {'.'.join(map(str, _OLDEST))} or later: pip install --upgrade torch"
        return Check("torch", "error", found, means)
    return Check("torch", "ok", found, f"gloo as fall-back is {'there' if told['gloo'] else 'missing'}")


def _gpus(told: dict[str, Any]) -> Check:
    present = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    if told["gpus"]:
        nccl = "NCCL is there" if told["nccl"] else "NCCL is missing: members meet through gloo"
        return Check("gpus", "ok", ", ".join(told["gpus"]), f"one member each; {nccl}")
    if present:
        means = "check the driver" if told["cuda"] else "install a CUDA build of torch to use them"
        return Check("gpus", "warning", f"{len(present)} present, but torch cannot use them", means)
    return Check("gpus", "ok", "none", "members compute on the CPU; --device cuda would be refused")


def _bfloat16(code: int, lines: list[str]) -> Check:
    if code == 0 and lines == ["64.0"]:
        return Check("bfloat16", "ok", "matrix products work on the CPU")
    if code == -signal.SIGILL:
        means = "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before training in bfloat16 on the CPU"
        return Check("bfloat16", "warning", "a matrix product dies of an illegal instruction", means)
    found = f"a matrix product fails ({exit_text(code) if code else f'64 became {lines}'})"
    return Check("bfloat16", "warning", found, "train in float32 on the CPU")
