"""Guests of a run as processes: killed in a call, away with the run, cut off, on a slow link with little memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.server.outside.calls import TOKEN
from paceline.testing.hosts import Hosts
from paceline.testing.limits import Limits
from tests.faults._guests import free_port, party

LONG = 1500  # epochs: until it is stopped
NONE = ["--checkpoint-keep", "0"]


@pytest.mark.slow
def test_two_members_and_a_guest(tmp_path: Path) -> None:
    with party(tmp_path) as made:
        port = free_port()
        words = f"diloco(every=5, guests=guests(2, at='127.0.0.1:{port}'))"
        run = made.run("run", words, n=2, epochs=LONG, more=NONE)
        made.until(lambda: "guests are let in" in made.said("run"), "the run's door")
        at = str(tmp_path / "runs" / "run" / "guests.json")
        assert (os.stat(at).st_mode & 0o777) == 0o600
        guest = made.run("guest", f"guest('{at}', every=5, last_s=5)", n=1, epochs=6)
        stranger = made.run("stranger", f"guest('127.0.0.1:{port}')", n=1, epochs=1, **{TOKEN: "another"})
        assert made.ended(stranger) != 0
        assert "the token is not that of the run" in made.said("stranger")
        assert "PACELINE_TOKEN" not in made.said("stranger")  # which is of members
        assert made.ended(guest) == 0, made.said("guest")
        made.stop("run")
        assert made.ended(run) == 0, made.said("run")
        weights = [line.split("weights ")[1] for line in made.said("run").splitlines() if "weights " in line]
        assert len(weights) == 2
        assert len(set(weights)) == 1
        assert weights[0].endswith("True")
        told, called = made.summary("run")["apart"], made.summary("guest")["called"]
        assert told["guests"] == 1
        assert 0 < told["guest_samples"] <= called["samples"]
        assert called["brought"] >= 2
        assert "1 guest brought" in made.said("run")
        assert "calls at the run" in made.said("guest")


@pytest.mark.slow
def test_a_guest_is_killed_in_a_call_and_then_the_run_with_all_of_its_members(tmp_path: Path) -> None:
    """There is one place: a guest that is gone must not keep it."""
    with party(tmp_path) as made:
        at = tmp_path / "runs" / "run" / "guests.json"
        words = f"local(every=40, guests=guests(1, at='127.0.0.1:{free_port()}', oldest=1000))"
        more = ["--checkpoint-every-s", "1"]
        run = made.run("run", words, n=2, epochs=LONG, more=more)
        made.until(lambda: "guests are let in" in made.said("run"), "the run's door")
        asked = f"guest('{at}', every=5, wait_s=60)"
        guest = made.run("guest", asked, n=1, epochs=LONG, more=more)
        made.until(lambda: made.steps("guest") > 20, "the guest's first calls")

        def calls() -> bool:
            found = made.status("guest")
            return found is not None and found.what == "calling the run"

        made.until(calls, "a call")
        kill(guest)
        made.ended(guest)
        before = made.steps("run")
        made.until(lambda: made.steps("run") > before + 40, "the members' steps without the guest")
        again = made.run("guest", asked, n=1, epochs=LONG, more=more)
        before = made.steps("guest")
        made.until(lambda: made.steps("guest") > before + 20, "the guest that was started again")

        note = json.loads(at.read_text())
        kill(run)
        made.ended(run)
        made.until(lambda: "is not reached" in made.said("guest"), "the guest to miss the run")
        resumed = made.run("run", words, n=2, epochs=LONG, more=more)
        made.until(lambda: "is reached again" in made.said("guest"), "the guest to find the run")
        assert json.loads(at.read_text()) == note
        before = made.steps("guest")
        made.until(lambda: made.steps("guest") > before + 20, "the guest's steps with the run that was resumed")
        made.stop("guest")
        made.stop("run")
        assert again.poll() is None
        assert resumed.poll() is None


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(Hosts.missing() or Limits.missing()), reason=Hosts.missing() or Limits.missing())
def test_a_phone(tmp_path: Path) -> None:
    """One thread, a quarter of a core, little memory, 1 Mbit/s, no port, and offline for a while: it brings what it
    learns, and the members take as many steps while it calls as while it does not."""
    with (
        Limits(memory_bytes=_MEMORY_BYTES, cores=0.25) as limits,
        Hosts(2, rate=["1gbit", "1mbit"]) as hosts,
        party(tmp_path, step_s=0.02, width=12_000) as made,
    ):

        def on(host: int, before: Sequence[str] = ()) -> None:
            made.start = lambda argv, **more: hosts.popen(host, argv, before=before, **more)

        on(0)
        at = f"{hosts.ips[0]}:7000"
        run = made.run("run", f"diloco(every=20, guests=guests(4, at='{at}', oldest=100))", n=2, epochs=LONG, more=NONE)
        made.until(lambda: "guests are let in" in made.said("run"), "the run's door")
        token = json.loads((tmp_path / "runs" / "run" / "guests.json").read_text())["token"]
        on(1, before=limits.words)
        words = f"guest('{at}', every=20, bytes_per_hour=40e6, last_s=60)"
        guest = made.run("guest", words, n=1, epochs=LONG, more=NONE, **{TOKEN: token})
        looks = {True: [0, 0], False: [0, 0]}  # while it calls, and while it does not: looks, steps of the members

        def watch() -> None:
            """As often as `until` looks."""
            found, steps = made.status("guest"), made.steps("run")
            if found and found.step:
                seen = looks[found.what == "calling the run"]
                seen[0] += 1
                seen[1] += steps - watched[0]
            watched[0] = steps

        def trained(steps: int) -> bool:
            assert limits.killed == 0, f"{_MEMORY_BYTES} bytes are not enough\n{made.said('guest')}"
            watch()
            return made.steps("guest") >= steps

        watched = [made.steps("run")]
        made.until(lambda: trained(70), "the guest's first calls", 240)
        listening = subprocess.run(
            ["ip", "netns", "exec", hosts.name(1), "ss", "-Hltun"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        open_to_others = [line for line in listening if not line.split()[4].startswith(("127.", "[::1]"))]
        assert open_to_others == []
        hosts.cut(1)
        made.until(lambda: "is not reached" in made.said("guest"), "the guest to miss the run", 240)
        steps = made.steps("guest")
        made.until(lambda: made.steps("guest") > steps + 40, "steps without a link")
        hosts.restore(1)
        made.until(lambda: "is reached again" in made.said("guest"), "the guest to find the run", 240)
        watched[:] = [made.steps("run")]
        steps = made.steps("guest")
        made.until(lambda: trained(steps + 60), "calls after that", 240)
        made.stop("guest")
        assert made.ended(guest, 200) == 0, made.said("guest")
        made.stop("run")
        assert made.ended(run, 200) == 0, made.said("run")
        called, told = made.summary("guest")["called"], made.summary("run")["apart"]
        assert called["brought"] >= 4
        assert told["guests"] == 1
        assert told["guest_rounds"] >= 3
        assert told["refused"] == {}
        (calling, steps_then), (alone, steps_else) = looks[True], looks[False]
        assert calling > 50  # it did call for long enough to compare
        assert steps_then / calling > 0.5 * steps_else / alone


_MEMORY_BYTES = 350_000_000  # 330 are enough: 290 of them in the member, most of it torch's, 20 in the launcher


def kill(program: subprocess.Popen[bytes]) -> None:
    """With all that it has started, at once."""
    below = [program.pid]
    for pid in below:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            below += [int(child) for child in task.read_text().split()]
    for pid in reversed(below):
        os.kill(pid, signal.SIGKILL)
