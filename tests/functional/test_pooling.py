"""Pooling against its definition, and refusals."""

import math

import numpy as np
import pytest
import torch

from lit_layers.functional.geometry import pool
from tests.support.references import normal


def test_pooling_takes_the_mean_the_last_or_the_first_real_token():
    tokens = normal(3, 6, 4)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    tokens = tokens.masked_fill(~mask[..., None], math.nan)
    real = [element[kept] for element, kept in zip(tokens, mask, strict=True)]
    centered = [prompt - prompt.mean(0) for prompt in real]
    expected = {
        "mean": [prompt.mean(0) for prompt in real],
        "last": [prompt[-1] for prompt in real],
        "cls": [prompt[0] for prompt in real],
        "centered_unit_mean": [(prompt / prompt.norm(dim=-1, keepdim=True)).mean(0) for prompt in centered],
    }
    for pooling, vectors in expected.items():
        np.testing.assert_allclose(pool(tokens, mask, pooling=pooling), torch.stack(vectors), rtol=1e-12, atol=1e-15)


def test_pooling_refuses_prompts_without_real_tokens_and_unknown_poolings():
    tokens, mask = normal(2, 3, 4), torch.tensor([[True] * 3, [False] * 3])
    for pooling in ("mean", "last", "cls", "centered_unit_mean"):
        with pytest.raises(ValueError, match=r"pooled vector is undefined at element \(1, 0\): there is no real token"):
            pool(tokens, mask, pooling=pooling)
        assert pool(tokens, mask, pooling=pooling, undefined="nan").isnan().all(-1).tolist() == [False, True]
    assert pool(tokens, mask & False, undefined="nan").isnan().all()
    with pytest.raises(ValueError, match="expected pooling to be one of"):
        pool(tokens, pooling="max")
