"""An embedding whose table is a tensor train: rows are computed when they are looked up, and the table never is.

A row i = (i1 … id) of the table is the product of d slices of cores, G1[i1] … Gd[id]. Gradients are those of the cores,
which are small: neither they nor the optimizer's state have the size of the table.

References: Hrinchuk et al., Tensorized embedding layers, 2020; Yin et al., TT-Rec, 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.layers.tensor_train import train
from paceline.layers.tensor_train.shapes import shape_of


class TTEmbedding(train.Train):
    """An `nn.Embedding` in `num_cores` cores. It is smaller, and slower to look up: a row of a table is just copied.

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: as in nn.Embedding. The padded row is zero.
        rank: between the cores; one number for all, or one for each of the `num_cores − 1` bonds.
        num_cores: 2 to 6.

    >>> layer = TTEmbedding(50257, 768, rank=16)
    >>> layer(torch.tensor([[0, 50256]])).shape, 50257 * 768 // sum(p.numel() for p in layer.parameters())
    (torch.Size([1, 2, 768]), 193)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        rank: int | Sequence[int],
        num_cores: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ConfigError(f"padding_idx={padding_idx}: the embedding has {num_embeddings} rows")
        super().__init__(shape_of(num_embeddings, embedding_dim, rank, num_cores), device, dtype)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.reset_parameters()

    @classmethod
    def of(
        cls,
        embedding: nn.Embedding,
        *,
        rank: int | Sequence[int] | None = None,
        error: float | None = None,
        num_cores: int = 2,
    ) -> TTEmbedding:
        """A trained table by TT-SVD, to a rank, or to ‖W − W_tt‖ ≤ error · ‖W‖ with as small ranks as it allows."""
        table = embedding.weight.detach()
        shape, cores = train.of_weight(table, rank, error, num_cores)
        made = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            rank=shape.ranks[1:-1],
            num_cores=num_cores,
            device=table.device,
            dtype=table.dtype,
        )
        train.place(made.cores, cores, trained=embedding.weight.requires_grad)
        return made.train(embedding.training)

    def reset_parameters(self) -> None:
        """Rows with the variance of nn.Embedding's, 1."""
        train.fill(self.cores, self.shape, 1.0)

    @property
    def weight(self) -> Tensor:
        """The whole table, computed anew at each access; the padded row is zero."""
        table = train.weight_of(self.cores, self.num_embeddings, self.embedding_dim)
        if self.padding_idx is None:
            return table
        rows = torch.arange(self.num_embeddings, device=table.device)
        return table * (rows != self.padding_idx).to(table.dtype)[:, None]

    def forward(self, index: Tensor) -> Tensor:
        if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            raise ConfigError(f"TTEmbedding wants whole numbers as rows, got {index.dtype}")
        flat = index.reshape(-1).long()
        # As in nn.Embedding, a look at the values costs a wait on a GPU; there the modes' own bounds are checked.
        if flat.device.type == "cpu" and flat.numel():
            low, high = int(flat.min()), int(flat.max())
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(f"rows {low} … {high} were asked for, there are 0 … {self.num_embeddings - 1}")
        rows = self._rows(flat)
        if self.padding_idx is not None:
            rows = rows * (flat != self.padding_idx).to(rows.dtype)[:, None]
        return rows.reshape(*index.shape, self.embedding_dim)

    def _rows(self, flat: Tensor) -> Tensor:
        digits = []
        for size in reversed(self.shape.outs):
            digits.append(flat % size)
            flat = flat // size
        digits.reverse()
        rows: Tensor | None = None  # (batch, n1 · … · nk, rk)
        for core, digit in zip(self.cores, digits):
            slices = core.transpose(0, 1).index_select(0, digit)  # (batch, r, n, r')
            if rows is None:
                rows = slices.squeeze(1)
            else:
                batch, r, n, right = slices.shape
                wider = rows.shape[1] * n
                rows = torch.bmm(rows, slices.reshape(batch, r, n * right)).reshape(batch, wider, right)
        assert rows is not None
        return rows.squeeze(2)[:, : self.embedding_dim]

    def extra_repr(self) -> str:
        padded = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padded}, {train.words(self.shape)}"
