"""Models of transformers, made from scratch: nothing is downloaded, and nothing of them is in the core."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.layers import transfer

transformers = pytest.importorskip("transformers", reason="pip install transformers, to try its models")

pytestmark = pytest.mark.slow


def bert(classes: int = 3) -> Any:
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=classes,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def vit() -> Any:
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, num_channels=1, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, num_labels=4,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


WORDS = torch.randint(0, 60, (12, 7), generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 2


def stepped(model: Any, loss: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(transfer.groups(model, lr=0.5))
    loss.backward()
    optimizer.step()


def test_bert_gets_another_head_and_computes_its_loss_by_it() -> None:
    model = bert(3)
    made = transfer.head(model, classes=2)
    assert made.name == "classifier"
    assert model.config.num_labels == model.num_labels == 2
    transfer.freeze(model, "bert")
    before = copy.deepcopy(model.state_dict())
    stepped(model, model(input_ids=WORDS, labels=LABELS).loss)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"classifier.weight", "classifier.bias"}


def test_features_of_bert_with_named_inputs(tmp_path: Path) -> None:
    model = bert().eval()
    transfer.freeze(model, "bert")
    mask = torch.ones_like(WORDS)
    data = [({"input_ids": w, "attention_mask": m}, int(y)) for w, m, y in zip(WORDS, mask, LABELS)]
    (last,) = [n for n, _ in model.named_modules() if n.endswith("layer.1")]
    kept = transfer.features(model, last, data, tmp_path, batch_size=5)  # type: ignore[arg-type]
    assert kept[0][0].shape == (7, 16)
    with torch.no_grad():
        expected = model.bert(input_ids=WORDS, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(torch.stack([kept[i][0] for i in range(12)]), expected)
    found = transfer.suggest(model, data)  # type: ignore[arg-type]
    assert [probe.cut.rpartition("bert.")[2] for probe in found.probes][:3] == [
        *("embeddings", "encoder.layer.0", "encoder.layer.1")
    ]


def test_adapters_on_the_linear_layers_of_gpt2(tmp_path: Path) -> None:
    model = gpt2().eval()
    with torch.no_grad():
        before = model(WORDS).logits
    names = transfer.lora(model, "*.c_attn", rank=2)
    assert len(names) == 2
    assert type(model.get_submodule(names[0])) is transfer.LoRAConv1D
    with torch.no_grad():
        torch.testing.assert_close(model(WORDS).logits, before)
    stepped(model, model(WORDS, labels=WORDS).loss)
    with torch.no_grad():
        after = model(WORDS).logits
    assert not torch.allclose(after, before)
    transfer.save_lora(model, tmp_path / "adapters.safetensors")
    other = gpt2().eval()
    transfer.save(model, tmp_path / "base.safetensors")
    transfer.merge(model)
    with torch.no_grad():
        torch.testing.assert_close(model(WORDS).logits, after, rtol=1e-4, atol=1e-5)
    assert transfer.load_lora(other, tmp_path / "adapters.safetensors") == names


def test_tied_weights_of_gpt2_are_once_in_a_file_and_nothing_is_missing(tmp_path: Path) -> None:
    model, other = gpt2().eval(), gpt2().eval()
    model.save_pretrained(tmp_path)
    found = transfer.load(other, tmp_path / "model.safetensors", show=None)
    assert not found.missing
    with torch.no_grad():
        torch.testing.assert_close(other(WORDS).logits, model(WORDS).logits)
    with pytest.raises(transfer.files.ConfigError, match="shares its weight with"):
        transfer.head(other, "lm_head", classes=5)


def test_vit_is_frozen_thawed_and_tapped() -> None:
    model = vit()
    assert transfer.head(model, classes=2).name == "classifier"
    images = torch.randn(6, 1, 16, 16)
    layers = [
        name for name, _ in model.named_modules() if name.endswith((".layer.0", ".layer.1", ".layers.0", ".layers.1"))
    ]
    taps = transfer.Taps(model, *layers)
    assert taps.widths(images) == [16, 16]
    transfer.freeze(model, "vit")
    plan = transfer.gradual(model)
    assert plan.thaw(model, 1)
    stepped(model, model(images, labels=LABELS[:6]).loss)


def test_what_transformers_saved_is_found_in_a_subset(tmp_path: Path) -> None:
    """A body without its head: partial, and said."""
    source, target = bert(3), bert(5)
    transfer.save(source, tmp_path / "bert.safetensors")
    found = transfer.load(target, tmp_path / "bert.safetensors", show=None)
    assert set(found.other_shape) == {"classifier.weight", "classifier.bias"}
