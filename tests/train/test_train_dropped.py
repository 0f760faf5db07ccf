"""A turn that was dropped: what the loop looks at in the rest of it is as of the last commit."""

from __future__ import annotations

from collections import defaultdict

from paceline.launch.spec import Elastic
from paceline.testing.cluster import Cluster

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
