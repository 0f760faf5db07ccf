"""`--on ssh` between hosts that are apart: namespaces with links of their own, and a disk that is not shared."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch import preflight
from paceline.testing.hosts import Hosts
from paceline.testing.sshd import Sshd
from tests.launch._scripts import LIMIT_S, SOURCES
from tests.launch._ssh import DIGITS, HELLO, Place, accuracy, servers_of, until


class Apart(Place):
    """Commands start on the first of the hosts; a and b are the others."""

    def __init__(self, folder: Path, servers: Sshd, hosts: Hosts) -> None:
        super().__init__(folder, servers)
        self.hosts = hosts

    def popen(self, *words: str) -> subprocess.Popen[str]:
        with (self.folder / "out").open("w") as out:
            argv = [sys.executable, "-m", "paceline", *words]
            env = {"PYTHONPATH": SOURCES}
            return self.hosts.popen(0, argv, env, cwd=self.folder, stdout=out, stderr=out, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def apart(tmp_path: Path, *rates: str) -> Iterator[Apart]:
    if reason := Hosts.missing():
        pytest.skip(reason)
    with Hosts(3, rate=list(rates) or None) as hosts:
        names = {"a": 1, "b": 2}
        inside = {name: ("ip", "netns", "exec", hosts.name(i)) for name, i in names.items()}
        addresses = {name: hosts.ips[i] for name, i in names.items()}
        with servers_of(tmp_path, inside=inside, addresses=addresses) as servers:
            yield Apart(tmp_path / "work", servers, hosts)


@pytest.mark.slow
def test_digits_between_hosts(tmp_path: Path) -> None:
    with apart(tmp_path, "1gbit", "1gbit", "1gbit") as place:
        place.script(DIGITS.read_text())
        code = place.popen(*place.words("-n", "2", "--hosts", "a:1,b:1", "--threads", "1"), "train.py").wait(LIMIT_S)
    assert code == 0, place.output
    assert "reached at 10.77.0.1 (eth0)" in place.output
    assert accuracy(place.output) >= 97.0


@pytest.mark.slow
def test_digits_go_on_when_a_host_is_killed(tmp_path: Path) -> None:
    with apart(tmp_path) as place:
        place.script(DIGITS.read_text())
        options = ("-n", "1:2", "--hosts", "a:1,b:1", "--silence-s", "1", "--threads", "1")
        process = place.popen(*place.words(*options), "train.py", "--epochs", "25")
        until(lambda: "epoch 2/" in place.output, lambda: place.output)
        place.hosts.kill(2)
        code = process.wait(LIMIT_S)
    assert code == 0, place.output
    assert "host b is not heard any more" in place.output
    assert accuracy(place.output) >= 97.0


@pytest.mark.slow
def test_the_doctor_measures_the_links(tmp_path: Path) -> None:
    with apart(tmp_path, "400mbit", "400mbit", "20mbit") as place:
        words = ("doctor", "--hosts", "a,b", "--ssh", place.servers.ssh, "--env", "PYTHONPATH", "--json")
        process = place.popen(*words)
        assert process.wait(LIMIT_S) == 0, place.output
    told = json.loads(place.output)
    speed = {(link["from"], link["to"]): link["bytes_per_s"] for link in told["links"]}
    assert len(speed) == 6
    assert told["hosts"]["b"]["address"] == "10.77.0.3"
    assert told["hosts"]["b"]["interface"] == "eth0"
    for slow in (("a", "b"), ("b", "a"), ("b", "this host")):
        assert 4 * speed[slow] < speed["a", "this host"], speed


@pytest.mark.slow
def test_hosts_that_do_not_reach_each_other(tmp_path: Path) -> None:
    with apart(tmp_path) as place:
        place.hosts.partition([1], [2])
        code = place.popen(*place.words("-n", "2", "--hosts", "a:1,b:1"), "train.py").wait(LIMIT_S)
    assert code == 2, place.output
    assert re.search(
        r"host a: does not reach host b at 10\.77\.0\.3:\d+ \(.*(timed out|No route to host)\)", place.output
    )
    assert "--interface" in place.output


# ---- a disk of its own


@contextlib.contextmanager
def own_disk(tmp_path: Path) -> Iterator[Place]:
    """The folder of the run is another, empty one on b."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a disk of its own needs root, and unshare (apt-get install util-linux)")
    (tmp_path / "work").mkdir()
    mount = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(tmp_path / "work"))
    with servers_of(tmp_path, inside={"b": mount}) as servers:
        yield Place(tmp_path / "work", servers)


def test_a_host_without_the_script(tmp_path: Path) -> None:
    with own_disk(tmp_path) as place:
        said = place.refused("-n", "2", "--hosts", "a:1,b:1")
    assert f"host b: there is no {place.folder}/train.py; copy it there (--sync does)" in said


@pytest.mark.slow
def test_files_are_copied_and_logs_come_back(tmp_path: Path) -> None:
    with own_disk(tmp_path) as place:
        (place.folder / "package").mkdir()
        (place.folder / "package" / "word.py").write_text("WORD = 'carried'\n")
        (place.folder / "__pycache__").mkdir()
        (place.folder / "__pycache__" / "junk").write_text("")
        place.script(HELLO + "import os\nfrom package.word import WORD\nprint(WORD, sorted(os.listdir('.')))\n")
        done = place.run("-n", "2", "--hosts", "a:1,b:1", "--sync")
        assert done.returncode == 0, done.stdout + done.stderr
        logs = place.logs
    assert "copied 2 files to b" in done.stderr
    assert "(not on the launcher's disk)" in done.stderr
    assert logs.count("carried") == 2
    there = re.findall(r"carried (\[.*\])", logs)
    assert sum("__pycache__" in line for line in there) == 1, there  # here, where it was not brought from
    assert sorted(re.findall(r"hello (\d)", logs)) == ["0", "1"]


@pytest.mark.slow
def test_nothing_is_copied_onto_itself(tmp_path: Path) -> None:
    with servers_of(tmp_path) as servers:
        place = Place(tmp_path / "work", servers)
        done = place.run("-n", "1", "--hosts", "a:1", "--sync")
    assert done.returncode == 0, done.stderr
    assert "--sync: nothing to copy" in done.stderr
    assert (place.folder / "train.py").read_text() == HELLO


def test_a_greeting_that_begins_like_an_answer_is_skipped():
    class Greeting:
        def start(self, host, program):
            words = ["sh", "-c", """echo "paceline users: welcome"; echo 'paceline {"fine": 1}'; cat > /dev/null"""]
            return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    asked = preflight.Asked(Greeting(), "a")
    try:
        assert asked.ask(do="facts") == {"fine": 1}
    finally:
        asked.close()
