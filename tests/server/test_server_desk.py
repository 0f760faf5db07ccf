"""Outsiders at a run's desks, over real sockets: what they read is of one version, and they can stop nobody."""

from __future__ import annotations

import contextlib
import json
import os
import random
import stat
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
from _house import SHAPES, TOKEN, House, house, push, training, until

import paceline
from paceline.core.errors import AuthError, ConfigError, Interrupted, PacelineError, TimedOut
from paceline.core.status import Status
from paceline.core.view import View
from paceline.data import Loader
from paceline.data.uploads import Uploads
from paceline.server import messages as m
from paceline.server.messages import UPLOADS
from paceline.server.outside import copies as copies_module
from paceline.server.outside import desk as desk_module
from paceline.server.outside import outsider as outside_module
from paceline.server.outside import visits as v
from paceline.server.outside.outsider import Outsider
from paceline.server.outside.samples import pack, unpack
from paceline.server.outside.taking import Taker
from paceline.server.placement import Tensor
from paceline.server.service import Service
from paceline.transport.mesh import visit
from paceline.transport.wires import Wires

UPLOAD = v.Upload([pack((torch.zeros(2), 1))])
TAKE = v.Take(course="0", number=0, batch_size=1, size=1)


@pytest.mark.parametrize("servers", [1, 3])
def test_weights_in_sync_are_of_one_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: int) -> None:
    monkeypatch.setattr(copies_module, "_PAUSE", 0.0)  # on a busy machine a copy may take long
    with house(tmp_path, servers=servers) as here:
        tables = here.open()
        with Outsider(here.address, TOKEN, 20.0) as outsider, training(tables):
            seen: list[int] = []
            deadline = time.monotonic() + 20
            while len(seen) < 3 and time.monotonic() < deadline:
                weights = outsider.weights(newer_than=seen[-1] if seen else -1)
                if weights is None:
                    time.sleep(0.001)
                    continue
                assert not weights.mixed
                assert len(set(weights.versions)) == 1
                assert [tuple(weights[f"p{i}"].shape) for i in range(4)] == SHAPES
                # Every step adds one: any other value would be of another version, or half of one.
                assert all((tensor == weights.version).all() for tensor in weights.values())
                seen.append(weights.version)
        assert seen == sorted(set(seen))
        assert len(seen) == 3


def test_weights_where_nobody_waits_say_that_they_are_mixed(tmp_path: Path) -> None:
    with house(tmp_path, workers=2, servers=2, gate="async") as here:
        tables = here.open(5.0)
        with Outsider(here.address, TOKEN, 20.0) as outsider:
            still = outsider.weights()
            assert still is not None
            assert (still.version, still.versions, still.mixed) == (0, (0, 0), False)
            assert all((tensor == 5.0).all() for tensor in still.values())
            push(tables[0])
            after = outsider.weights(newer_than=0)
            assert after is not None
            assert after.versions == outsider.versions() == (1, 1)
            assert outsider.weights(newer_than=1) is None
            push_half(here.services[0])
            half = outsider.weights()
            assert half is not None
            assert half.mixed
            assert half.versions == (1, 1)


def push_half(service: Service) -> None:
    """A worker that is nowhere to be found has pushed the first of its chunks."""
    shard, chunk = service.tables[0].shard, service.tables[0].chunks[0]

    def half() -> None:
        step = shard.join(9) + 1
        shard.begin(9, m.Push(table=0, view=1, step=step, read=1, weight=1.0, groups=[{"lr": 1.0}]))
        shard.part(9, 0, torch.ones(chunk.numel))

    service.still(half)


def test_weights_before_there_are_any(tmp_path: Path) -> None:
    with house(tmp_path) as here, Outsider(here.address, TOKEN, 0.3) as outsider:
        with pytest.raises(TimedOut, match=r"has not called run\.optimizer yet"):
            outsider.weights()
        client = here.clients[0]
        rule = m.Rule(optimizer="SGD", groups=[{"lr": 1.0}], gate="sync")
        client.open([(Tensor("p", (3,), "float32", 0), torch.ones(3))], rule)  # opened, but not stored yet
        assert here.services[0].tables
        with pytest.raises(TimedOut):
            outsider.weights()


def test_a_reader_that_reads_nothing_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "_STUCK_S", 0.5)
    with house(tmp_path) as here:
        table = here.open()[0]
        stuck = []
        for _ in range(copies_module._AT_ONCE):  # they hold all copies that there may be
            push(table)
            channel = visit(here.address, TOKEN, 5.0)
            for message in (v.Visit(), v.Pin()):
                channel.send(v.encode(message))
                v.decode_from_desk(channel.recv(5.0))
            stuck.append(channel)
        for _ in range(20):
            push(table)
        with Outsider(here.address, TOKEN, 10.0) as outsider:  # waits until those have lost theirs
            weights = outsider.weights()
            assert weights is not None
            assert weights.version == 22
        for channel in stuck:
            channel.close()


def test_copies_take_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "_PAUSE", 1e6)  # the next copy is never due
    with house(tmp_path) as here, Outsider(here.address, TOKEN, 0.3) as outsider:
        table = here.open()[0]
        first = outsider.weights()
        assert first is not None
        del first
        push(table)
        with pytest.raises(TimedOut):
            outsider.weights()


def test_only_so_many_outsiders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "MAX_VISITORS", 2)
    with house(tmp_path) as here:
        here.open()
        seated = [Outsider(here.address, TOKEN, 5.0) for _ in range(2)]
        with pytest.raises(ConfigError, match="all 2 places for outsiders are taken"):
            Outsider(here.address, TOKEN, 5.0)
        monkeypatch.setattr(desk_module, "_IDLE_S", 0.0)  # now one that says nothing makes room
        with Outsider(here.address, TOKEN, 5.0) as third:
            assert third.versions() == (0,)
        for outsider in seated:
            outsider.close()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([b"\xff\x00 no message"], "cannot be read"),
        ([v.encode(v.Look())], "before Visit"),
        ([v.encode(v.Visit(protocol=7))], "speaks protocol 7, the run 3"),
        ([v.encode(v.Visit()), v.encode(v.Read())], "without a copy"),
        ([v.encode(v.Visit()), v.encode(v.Visit())], "out of turn"),
        ([v.encode(v.Visit()), v.encode(TAKE)], "for the members of the run"),
        ([v.encode(v.Visit(rank=0)), v.encode(TAKE), v.encode(v.Upload([b"\xc1"]))], "a sample cannot be read"),
        ([v.encode(v.Visit()), v.encode(v.Pinned(version=1))], "cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, said: list[bytes], message: str) -> None:
    with house(tmp_path) as here:
        here.open()
        with visit(here.address, TOKEN, 5.0) as channel:
            for each in said:
                channel.send(each)
            answer = v.decode_from_desk(channel.recv(5.0))
            while not isinstance(answer, v.Refused):
                answer = v.decode_from_desk(channel.recv(5.0))
            assert message in answer.message
        with Outsider(here.address, TOKEN, 5.0) as outsider:
            assert outsider.versions() == (0,)


def test_fuzzed_frames_end_one_connection_and_nothing_else(tmp_path: Path) -> None:
    chance = random.Random(4)
    whole = [v.encode(each) for each in (v.Look(), v.Pin(limit_s=0.01), v.Watch(), UPLOAD, v.Finish(), TAKE)]
    with house(tmp_path) as here:
        tables = here.open()
        with training(tables) as counts, Outsider(here.address, TOKEN, 10.0) as outsider:
            for _ in range(60):
                with contextlib.suppress(PacelineError), visit(here.address, TOKEN, 5.0) as channel:
                    if chance.random() < 0.8:
                        channel.send(v.encode(v.Visit()))
                    frame = bytearray(chance.choice(whole))
                    for _ in range(chance.randint(0, 3)):
                        frame[chance.randrange(len(frame))] = chance.randrange(256)
                    if chance.random() < 0.5:
                        channel.send(frame[: chance.randint(0, len(frame))])
                    else:  # not even a frame
                        channel.send_raw(memoryview(chance.randbytes(chance.randint(1, 40))))
                    channel.recv(0.02)
            before = counts[0]
            until(lambda: counts[0] > before)
            assert outsider.weights() is not None
        assert not here.services[0].fault


def test_an_upload_that_nobody_wants_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with house(tmp_path) as here, Outsider(here.address, TOKEN, 5.0) as outsider:
        with pytest.raises(TimedOut, match="its script has not asked for samples"):  # too soon for a warning
            outsider.upload([1, 2, 3], wait_s=0.1)
        monkeypatch.setattr(outside_module, "_PATIENCE_S", 0.0)
        with pytest.warns(UserWarning, match=r"upload\(\) to run .* waits: its script has not asked") as told:
            with pytest.raises(TimedOut):
                outsider.upload([1, 2, 3], wait_s=1.5)
        assert len(told) == 1
        with pytest.raises(ConfigError, match="longer than"):
            outsider.upload([torch.zeros(5 << 20)])


def test_loaders_share_out_what_is_uploaded_and_a_lost_member_gives_it_back(tmp_path: Path) -> None:
    with house(tmp_path) as here, contextlib.ExitStack() as stack:
        workers = [stack.enter_context(contextlib.closing(Wires(TOKEN))) for _ in range(2)]
        members = (here.wires[0].view.members[0], *(w.describe(i + 1, f"w{i}") for i, w in enumerate(workers)))
        seen: list[list[int]] = [[], []]
        rested = []

        def work(i: int) -> None:
            wires = workers[i]
            wires.join(View(number=1, members=members), i + 1, limit_s=20, status=Status(None))
            queue = Taker(wires, 0, size=1, like=(torch.zeros(2), 0), rest=lambda: rested.append(i))
            for _, numbers in Loader(Uploads(queue), batch_size=3, rank=i, size=2):
                if i == 1 and len(seen[1]) == 6:
                    wires.close()  # as the end of its process would: these three are not trained
                    return
                seen[i] += numbers.tolist()

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(2)]
        for thread in threads:
            thread.start()
        with Outsider(here.address, TOKEN, 5.0) as outsider:
            samples = [(torch.zeros(2), i) for i in range(40)]
            assert outsider.upload(samples[:20]) == 20
            with pytest.raises(ConfigError, match=r"like \(float32\[2\], int\), and this one is \(float32\[3\], int\)"):
                outsider.upload([(torch.zeros(3), 1)])
            until(lambda: rested)  # all that came is trained, and nobody is to wait for these workers
            assert outsider.upload(samples[20:]) == 20
            outsider.finish_uploads()
            with pytest.raises(ConfigError, match="takes no more samples"):
                outsider.upload(samples)
        for thread in threads:
            thread.join(20)
        assert sorted(seen[0] + seen[1]) == list(range(40))


@pytest.mark.parametrize("first", ["desk", "shards"])
def test_a_lost_worker_gives_back_what_its_last_push_was_not_made_of(tmp_path: Path, first: str) -> None:
    """Its connection to the desk may end before its last push is taken, which settles one of two batches."""
    with house(tmp_path, gate="async") as here:
        service, desk = here.services[0], here.desks[0]
        service.settle, service.left = desk.settle, desk.left
        (table,) = here.open()
        worker, other = (visit(here.address, TOKEN, 5.0) for _ in range(2))
        take = msgspec.structs.replace(TAKE, course="7/0")
        for channel, rank in ((worker, 0), (other, 1)):
            channel.send(v.encode(v.Visit(rank=rank)))
            channel.recv(10)
        worker.send(v.encode(take))
        assert isinstance(v.decode_from_desk(worker.recv(10)), v.Soon)
        with Outsider(here.address, TOKEN, 5.0) as outsider:
            outsider.upload([torch.tensor(i) for i in range(2)])
            outsider.finish_uploads()
        for number in range(2):
            worker.send(v.encode(msgspec.structs.replace(take, number=number)))
            assert isinstance(v.decode_from_desk(worker.recv(10)), v.Given)
        if first == "desk":
            worker.close()
            until(lambda: 0 in desk._going)
            other.send(v.encode(take))
            assert isinstance(v.decode_from_desk(other.recv(10)), v.Soon)  # nothing is given back yet
        gradients = [torch.ones(slot.parameter.shape) for slot in table.slots]
        table.push(gradients, [{"lr": 1.0}], leases={UPLOADS + "7/0": [0]})
        here.clients[0].close(said=False)
        worker.close()
        found = None
        while not isinstance(found, v.Given):
            other.send(v.encode(take))
            found = v.decode_from_desk(other.recv(10))
        assert [int(unpack(sample)) for sample in found.samples] == [1]
        other.close()


def test_a_note_lets_the_owner_in_and_a_wrong_token_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / "digits"
    directory.mkdir(parents=True)
    old = os.umask(0)
    try:
        made = House(directory, 1, 2, "async")
    finally:
        os.umask(old)
    with contextlib.closing(made):
        made.open()
        assert stat.S_IMODE((directory / "desk.json").stat().st_mode) == 0o600
        for where in ("digits", str(directory)):
            with paceline.connect(where) as outsider:
                assert (outsider.name, outsider.strategy, outsider.versions()) == ("digits", "async", (0, 0))
        last = made.wires[0].view.members[1].address
        with paceline.connect(last, token=TOKEN) as outsider:  # any desk tells the others
            assert outsider.versions() == (0, 0)
        for where in (made.address, "digits"):
            with pytest.raises(AuthError, match=r"token= is not that of the run at .*: take the one in its desk.json"):
                paceline.connect(where, token="another")
        open_ = paceline.connect("digits")
        with pytest.raises(ConfigError, match="needs token="):
            paceline.connect(made.address)
        with pytest.raises(ConfigError, match=r"did you mean 'digits'|no such run here"):
            paceline.connect("digit")
        note = (directory / "desk.json").read_text()
    assert not (directory / "desk.json").exists()
    for ask in (open_.versions, open_.weights, open_.versions):
        with pytest.raises(Interrupted, match="run 'digits' is over, or cannot be reached any more"):
            ask()
    Status(directory / "status" / "rank-0").set("finished")
    with pytest.raises(ConfigError, match=r"run 'digits' is over \(finished\)"):
        paceline.connect("digits")
    with pytest.raises(Interrupted, match="nobody listens"):
        paceline.connect(json.loads(note)["addresses"][0], token=TOKEN)
    (directory / "desk.json").write_text(note)  # as of a run that was killed
    with pytest.raises(Interrupted, match="run 'digits' is over: it was killed"):
        paceline.connect("digits")


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_watching_follows_the_files_and_ends_with_the_run(tmp_path: Path, long: bool) -> None:
    events = tmp_path / "events" / "rank-0.jsonl"
    events.parent.mkdir()
    now = time.time()
    old = {"kind": "end", "time": now - 1000, "rank": 0, "outcome": "failed"}  # of an earlier start
    start = {"kind": "start", "time": now, "rank": 0, "epochs": 4, "resumed_epoch": None}
    steps = [
        {
            "kind": "step",
            "time": now + i,
            "rank": 0,
            "epoch": 1,
            "step": 5 * i,
            "samples": 80,
            "scalars": {"loss": "nan"},
        }
        for i in range(3)
    ]
    steps[-1]["scalars"] = {"loss": 0.5, "accuracy": 0.25}
    events.write_text(json.dumps(old) + "\n")
    Status(tmp_path / "status" / "rank-0").set("training")
    with house(tmp_path) as here:
        noise = [{"kind": "told", "line": "x" * 1000}] * 400 if long else []
        with events.open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in (start, *noise, *steps))
            file.write('{"kind": "st')
        push(here.open()[0])
        with Outsider(here.address, TOKEN, 5.0) as outsider:
            told = outsider.watch(every_s=0.0)
            first = next(told)
            assert (first.state, first.epoch, first.epochs, first.step, first.loss) == ("running", 1, 4, 10, 0.5)
            assert first.samples_per_s == pytest.approx(80.0, rel=0.01)
            assert (first.version, first.applied, first.dropped) == (1, 1, 0)
            assert [doing.what for doing in first.members] == ["training"]
            with events.open("a") as file:
                file.write('ep"}\n' + json.dumps({"kind": "end", "time": now + 9, "outcome": "finished"}) + "\n")
            ending = threading.Thread(target=here.desks[0].close, daemon=True)
            ending.start()
            assert [each.state for each in told][-1] == "finished"
            ending.join(10)
            with pytest.raises(PacelineError):
                outsider.weights()
