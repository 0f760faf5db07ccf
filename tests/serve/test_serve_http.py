"""`paceline serve` over HTTP: results, limits and their codes, on the fast lane and beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from _serving import NET, Served, made, until, weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from uvicorn.server import ServerState

from paceline.serve import fast_lane
from paceline.serve.app import make_app
from paceline.serve.counts import Counts
from paceline.serve.fast_lane import FastLane
from paceline.serve.labelled import Labelled
from paceline.serve.predict import Predict
from paceline.serve.settings import Settings

JSON = {"Content-Type": "application/json"}
TENSORS = {"Content-Type": "application/x-safetensors"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ("--replicas", "2", "--max-batch-size", "8", "--max-body", "1MiB")
    with Served(tmp_path_factory.mktemp("http"), *options) as served:
        yield served.wait()


def raw(port: int, data: bytes, *pieces: bytes) -> list[tuple[int, bytes]]:
    """Send bytes as they are, and read all answers until the other side closes."""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(data)
        for piece in pieces:
            connection.sendall(piece)
        connection.settimeout(60)
        file = connection.makefile("rb")
        answers = []
        while line := file.readline():
            length = 0
            while (header := file.readline().strip()) != b"":
                name, _, value = header.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            answers.append((int(line.split()[1]), file.read(length)))
        return answers


def request(body: bytes, *headers: str, path: str = "/predict", version: str = "1.1", host: str = "localhost") -> bytes:
    lines = [f"POST {path} HTTP/{version}", f"Host: {host}", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def outputs(answer: bytes) -> torch.Tensor:
    return torch.tensor(json.loads(answer)["outputs"])


def test_results_are_the_models(server: Served) -> None:
    x = torch.rand(3, 2, 3)
    expected = made()(x).detach()
    status, headers, body = server.ask("POST", "/predict", json.dumps({"inputs": x.tolist()}).encode(), JSON)
    assert status == 200
    assert json.loads(body)["version"] == int(headers["x-paceline-version"]) == 1
    torch.testing.assert_close(outputs(body), expected)
    status, headers, body = server.ask("POST", "/predict", save({"x": x}), TENSORS)
    assert (status, headers["content-type"], headers["x-paceline-version"]) == (200, TENSORS["Content-Type"], "1")
    torch.testing.assert_close(load(body)["outputs"], expected)
    status, headers, body = server.ask("POST", "/predict", save({"x": x}), {**TENSORS, "Accept": "application/json"})
    torch.testing.assert_close(outputs(body), expected)


def test_batched_results_equal_single_ones(server: Served) -> None:
    """Many at once, so that they are computed together: each gets its own rows."""
    items = torch.rand(64, 2, 3)
    with ThreadPoolExecutor(16) as pool:
        rows = list(pool.map(lambda x: server.predict([x.tolist()])[1]["outputs"][0], items))
    torch.testing.assert_close(torch.tensor(rows), made()(items).detach(), rtol=1e-5, atol=1e-6)
    assert server.metric("batch_items_sum") >= 64


def test_the_same_answers_on_every_way_in(server: Served) -> None:
    """The fast lane, pieces, several in one write, chunks, HTTP/1.0: one result."""
    x = torch.rand(1, 2, 3)
    body = json.dumps({"inputs": x.tolist()}).encode()
    end = request(body, "Connection: close")
    chunked = (
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
        b"Connection: close\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    )
    ways = {
        "whole": [end],
        "in pieces": [end[:7], end[7:60], end[60:-5], end[-5:]],
        "three at once": [request(body) + request(body) + end],
        "a page between": [request(body) + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + end],
        "chunked": [chunked],
        "expected": [request(body, "Connection: close", "Expect: 100-continue")],
        "1.0": [request(body, version="1.0")],
        "with a query": [request(body, "Connection: close", path="/predict?a=1")],
    }
    for name, pieces in ways.items():
        answers = [answer for answer in raw(server.port, *pieces) if answer[0] != 100]
        assert {status for status, _ in answers} == {200}, (name, answers)
        results = [outputs(text) for _, text in answers if b"outputs" in text]
        assert len(results) == (3 if name == "three at once" else 2 if name == "a page between" else 1), name
        for result in results:
            torch.testing.assert_close(result, made()(x).detach())


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b'{"inputs": [1]}', {}, 422),
        (b'{"inputs": [[[1, 2, 3], [4, 5, 6]]]}', {"Content-Type": "text/plain"}, 415),
        (b'{"inputs": [[[1, 2, 3], [4, 5, 6]]]}', {"Accept": "image/png"}, 406),
        (b'{"inputs": [[[1, 2, 3], [4, 5, 6]]]}', {"X-Paceline-Deadline-Ms": "soon"}, 422),
        (json.dumps({"inputs": [[[1, 2, 3], [4, 5, 6]]] * 9}).encode(), {}, 413),
        (b"[" * 600_000, {}, 422),
        (b" " * (1 << 20) + b"{}", {}, 413),
        (b"short", TENSORS, 400),
        (save({"x": torch.zeros(1, 2, 2)}), TENSORS, 422),
    ],
)
def test_what_is_refused_says_why(server: Served, body: bytes, headers: dict[str, str], status: int) -> None:
    found, answered, text = server.ask("POST", "/predict", body, {**JSON, **headers})
    assert found == status, text
    assert answered["content-type"] == "application/json"
    assert json.loads(text)["error"]


@pytest.mark.parametrize("kind", ["announced", "chunked"])
def test_who_sends_far_too_much_hears_so_and_may_ask_again(server: Served, kind: str) -> None:
    """All of it is sent before the answer is read, as most clients do."""
    data, good = b" " * (1 << 20), json.dumps({"inputs": [[[1, 2, 3], [4, 5, 6]]]}).encode()
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    if kind == "announced":
        pieces = [head + b"Content-Length: %d\r\n\r\n" % (32 * len(data)), *[data] * 32]
    else:
        pieces = [head + b"Transfer-Encoding: chunked\r\n\r\n", *[b"100000\r\n" + data + b"\r\n"] * 32, b"0\r\n\r\n"]
    answers = raw(server.port, *pieces, request(good, "Connection: close"))
    assert [status for status, _ in answers] == [413, 200]


def test_without_a_token_no_name_but_our_own_is_answered(server: Served) -> None:
    """A page whose name was made to lead here is of one origin with us, so a browser lets it do what we let it do."""
    body = json.dumps({"inputs": [[[1, 2, 3], [4, 5, 6]]]}).encode()
    rebound = f"rebound.example:{server.port}"
    page = {**JSON, "Host": rebound, "Origin": f"http://{rebound}"}
    orders = [("POST", f"/versions/{order}") for order in ("pin", "unpin", "pause", "resume", "rollback")]
    for method, path in [*orders, ("POST", "/learn"), *(("GET", p) for p in ("/", "/status", "/versions", "/health"))]:
        status, _, said = server.ask(method, path, body, page)
        assert (status, b"--token-file" in said) == (421, True), path
    assert not json.loads(server.ask("GET", "/versions")[2])["paused"]

    before = server.metric("requests_total", 'code="421"')
    theirs, ours = request(body, host=rebound), request(body, host=f"127.0.0.1:{server.port}")
    chunked = request(body, "Transfer-Encoding: chunked", host=rebound).partition(b"Content-Length")[0]
    end = chunked + b"Connection: close\r\n\r\n"
    statuses = [status for status, _ in raw(server.port, theirs, ours, theirs, theirs, ours, end)]
    assert statuses == [421, 200, 421, 421, 200, 421]
    assert server.metric("requests_total", 'code="421"') == before + 4
    for own in ("localhost", "LOCALHOST:1", "net.localhost", "127.8.9.10:80", "[::1]", f"[::1]:{server.port}"):
        assert server.ask("POST", "/predict", body, {**JSON, "Host": own})[0] == 200, own
        assert server.ask("GET", "/status", None, {"Host": own})[0] == 200, own


def test_a_body_that_is_cut_off_is_no_fault_of_ours(server: Served) -> None:
    """In a chunk, and with a chunk that is none: the log has no traceback for it."""
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    before = server.metric("requests_total", 'code="400"')
    for body in (b"20\r\n{", b'5\r\n{"inp\r\nzzzz\r\n'):
        with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
            connection.sendall(head + body)
    until(lambda: server.metric("requests_total", 'code="400"') >= before + 2)
    assert "Traceback" not in server.text


def test_other_pages(server: Served) -> None:
    assert server.ask("GET", "/health")[0] == 200
    assert server.ask("GET", "/ready")[0] == 200
    assert server.ask("GET", "/predict")[0] == 405
    assert server.ask("GET", "/nothing")[0] == 404
    status, _, body = server.ask("GET", "/openapi.json")
    assert status == 200
    described = json.loads(body)["paths"]["/predict"]["post"]
    item = described["requestBody"]["content"]["application/json"]["schema"]["properties"]["inputs"]["items"]
    assert (item["minItems"], item["items"]["minItems"]) == (2, 3)
    assert {"200", "400", "413", "415", "422", "429", "503", "504"} <= set(described["responses"])
    status, _, body = server.ask("GET", "/versions")
    assert status == 200
    assert [version["number"] for version in json.loads(body)["versions"]] == [1]


def test_counts_add_up_over_replicas(server: Served) -> None:
    """Connections go to both replicas, and every request is counted once."""
    before, refused = server.metric("requests_total", 'code="200"'), server.metric("requests_total", 'code="422"')
    batches = server.metric("latency_seconds_count")
    for _ in range(10):
        assert server.predict([[[1, 2, 3], [4, 5, 6]]])[0] == 200
        assert server.predict([1])[0] == 422
    assert server.metric("requests_total", 'code="200"') == before + 10
    assert server.metric("requests_total", 'code="422"') == refused + 10
    assert server.metric("latency_seconds_count") == batches + 20
    assert server.metric("latency_seconds_bucket", 'le="+Inf"') == batches + 20
    assert server.metric("replicas", 'state="ready"') == 2
    assert server.metric("version") == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.binary(max_size=40)
    | st.builds(lambda v: json.dumps({"inputs": v}).encode(), st.lists(st.floats() | st.none())),
    kind=st.sampled_from(["application/json", "application/x-safetensors", "text/html", "", "a/b; c"]),
    name=st.sampled_from(
        ["Accept", "X-Paceline-Deadline-Ms", "Authorization", "Expect", "Transfer-Encoding", "Connection"]
    ),
    value=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12),
    data=st.data(),
)
def test_no_bytes_give_a_500(server: Served, body: bytes, kind: str, name: str, value: str, data: Any) -> None:
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{name}: {value}\r\n"
    whole = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body + request(b"{", "Connection: close")
    cut = data.draw(st.integers(1, len(whole)))
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(whole[:cut])
        with contextlib.suppress(OSError):  # it may have been refused already, and closed
            connection.sendall(whole[cut:])
            connection.shutdown(socket.SHUT_WR)
        connection.settimeout(60)
        answer = b""
        try:
            while piece := connection.recv(1 << 16):
                answer += piece
        except ConnectionResetError:
            pass
    assert b"HTTP/1.1 500" not in answer
    assert server.ask("GET", "/health")[0] == 200


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("table")
    weights(directory, "make_table")
    (directory / "net.py").write_text(NET + "\ndef example_inputs(): return torch.zeros(2, 4).long(), torch.ones(2)\n")
    with Served(directory, "--replicas", "1", "--max-queue-delay-us", "200000", model="make_table") as served:
        yield served.wait()


@pytest.mark.slow
def test_several_arguments_and_outputs_and_one_bad_neighbour(table: Served) -> None:
    """An index that the table does not have fails alone, although it was in a batch with others."""
    model = made("make_table")
    words, weight = torch.arange(4).view(1, 4), torch.tensor([2.0])
    good = {"words": words.tolist(), "weight": weight.tolist()}
    bad = {"words": [[1, 2, 3, 99]], "weight": [1.0]}
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(table.predict, [good, bad, good, good, bad, good]))
    assert [status for status, _ in answers] == [200, 422, 200, 200, 422, 200]
    expected = model(words, weight)
    for status, answer in answers:
        if status == 200:
            torch.testing.assert_close(torch.tensor(answer["outputs"]["mean"]), expected["mean"].detach())
            assert answer["outputs"]["count"] == [2]
        else:
            assert "index out of range" in answer["error"]
    assert table.predict({"words": words.tolist()})[0] == 422


@pytest.mark.slow
def test_a_token_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    with Served(tmp_path, "--replicas", "1", "--token-file", "token") as served:
        served.token = "secret"
        served.wait()
        x = [[[1, 2, 3], [4, 5, 6]]]
        assert served.predict(x)[0] == 200
        assert served.predict(x, Host="model.example")[0] == 200  # with a token the name does not matter
        assert served.ask("GET", "/versions", None, {"Host": "model.example"})[0] == 200
        for wrong in ("Bearer secre", "Bearer secrett", "secret", "", "Bearer \xe9"):
            status, answer = served.predict(x, Authorization=wrong)
            assert (status, "Bearer" in answer["error"]) == (401, True)
            assert served.ask("GET", "/metrics", None, {"Authorization": wrong})[0] == 401
            assert served.ask("POST", "/versions/pause", None, {"Authorization": wrong})[0] == 401
            assert served.ask("GET", "/openapi.json", None, {"Authorization": wrong})[0] == 401
            assert served.ask("GET", "/health", None, {"Authorization": wrong})[0] == 200


IMPATIENT = """
import paceline.serve.fast_lane
paceline.serve.fast_lane.WHOLE_S = 2.0

class Thinks(Net):
    def forward(self, x):
        time.sleep(5.0 if x.max() > 100 else 0.0)
        return super().forward(x)

def make_thinks():
    return Thinks()
"""


def byte_by_byte(port: int, whole: bytes, slow: bytes) -> tuple[bytes, float]:
    """Send the rest a byte at a time until the other side closes; all that came back, and after how long it ended."""
    got, began = b"", time.monotonic()
    with socket.create_connection(("127.0.0.1", port), 60) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(whole)
        for at in range(len(slow)):
            connection.sendall(slow[at : at + 1])
            if select.select([connection], [], [], 0.1)[0]:
                got += (piece := connection.recv(1 << 16))
                if not piece:
                    break
        while piece := connection.recv(1 << 16):
            got += piece
    return got, time.monotonic() - began


@pytest.mark.parametrize("length", ["Content-Length: 300000", "Transfer-Encoding: chunked"])
def test_a_body_that_the_app_waits_for_in_vain_is_counted_as_late(monkeypatch: pytest.MonkeyPatch, length: str) -> None:
    async def one_late() -> tuple[bytes, dict[int, int]]:
        loop, counts = asyncio.get_running_loop(), Counts()
        wanted = Settings(model="")
        lanes: list[FastLane] = []
        monkeypatch.setattr(FastLane, "predict", Predict(wanted, counts), raising=False)
        monkeypatch.setattr(FastLane, "closed", lambda *_: None, raising=False)
        app = make_app(FastLane.predict, Labelled(wanted), None, lambda: "")  # type: ignore[arg-type]
        config = uvicorn.Config(app, http=FastLane, ws="none", lifespan="off", log_config=None)
        config.load()

        def protocol() -> FastLane:
            lanes.append(FastLane(config=config, server_state=ServerState(), app_state={}, _loop=loop))
            return lanes[-1]

        listening = await loop.create_server(protocol, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.write(f"POST /predict HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n1".encode())
        while not (lanes and lanes[0].cycle):
            await asyncio.sleep(0.01)
        monkeypatch.setattr(fast_lane, "WHOLE_S", 0.0)
        await asyncio.sleep(0.01)
        lanes[0].tend()
        answer = await reader.read()
        while not counts.requests:
            await asyncio.sleep(0.01)
        writer.close()
        listening.close()
        return answer, counts.requests

    answer, counted = asyncio.run(asyncio.wait_for(one_late(), 30))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert counted == {408: 1}


@pytest.mark.slow
def test_a_request_that_does_not_come_to_its_end_is_let_go(tmp_path: Path) -> None:
    """However often a byte comes; one that is computed for longer is not meant."""
    (tmp_path / "net.py").write_text(NET + IMPATIENT)
    weights(tmp_path)
    head, end = request(b" " * 300)[:-300], b" " * 299
    page = f"GET /status HTTP/1.1\r\nHost: localhost\r\nX-Long: {'x' * 300}".encode()
    chunked = b"POST /learn HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n200\r\n"
    pieces = chunked.replace(b"/learn", b"/predict")
    large = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000\r\n\r\n"
    order = b"POST /versions/pin HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300\r\n\r\n"
    good = request(json.dumps({"inputs": [[[1, 2, 3], [4, 5, 6]]]}).encode())
    ways = {
        "head": (b"", request(b"", f"X-Long: {'x' * 300}")),
        "body": (head, end),
        "the second on its connection": (good, head + end),
        "another page": (b"", page),
        "after another page": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + order, end),
        "chunk": (chunked, end),
        "chunk of a question": (pieces, end),  # which the app counts, not the fast lane
        "large body": (large, end),
        "silent": (head, b""),
    }
    options = ("--replicas", "1", "--max-batch-size", "1", "--model", "net.py:make_thinks")
    with Served(tmp_path, *options) as served:
        served.wait()
        with ThreadPoolExecutor(len(ways)) as pool:
            asked = {name: pool.submit(byte_by_byte, served.port, *way) for name, way in ways.items()}
        for name, future in asked.items():
            got, took_s = future.result()
            *before, last = got.split(b"HTTP/1.1 ")[1:]
            assert last.startswith(b"408 "), (name, got)
            assert b"Connection: close" in last
            assert b"within 2 s" in last
            assert [answer[:3] for answer in before] == [b"200"] * (
                name in ("the second on its connection", "after another page")
            )
            assert 1.5 < took_s < 40, name
        assert served.metric("requests_total", 'code="408"') == 6
        assert served.metric("requests_total", 'code="400"') == 0
        assert served.predict([[[1, 2, 3], [4, 5, 600]]])[0] == 200


@pytest.mark.slow
def test_one_who_asks_on_without_reading_is_waited_for_and_let_go(tmp_path: Path) -> None:
    """Answers do not pile up in the replica; one who reads late gets them all."""
    (tmp_path / "net.py").write_text(NET + IMPATIENT)
    weights(tmp_path)
    asked = request(b"{}")
    with Served(tmp_path, "--replicas", "1", "--model", "net.py:make_thinks") as served:
        served.wait()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", served.port))
            connection.settimeout(60)
            began = time.monotonic()
            with pytest.raises(ConnectionError):  # it has not read for two seconds
                for _ in range(1000):
                    connection.sendall(asked * 1000)
            assert time.monotonic() - began > 1.5
        assert 0 < served.metric("requests_total", 'code="422"') < 100_000
        answers = raw(served.port, asked * 2000 + request(b"{}", "Connection: close"))
        assert [status for status, _ in answers] == [422] * 2001
