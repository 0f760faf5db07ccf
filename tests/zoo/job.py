"""Runs the zoo's cases and writes what came out: `job.py FOLDER [CASE ...]`.

Under the launcher, every member runs all cases under Paceline and then all under DDP; alone, in plain PyTorch
and under Paceline (a run of one). For each system and rank FOLDER gets SYSTEM-RANK.safetensors with tensors
named CASE/TENSOR, and SYSTEM-RANK.json with the cases that failed and why.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from case import Side
from cases import CASES
from safetensors.torch import save_file
from sides import Ddp, Ours, Plain
from uneven import UNEVEN

import paceline


def run_all(system: str, side: Side, names: Iterable[str], folder: Path) -> None:
    tensors, failures = {}, {}
    for name in names:
        torch.manual_seed(0)
        torch.compiler.reset()
        try:
            found = CASES[name].run(side) if name in CASES else UNEVEN[name](side)
        except Exception as error:
            traceback.print_exc()
            failures[name] = f"{type(error).__name__}: {error}"
            side.recover()
        else:
            tensors.update({f"{name}/{key}": value.contiguous() for key, value in found.items()})
    save_file(tensors, folder / f"{system}-{side.rank}.safetensors")
    (folder / f"{system}-{side.rank}.json").write_text(json.dumps(failures))


def main() -> None:
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    run: Any = paceline.join(name="zoo", root=str(folder / "runs"), progress="off", checkpoint_keep=0)
    if run.size == 1:
        names = wanted or list(CASES)
        run_all("plain", Plain(), names, folder)
        run_all("alone", Ours(run), names, folder)
    else:
        run_all("ours", Ours(run), wanted or [*CASES, *UNEVEN], folder)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = f"file://{folder}/gloo"
        dist.init_process_group("gloo", init_method=store, rank=run.rank, world_size=run.size)
        run_all("ddp", Ddp(), wanted or CASES, folder)
        dist.destroy_process_group()
    run.close()


if __name__ == "__main__":
    main()
