"""The sides of bench.serve: ours and three peers as processes, the load that wrk makes, and versions that come in."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BATCH = 32
_LIMIT_S = 180.0
_TYPES = {"json": "application/json", "raw": "application/x-safetensors"}
_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True)
class Load:
    """What one block of load came to."""

    p50_ms: float
    p99_ms: float
    per_s: float
    failed: int
    cpu_us: float  # of the server's processes, per request


@dataclass
class Side:
    """One server."""

    name: str
    command: list[str]
    kind: str
    path: str = "/predict"
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    script: Path = Path()

    def start(self, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        words = [word.replace("PORT", str(self.port)) for word in self.command]
        log = (directory / f"{self.name}.log").open("wb")
        self.process = subprocess.Popen(words, env={**os.environ, **self.env}, stdout=log, stderr=log)
        self.script = directory / f"{self.kind}.lua"
        self.body = (directory / f"body.{self.kind}").read_bytes()
        deadline = time.monotonic() + _LIMIT_S
        while not self._answers():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(
                    f"{self.name} does not answer: {(directory / f'{self.name}.log').read_text()[-2000:]}"
                )
            time.sleep(0.2)
        time.sleep(2)  # for its other workers

    def ask(self) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("POST", self.path, self.body, headers_of(self.kind, self.body))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _answers(self) -> bool:
        try:
            return self.ask()[0] == 200
        except OSError:
            return False

    def load(self, connections: int, seconds: float) -> Load:
        before = self._cpu_s()
        words = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}", "--latency", "--timeout", "10s"]
        url = f"http://127.0.0.1:{self.port}{self.path}"
        text = subprocess.run([*words, "-s", str(self.script), url], capture_output=True, text=True, check=True).stdout
        spent = self._cpu_s() - before
        requests = int(_found(r"(\d+) requests in", text))
        failed = int(_found(r"Non-2xx or 3xx responses: (\d+)", text, "0"))
        failed += sum(map(int, re.findall(r"(?:connect|read|write|timeout) (\d+)", text)))
        return Load(
            _milliseconds(_found(r"\n\s+50%\s+(\S+)", text)),
            _milliseconds(_found(r"\n\s+99%\s+(\S+)", text)),
            float(_found(r"Requests/sec:\s+(\S+)", text)),
            failed,
            spent / max(1, requests) * 1e6,
        )

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)
        deadline = time.monotonic() + _LIMIT_S
        while not self._answers() and time.monotonic() < deadline:
            time.sleep(0.1)

    def stop(self) -> None:
        if self.process is None:
            return
        everyone = self._family()
        self._signal(signal.SIGCONT)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        for pid in everyone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> None:
        for pid in self._family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _family(self) -> list[int]:
        assert self.process
        parents = {pid: fields[1] for pid, fields in _processes().items()}
        found = [self.process.pid]
        for pid in sorted(parents):
            above = pid
            while above and above != self.process.pid:
                above = int(parents.get(above, 0))
            if above and pid not in found:
                found.append(pid)
        return found

    def _cpu_s(self) -> float:
        processes = _processes()
        ticks = sum(int(processes[p][11]) + int(processes[p][12]) for p in self._family() if p in processes)
        return ticks / os.sysconf("SC_CLK_TCK")


def ours(directory: Path, kind: str) -> Side:
    """`paceline serve`, as it chooses by itself."""
    weights = write_version(directory, 0)
    words = ["-m", "paceline", "serve", str(weights), "--model", "bench/_serve_model.py:make", "--port", "PORT"]
    words += ["--max-batch-size", str(BATCH)]
    return Side("ours", [sys.executable, *words], kind)


def peers(python: str, kind: str) -> list[Side]:
    """LitServe and mosec with one worker, which leaves a core for what takes requests in; LitServe reads JSON alone."""
    cores = len(os.sched_getaffinity(0))
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    fastapi = [python, "-m", "bench.peers.serve_fastapi", "PORT", str(cores)]
    litserve = [python, "-m", "bench.peers.serve_litserve", "PORT", "1", str(BATCH), "0.001", "1"]
    mosec = [python, "-m", "bench.peers.serve_mosec", "--port", "PORT"]
    batches = {"WORKERS": "1", "BATCH": str(BATCH), "WAIT_MS": "1", "KIND": kind}
    found = [
        Side("fastapi", fastapi, kind, "/predict" if kind == "json" else "/raw", threads),
        Side("mosec", mosec, kind, env={**threads, **batches}),
    ]
    return [*found, Side("litserve", litserve, kind, env=threads)] if kind == "json" else found


def headers_of(kind: str, body: bytes) -> dict[str, str]:
    offset = 8 + int.from_bytes(body[:8], "little") if kind == "raw" else 0
    return {"Content-Type": _TYPES[kind], "X-Offset": str(offset)}


def write_bodies(directory: Path) -> None:
    """One image, as JSON with four digits and as safetensors; and what makes wrk send it."""
    import torch
    from safetensors.torch import save

    generator = random.Random(0)
    image = [[[[round(generator.random(), 4) for _ in range(28)] for _ in range(28)]]]
    bodies = {
        "json": json.dumps({"inputs": image}, separators=(",", ":")).encode(),
        "raw": save({"input": torch.tensor(image)}),
    }
    for kind, body in bodies.items():
        (directory / f"body.{kind}").write_bytes(body)
        lines = ['wrk.method = "POST"', f'local file = io.open("{directory}/body.{kind}", "rb")']
        lines += ['wrk.body = file:read("*a")', "file:close()"]
        lines += [f'wrk.headers["{name}"] = "{value}"' for name, value in headers_of(kind, body).items()]
        (directory / f"{kind}.lua").write_text("\n".join(lines) + "\n")


def write_version(directory: Path, number: int) -> Path:
    """The weights of version `number`, in the file that ours follows: the last bias says which one it is."""
    import torch
    from safetensors.torch import save_file

    from bench._serve_model import make

    state = {name: tensor + 1e-3 * number for name, tensor in make().state_dict().items()}
    state["11.bias"] = torch.full((10,), float(number))
    path = directory / "weights.safetensors"
    part = directory / ".weights.safetensors"
    save_file(state, part)
    os.replace(part, path)
    return path


@contextlib.contextmanager
def new_versions(directory: Path, every_s: float) -> Iterator[list[float]]:
    """A new version every so often, as long as this lasts; when each was written."""
    over = threading.Event()
    written: list[float] = []

    def go() -> None:
        while not over.wait(every_s):
            write_version(directory, len(written) + 1)
            written.append(time.monotonic())

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    try:
        yield written
    finally:
        over.set()
        thread.join()


def freshness(side: Side, directory: Path) -> float:
    """Seconds from the writing of a version to the first answer with it."""
    before = json.loads(side.ask()[1])["version"]
    time.sleep(1.0)
    write_version(directory, random.randrange(1000, 2000))
    began = time.monotonic()
    while json.loads(side.ask()[1])["version"] == before:
        if time.monotonic() - began > _LIMIT_S:
            raise RuntimeError("the new version is not served")
    return time.monotonic() - began


def _processes() -> dict[int, list[str]]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found[int(folder.name)] = (folder / "stat").read_text().rpartition(")")[2].split()
    return found


def _found(pattern: str, text: str, default: str = "") -> str:
    match = re.search(pattern, text)
    if match is None and not default:
        raise RuntimeError(f"wrk said nothing that matches {pattern!r}: {text}")
    return match[1] if match else default


def _milliseconds(text: str) -> float:
    match = re.fullmatch(r"([\d.]+)(us|ms|s)", text)
    assert match, text
    return float(match[1]) * _UNITS[match[2]]
