"""`paceline doctor --hosts`, over real ssh servers."""

from __future__ import annotations

import json
import re

import pytest

from paceline.cli import matrix
from paceline.core.errors import ConfigError
from paceline.launch.preflight import HERE, Facts, Link, Report, crowded, pairs, towards
from tests.launch._ssh import Place, place

__all__ = ["place"]

FACTS = Facts(
    python="3.11.2",
    executable="python3",
    torch="2.13.0",
    paceline="0.1.0",
    cores=2,
    gpus=0,
    cwd=True,
    shared=False,
    rsync=False,
    name="b",
)


def doctor(place: Place, *options: str) -> tuple[int, str, str]:
    ssh = ("--ssh", place.servers.ssh, "--env", "PYTHONPATH")
    done = place.paceline("doctor", "--hosts", "a,b", *ssh, *options)
    return done.returncode, done.stdout, done.stderr


def test_the_matrix_of_two_hosts(place: Place) -> None:
    code, out, err = doctor(place)
    assert code == 0, out + err
    assert re.search(r"^a +3\.\d+\.\d+ .* 127\.0\.0\.1 +lo +shared$", out, flags=re.M)
    assert re.search(r"^from this host +- +\d+, \S+ +\d+, \S+$", out, flags=re.M)
    assert out.endswith("a run can start on these hosts\n")


def test_what_is_wrong_is_in_it(place: Place) -> None:
    place.servers.stop("b")
    code, out, _ = doctor(place, "--json")
    told = json.loads(out)
    assert code == 1
    assert not told["ok"]
    assert list(told["hosts"]) == ["a"]
    assert {(link["from"], link["to"]) for link in told["links"]} == {("a", HERE), (HERE, "a")}
    assert [error[:30] for error in told["errors"]] == ["host b: nothing listens there "]


def test_options_about_hosts_need_some(place: Place) -> None:
    done = place.paceline("doctor", "--interface", "eth0")
    assert (done.returncode, "give --hosts a,b" in done.stderr) == (2, True)


def test_hosts_that_name_none_are_not_this_one(place: Place) -> None:
    """An empty variable of a shell; this host alone would be found to be well."""
    done = place.paceline("doctor", "--hosts", "")
    assert (done.returncode, "--hosts: '' names no host" in done.stderr) == (2, True)


def test_a_link_that_was_not_measured_is_a_dash() -> None:
    report = Report(["a"], facts={"a": FACTS}, address={HERE: "10.0.0.1", "a": "10.0.0.2"})
    report.links["a", HERE] = Link(0.0002, 1e6)
    shown = "\n".join(matrix.lines(report))
    assert "8, 0.2" in shown
    assert "another one" in shown
    assert "from this host            -             -" in shown


def test_more_slots_than_cores_are_told() -> None:
    assert crowded({"b": FACTS}, {"b": 2}) == []
    assert crowded({"b": FACTS}, {"b": 3}) == ["host b: 3 slots on 2 cores: its members take turns"]


def test_many_hosts_are_not_measured_each_to_each() -> None:
    names = [f"n{i}" for i in range(20)]
    found = list(pairs(names))
    assert len(found) == len(set(found)) < 3 * len(names)
    assert {source for source, _ in found} == set(names)


def test_the_address_of_a_way_out_goes_before_loopback() -> None:
    ways = {"here": "127.0.0.1", "a": "10.0.0.1"}
    assert towards(["here", "a"], ways.__getitem__) == "10.0.0.1"
    assert towards(["here"], ways.__getitem__) == "127.0.0.1"

    def nowhere(name: str) -> str:
        raise ConfigError(name)

    with pytest.raises(ConfigError, match="give --listen ADDRESS or --interface NAME"):
        towards(["a"], nowhere)
