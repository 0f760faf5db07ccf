"""A small GPT that learns to write, character by character, from any text file.

    paceline run -n 2 examples/char_gpt.py --text book.txt

Without --text it reads what every Python brings along: the language reference, from which `help()` answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Neighbouring windows of the text; the target is the same window one character on."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = index * self.context
        return self.tokens[begin : begin + self.context], self.tokens[begin + 1 : begin + 1 + self.context]


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int = 128, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight  # tied

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        h = self.token(x) + self.position.weight[:length]
        return self.head(self.layers(h, mask=mask, is_causal=True))

    @torch.no_grad()
    def write(self, begin: Tensor, length: int) -> Tensor:
        """Go on from `begin`, one character at a time."""
        text = begin.unsqueeze(0)
        for _ in range(length):
            chances = (self(text[:, -self.context :])[0, -1] / 0.8).softmax(0)
            text = torch.cat([text, torch.multinomial(chances, 1).unsqueeze(0)], 1)
        return text[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, help="any text file; default: Python's language reference")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="per member")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--limit", type=int, help="use only so many characters")
    options = parser.parse_args()
    text = options.text.read_text() if options.text else "\n".join(topics[name] for name in sorted(topics))
    text = text[: options.limit]
    characters = sorted(set(text))
    tokens = torch.tensor([characters.index(c) for c in text])
    cut = len(tokens) * 9 // 10

    run = paceline.join()
    torch.manual_seed(run.seed)
    model = GPT(len(characters), options.context).to(run.device)
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    loader = run.loader(Windows(tokens[:cut], options.context), batch_size=options.batch_size)

    for _ in run.epochs(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            run.log(loss=loss)

    def measure(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"test_loss": F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")}

    result = run.evaluate(measure, Windows(tokens[cut:], options.context), batch_size=64)
    if run.is_first:
        print(f"test loss: {result['test_loss']:.3f} per character")
        written = model.write(tokens[cut : cut + 16].to(run.device), 200)
        print("".join(characters[i] for i in written.tolist()))


if __name__ == "__main__":
    main()
