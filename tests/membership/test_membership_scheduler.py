"""The scheduler over real sockets: found again after a kill, deaf to garbage, and it accuses nobody wrongly."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from paceline.core.errors import AuthError, ConfigError, Interrupted, TimedOut
from paceline.core.view import Member
from paceline.membership.agent_line import look, scale
from paceline.membership.messages import MAX_MESSAGE_BYTES, Refused
from paceline.membership.orders import Arrive, Beat, Broken, Host, Over, Ready, Start, Stop, ToMember, decode, encode
from paceline.membership.scheduler import Scheduler, main
from paceline.transport.channel import connect
from tests.membership._scheduling import (
    SILENCE_S,
    TOKEN,
    Program,
    agent,
    closing,
    ids,
    line,
    lines,
    me,
    scheduler,
    see,
    until,
)


def test_members_arrive_form_and_finish(tmp_path):
    with scheduler(tmp_path, target=3, seed=7) as there:
        members = lines(there.address, 3)
        with closing(*members):
            views = [member.newer(0, 5.0) for member in members]
            assert {ids(v.view) == [0, 1, 2] for v in views} == {True}
            assert members[0].standing.settings.seed == 7
            members[0].formed(1, 0)
            until(lambda: [m.state for m in see(there.address).members] == ["in"] * 3)
            for member in members:
                member.leave("finished")
        assert there.over == ""
        with pytest.raises(Interrupted, match="the run has finished"):
            line(there.address, 0)


def test_a_killed_scheduler_comes_back_and_nobody_minds(tmp_path):
    with Program(tmp_path, target=3) as there:
        members, host = lines(there.address, 3), agent(there.address, running=())
        with closing(*members, host):
            for member in members:
                assert member.newer(0, 5.0).term == 1
            members[0].formed(1, 0)
            until(lambda: see(there.address).members[0].state == "in")
            address = there.address
            there.kill()
            time.sleep(SILENCE_S / 2)
            there.start()
            assert (there.address, there.term) == (address, 2)
            until(lambda: all(member.standing.term == 2 for member in members))
            time.sleep(2 * SILENCE_S)
            picture = see(address)
            assert (picture.term, picture.view.number) == (2, 1)
            assert all(member.newest.view.number == 1 for member in members)
            members[2].close()
            assert ids(members[0].newer(1, 5.0).view) == [0, 1]


@pytest.mark.slow
def test_who_does_not_come_back_to_the_new_scheduler_is_lost(tmp_path):
    with Program(tmp_path) as there:
        members = lines(there.address, 2)
        with closing(*members):
            members[0].newer(0, 5.0)
            there.kill()
            members[1].close()
            there.start()
            assert ids(members[0].newer(1, 5.0).view) == [0]


def test_a_line_that_is_cut_for_a_moment_makes_no_view_for_longer_it_does(tmp_path):
    with scheduler(tmp_path) as there:
        members = lines(there.address, 2)
        with closing(*members):
            members[0].newer(0, 5.0)
            for _ in range(3):
                members[1]._tie.cut()
                time.sleep(0.1)
            time.sleep(1.5 * SILENCE_S)
            assert see(there.address).view.number == 1
            members[1].close()
            assert ids(members[0].newer(1, 5.0).view) == [0]
            back = line(there.address, 1)  # the same process, which knows of no view
            with closing(back):
                back.ready(1)
                members[0].formed(2, 5)
                planned = back.newer(2, 5.0)
                assert (planned.planned, ids(planned.view)) == (True, [0, 1])


def test_an_agent_starts_members_and_says_when_they_end(tmp_path):
    with scheduler(tmp_path) as there, agent(there.address) as host:
        assert [host.orders.get(timeout=5) for _ in range(2)] == [Start(1, 0), Start(1, 1)]
        for id in (0, 1):
            host.started(id, 1000 + id)
        members = lines(there.address, 2)
        with closing(*members):
            members[0].newer(0, 5.0)
            began = time.monotonic()
            host.ended(1, -9)
            assert ids(members[0].newer(1, 5.0).view) == [0]
            assert time.monotonic() - began < SILENCE_S  # known before any silence
            assert host.orders.get(timeout=5) == Start(1, 1)
            seen = see(there.address).members[1]
            assert (seen.host, seen.state, seen.replaced, seen.why) == ("a", "starting", 1, "was killed by signal 9")


def test_a_silent_agents_members_are_lost_and_found(tmp_path):
    with scheduler(tmp_path, target=4) as there, agent(there.address, "a", 2) as one:
        two = agent(there.address, "b", 2)
        members = lines(there.address, 4)
        with closing(*members):
            members[0].newer(0, 5.0)
            members[0].formed(1, 0)
            two.close()
            view = members[0].newer(1, 5.0).view
            assert ids(view) == [0, 1]
            assert ids(members[2].newer(1, 5.0).view) == [0, 1]  # it is told
            members[0].formed(2, 1)
            for id in (2, 3):
                members[id].ready(2)
            time.sleep(2 * SILENCE_S)  # nobody is taken in whose agent is silent
            assert see(there.address).view.number == 2
            with agent(there.address, "b", 2, running=(2, 3)):
                assert ids(members[0].newer(2, 5.0).view) in ([0, 1, 2, 3], [0, 1, 3, 2])
            assert one.orders.qsize() == 2


def test_a_paused_process_is_lost_and_rejoins(tmp_path):
    with scheduler(tmp_path) as there, agent(there.address) as host:
        members = lines(there.address, 2)
        with closing(*members):
            members[0].newer(0, 5.0)
            host.beat([1])
            assert ids(members[0].newer(1, 5.0).view) == [0]
            members[0].formed(2, 3)
            host.beat([])
            assert ids(members[1].newer(1, 5.0).view) == [0]
            members[1].ready(2)
            assert ids(members[0].newer(2, 5.0).view) == [0, 1]


def test_scale_and_look(tmp_path):
    with scheduler(tmp_path) as there, agent(there.address) as host:
        for _ in range(2):
            host.orders.get(timeout=5)
        assert "members 2, 3 will be started" in scale(there.address, TOKEN, 4)
        assert [host.orders.get(timeout=5).id for _ in range(2)] == [2, 3]
        with pytest.raises(ConfigError, match="must be between 1 and 4"):
            scale(there.address, TOKEN, 9)
        assert "will leave" in scale(there.address, TOKEN, 2)
        assert [host.orders.get(timeout=5) for _ in range(2)] == [Stop(1, 2), Stop(1, 3)]


def test_too_few_are_told_and_so_is_the_agent(tmp_path):
    with scheduler(tmp_path, least=2, replacements=0) as there, agent(there.address) as host:
        members = lines(there.address, 2)
        with closing(*members):
            members[0].newer(0, 5.0)
            host.ended(1, 1)
            with pytest.raises(Interrupted, match="fewer than 2 members can go on: member 1 on a ended with code 1"):
                while True:
                    members[0].newer(2, 5.0)
        order = host.orders.get(timeout=5)
        while not isinstance(order, Over):  # its Starts, unless members came before it
            order = host.orders.get(timeout=5)
        assert "member 1" in order.reason


def test_a_stranger_gets_nothing(tmp_path):
    with scheduler(tmp_path) as there:
        with pytest.raises(AuthError):
            look(there.address, "another token")
        assert see(there.address).term == 1


def test_malformed_words_hurt_nobody(tmp_path):
    rng = random.Random(3)
    words = [encode(me(0)), encode(Host(name="x", slots=1)), encode(Ready(1)), encode(Beat())]
    with scheduler(tmp_path, silence_s=2.0) as there:
        members = lines(there.address, 2)
        with closing(*members):
            members[0].newer(0, 5.0)
            for number in range(60):
                data = bytearray(rng.choice(words))
                for _ in range(rng.randrange(1, 4)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
                channel = connect(there.address, TOKEN, 5.0)
                channel.send(bytes(data) if number % 3 else rng.randbytes(rng.randrange(100)))
                channel.close()
            channel = connect(there.address, TOKEN, 5.0)
            channel.send(b"\xc1")
            answer = decode(channel.recv(5.0), ToMember)
            assert isinstance(answer, Refused)
            assert "malformed" in answer.message
            channel.close()
            channel = connect(there.address, TOKEN, 5.0)
            channel.send_raw(memoryview((MAX_MESSAGE_BYTES + 1).to_bytes(8, "little")))  # a frame that is too long
            with pytest.raises(Interrupted):
                channel.recv(5.0)
            channel.close()
            newer = msgspec.structs.replace(me(3), protocol=99)
            channel = connect(there.address, TOKEN, 5.0)
            channel.send(encode(newer))
            assert "protocol 99" in decode(channel.recv(5.0), ToMember).message
            channel.close()
            assert see(there.address).view.size == 2


def test_garbage_on_a_members_line_costs_that_line_only(tmp_path):
    with scheduler(tmp_path) as there:
        members = lines(there.address, 2)
        with closing(*members):
            members[0].newer(0, 5.0)
            members[1]._tie.send(b"\xc1\xc1")
            members[1]._tie.send(encode(Host(name="x", slots=1)))
            time.sleep(1.5 * SILENCE_S)
            picture = see(there.address)
            assert (picture.view.number, picture.view.size) == (1, 2)


def test_a_scheduler_that_cannot_write_goes_on_and_says_so(tmp_path, capsys, monkeypatch):
    with scheduler(tmp_path) as there:

        def full(parts):
            raise sqlite3.OperationalError("database or disk is full")

        save = there._journal.save
        monkeypatch.setattr(there._journal, "save", full)
        members = lines(there.address, 2)
        with closing(*members):
            assert ids(members[0].newer(0, 5.0).view) == [0, 1]
            assert "cannot write its journal: database or disk is full" in capsys.readouterr().err
            monkeypatch.setattr(there._journal, "save", save)
            until(lambda: not there._journal_failed)
    with scheduler(tmp_path) as there:
        assert see(there.address).view.number == 1


def test_one_who_reads_nothing_delays_nobody(tmp_path):
    large = Member(rank=2, host="h", pid=1002, address="x" * 200_000)  # fills what a socket holds, view by view
    with scheduler(tmp_path, target=3, silence_s=60.0) as there:
        deaf = connect(there.address, TOKEN, 5.0)
        deaf.send(encode(Arrive(id=2, member=large)))
        members = lines(there.address, 2)
        with closing(*members, deaf):
            assert members[0].newer(0, 5.0).view.size == 3
            for number in range(1, 81):
                deaf.send(encode(Broken(number, -1)))
                for member in members:
                    member.broken(number, -1, "a passing fault")
                members[0].formed(members[0].newer(number, 5.0).view.number, number)
            assert members[1].newer(80, 5.0).view.size == 3


def test_fifty_members_come_beat_and_leave_without_suspicion(tmp_path):
    count = 50
    with scheduler(tmp_path, target=count, most=count, silence_s=2.0) as there:
        hosts = [agent(there.address, f"host-{h}", 10) for h in range(5)]
        members = [None] * count

        def come(id):
            members[id] = line(there.address, id, limit_s=20.0)

        threads = [threading.Thread(target=come, args=(id,)) for id in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with closing(*members, *hosts):
            assert members[0].newer(0, 20.0).view.size == count
            members[0].formed(1, 0)
            time.sleep(2.5)
            picture = see(there.address)
            assert picture.view.number == 1
            assert {m.state for m in picture.members} == {"in"}
            for member in members:
                member.leave("finished")
        assert there.over == ""


def test_the_program_says_what_is_wrong_and_ends_when_told(tmp_path, capsys):
    for told in ("no json", '{"journal": "x"}', '{"journal": "x", "least": 0, "target": 1, "most": 1}'):
        (tmp_path / "told").write_text(told)
        assert main([str(tmp_path / "told")]) == 2
        assert capsys.readouterr().err.startswith("paceline: the scheduler cannot start: ")
    with Program(tmp_path) as there:
        there.process.terminate()
        assert there.process.wait(10) == 0


def test_the_program_imports_no_torch():
    program = "import sys, paceline.membership.scheduler, paceline.membership.agent_line; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert said.stdout.strip() == "False"


def test_a_taken_port_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.membership.scheduler._PORT_LIMIT_S", 0.2)
    with scheduler(tmp_path) as there:
        rules = there._roster._books.rules
        journal = tmp_path / "other.sqlite"
        port = there.address.rpartition(":")[2]
        with sqlite3.connect(journal) as db:
            db.execute("CREATE TABLE journal (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
            db.executemany("INSERT INTO journal VALUES (?, ?)", [("port", port), *there._roster.dump().items()])
        db.close()
        with pytest.raises(ConfigError, match=f"port={port}"):
            Scheduler(rules, TOKEN, journal)


@pytest.mark.slow
def test_a_scheduler_killed_again_and_again_loses_no_word(tmp_path):
    """Members that break and form all the time, under a scheduler that dies every second: numbers only rise."""
    with Program(tmp_path, target=3, silence_s=2.0) as there:
        members = lines(there.address, 3)
        numbers: list[list[int]] = [[] for _ in members]
        stop = threading.Event()

        def live(id):
            held = 0
            while not stop.is_set():
                try:
                    held = members[id].newer(held, 1.0).view.number
                except (TimedOut, Interrupted):
                    continue
                numbers[id].append(held)
                members[id].formed(held, held)
                time.sleep(0.02)
                members[id].broken(held, -1, "test")

        threads = [threading.Thread(target=live, args=(id,)) for id in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(8):
            time.sleep(1.0)
            there.kill()
            there.start()
        before = max(map(max, numbers))
        time.sleep(3.0)
        stop.set()
        for thread in threads:
            thread.join()
        with closing(*members):
            assert all(said == sorted(set(said)) for said in numbers)
            assert max(map(max, numbers)) > before  # it goes on
            assert {m.state for m in see(there.address).members} == {"in"}
