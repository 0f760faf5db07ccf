"""Replicas and their parent: killed ones come back, the end loses nothing, what cannot be served is said."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from _serving import NET, Served, made, until, weights
from safetensors.torch import save_file

from paceline.serve.messages import Drain
from paceline.serve.replica import SETTINGS, SHELF
from paceline.serve.settings import Settings

X = [[[1, 2, 3], [4, 5, 6]]]


@pytest.mark.slow
def test_a_killed_replica_is_started_again_and_counts_stay(tmp_path: Path) -> None:
    with Served(tmp_path, "--replicas", "2") as served:
        served.wait()
        for _ in range(6):
            assert served.predict(X)[0] == 200
        counted = served.metric("requests_total", 'code="200"')
        first, second = served.replicas()
        os.kill(first, signal.SIGKILL)
        until(lambda: "has ended (signal 9)" in served.text)
        for _ in range(6):
            assert served.predict(X)[0] == 200  # by the other one, while it is away
        until(lambda: served.metric("replicas", 'state="ready"') == 2)
        assert second in served.replicas()
        assert served.predict(X)[0] == 200
        assert served.metric("requests_total", 'code="200"') == counted + 7
        assert served.metric("replica_starts_total") == 3
        assert served.stop() == 0


@pytest.mark.slow
def test_replicas_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with Served(tmp_path, "--replicas", "2") as served:
        served.wait()
        replicas = served.replicas()
        served.process.kill()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in replicas))


@pytest.mark.slow
def test_more_connections_than_descriptors_end_no_replica(tmp_path: Path) -> None:
    """Those above the limit hear 503, and when the others are gone all is as before."""
    with Served(tmp_path, "--replicas", "2") as served:
        resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, (64, 64))  # long before it has imported torch
        served.wait()
        replicas = served.replicas()
        idle = [socket.create_connection(("127.0.0.1", served.port), 60) for _ in range(100)]
        until(lambda: served.ask("GET", "/ready")[0] == 503)
        status, headers, body = served.ask("GET", "/ready")
        assert (status, headers["retry-after"]) == (503, "1")
        assert "another connection" in json.loads(body)["error"]
        for connection in idle:
            connection.close()
        until(lambda: served.ask("GET", "/ready")[0] == 200)
        until(lambda: served.metric("connections") == 1)  # the one that asks
        assert served.replicas() == replicas
        assert served.predict(X)[0] == 200


@pytest.mark.slow
def test_signals_that_come_again_leave_nothing_behind(tmp_path: Path) -> None:
    """Also while what it has is put away, when the loop is over."""
    (tmp_path / "private").mkdir()
    with Served(tmp_path, "--replicas", "1", env={"TMPDIR": str(tmp_path / "private")}) as served:
        served.wait()
        assert any((tmp_path / "private").iterdir())
        while served.process.poll() is None:
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        # Its exit code is that of a signal where one met the interpreter when all was put away.
        assert not list((tmp_path / "private").glob("*paceline*"))


@pytest.mark.slow
def test_a_replica_that_waits_for_its_first_version_ends_when_it_is_told(tmp_path: Path) -> None:
    """By itself: the parent would kill it, some seconds later."""
    (tmp_path / "net.py").write_text(NET)
    private = tmp_path / "private"
    (private / SHELF).mkdir(parents=True)
    (private / SETTINGS).write_bytes(msgspec.json.encode(Settings(model=f"{tmp_path}/net.py:make")))
    talk, their_talk = socket.socketpair()
    lane, their_lane = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with talk, lane, their_talk, their_lane:
        ends = (their_talk.fileno(), their_lane.fileno())
        words = [sys.executable, "-m", "paceline.serve.replica", str(private), *map(str, ends)]
        process = subprocess.Popen(words, pass_fds=ends)
        try:
            until(lambda: (private / "choice.json").exists())
            told = msgspec.msgpack.encode(Drain())
            talk.sendall(len(told).to_bytes(4, "little") + told)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_the_end_loses_no_request(tmp_path: Path) -> None:
    """Connections that ask again and again, each until it is told to close: every request sent is answered with 200."""
    with Served(tmp_path, "--replicas", "2") as served:
        served.wait()
        body = json.dumps({"inputs": X}).encode()
        lines = [
            "POST /predict HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        head = "\r\n".join([*lines, "", ""])
        sent, answered, others = [0] * 8, [0] * 8, []
        under_way = threading.Barrier(9, timeout=60)

        def ask(who: int) -> None:
            with socket.create_connection(("127.0.0.1", served.port), 60) as connection:
                file = connection.makefile("rb")
                for number in range(1_000_000):
                    if number == 20:
                        under_way.wait()
                    connection.sendall(head.encode() + body)
                    sent[who] += 1
                    status = file.readline()
                    headers = {}
                    while line := file.readline().strip():
                        name, _, value = line.decode().partition(": ")
                        headers[name.lower()] = value
                    if not status or file.read(int(headers["content-length"])) == b"":
                        others.append(status)
                        return
                    answered[who] += b" 200 " in status
                    if headers.get("connection") == "close":
                        return

        threads = [threading.Thread(target=ask, args=(who,)) for who in range(8)]
        for thread in threads:
            thread.start()
        under_way.wait()
        assert served.stop() == 0
        for thread in threads:
            thread.join(60)
        assert not others
        assert sent == answered
        assert min(sent) > 20


@pytest.mark.slow
def test_slow_requests_under_way_are_finished_and_late_ones_are_told(tmp_path: Path) -> None:
    options = ("--replicas", "1", "--max-batch-size", "1", "--queue-limit", "3")
    with Served(tmp_path, *options, env={"PAUSE_S": "0.5"}) as served:
        served.wait()
        found: list[int] = []
        threads = [threading.Thread(target=lambda: found.append(served.predict(X)[0])) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert 429 in found
        assert found.count(200) >= 1
        assert set(found) == {200, 429}
        del found[:]
        first = threading.Thread(target=lambda: found.append(served.predict(X)[0]))
        first.start()
        until(lambda: served.metric("batch_items_count") > 0 and served.metric("connections") >= 2)
        status, answer = served.predict(X, X_Paceline_Deadline_Ms="1")
        assert (status, "deadline" in answer["error"]) == (504, True)
        last = threading.Thread(target=lambda: found.append(served.predict(X)[0]))
        last.start()
        until(lambda: found or served.metric("connections") >= 2)
        served.process.send_signal(signal.SIGTERM)  # twice, as one sends it who tells a process and its group
        time.sleep(0.01)
        assert served.stop() == 0
        first.join(60)
        last.join(60)
        assert found == [200, 200]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--model", "net.py:mak"), "did you mean 'make'?"),
        (("--model", "nets.py:make"), "did you mean 'net.py'?"),
        (("--input", "7"), "the model does not take"),
        (("--input", "2x3", "--input", "4"), "the model's forward takes 1"),
        (("--precision", "int4"), "did you mean 'int8'?"),
        (("--device", "gpu"), "--device 'gpu' cannot be used here"),
        (("--port", "99999"), "'99999' is no port"),
        (("--codec", "quantise(3)"), "did you mean 'quantize'"),
        (("--model", "net.py:broken"), "net.py:broken fails ("),
        (("--holdout", "net.py:broken"), "RuntimeError: not today"),
        (("--host", "203.0.113.7"), "cannot listen on --host 203.0.113.7"),
    ],
)
def test_what_cannot_be_served_is_said(tmp_path: Path, options: tuple[str, ...], why: str) -> None:
    with Served(tmp_path, *options) as served:
        assert served.process.wait(120) == 2
        served._reader.join(10)
        assert why in served.text


def test_an_unknown_run_is_said(tmp_path: Path) -> None:
    with Served(tmp_path, what="nothing") as served:
        assert served.process.wait(120) == 2
        served._reader.join(10)
        assert "'nothing' is no run" in served.text


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_is_pinned_stays_so_when_the_server_is_started_again(tmp_path: Path) -> None:
    """Also where its weights are gone from the source, and where another model cannot take it."""
    file = weights(tmp_path)
    with Served(tmp_path, "--replicas", "1") as served:
        served.wait()
        before = served.predict(X)[1]
        tensors = {name: tensor + 1 for name, tensor in made().state_dict().items()}
        save_file(tensors, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)
        until(lambda: served.predict(X)[1]["version"] == 2)
        assert served.ask("POST", "/versions/pin", b'{"version": 1}')[0] == 200
        until(lambda: served.predict(X)[1] == before)
        served.process.kill()
    with Served(tmp_path, "--replicas", "1") as served:
        served.wait()
        assert served.predict(X)[1] == before
        assert "serves version 1, which was pinned before this start, until it is unpinned" in served.text
        assert served.stop() == 0
    small = NET + "\ndef make_small():\n    return nn.Sequential(nn.Flatten(), nn.Linear(6, 3))\n"
    (tmp_path / "net.py").write_text(small)
    net: dict[str, Any] = {}
    exec(small, net)
    save_file(net["make_small"]().state_dict(), file)
    with Served(tmp_path, "--replicas", "1", "--model", "net.py:make_small") as served:
        served.wait()
        assert served.predict(X)[0] == 200
        assert "which was pinned before this start, cannot be served" in served.text
        assert served.ask("POST", "/versions/unpin")[0] == 200
    assert not file.with_name(f"{file.name}.serving").exists()
