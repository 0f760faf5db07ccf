"""The ring between four hosts against gloo: `python -m bench._ring_hosts [--quick] [--json FILE]`.

Called by bench.allreduce; needs root. The hosts are network namespaces (`paceline.testing.hosts`). One process
on each runs blocks of gloo's all-reduce and of ours in turns (`--hosts-rank`) and prints its times as JSON; a
block takes as long as on the slowest host. Plain TCP on both sides; the figures with `tls` show what encryption
costs, for which gloo's wheel has no counterpart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SIZE = 4
SMALL, LARGE = 100_000, 25_000_000  # bytes
RATE_BYTES = 125e6  # 1 Gbit/s
PORT = 29600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--hosts-rank", type=int, help="be the process on that host")
    parser.add_argument("--bytes", type=int, nargs="+", default=[LARGE])
    parser.add_argument("--sides", nargs="+", default=["gloo", "plain"])
    parser.add_argument("--blocks", type=int, default=7)
    options = parser.parse_args()
    if options.hosts_rank is not None:
        return on_host(options.hosts_rank, options.bytes, options.sides, options.blocks)
    quick: bool = options.quick
    figures = measure(["gloo", "plain"] if quick else ["gloo", "plain", "tls"], blocks=3 if quick else 9)
    for name, value in figures.items():
        print(f"{name:32} {value:.4g}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")
    return None


def measure(sides: Sequence[str], blocks: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    near = run(0.0, [LARGE], sides, blocks)[LARGE]
    far = run(10.0, [SMALL, LARGE], sides, blocks)
    ideal_s = 2 * (SIZE - 1) / SIZE * LARGE / RATE_BYTES
    for side in sides[1:]:
        end = "" if side == "plain" else f"_{side}"
        figures[f"ring_link_share{end}"] = ideal_s / statistics.median(near[side])
        figures[f"ring_over_gloo{end}"] = ratio(near["gloo"], near[side])
        figures[f"latency_speedup_small{end}"] = ratio(far[SMALL]["gloo"], far[SMALL][side])
        figures[f"latency_speedup_large{end}"] = ratio(far[LARGE]["gloo"], far[LARGE][side])
    return figures


def ratio(peer: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(p / o for p, o in zip(peer, ours))


def run(delay_ms: float, sizes: Sequence[int], sides: Sequence[str], blocks: int) -> dict[int, dict[str, list[float]]]:
    """Seconds of an all-reduce in each block: by bytes and side."""
    from paceline.testing.hosts import Hosts

    words = ["--bytes", *map(str, sizes), "--sides", *sides, "--blocks", str(blocks)]
    code = f"import runpy, os, sys; sys.argv[1:] = ['--hosts-rank', os.environ['HOSTS_RANK'], *{words!r}]; "
    code += "runpy.run_module('bench._ring_hosts', run_name='__main__')"
    with Hosts(SIZE, rate="1gbit", delay_ms=delay_ms) as hosts:
        done = hosts.run([sys.executable, "-c", code], limit_s=300.0)
    if any(each.code for each in done):
        raise SystemExit("\n".join(f"[{e.host}] ended with {e.code}\n{e.output[-2000:]}" for e in done))
    said = [json.loads(each.output.splitlines()[-1]) for each in done]
    return {
        nbytes: {side: [max(times) for times in zip(*(each[f"{side} {nbytes}"] for each in said))] for side in sides}
        for nbytes in sizes
    }


def on_host(rank: int, sizes: Sequence[int], sides: Sequence[str], blocks: int) -> None:
    """Take turns, block by block, and print the seconds of each."""
    import torch
    import torch.distributed as dist

    from paceline.core.view import Member, View
    from paceline.transport.channel import Listener
    from paceline.transport.mesh import Mesh
    from paceline.transport.ring import Ring

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    first = f"tcp://{os.environ['HOSTS_FIRST_IP']}:{PORT}"
    dist.init_process_group("gloo", init_method=first, rank=rank, world_size=SIZE)
    all_reduce = {"gloo": dist.all_reduce}
    link = None
    for number, side in enumerate(s for s in sides if s != "gloo"):
        port, encrypt = PORT + 1 + number, side == "tls"
        listener = Listener(os.environ["HOSTS_IP"], "a token", port=port, encrypt=encrypt)
        members = [Member(rank=r, host=f"h{r}", pid=1, address=f"10.77.0.{r + 1}:{port}") for r in range(SIZE)]
        mesh = Mesh(View(number=1, members=tuple(members)), rank, "a token", listener, 60.0, encrypt=encrypt)
        ring = Ring(mesh, range(SIZE), "bench")
        link = ring.link
        all_reduce[side] = ring.all_reduce
    for side in sides:
        probe = torch.full((250_000,), float(rank))
        all_reduce[side](probe)
        assert bool((probe == 6.0).all()), f"{side} did not give the sum"
    times: dict[str, list[float]] = {}
    for nbytes in sizes:
        flat = torch.zeros(nbytes // 4)
        iterations = 10 if nbytes <= SMALL else 2
        for block in range(-1, blocks):  # the first one warms up
            # In rotation, so that no side follows itself: its connections would start warm, the others' cold.
            turn = block % len(sides)
            for side in [*sides[turn:], *sides[:turn]]:
                dist.barrier()
                start = time.perf_counter()
                for _ in range(iterations):
                    all_reduce[side](flat)
                if block >= 0:
                    taken = (time.perf_counter() - start) / iterations
                    times.setdefault(f"{side} {nbytes}", []).append(taken)
    dist.barrier()
    print(json.dumps({"link": [link.latency_s, link.bytes_per_s] if link else [], **times}))
    sys.stdout.flush()
    os._exit(0)  # the others may still be in the barrier: nothing to take down in order


if __name__ == "__main__":
    main()
