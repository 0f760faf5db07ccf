"""`paceline.join()`: whose settings hold, and what is refused before a run begins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import paceline
from paceline.core import status
from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.strategies import AllReduce, Async, Bounded, Strategy, Sync, choose, make_strategy, words_of
from paceline.testing.cluster import Cluster


def test_a_default_that_was_typed_goes_before_the_script() -> None:
    def script() -> None:
        import paceline

        run = paceline.join(seed=5, checkpoint_keep=3, strategy=paceline.AllReduce(bucket_mb=2))
        print("got", run.seed, run.settings.checkpoint_keep, run._strategy.bucket_bytes)

    (member,) = Cluster(1).run(script, settings=Settings(checkpoint_keep=1))
    assert "got 5 1 2000000" in member.output
    (member,) = Cluster(1).run(script, settings=Settings().pin("seed", "strategy"))  # --seed 0 --strategy allreduce
    assert "got 0 3 2000000" in member.output  # the script's says more
    (member,) = Cluster(1).run(script, settings=Settings(strategy="allreduce(bucket_mb=3)").pin("strategy"))
    assert "got 5 3 3000000" in member.output
    assert "goes before the script's allreduce(bucket_mb=2.0): bucket_mb is left out" in member.output


@pytest.mark.parametrize(
    ("script", "typed", "words", "left_out"),
    [
        (Async("dana(0.9)"), "async", "async(correct='dana(momentum=0.9)')", ""),
        (Async("dana(0.9)"), "async(correct='dana(0.9)')", "async(correct='dana(momentum=0.9)')", ""),
        (Async("dana(0.9)"), "async(correct='drop(8)')", "async(correct='drop(age=8)')", "correct is left out"),
        (Async("dana(0.9)"), "sync", "sync", "correct is left out"),
        (Bounded(4, "gap"), "bounded(4)", "bounded(staleness=4, correct='gap')", ""),
        (Bounded(4, "gap"), "bounded(8)", "bounded(staleness=8)", "correct, staleness is left out"),
        (Bounded(4, "gap"), "async", "async(correct='gap')", "its gate is left out, correct stays"),
        (Sync(), "async", "async", "its gate is left out"),
        (Sync(backups=1), "sync(backups=0)", "sync", "backups is left out"),
        (Sync(per_host=True), "async", "async", "per_host is left out"),
        (Async(), "allreduce", "allreduce", "all of which is left out"),
        (AllReduce(bucket_mb=2, codec="sign"), "allreduce(codec=sign)", None, ""),
    ],
)
def test_a_strategy_of_the_script_and_one_that_was_typed(
    script: Strategy, typed: str, words: str | None, left_out: str
) -> None:
    before = words_of(script)
    chosen, said = choose(script, typed)
    assert words_of(chosen) == (words or before)
    assert bool(said) == bool(left_out)
    assert said.endswith(left_out)
    assert before in said or not said
    assert words_of(make_strategy(words_of(chosen))) == words_of(chosen)


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        (Settings(strategy="sync(backups=1)"), False),  # typed, so that the script's object is left out
        pytest.param(Settings(), True, marks=pytest.mark.slow),
    ],
)
def test_the_gate_is_turned_on_the_run_whatever_strategy_it_has(settings: Settings, same: bool) -> None:
    script = """
        import torch, paceline
        given = paceline.Sync()
        run = paceline.join(strategy=given)
        try:
            given.turn("async")
        except paceline.ConfigError as error:
            print("refused", str(error)[:40])
        model = torch.nn.Linear(2, 2)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        try:
            run.turn("sync(backups=2)")
        except paceline.ConfigError as error:
            print("refused", error)
        for epoch in run.epochs(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if epoch == 0:
                run.turn("bounded(staleness=4)")
        print("gate", run._strategy.gate.words, run._strategy is given)
    """
    for member in Cluster(2).run(script, settings=settings):
        assert "refused turn('async'): this strategy is not that" in member.output
        assert "refused sync(backups=2): 2 workers push, so at most 1" in member.output
        assert f"gate bounded(staleness=4) {same}" in member.output


def test_a_gate_needs_servers(tmp_path: Path) -> None:
    with paceline.join(root=str(tmp_path), name="run", progress="off") as run:
        with pytest.raises(ConfigError, match="allreduce has no servers"):
            run.turn("async")


@pytest.mark.slow
def test_more_backups_than_others_are_refused_at_the_start() -> None:
    script = """
        import torch, paceline
        model = torch.nn.Linear(2, 2)
        paceline.join(strategy="sync(backups=2)").optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    """
    finished = Cluster(2).run(script, settings=Settings())
    assert all("sync(backups=2): 2 workers push, so at most 1 can be backups" in m.output for m in finished)


def test_a_strategy_of_the_script_is_named_and_where_its_shards_live() -> None:
    script = """
        import torch, paceline
        run = paceline.join(strategy=paceline.Async("dana(0.9)"), progress="plain")
        model = torch.nn.Linear(2, 2)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for epoch in run.epochs(1):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        run.close()
        if run.is_first:
            print((run.dir / "summary.json").read_text())
    """
    first, second = Cluster(2).run(script, settings=Settings())
    words = "async(correct='dana(momentum=0.9)')"
    assert f"2 members  {words}  cpu" in first.output
    assert f'"strategy": "{words}"' in first.output
    assert first.output.count(f"{words} comes from the script, so a part of the parameters lives with every") == 1
    assert "comes from the script" not in second.output


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
