"""A state that is sent while it changes: what arrives is what it was when it was lent."""

from __future__ import annotations

import queue
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import Coming, Lent, digest
from paceline.core.errors import Interrupted, TimedOut
from paceline.transport.channel import Listener, connect

LIMIT_S = 60.0


class Slow:
    """A pipe that lets `open` messages through, then waits for `go`."""

    name = "the other"

    def __init__(self, open: int = 0) -> None:
        self.go = threading.Event()
        self._open = open
        self._there: queue.Queue[bytes] = queue.Queue()

    def send(self, *parts: bytes | bytearray | memoryview) -> None:
        if self._open <= 0:
            assert self.go.wait(LIMIT_S)
        self._open -= 1
        self._there.put(b"".join(parts))

    def recv(self, limit_s: float) -> bytes:
        try:
            return self._there.get(timeout=limit_s)
        except queue.Empty:
            raise TimedOut("nothing came") from None


def state_of(sizes: list[int]) -> dict[str, object]:
    tensors = {f"t{i}": torch.randn(size).to(kind) for i, size in enumerate(sizes) for kind in [KINDS[i % len(KINDS)]]}
    return {"model": tensors, "step": 3, "none": torch.empty(0), "scalar": torch.tensor(2.5)}


KINDS = [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=6), st.integers(0, 8))
def test_what_arrives_is_as_of_the_moment_when_it_was_lent(sizes: list[int], sent: int) -> None:
    state = state_of(sizes)
    before = digest(state)
    pipe = Slow(open=sent)
    lent = Lent(state, [pipe])
    coming = Coming(lent.head, pipe, LIMIT_S)
    lent.keep()
    for tensor in state["model"].values():  # type: ignore[attr-defined]
        tensor.zero_()
    pipe.go.set()
    assert digest(coming.wait()) == before


def test_large_tensors_of_any_layout_travel_over_real_channels_to_several() -> None:
    torch.manual_seed(0)
    state = {"w": torch.randn(3, 8, 16, 16).contiguous(memory_format=torch.channels_last), "e": torch.randn(3 << 20)}
    listener = Listener("127.0.0.1", token="t")
    here = [connect(listener.address, token="t", limit_s=LIMIT_S) for _ in range(2)]
    there = [listener.accept(LIMIT_S) for _ in range(2)]
    lent = Lent(state, there)
    for channel in here:
        got = Coming(lent.head, channel, LIMIT_S).wait()
        assert torch.equal(got["w"], state["w"])
        assert torch.equal(got["e"], state["e"])
    for channel in (*here, *there):
        channel.close()
    listener.close()


def test_one_that_goes_away_does_not_keep_the_state_from_another() -> None:
    listener = Listener("127.0.0.1", token="t")
    here = [connect(listener.address, token="t", limit_s=LIMIT_S) for _ in range(2)]
    there = [listener.accept(LIMIT_S) for _ in range(2)]
    gone = {channel.name: channel for channel in there}
    assert gone
    there[0].close()
    lent = Lent({"w": torch.ones(10)}, there)
    ends = [Coming(lent.head, channel, LIMIT_S) for channel in here]
    results = []
    for end in ends:
        try:
            results.append(end.wait()["w"].sum().item())
        except Interrupted:
            results.append("interrupted")
    assert sorted(map(str, results)) == ["10.0", "interrupted"]
    for channel in (*here, *there):
        channel.close()
    listener.close()


def test_too_many_bytes_are_refused() -> None:
    pipe = Slow(open=2)
    head = {"structure": '{"w": {"$tensor": "w"}}', "tensors": [["w", "float32", [2]]]}
    pipe.send(b"x" * 12)
    with pytest.raises(Interrupted, match="do not fit"):
        Coming(head, pipe, LIMIT_S).wait()


@given(st.integers(0, 9), st.sampled_from(KINDS))
def test_a_digest_tells_one_changed_number(at: int, kind: torch.dtype) -> None:
    tensor = torch.ones(10).to(kind)
    before = digest({"t": tensor})
    tensor[at] = 0
    assert digest({"t": tensor}) != before
