"""Features on disk: what cannot be kept is refused, and members share the work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.layers.transfer import features, freeze
from paceline.testing.cluster import Cluster


def samples(num: int = 20) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(num, 4, generator=generator), torch.arange(num) % 3)


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Transformed at random."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), float(index)) + torch.randn(4), index


class Restless(nn.Module):
    """Random in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.layer(x), 0.5, training=True)


def test_what_is_random_cannot_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    freeze(model, "0", "1")
    with pytest.raises(ConfigError, match="came out otherwise when drawn again"):
        features(model, "2", Noisy(), tmp_path)
    restless = Restless().requires_grad_(False)
    with pytest.raises(ConfigError, match="gave other values for the same sample, in eval mode"):
        features(nn.Sequential(restless), "0", samples(), tmp_path)
    features(model, "2", samples(), tmp_path)
    assert "dropout is off in what is kept (2)" in capsys.readouterr().out
    for p in model.parameters():
        p.requires_grad_(False)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).requires_grad_(False)
    with pytest.raises(ConfigError, match="1 is a norm in training mode before '1': its statistics go on changing"):
        features(plain, "1", samples(), tmp_path / "other")


class Scaled(nn.Module):
    """A forward pass whose code says more than its modules do."""

    def __init__(self, activation: nn.Module, by: float = 1.0, dropout: float = 0.1) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)
        self.activation, self.dropout, self.by = activation, nn.Dropout(dropout), by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.activation(self.norm(self.layer(x)))) * self.by


def test_what_was_computed_otherwise_with_the_same_weights_is_stale(tmp_path: Path) -> None:
    def kept(body: nn.Module) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(body, nn.Linear(8, 2))
        for p in body.parameters():
            nn.init.normal_(p)
        freeze(model, "0")
        return features(model, "0", samples(4), tmp_path)[3][0]

    first = kept(Scaled(nn.ReLU()))
    torch.testing.assert_close(kept(Scaled(nn.ReLU(), dropout=0.3)), first)  # off in what is kept
    for other in (Scaled(nn.Tanh()), Scaled(nn.LeakyReLU(0.2))):
        with pytest.raises(ConfigError, match="made by other modules, or by the same with other settings: remove"):
            kept(other)
    wide = Scaled(nn.ReLU())
    wide.norm.eps = 0.5
    with pytest.raises(ConfigError, match="made by other modules"):
        kept(wide)
    for name in ("00", "01"):  # whichever block is there
        with pytest.raises(ConfigError, match="by another forward pass: '0' now gives other values"):
            kept(Scaled(nn.ReLU(), by=2.0))
        (tmp_path / f"features-{name}.safetensors").unlink()


def test_samples_that_are_not_a_number_are_kept_as_they_come_out(tmp_path: Path) -> None:
    data = TensorDataset(torch.full((3, 4), float("nan")), torch.arange(3))
    model = nn.Sequential(nn.Linear(4, 2)).requires_grad_(False)
    for _ in range(2):
        assert features(model, "0", data, tmp_path)[1][0].isnan().all()


def test_samples_that_cannot_be_kept_are_told_of(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 2)).requires_grad_(False), torch.zeros(4)
    for data, told in [
        ([(x, "cat")] * 9, "sample 0 has a text in it: features keeps tensors and numbers"),
        ([(x, {"kind": 1})] * 9, "sample 0 has a dict in it"),
        ([(x, (1, 2))] * 9, "sample 0 has a list in it"),
        ([(torch.zeros(5), 1)] * 9, r"the model does not take inputs of shape \(1, 5\)"),
        ([(x, torch.zeros(1 + i)) for i in range(100)], "features cannot be computed or written: .*size"),
    ]:
        with pytest.raises(ConfigError, match=told):
            features(model, "0", data, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_size=0: at least one"):
        features(model, "0", samples(), tmp_path, batch_size=0)


def test_several_cuts_and_inputs_with_names(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, str]:
            return self.b(self.a(x) + shift), "and more"

    x = torch.randn(9, 4)
    data = [({"x": row, "shift": torch.tensor([float(i)])}, i % 2) for i, row in enumerate(x)]
    model = Named().requires_grad_(False)
    found = features(model, ["a", "b"], data, tmp_path, batch_size=4)  # type: ignore[arg-type]
    low, high, label = found[5]
    torch.testing.assert_close(low, model.a(x[5]))
    torch.testing.assert_close(high, model.b(low + 5))
    assert int(label) == 1


MEMBERS = """
import os, sys
import torch
from pathlib import Path
from torch import nn
import paceline
from paceline import transfer

where, seed = sys.argv[1].replace("RANK", os.environ.get("RANK", "")), int(sys.argv[2])

class Counted(torch.utils.data.Dataset):
    drawn = []
    def __len__(self):
        return 200
    def __getitem__(self, index):
        self.drawn.append(index)
        return torch.full((4,), index / 100), index

run = paceline.join()
torch.manual_seed(seed if seed >= 0 else run.rank)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
transfer.freeze(model, "0")
where = Path(where.replace("MEMBER", str(run.rank)))
known = any(where.glob("features-*"))
kept = transfer.features(model, "1", Counted(), where, run=run)
computed = len(Counted.drawn) - 17  # eight samples twice, and the first once more, for the fingerprint
computed -= known  # and one to compare with what is there
_, top = transfer.cut(model, "1")
optimizer = run.optimizer(torch.optim.SGD(top.parameters(), lr=0.1), top)
seen = []
for epoch in run.epochs(1):
    for x, y in run.loader(kept, batch_size=10):
        torch.testing.assert_close(x, model[:2](y[:, None].expand(-1, 4) / 100))
        optimizer.zero_grad()
        top(x).square().mean().backward()
        optimizer.step()
        seen += y.tolist()
print("computed", computed, "seen", len(set(seen)), flush=True)
run.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["common", "own-MEMBER"])
@pytest.mark.parametrize("strategy", ["allreduce", "sync"])
def test_members_share_the_work_and_read_all(where: str, strategy: str, tmp_path: Path) -> None:
    def go(size: int, seed: int = 0) -> list[tuple[int, str]]:
        settings = Settings(root=str(tmp_path / "runs"), strategy=strategy, progress="off", fresh=True)
        ended = Cluster(size).run(MEMBERS, [str(tmp_path / where), str(seed)], settings=settings)
        return [(member.code, member.output) for member in ended]

    for code, output in (first := go(2)):
        assert code == 0, output
        assert "computed 100 seen 100" in output
    assert len(first) == 2
    files = sorted(tmp_path.glob(where.replace("MEMBER", "0") + "/features-*"))
    assert len(files) == 50
    for path in tmp_path.glob("*/features-0[012].safetensors"):
        path.unlink()  # as if the run had been killed before these
    again = [output for _, output in go(3)]
    assert sorted(output.split("computed ")[1].split()[0] for output in again) == ["4", "4", "4"], again
    stale = go(2, seed=1)
    assert all(code != 0 and "with other weights" in output for code, output in stale), stale
    unlike = go(2, seed=-1)
    assert all(code != 0 for code, _ in unlike)
    assert any("with other weights" in output for _, output in unlike), unlike
