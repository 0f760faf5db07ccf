"""Models of torchvision and timm, where they are installed, made from scratch: nothing is downloaded."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.layers import transfer
from paceline.layers.transfer.depth import layers

pytestmark = pytest.mark.slow

try:
    torchvision: Any = import_module("torchvision.models")
    timm: Any = import_module("timm")
except (ImportError, RuntimeError) as error:  # the second where torchvision was built for another torch
    pytest.skip(f"pip install timm torchvision, to try their models: {error}", allow_module_level=True)

# The model, what lies on top of it, some of its layers from the input on, and how many there are.
MODELS = [
    ("torchvision resnet18", "fc", ["conv1", "layer1.0", "layer4.1"], 11),
    ("torchvision mobilenet_v2", "classifier.1", ["features.0.0", "features.1", "features.17"], 22),
    ("torchvision vit_b_16", "heads.head", ["conv_proj", "encoder.layers.encoder_layer_0", "encoder.ln"], 17),
    ("timm vit_tiny_patch16_224", "head", ["patch_embed.proj", "blocks.0", "blocks.11", "norm"], 16),
    ("timm convnext_atto", "head.fc", ["stem.0", "stages.0.blocks.1", "stages.2.blocks.5"], 21),
    ("timm efficientnet_b0", "classifier", ["conv_stem", "blocks.1.0", "blocks.6.0"], 21),
]


@pytest.mark.parametrize(("kind", "top", "some", "count"), MODELS, ids=[row[0] for row in MODELS])
def test_a_model_gets_a_head_is_probed_frozen_kept_and_thawed(
    kind: str, top: str, some: list[str], count: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    where, name = kind.split()
    model = timm.create_model(name) if where == "timm" else getattr(torchvision, name)()
    row = [layer.name for layer in layers(model)]
    assert [name for name in row if name in some] == some
    assert len(row) == count
    assert transfer.head(model, classes=3).name == top
    data = TensorDataset(torch.randn(9, 3, 224, 224), torch.arange(9) % 3)
    told = transfer.suggest(model, data)
    transfer.freeze(model, *told.freeze)
    assert len(transfer.features(model, told.cut, data, tmp_path)) == 9
    transfer.freeze(model, "*")
    transfer.unfreeze(model, top)
    plan = transfer.gradual(model)
    optimizer = torch.optim.SGD(transfer.groups(model, lr=0.01, decay=0.8))
    for epoch in range(3):
        if plan.thaw(model, epoch):
            for group in transfer.groups(model, lr=0.01, decay=0.8, beside=optimizer):
                optimizer.add_param_group(group)
    transfer.lora(model, top, rank=2)
    assert model(data.tensors[0][:2]).shape == (2, 3)
    assert transfer.merge(model) == [top]
