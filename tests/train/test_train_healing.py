"""Newcomers get the state while the others train on: real members, whose state is held back on its way."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.settings import Settings
from paceline.launch.spec import Elastic
from paceline.testing.cluster import Cluster

# Two members; the second dies once and comes back. The first sends nothing of its state before it has taken its next
# step, so that it could never go on if it waited for the newcomer.
SCRIPT = """
    import hashlib, os, signal, sys, time
    from pathlib import Path
    import torch, paceline
    from paceline.checkpoint import peers
    from torch import nn

    KIND, died = sys.argv[1], Path(sys.argv[2])
    run = paceline.join(progress="off", checkpoint_keep=0)
    torch.manual_seed(1 + run.rank)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    kind = torch.optim.Adam if KIND == "adam" else torch.optim.SGD
    options = {} if KIND == "adam" else {"momentum": 0.9}
    optimizer = run.optimizer(kind(model.parameters(), lr=0.05, **options), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.9)
    run.track(scheduler=scheduler)
    data = torch.utils.data.TensorDataset(torch.randn(240, 4, generator=torch.Generator().manual_seed(0)),
                                          torch.arange(240) % 2)
    loader = run.loader(data, batch_size=4)

    pour, held = peers._pour, []
    def late(tensor, pipe):
        if not held:
            held.append(run.step)
            deadline = time.monotonic() + 20
            while run.step == held[0] and time.monotonic() < deadline:
                time.sleep(0.005)
            print("WENT ON", run.step - held[0], flush=True)
        pour(tensor, pipe)
    peers._pour = late

    back = died.exists()
    turns = 0
    for epoch in run.epochs(4):
        for x, y in loader:
            time.sleep(0.2 if run.size == 1 else 0.01)  # the newcomer has a while to come
            if run.rank == 1 and not back and run.step == 10:
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if KIND == "clamped":  # weights that change outside of a step
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(0.999)
            if back and turns == 0:
                print("FIRST", run.healing, loader.last_real, run.size, flush=True)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if back and turns == 0:
                print("AFTER", run.healing, flush=True)
            turns += 1
            run.log(loss=loss)
            scheduler.step()
    state = [*model.state_dict().values()] + [t for s in optimizer.state.values() for t in s.values()]
    numbers = b"".join(t.detach().double().numpy().tobytes() for t in state if torch.is_tensor(t))
    print("END", hashlib.sha256(numbers).hexdigest(), run.step, optimizer.param_groups[0]["lr"], run.size, flush=True)
"""


def said(output: str, word: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(word)]


@pytest.mark.parametrize(
    "kind", ["sgd", pytest.param("adam", marks=pytest.mark.slow), pytest.param("clamped", marks=pytest.mark.slow)]
)
def test_the_others_go_on_while_a_newcomer_gets_the_state(kind: str, tmp_path: Path) -> None:
    elastic = Elastic(least=1, most=2, replacements=2, standbys=1)
    settings = Settings().with_(root=str(tmp_path), name="it")
    with Cluster(2, elastic=elastic).start(SCRIPT, [kind, str(tmp_path / "died")], settings=settings) as running:
        ended = running.wait(90.0)
    text = "\n".join([*map(str, ended), *running.said])
    first = next(one for one in ended if one.rank == 0)
    second = next(one for one in ended if one.rank == 1)
    assert said(second.output, "FIRST") == ["FIRST True 0 2"], text
    assert said(second.output, "AFTER") == ["AFTER False"], text
    (ahead,) = said(first.output, "WENT ON")
    assert int(ahead.split()[-1]) >= 1, text
    assert said(first.output, "END")[-1] == said(second.output, "END")[-1], text  # weights, momenta, statistics
    again = "a newcomer was not equal to the others" in (tmp_path / "it" / "events" / "rank-0.jsonl").read_text()
    assert again == (kind == "clamped"), text
