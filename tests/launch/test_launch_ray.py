"""The ray engine without a cluster: what it refuses, what it would start, and how it deals members out."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.launch import engines
from paceline.launch.on_ray import cluster, gauges
from paceline.launch.on_ray.cluster import Node, Share, find, too_few
from paceline.launch.on_ray.ground import dealt
from paceline.launch.on_ray.post import Post
from paceline.launch.spec import Elastic, JobSpec


def spec(tmp_path: Path, **more: Any) -> JobSpec:
    (tmp_path / "train.py").write_text("")
    return JobSpec(
        script="train.py", num_members=4, elastic=Elastic(least=2, most=4, **more), cwd=str(tmp_path), threads=None
    )


def test_what_would_be_started_is_told_without_ray(tmp_path: Path) -> None:
    engine = engines.make("ray", {"cpus": 2.0, "gpus": 1.0, "address": "10.0.0.1:6379"})
    shown = engine.preview(engine.prepare(spec(tmp_path)))
    assert "10.0.0.1:6379" in shown
    assert "2 to 4 times (CPU 2, GPU 1)" in shown
    assert "OMP_NUM_THREADS=2" in shown
    assert shown.count("train.py") >= 4  # each member's command


@pytest.mark.parametrize(
    ("given", "named"),
    [({"hosts": "a:2,b:2"}, "--hosts"), ({"slots": 4}, "--slots"), ({"start_on": "x {host}"}, "--st")],
)
def test_what_ray_decides_is_refused(tmp_path: Path, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}.* does not go with --on ray"):
        engines.make("ray", {}).prepare(spec(tmp_path, **given))


def test_without_ray_the_pip_line_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else found(name, *more))
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[ray\]'"):
        engines.make("ray", {}).check(spec(tmp_path))


@pytest.mark.parametrize("words", [["--cpus", "0"], ["--cpus", "1.5"], ["--gpus", "many"]])
def test_an_amount_that_ray_does_not_deal_in(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "--on", "ray", *words, "--dry-run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "is not an amount that Ray deals in" in done.stderr


def test_where_the_cluster_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_REACH_S", 0.5)
    monkeypatch.setattr(cluster, "_current", lambda: "127.0.0.1:1")  # of a cluster that was killed
    assert find("", {}) == find("local", {"RAY_ADDRESS": "10.0.0.1:6379"}) == "local"
    for address, said in {
        "ray://head:10001": "ray job submit",
        "auto": "no Ray cluster runs on this host",
        "127.0.0.1:1": "no Ray cluster answers there",
        "head": "is not ip:port, auto or local",
    }.items():
        with pytest.raises(ConfigError, match=f"^--address .*{re.escape(said)}"):
            find(address, {})
        with pytest.raises(ConfigError, match=r"^RAY_ADDRESS "):
            find("", {"RAY_ADDRESS": address})


def test_a_cluster_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Version mismatch: The cluster was started with:\n    Ray: 2.44.0\n    Python: 3.11.2\nThis process: ..."

    def init(**options: Any) -> None:
        raise RuntimeError(text)

    fake = types.SimpleNamespace(
        init=init, shutdown=lambda: None, exceptions=types.SimpleNamespace(RayError=RuntimeError)
    )
    private = types.SimpleNamespace(worker=types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray._private", private)
    with pytest.raises(ConfigError, match=r"of another version .* Ray: 2\.44\.0 Python: 3\.11\.2 .*install the same"):
        cluster.enter("local", 1)


def test_members_are_dealt_to_few_nodes() -> None:
    assert dealt([1, 1], 2) == [1, 1]
    assert dealt([1, 8, 8], 8) == [0, 8, 0]
    assert dealt([3, 2], 9) == [3, 2]
    assert Share(cpus=0.1).fit({"CPU": 0.3}) == 3  # and not 2, as floats would have it
    assert Share(cpus=1, gpus=1).fit({"CPU": 8.0}) == 0


def test_too_few_cores_are_counted() -> None:
    nodes = [
        Node(id="1", name="a", total={"CPU": 4.0}, free={"CPU": 2.0}),
        Node(id="2", name="b", total={"CPU": 4.0}, free={}),
    ]
    said = too_few(nodes, Share(cpus=2), 5, "10.0.0.1:6379")
    assert said.startswith("5 members need 10 CPUs, and the cluster at 10.0.0.1:6379 has 8 (2 free)")
    assert "by node: a 1, b 0; start fewer (-n 1)" in said


class _Method:
    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.calls = answers, 0

    def remote(self, *given: Any) -> Any:
        self.calls += 1
        return self.answers.pop(0) if self.answers else None


@pytest.mark.parametrize("lost", [False, True])
def test_an_agents_actor_is_kept_as_a_process(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    def get(answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    last = RuntimeError("The actor died.\nand pages") if lost else (["[1] two"], 3)
    actor = types.SimpleNamespace(
        begin=_Method([None]), read=_Method([(["[0] one"], None), last]), drain=_Method([None])
    )
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(get=get, kill=lambda actor: None))
    post = Post(actor, "node", b"{}")
    code = post.wait(10.0)
    lines = list(post.stdout)
    assert lines[0] == b"[0] one"
    assert (code, lines[1]) == ((-9, b"paceline: Ray has lost it: The actor died.") if lost else (3, b"[1] two"))
    post.close()
    assert actor.drain.calls == 0  # there is nobody to drain


def test_the_newest_step_of_a_member(tmp_path: Path) -> None:
    assert gauges.newest(tmp_path / "none") is None
    path = tmp_path / "rank-0.jsonl"
    path.write_text(
        '{"kind": "step", "step": 1, "samples": 8.0, "scalars": {"loss": 0.5}}\n'
        '{"kind": "step", "step": 2, "samples": 9.0, "scalars": {"loss": 0.25}}\n'
        '{"kind": "checkpoint", "step": 2}\n{"kind": "st'
    )
    found = gauges.newest(path)
    assert found
    assert (found.step, found.samples, found.scalars) == (2, 9, {"loss": 0.25})
