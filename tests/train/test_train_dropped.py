"""A turn that was dropped: what the loop looks at in the rest of it is as of the last commit."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from paceline.launch.spec import Elastic
from paceline.testing.cluster import Cluster
from paceline.testing.ledger import Ledger

# The second member dies in its eleventh turn. The first evaluates after every step: in the dropped turn once more for
# step 10, after a scheduler's step.
SCRIPT = """
    import os, signal
    import torch, paceline
    from torch import nn

    run = paceline.join(progress="off", checkpoint_keep=0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    run.track(scheduler=scheduler)
    data = torch.utils.data.TensorDataset(torch.randn(80, 4), torch.randn(80, 1))
    loader = run.loader(data, batch_size=2)
    for epoch in run.epochs(1):
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            if run.rank == 1 and run.step == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            value = run.evaluate(lambda x, y: {"loss": (model(x) - y).square().mean()}, data, batch_size=80)["loss"]
            print("AT", run.step, repr(value), optimizer.param_groups[0]["lr"], flush=True)
            scheduler.step()
"""


def test_an_evaluation_in_a_dropped_turn_says_the_same_as_that_of_the_last_commit() -> None:
    elastic = Elastic(least=1, most=2, replacements=0, standbys=0)
    ended = Cluster(2, elastic=elastic).run(SCRIPT)
    output = next(one.output for one in ended if one.rank == 0)
    said = defaultdict(list)
    for line in output.splitlines():
        if line.startswith("AT "):
            _, step, *rest = line.split()
            said[int(step)].append(rest)
    assert len(said[10]) == 2, output
    value, rate = zip(*said[10])
    assert abs(float(value[0]) - float(value[1])) < 1e-6, output  # of two members' halves, and of one's whole
    assert float(rate[1]) == float(rate[0]) * 0.9, output  # after the scheduler's step of turn 10, before another
    assert max(said) > 20, output


# The last turn of the second epoch, of 16 samples for three members: the first is stopped, the second killed, and the
# third waits for another one. When the first goes on it is still in that turn, whose samples are to be dealt once more.
LAST_TURN = """
    import os, signal, subprocess
    from pathlib import Path
    import torch, paceline
    from torch import nn
    from torch.nn import functional as F
    from paceline.testing.counted import Book, Counted, Numbered

    run = paceline.join(progress="off", checkpoint_keep=0)
    torch.manual_seed(0)
    me, ledger = int(os.environ["PACELINE_RANK"]), Path("LEDGER")
    model = Counted(nn.Linear(8, 2), 64)
    optimizer = run.optimizer(torch.optim.SGD(model.groups(), lr=0.1), model)
    loader = run.loader(Numbered(64), batch_size=8)
    book = Book(run, model, loader, 3, ledger)
    turns = 0
    for _ in run.epochs(3):
        for x, y, numbers in loader:
            turns += 1
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + model.count(numbers)
            if turns == 6 and not (ledger / "killed").exists():
                if me == 0:
                    go_on = f"sleep 2.5; kill -CONT {os.getpid()}"
                    subprocess.Popen(["sh", "-c", go_on], start_new_session=True)
                    os.kill(os.getpid(), signal.SIGSTOP)
                if me == 1:
                    (ledger / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            book.step(optimizer, numbers)
    book.end()
    print("TURNS", me, turns, flush=True)
"""


@pytest.mark.slow
def test_one_that_was_stopped_in_the_last_turn_of_an_epoch_deals_its_samples_once_more(tmp_path: Path) -> None:
    elastic = Elastic(least=2, most=3, replacements=0, standbys=0, silence_s=0.8)
    ended = Cluster(3, elastic=elastic).run(LAST_TURN.replace("LEDGER", str(tmp_path)))
    told = Ledger.read(tmp_path).check()
    assert told.clean, (told, ended)
    assert told.samples == 3 * 64
    turns = [line.split()[2] for one in ended for line in one.output.splitlines() if line.startswith("TURNS")]
    assert len(turns) == 2, ended
    assert len(set(turns)) == 1, ended
