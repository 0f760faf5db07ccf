"""What a model gives: outputs that no answer can hold are refused with a way out, which is tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.serve.fields import outputs_of


@pytest.mark.parametrize(
    "other", [{"keys": torch.zeros(2)}, (torch.zeros(2),), "text", torch.tensor(0.5), torch.zeros(3)]
)
def test_what_no_answer_can_hold_is_refused_with_a_way_out(other: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"'other' with .* must return tensors.* switch .* off .*, or return a module"
    ):
        outputs_of({"logits": torch.zeros(2, 5), "other": other}, 2)


@pytest.mark.slow
def test_a_model_with_a_cache_is_taken_without_it() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8, use_cache=True)
    model = transformers.GPT2LMHeadModel(config).eval()
    words = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"'past_key_values' with a \w+Cache: .*model\.config\.use_cache = False"):
        outputs_of(model(words), 2)
    model.config.use_cache = False
    assert [field.name for field in outputs_of(model(words), 2)] == ["logits"]
