"""Where a process believes to stand, for every way in which it may have been started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.core.errors import ConfigError
from paceline.environment import Place, detect, this_host
from paceline.environment import paceline as ours

OURS = ours.variables(
    Place(
        kind="paceline",
        rank=1,
        size=4,
        local_rank=1,
        local_size=2,
        rendezvous="127.0.0.1:2940",
        token="secret",
    )
)
ELASTIC = {k: v for k, v in OURS.items() if k != "PACELINE_RENDEZVOUS"} | {"PACELINE_SCHEDULER": "10.0.0.1:2941"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_nothing_set_is_a_run_of_one():
    place = detect({"MASTER_ADDR": "10.0.0.1", "PATH": "/bin"})
    assert (place.kind, place.rank, place.size, place.host) == ("alone", 0, 1, this_host())


def test_our_launchers_variables_are_read_back():
    place = detect(OURS)
    assert (place.kind, place.rank, place.size, place.local_rank, place.local_size) == (
        "paceline",
        1,
        4,
        1,
        2,
    )
    assert (place.rendezvous, place.token, place.host) == ("127.0.0.1:2940", "secret", this_host())


def test_torchruns_variables():
    place = detect(TORCHRUN)
    assert (place.kind, place.rank, place.size, place.local_rank, place.local_size) == (
        "torchrun",
        3,
        4,
        1,
        2,
    )
    assert place.token == place.rendezvous == ""


def test_our_launcher_wins_over_torchrun():
    assert detect(TORCHRUN | OURS).kind == "paceline"


def test_where_members_come_and_go_they_meet_at_the_scheduler():
    place = detect(ELASTIC)
    assert (place.kind, place.rank, place.size) == ("paceline", 1, 4)
    assert (place.scheduler, place.rendezvous) == ("10.0.0.1:2941", "")
    assert ours.variables(place) == ELASTIC


@pytest.mark.parametrize("variables", [OURS, ELASTIC, TORCHRUN], ids=["paceline", "elastic", "torchrun"])
def test_a_missing_variable_is_named(variables):
    for missing in variables.keys() - {"PACELINE_SCHEDULER"}:  # without it, a rendezvous is what is missing
        rest = {k: v for k, v in variables.items() if k != missing}
        with pytest.raises(ConfigError, match=rf"^{missing} is not set .*unset them all to run it alone"):
            detect(rest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"PACELINE_RANK": "x"}, "PACELINE_RANK='x' must be a whole number of at least 0"),
        ({"PACELINE_RANK": "-1"}, "PACELINE_RANK='-1'"),
        ({"PACELINE_SIZE": "0"}, "PACELINE_SIZE='0' must be a whole number of at least 1"),
        ({"PACELINE_RANK": "4"}, "PACELINE_RANK=4 must be below PACELINE_SIZE=4"),
        ({"PACELINE_LOCAL_RANK": "2"}, "PACELINE_LOCAL_RANK=2 must be below PACELINE_LOCAL_SIZE=2"),
        ({"PACELINE_LOCAL_SIZE": "9"}, "PACELINE_LOCAL_SIZE=9 exceeds PACELINE_SIZE=4"),
        ({"PACELINE_RENDEZVOUS": "nowhere"}, "PACELINE_RENDEZVOUS='nowhere' must be an address and a port"),
        ({"PACELINE_RENDEZVOUS": "127.0.0.1:99999"}, "PACELINE_RENDEZVOUS"),
    ],
)
def test_bad_values_of_ours(change, message):
    with pytest.raises(ConfigError, match=message):
        detect(OURS | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"PACELINE_SCHEDULER": "nowhere"}, "PACELINE_SCHEDULER='nowhere' must be an address and a port"),
        ({"PACELINE_RENDEZVOUS": "127.0.0.1:2940"}, "PACELINE_RENDEZVOUS='127.0.0.1:2940' and PACELINE_SCHEDULER="),
        ({"PACELINE_SERVERS": "1"}, "PACELINE_SERVERS=1 contradicts PACELINE_SCHEDULER='10.0.0.1:2941'"),
    ],
)
def test_bad_values_of_an_elastic_run(change, message):
    with pytest.raises(ConfigError, match=message):
        detect(ELASTIC | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "RANK=4 must be below WORLD_SIZE=4"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE='four'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    ],
)
def test_bad_values_of_torchrun(change, message):
    with pytest.raises(ConfigError, match=message):
        detect(TORCHRUN | change)


def test_the_host_is_the_same_in_another_process_of_this_host():
    code = "from paceline.environment import this_host; print(this_host())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.strip() == this_host()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a network namespace")
def test_a_network_namespace_is_another_host():
    code = "from paceline.environment import this_host; print(this_host())"
    made = subprocess.run(["unshare", "-n", sys.executable, "-c", code], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot make a network namespace: {made.stderr.strip()}")
    assert made.stdout.strip() != this_host()


def test_detecting_does_not_import_torch():
    code = "import sys, paceline.environment as e; e.detect(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("other", [{}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}])
def test_labels_are_read_wherever_it_was_started(other):
    where = {"MASTER_ADDR": "here", "MASTER_PORT": "1"} if other else {}
    place = detect({**other, **where, "PACELINE_LABELS": "gpu,site-a"})
    assert place.kind == ("torchrun" if other else "alone")
    assert place.labels == ("gpu", "site-a")
    with pytest.raises(ConfigError, match="PACELINE_LABELS: 'a b' is not a label"):
        detect({"PACELINE_LABELS": "a b"})
