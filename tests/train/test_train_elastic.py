"""What an elastic run refuses, because members that come or are behind could not have it."""

from __future__ import annotations

from paceline.launch.spec import Elastic
from paceline.testing.cluster import Cluster

SCRIPT = """
    import torch, paceline
    from paceline.core.errors import ConfigError
    from paceline.data import ByFile, Files

    run = paceline.join(progress="off", checkpoint_keep=0)
    model = torch.nn.Linear(2, 2)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    try:
        run.loader(Files(["a", "b"], open), batch_size=1, partition=ByFile())
    except ConfigError as error:
        print("REFUSED", error)
    try:
        next(run.epochs(1))
    except ConfigError as error:
        print("REFUSED", error)
    run.track(scheduler=scheduler)
    print("LEFT", run.size)
"""


def test_what_could_not_be_handed_on_is_refused_in_a_sentence() -> None:
    for member in Cluster(2, elastic=Elastic(least=2, most=2, replacements=0, standbys=0)).run(SCRIPT):
        assert "REFUSED run.loader: files that members open for themselves (ByFile) cannot be dealt" in member.output
        assert "REFUSED a learning-rate scheduler drives this optimizer, and members that come" in member.output
        assert "LEFT 2" in member.output
