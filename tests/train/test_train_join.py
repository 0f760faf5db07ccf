"""`paceline.join()`: whose settings hold, and what is refused before a run begins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import paceline
from paceline.core import status
from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.testing.cluster import Cluster


def test_a_default_that_was_typed_goes_before_the_script() -> None:
    def script() -> None:
        import paceline

        run = paceline.join(seed=5, checkpoint_keep=3, strategy=paceline.AllReduce(bucket_mb=2))
        print("got", run.seed, run.settings.checkpoint_keep, run._strategy.bucket_bytes)

    (member,) = Cluster(1).run(script, settings=Settings(checkpoint_keep=1))
    assert "got 5 1 2000000" in member.output
    (member,) = Cluster(1).run(script, settings=Settings().pin("seed", "strategy"))  # --seed 0 --strategy allreduce
    assert "got 0 3 4000000" in member.output


def test_a_name_that_the_script_cannot_give_is_said_once(tmp_path: Path) -> None:
    script = """
        import paceline
        run = paceline.join(name="mine", root="elsewhere", progress="plain")
        paceline.join(name="mine")
        print("in", run.dir)
    """
    finished = Cluster(2).run(script, settings=Settings(root=str(tmp_path), name="yours"))
    said = "".join(member.output for member in finished)
    assert [m.code for m in finished] == [0, 0], said
    assert said.count(f"in {tmp_path}/yours\n") == 2
    assert said.count("join(name='mine') has no effect under paceline run, which uses 'yours': give --name mine") == 1
    assert said.count("join(root='elsewhere') has no effect") == 1
    assert said.count("no effect") == 2
    (member,) = Cluster(1).run(script, settings=Settings(root=str(tmp_path), name="mine"))
    assert "join(root" in member.output
    assert "join(name" not in member.output


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "glo"}, "unknown transport 'glo': did you mean 'gloo'?"),
        ({"progress": "of"}, "unknown progress 'of': did you mean 'off'?"),
        ({"strategy": "allreduce(bucket=1)"}, "strategy 'allreduce' has no option 'bucket': did you mean 'bucket_mb'?"),
    ],
)
def test_unknown_words_are_refused_alone_too(settings: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        paceline.join(root=str(tmp_path / "runs"), **settings)
    assert not list(tmp_path.iterdir())


def test_who_has_joined_prepares(tmp_path: Path) -> None:
    with paceline.join(root=str(tmp_path), name="run", progress="off"):
        doing = status.read(tmp_path / "run/status/rank-0", 0)
        assert doing
        assert doing.what == "preparing"
    script = """
        import paceline
        from paceline.core import status
        run = paceline.join()
        print(status.read(run.dir / "status" / f"rank-{run.rank}", run.rank).what)
    """
    assert [member.output for member in Cluster(2).run(script, settings=Settings(progress="off"))] == [
        "preparing\n"
    ] * 2


def test_a_loader_asked_for_in_torchs_words_says_ours(tmp_path: Path) -> None:
    with paceline.join(root=str(tmp_path), name="run", progress="off") as run:
        for ask in (run.loader, lambda *args, **options: run.evaluate(lambda x: {}, *args, **options)):
            with pytest.raises(ConfigError, match="the loader has no option 'num_workers': use workers="):
                ask([1, 2, 3], 2, num_workers=2)
