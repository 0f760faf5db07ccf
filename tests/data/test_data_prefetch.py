"""Fetching ahead: bounded, counted when handed out, and gone when its iteration is."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from paceline.data import Loader
from paceline.data.batches import VERY_SLOW_S
from paceline.data.prefetch import JOIN_LIMIT_S, Background

PAUSE_S = 2 * VERY_SLOW_S  # enough to be fetched in the background from the second batch on


class Slow(Dataset[Any]):
    """Each sample takes a while; remembers which were read, and in which threads."""

    def __init__(self, length: int, bad: int = -1, error: type[Exception] = ValueError) -> None:
        self.length, self.bad, self.error = length, bad, error
        self.read: list[int] = []
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(PAUSE_S)
        self.threads.add(threading.current_thread().name)
        if index == self.bad:
            raise self.error("cannot decode")
        self.read.append(index)
        return index


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "paceline-prefetch"]


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_the_buffer_is_bounded_and_only_what_was_handed_out_counts(prefetch: int) -> None:
    data = Slow(12)
    loader = Loader(data, batch_size=1, shuffle=False, prefetch=prefetch)
    handed = 0
    for batch in loader:
        handed += 1
        assert batch.tolist() == [handed - 1]
        assert loader.state_dict()["consumed"] == handed
        if handed in (3, 4):  # a slow consumer: the buffer fills behind its back, and no further
            limit = time.monotonic() + 10
            while len(data.read) < handed + prefetch and time.monotonic() < limit:
                time.sleep(0.01)
            time.sleep(2 * PAUSE_S)
            assert len(data.read) == handed + prefetch
        assert len(data.read) - handed <= prefetch + 1
    assert data.threads == {"MainThread", "paceline-prefetch"}
    assert handed == 12


def test_without_prefetch_nothing_is_fetched_ahead() -> None:
    data = Slow(5)
    for handed, _ in enumerate(Loader(data, batch_size=1, prefetch=0), 1):
        assert len(data.read) == handed
    assert data.threads == {"MainThread"}


def test_quick_batches_are_fetched_here() -> None:
    def stays() -> bool:
        return not any(prefetching() for _ in Loader(torch.arange(20), batch_size=2))

    assert any(stays() for _ in range(5))  # on a busy machine any batch may look slow


def test_break_stops_the_thread_at_once() -> None:
    data = Slow(100)
    loader = Loader(data, batch_size=1)
    for handed, _ in enumerate(loader):
        if handed == 2:
            assert prefetching()
            break
    assert not prefetching()
    assert loader.state_dict()["consumed"] == 3


def test_close_and_collection_stop_the_thread() -> None:
    loader = Loader(Slow(100), batch_size=1)
    one, other = iter(loader), iter(loader)
    assert [next(one), next(one)] == [next(other), next(other)]
    assert len(prefetching()) == 2
    del other
    gc.collect()
    assert len(prefetching()) == 1
    loader.close()
    assert not prefetching()
    assert list(one) == []


def test_closing_does_not_wait_for_a_fetch_that_hangs() -> None:
    release = threading.Event()

    def items() -> Any:
        yield 1
        release.wait(30)

    background = Background(items(), ahead=2)
    assert next(background) == 1
    start = time.monotonic()
    background.close()
    assert time.monotonic() - start < JOIN_LIMIT_S + 2
    release.set()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bad", [0, 7])
def test_an_error_in_the_dataset_names_the_sample(workers: int, bad: int) -> None:
    loader = Loader(Slow(10, bad=bad), batch_size=2, shuffle=False, workers=workers)
    seen = []
    with pytest.raises(ValueError) as caught:
        seen.extend(batch.tolist() for batch in loader)
    told = str(caught.value) + " ".join(getattr(caught.value, "__notes__", []))
    assert "cannot decode" in told
    assert f"while reading sample {bad} of Slow" in told
    assert seen == [[n, n + 1] for n in range(0, bad - 1, 2)]
    gc.collect()
    start = time.monotonic()
    del caught
    gc.collect()
    assert not prefetching()
    assert not workers or time.monotonic() - start < 5 * workers, "torch by itself would wait 5 s for each worker"


def test_a_stop_iteration_in_the_dataset_does_not_end_the_loop_in_silence() -> None:
    with pytest.raises(RuntimeError, match="StopIteration while reading sample 3 of Slow"):
        list(Loader(Slow(5, bad=3, error=StopIteration), batch_size=1, shuffle=False))


def test_an_error_in_collate_names_the_samples() -> None:
    data = [torch.ones(n) for n in (1, 1, 2, 1)]
    with pytest.raises(RuntimeError) as caught:
        list(Loader(data, batch_size=2, shuffle=False))
    assert "while collating samples [2, 3]" in caught.value.__notes__


def test_the_number_of_threads_of_torch_is_left_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = []
        for _ in Loader(Slow(4), batch_size=1):
            newcomer = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            newcomer.start()
            newcomer.join(10)
            found.append(torch.get_num_threads())
        assert set(found) == {3}
    finally:
        torch.set_num_threads(before)


def test_workers_give_the_same_batches_and_leave_when_the_loop_is_left() -> None:
    alone = [batch.tolist() for batch in Loader(list(range(23)), batch_size=3, rank=1, size=2)]
    loader = Loader(list(range(23)), batch_size=3, rank=1, size=2, workers=2)
    assert [batch.tolist() for batch in loader] == alone
    loader.set_epoch(0)
    for _ in loader:
        break  # the fixture looks for processes that are left


ORPHAN = """
import os, sys, time
from torch.utils.data import Dataset
from paceline.data import Loader
class Data(Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index):
        time.sleep(0.05)
        return os.getpid()
for batch in Loader(Data(), batch_size=1, workers=1):
    print(int(batch[0]), flush=True)
    time.sleep(60)
"""


def test_a_worker_dies_with_its_member() -> None:
    member = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    assert member.stdout is not None
    worker = int(member.stdout.readline())
    time.sleep(0.5)  # now it has fetched ahead and waits for more work
    assert alive(worker)
    member.kill()
    member.wait(10)
    limit = time.monotonic() + 3  # torch by itself would need more than 5 s
    while time.monotonic() < limit and alive(worker):
        time.sleep(0.02)
    lives = alive(worker)
    if lives:
        os.kill(worker, signal.SIGKILL)
    member.stdout.close()
    assert not lives


HANGS_UP = """
import time
import torch
from multiprocessing import current_process, resource_sharer
from multiprocessing.connection import Client
from torch.utils.data import Dataset
from paceline.data import Loader
class Data(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        if index == 4:  # as a member does that is killed while it takes a batch over
            resource_sharer.DupFd(0)
            Client(resource_sharer._resource_sharer._address, authkey=current_process().authkey).close()
            time.sleep(0.3)
        return torch.zeros(3)
print(sum(len(batch) for batch in Loader(Data(), batch_size=2, shuffle=False, workers=1)))
"""


def test_a_worker_says_nothing_of_a_member_that_hangs_up() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS_UP], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("8\n", "")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
