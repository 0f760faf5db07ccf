"""Members that train apart and may come and go: the same bits as those that stay, as long as nobody does."""

from __future__ import annotations

import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.data import Loader
from paceline.launch import beforehand, reach
from paceline.launch.spec import Elastic
from paceline.membership.agent_line import scale
from paceline.testing.cluster import Cluster
from paceline.train.division import Division

SCRIPT = """
import hashlib, os, sys, time
import torch, torch.nn.functional as F
import paceline

words, kill_at, gate = sys.argv[1], int(sys.argv[2]), sys.argv[3]
epochs = 80 if gate else 4
run = paceline.join(strategy=words)
g = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(96, 6, generator=g), torch.randint(3, (96,), generator=g))
torch.manual_seed(0)
norm = torch.nn.Identity() if gate else torch.nn.BatchNorm1d(64)  # which refuses a batch of one
model = torch.nn.Sequential(torch.nn.Linear(6, 64), norm, torch.nn.ReLU(),
                            torch.nn.Linear(64, 32), torch.nn.Linear(32, 3))
optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.02), model)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
run.track(scheduler=scheduler)
loader = run.loader(data, batch_size=4)

def digest():
    whole = hashlib.sha256()
    for value in model.state_dict().values(): whole.update(value.numpy().tobytes())
    return whole.hexdigest()[:12]

for epoch in run.epochs(epochs):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.log(loss=loss, tokens=len(x))
        time.sleep(0.0 if not gate or os.path.exists(gate) else 0.05)  # until the test has seen enough
        if run.step == kill_at:
            os._exit(9)
        print("AT", run.step, run.size, flush=True)
    loss = run.evaluate(lambda x, y: {"loss": F.cross_entropy(model(x), y)}, data)["loss"]
    print("EPOCH", epoch, digest(), round(loss, 6))
print("END", digest(), run.step, run.size, f"{optimizer.param_groups[0]['lr']:.6f}")
"""
ELASTIC = Elastic(least=1, most=3, standbys=0, replacements=0)
WORDS = "diloco(every=3, codec='topk(0.1), decay=0.9', average=tokens)"


def ends(outputs: list[str]) -> list[str]:
    return [line for output in outputs for line in re.findall(r"END .*", output)]


def trained(*, most: int = 2, elastic: bool = True, root: Path | None = None, kill_at: int = -1) -> list[str]:
    group = Elastic(least=1, most=most, standbys=0, replacements=0) if elastic else None
    kept = Settings().with_(checkpoint_every_s=0.001, progress="off")
    kept = kept.with_(root=str(root), name="it") if root else kept
    found = Cluster(most, elastic=group).run(SCRIPT, (WORDS, kill_at, ""), settings=kept, limit_s=120)
    return [member.output for member in found]


@pytest.fixture(scope="module")
def whole() -> list[str]:
    return trained()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was lost with all of its members, in the middle of a round."""
    root = tmp_path_factory.mktemp("killed")
    assert not ends(trained(root=root, kill_at=19))
    return root


def test_while_nobody_comes_or_goes_it_is_the_run_of_a_fixed_number(whole: list[str]) -> None:
    fixed = trained(elastic=False)
    assert len(ends(fixed)) == 2
    assert len(set(ends(fixed))) == 1
    assert ends(whole) == ends(fixed)
    epochs = [re.findall(r"EPOCH .*", output) for output in (*fixed, *whole)]
    assert epochs[0]
    assert all(each == epochs[0] for each in epochs)


def test_resumed_from_a_round_equals_uninterrupted(whole: list[str], killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    resumed = trained(root=tmp_path)
    assert "AT 1 " not in resumed[0]
    assert ends(resumed) == ends(whole)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 3])
def test_resumed_by_another_number_members_are_equal(killed: Path, tmp_path: Path, most: int) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    resumed = trained(root=tmp_path, most=most)
    assert len(ends(resumed)) == most
    assert len(set(ends(resumed))) == 1


@pytest.mark.slow
def test_members_come_and_leave_between_rounds(tmp_path: Path) -> None:
    kept = Settings().with_(progress="off", checkpoint_keep=0)
    args = ("diloco(every=4)", -1, tmp_path / "enough")
    with Cluster(3, elastic=ELASTIC).start(SCRIPT, args, settings=kept) as running:
        running.wait_for(0, "AT 2 3")
        where = reach.read(running.dir)
        assert where is not None
        assert "member 2 will leave" in scale(where.address, where.token, 2)
        running.wait_for(0, " 2\n")
        before = running.output(0).rindex(" 2\n")
        scale(where.address, where.token, 3)
        while " 3\n" not in running.output(0)[before:]:  # another process has come
            running.wait_for(0, "AT", limit_s=30)
            time.sleep(0.1)
        (tmp_path / "enough").touch()
        found = running.wait(60)
    assert [member.code for member in found] == [0, 0, 0, 0]
    outputs = [running.output(rank) for rank in range(3)]
    assert len(ends(outputs)) == 3
    assert len(set(ends(outputs))) == 1, outputs


@pytest.mark.slow
def test_all_who_are_asked_to_leave_hold_a_round_and_save_before_they_go(tmp_path: Path) -> None:
    kept = Settings().with_(progress="off", root=str(tmp_path / "runs"), name="it", checkpoint_every_s=60.0)
    args = ("diloco(every=400)", -1, tmp_path / "enough")
    with Cluster(2, elastic=ELASTIC).start(SCRIPT, args, settings=kept) as running:
        running.wait_for(0, "AT 9 ")
        running.stop(signal.SIGTERM)
        running.outcome(60)
        last = [re.findall(r"AT (\d+) ", running.output(rank))[-1] for rank in range(2)]
    (tmp_path / "enough").touch()
    outputs = [member.output for member in Cluster(2, elastic=ELASTIC).run(SCRIPT, args, settings=kept)]
    assert len(set(ends(outputs))) == 1
    went_on = int(re.findall(r"AT (\d+) ", outputs[0])[0])
    assert went_on == max(map(int, last)) + 1, "nothing that was learnt was lost"


@pytest.mark.parametrize(
    ("words", "members", "why"),
    [
        ("diloco(every=8, overlap=2)", (2, 4), "-n MIN:MAX does not go with overlap=2"),
        ("post_local(warmup=5)", (2, 4), "-n MIN:MAX does not go with warmup=5"),
        ("diloco(inner=allreduce)", (2, 4), "-n MIN:MAX does not go with inner=allreduce"),
        ("diloco(quorum=5)", (2, 4), "quorum=5 with -n 2:4: from 2"),
        ("diloco(quorum=2)", (3, 4), "quorum=2 with -n 3:4: from 3"),
        ("local(average=median)", (2, 4), "average=median: of two members it is the mean"),
        ("diloco(quorum=2)", 3, "quorum=2: only a run whose members may come and go"),
        ("local(average=median)", 2, "average=median: of two members it is the mean"),
        ("diloco(guests=2)", (2, 4), "-n MIN:MAX does not go with guests=2"),
        ("guest('guests.json')", 2, "a guest trains alone: start it with -n 1"),
        ("guest('guests.json')", (1, 1), "a guest trains alone: start it with -n 1"),
        ("guest('127.0.0.1:7000')", 1, "set PACELINE_GUEST_TOKEN to the token"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    words: str, members: tuple[int, int] | int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_GUEST_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=re.escape(why)):
        beforehand.check_rounds(words, members)


def test_what_the_script_asks_for_is_refused_when_it_joins() -> None:
    script = """
        import torch, paceline
        run = paceline.join(progress="off", checkpoint_keep=0, strategy="diloco(every=4)")
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(range(8))
        try:
            run.loader(Stream(), batch_size=2)
        except paceline.ConfigError as error:
            print("REFUSED", error)
    """
    group = Elastic(least=2, most=2, replacements=0, standbys=0)
    for member in Cluster(2, elastic=group).run(script):
        assert "REFUSED run.loader: a stream cannot be dealt out again by members that train apart" in member.output


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whoever_is_lost_when_every_sample_counts_once(data: st.DataObject) -> None:
    """One epoch, by members that draw at their own pace, commit, are lost, are late, and come."""
    length, batch_size = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 5))
    numbers = list(range(length))

    def loader() -> Loader:
        return Loader(numbers, batch_size=batch_size, seed=3)

    probe = loader()
    members: dict[int, Loader] = {}
    given_since: dict[int, list[int]] = {}
    counted: list[int] = []
    names = iter(range(1000))
    present = [next(names) for _ in range(data.draw(st.integers(1, 4)))]
    division = Division.among([(m, "its process") for m in present], 1, [probe.state_dict()], [probe])
    iterators = {}

    def deal(state: dict[str, object]) -> None:
        for seat, m in enumerate(present):
            members.setdefault(m, loader()).go_on(state, seat, len(present))
            if m not in iterators:
                iterators[m] = iter(members[m])
            given_since[m] = []

    deal(probe.state_dict())
    for turn in range(200):
        for m in present:  # each takes as many steps as it likes
            for _ in range(data.draw(st.integers(0, 4)) if turn < 150 else 60):
                if members[m].over:
                    break
                batch = next(iterators[m])
                given_since[m] += batch.tolist() if members[m].last_real else []
        if len(present) > 1 and turn < 150 and data.draw(st.booleans()):
            present.remove(data.draw(st.sampled_from(present)))  # what it drew since the last round counts for nothing
        late = data.draw(st.sampled_from([None, *present])) if len(present) > 1 and turn < 150 else None
        there = [m for m in present if m != late]
        for m in there:
            division.count(division.seat((m, "its process")), (members[m].drawn,))
            counted += given_since[m]
            given_since[m] = []
        newcomer = turn < 150 and len(present) < 5 and data.draw(st.booleans())
        if newcomer or any(members[m].over for m in there):
            present = [*there, next(names)] if newcomer else there
            state = division.state(0, probe)
            division = Division.among([(m, "its process") for m in present], division.number + 1, [state], [probe])
            deal(state)
            if all(members[m].over for m in present):
                break
    assert sorted(counted) == numbers
    assert division.state(0, probe)["consumed"] == length
