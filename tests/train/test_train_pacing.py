"""What is done about slow members, besides naming them: see also tests/faults/test_faults_stragglers.py."""

from __future__ import annotations

import pytest

from paceline.core.settings import Settings
from paceline.testing.cluster import Cluster


def test_with_unequal_shares_the_gradient_is_still_the_mean_over_the_global_batch() -> None:
    script = """
        import torch, paceline
        run = paceline.join(progress="off", checkpoint_keep=0)
        model = torch.nn.Linear(3, 1, bias=False)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        loader = run.loader(torch.randn(70, 3, generator=torch.Generator().manual_seed(1)), batch_size=8)
        sizes = []
        for epoch in run.epochs(1):
            for step, x in enumerate(loader):
                optimizer.zero_grad()
                model(x).mean().backward()
                real = x[: loader.last_real]
                everyone = run.all_reduce(torch.cat([real.sum(0), torch.tensor([float(len(real))])]))
                torch.testing.assert_close(model.weight.grad[0], everyone[:3] / everyone[3])
                optimizer.step()
                sizes.append(len(real))
                if step == 1:
                    loader.share([13, 3])
        print("drew", sizes)
    """
    first, second = Cluster(2).run(script)
    assert "drew [8, 8, 13, 13, 4]" in first.output, first.output  # of the last 6, 13/16 are 4.875
    assert "drew [8, 8, 3, 3, 2]" in second.output, second.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "strategy", "said"),
    [
        ("Stream()", "allreduce", "cannot follow the members' speed here, since every member reads the whole stream"),
        ("torch.zeros(8, 2)", "sync", "--stragglers less is for --strategy allreduce, and does nothing here"),
    ],
)
def test_what_cannot_be_done_is_said_at_the_start(dataset: str, strategy: str, said: str) -> None:
    script = f"""
        import torch, paceline
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(torch.zeros(8, 2))
        run = paceline.join(progress="off", checkpoint_keep=0, strategy={strategy!r})
        model = torch.nn.Linear(2, 1)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loader = run.loader({dataset}, batch_size=2, shuffle=False)
        for epoch in run.epochs(1):
            for x in loader:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
    """
    first, second = Cluster(2).run(script, settings=Settings(stragglers="less"))
    assert first.code == 0, first.output
    assert first.output.count(said) == 1, first.output
    assert said not in second.output
