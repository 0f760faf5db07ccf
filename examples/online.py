"""Digits from a camera that slowly turns: served and learned at once, with and without following the training.

    python examples/online.py                     some minutes on a busy machine; writes online.svg

It starts the run of online_train.py and two servers of it. Each image is classified by both, then its label comes in
and goes back into the run through /learn. The model begins with nothing. When the camera starts to turn, one server is
told to take no further versions (as one would serve a checkpoint), the other goes on following.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import paceline

SCRIPT = Path(__file__).with_name("online_train.py")
TOGETHER = 8  # images in one request
BEHIND = 256  # samples that may wait for the run: on a slow machine the stream is slower too


def turned(images: torch.Tensor, degrees: float) -> torch.Tensor:
    a = math.radians(degrees)
    turn = torch.tensor([[math.cos(a), -math.sin(a), 0.0], [math.sin(a), math.cos(a), 0.0]])
    grid = F.affine_grid(turn.expand(len(images), 2, 3), [len(images), 1, 8, 8], align_corners=False)
    return F.grid_sample(images[:, None], grid, align_corners=False)[:, 0]


@contextlib.contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """`paceline ...`, ended with the block."""
    command = [sys.executable, "-m", "paceline", *words]
    said = subprocess.PIPE if words[0] == "serve" else None
    with subprocess.Popen(command, stderr=said, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def address(server: subprocess.Popen[str]) -> str:
    assert server.stderr
    for line in server.stderr:
        if found := re.search(r"answers at (http://\S+)/predict", line):
            return found[1]
    raise SystemExit("a server has not started")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        told: dict[str, Any] = json.load(answer)
        return told


def stream(still: int, turning: int, degrees: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Images and labels, a few at a time: upright first, then the camera turns."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    chance = torch.Generator().manual_seed(0)
    for at in range(0, still + turning, TOGETHER):
        some = torch.randint(len(images), (TOGETHER,), generator=chance)
        yield turned(images[some], degrees * max(0, at - still) / turning), labels[some]


def live(options: argparse.Namespace, follows: str, stays: str) -> dict[str, list[float]]:
    """The accuracy of both servers, request by request."""
    accuracy: dict[str, list[float]] = {follows: [], stays: []}
    run = paceline.connect("online")
    progress = run.watch(every_s=0.02)
    for number, (x, y) in enumerate(stream(options.still, options.turning, options.degrees)):
        if number * TOGETHER == options.still:
            post(f"{stays}/versions/pause", {})
        for server, right in accuracy.items():
            scores = torch.tensor(post(f"{server}/predict", {"inputs": x.tolist()})["outputs"])
            right.append(float((scores.argmax(1) == y).float().mean()))
        post(f"{follows}/learn", {"inputs": x.tolist(), "labels": y.tolist()})
        if number % 8 == 0:
            while next(progress).uploads_waiting > BEHIND:
                pass
    run.finish_uploads()
    return accuracy


def means(values: list[float], parts: int = 40) -> list[float]:
    size = max(1, len(values) // parts)
    return [sum(values[i : i + size]) / size for i in range(0, len(values) - size + 1, size)]


def draw(path: Path, still: float, curves: dict[str, list[float]]) -> None:
    """A small picture; `still`: the part of the stream before the camera turns."""
    mark = 60 + 600 * still
    parts = [f'<path d="M60 20V320H660M{mark:.0f} 20V320" stroke="#999" fill="none"/>']
    parts += [f'<text x="52" y="{324 - 300 * v:.0f}" text-anchor="end">{v:g}</text>' for v in (0, 0.5, 1)]
    parts.append(f'<text x="{mark + 6:.0f}" y="32">the camera begins to turn</text>')
    parts.append(
        '<text x="360" y="350" text-anchor="middle">images seen; accuracy on each before its label came</text>'
    )
    for i, ((name, values), colour) in enumerate(zip(curves.items(), ("#1965b0", "#dc050c"))):
        points = " ".join(f"{60 + 600 * (j + 0.5) / len(values):.1f},{320 - 300 * v:.1f}" for j, v in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="80" y="{280 + 20 * i}" fill="{colour}">{name}</text>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 365" font-family="sans-serif" font-size="13">'
    path.write_text("\n".join([head, '<rect width="680" height="365" fill="white"/>', *parts, "</svg>", ""]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--still", type=int, default=4000, help="images before the camera turns")
    parser.add_argument("--turning", type=int, default=8000, help="images while it does")
    parser.add_argument("--degrees", type=float, default=90.0)
    parser.add_argument("--out", type=Path, default=Path("online.svg"))
    options = parser.parse_args()
    options.still -= options.still % TOGETHER

    quiet = ("--progress", "off", "--wait-limit-s", "300")
    serving = ("serve", "online", "--model", f"{SCRIPT}:make_model", "--replicas", "1", "--port", "0")
    with started("run", "-n", "2", "--strategy", "async", "--name", "online", *quiet, str(SCRIPT)) as run:
        while not Path("runs/online/desk.json").exists() and run.poll() is None:
            time.sleep(0.1)
        # What the other is ordered is not for the next server of this run.
        with (
            tempfile.TemporaryDirectory() as orders,
            started(*serving) as one,
            started(*serving, "--orders", orders) as other,
        ):
            follows, stays = address(one), address(other)
            print(f"watch it at {follows}/", flush=True)
            accuracy = live(options, follows, stays)
            run.wait(120)
    curves = {"follows the training": means(accuracy[follows]), "does not, from there on": means(accuracy[stays])}
    draw(options.out, options.still / (options.still + options.turning), curves)
    for name, values in curves.items():
        print(f"{name}: {100 * sum(values[-10:]) / len(values[-10:]):.1f}% right in the last quarter")
    print(f"drawn in {options.out}")


if __name__ == "__main__":
    main()
