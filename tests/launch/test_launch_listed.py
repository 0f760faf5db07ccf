"""Hosts as they are written: on the command line, in files, and by programs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.launch import listed
from paceline.launch.spec import Room


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("a:4,b", {"a": Room(4), "b": Room(1)}),
        ("me@node7:2", {"me@node7": Room(2)}),
        ("[::1]:2, 2001:db8::7", {"::1": Room(2), "2001:db8::7": Room(1)}),
        ("me@[2001:db8::7]:3,fe80::1%eth0", {"me@2001:db8::7": Room(3), "fe80::1%eth0": Room(1)}),
    ],
)
def test_lists_of_hosts(source, found):
    assert listed.read(source) == found
    assert listed.read(listed.text(found)) == found


def test_many_hosts_are_no_file_name():
    """More characters than the name of a file may have."""
    names = {f"node{i:03}": Room(4) for i in range(100)}
    assert listed.is_list(listed.text(names))
    assert listed.read(listed.text(names)) == names


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):  # root may read whatever there is
        raise PermissionError(13, "Permission denied")

    (tmp_path / "hosts.txt").write_text("a 4\n")
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r"hosts.txt': the file cannot be read: Permission denied"):
        listed.read(str(tmp_path / "hosts.txt"))


def test_a_file_of_hosts(tmp_path):
    """As on the command line, or in columns; with comments and blank lines."""
    file = tmp_path / "hosts.txt"
    file.write_text("# ours\n\na:2\nb 4 gpu,site-a  # large\r\n[::1]:2 gpu\n  2001:db8::7 3\nc:1 \n")
    assert listed.read(str(file)) == {
        "a": Room(2),
        "b": Room(4, ("gpu", "site-a")),
        "::1": Room(2, ("gpu",)),
        "2001:db8::7": Room(3),
        "c": Room(1),
    }


def test_a_program_tells_the_hosts(tmp_path):
    program = tmp_path / "hosts"
    program.write_text("#!/bin/sh\necho node1 4 gpu,site-a\necho node2\n")
    program.chmod(0o755)
    assert listed.read(str(program)) == {"node1": Room(4, ("gpu", "site-a")), "node2": Room(1)}
    program.write_text("#!/bin/sh\necho no cloud >&2\nexit 3\n")
    with pytest.raises(ConfigError, match=r"the program ended with .*3: no cloud"):
        listed.read(str(program))
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(ConfigError, match=r"3: it printed no error$"):
        listed.read(str(program))
    with pytest.raises(ConfigError, match="there is no such file"):
        listed.read(str(tmp_path / "none"))
    program.write_text("#!/bin/sh\nprintf 'a 1\\n\\377\\376 1\\n'\n")
    with pytest.raises(ConfigError, match=r"hosts:2: .* is not a host's name"):
        listed.read(str(program))


@pytest.mark.parametrize("over", [False, True])
def test_a_program_that_does_not_end_is_ended_with_what_it_has_started(over, tmp_path, monkeypatch):
    monkeypatch.setattr(listed, "_PROGRAM_LIMIT_S", 60.0 if over else 0.5)
    program, child = tmp_path / "hosts", tmp_path / "child"
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {child}\nwait\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match="the program did not end"):
        listed.read(str(program), lambda: over and child.exists() and child.read_text() != "")
    stat = Path(f"/proc/{child.read_text().strip()}/stat")
    deadline = time.monotonic() + 10.0
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "line",
    [
        *("a b", "a 0", "a 1 2", "a 1 gpu,b/c", "a 1 gpu site", "-oProxyCommand=x 1", "a 1\na 2", "a;b 1", "a -1"),
        *("a:x", "a:", "a:0", "a:1 2", ":2", "@a", "-me@a", "[a]:2", "[::1", "[::1]2", "[::1]:", "a:1:2", "::1:g"),
        *("[::1]:2\n::1", "fe80::1", "me@[fe80::1]:2"),
    ],
)
def test_what_is_no_host_is_refused_with_its_line(line):
    with pytest.raises(ConfigError, match=r"^hosts:\d: "):
        listed.parse(line, "hosts")


def test_a_file_of_an_editor_that_marks_its_beginning():
    assert listed.parse("\ufeffa 4\nb\n", "hosts") == {"a": Room(4), "b": Room(1)}


def test_what_to_write_instead():
    with pytest.raises(ConfigError, match=r"^hosts:1: 'a:1:2' is not a host's name.*as in \[2001:db8::1\]:4$"):
        listed.parse("a:1:2", "hosts")
    with pytest.raises(ConfigError, match=r"^hosts:2: fe80::1 is an address of one link only.* fe80::1%eth0"):
        listed.parse("a\nfe80::1", "hosts")


@pytest.mark.parametrize("text", ["", "\n", "# nobody today\n\n"])
def test_a_file_without_a_host(text, tmp_path):
    file = tmp_path / "hosts.txt"
    file.write_text(text)
    assert listed.read(str(file)) == {}  # while a run lasts, that is no error
    with pytest.raises(ConfigError, match=r"hosts.txt': no line of it names a host; write a name and its slots"):
        listed.some(str(file))
