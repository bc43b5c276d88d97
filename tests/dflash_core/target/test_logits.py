"""The target's logits out of its last state: equal to transformers' own, whatever the family does to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_core.target.head import load_embedding_and_head
from dflash_core.target.logits import target_logits
from dflash_core.target.runtime import load_model
from tests.support import official as scenes
from tests.support.tiny_families import MAKERS


@pytest.mark.parametrize("family", MAKERS)
@torch.inference_mode()
def test_they_equal_the_models_own(family: str, tmp_path: Path) -> None:
    target = scenes.write_target(tmp_path, family, scale=3.0)
    model = load_model(target, "float32")
    vocabulary = target.config.vocab_size
    ids = torch.randint(8, 150, (1, 12), generator=torch.Generator().manual_seed(3))
    output = model(ids, output_hidden_states=True)
    logits = target_logits(
        load_embedding_and_head(target).head_VD,
        target.config,
        num_token_rows=vocabulary - 5,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    found = logits(output.hidden_states[-1][0])
    torch.testing.assert_close(found[:, :-5], output.logits[0, :, : vocabulary - 5], rtol=1e-5, atol=1e-5)
    assert (found[:, -5:] == -torch.inf).all(), "padding is no token"
    assert found[:, :-5].std() > 0.1
