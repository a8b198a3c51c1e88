"""The attentive probe: its forward pass against numpy, a problem that only attention solves, and invariances."""

import numpy as np
import pytest
import torch

from lit_layers.functional import fit_attentive_probe


def planted(rows: int = 160, tokens: int = 6, dim: int = 8, seed: int = 0):
    """Return rows where a marked token at a random position holds the class, and all others hold a random class."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, tokens, dim, generator=generator, dtype=torch.float64) * 0.1
    labels = torch.randint(0, 2, (rows,), generator=generator)
    states[..., 0] += torch.randint(0, 2, (rows, tokens), generator=generator) * 2 - 1
    position = torch.randint(0, tokens, (rows,), generator=generator)
    states[torch.arange(rows), position, 0] = labels.double() * 2 - 1
    states[torch.arange(rows), position, 1] += 4
    return states, torch.ones(rows, tokens, dtype=torch.bool), labels


@pytest.fixture(scope="module")
def fitted():
    states, mask, labels = planted()
    return fit_attentive_probe(states, mask, labels, num_classes=2, num_heads=2, steps=300)


def test_the_probe_finds_the_token_that_holds_the_class_and_a_mean_over_tokens_does_not(fitted):
    states, mask, labels = planted(seed=1)
    hits = (fitted.log_proba(states, mask).argmax(-1) == labels).double().mean()
    assert hits > 0.9
    train, _, train_labels = planted()
    # The best linear map of the mean states, by least squares on +-1.
    ones = np.ones((len(train), 1))
    design = np.hstack([train.mean(1).numpy(), ones])
    weights = np.linalg.lstsq(design, train_labels.numpy() * 2.0 - 1, rcond=None)[0]
    mean_predictions = np.hstack([states.mean(1).numpy(), ones]) @ weights > 0
    assert (mean_predictions == labels.numpy().astype(bool)).mean() < 0.8


def test_log_probabilities_equal_those_of_numpy(fitted):
    states, mask, _ = planted(rows=5, seed=2)
    mask[1, 4:] = False
    found = fitted.log_proba(states, mask).numpy()
    p = {name: value.numpy() for name, value in vars(fitted).items()}
    heads, size = p["query"].shape
    for row in range(5):
        x = (states[row].numpy()[mask[row].numpy()] - p["mean"]) / p["scale"]
        pooled = []
        for head in range(heads):
            columns = slice(head * size, (head + 1) * size)
            scores = (x @ p["key"].T)[:, columns] @ p["query"][head] / np.sqrt(size)
            share = np.exp(scores - scores.max())
            pooled.append((share / share.sum()) @ (x @ p["value"].T)[:, columns])
        logits = p["weight"] @ np.concatenate(pooled) + p["bias"]
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        np.testing.assert_allclose(found[row], expected, rtol=1e-9)


def test_token_order_and_the_content_of_padding_do_not_matter(fitted):
    states, mask, labels = planted(rows=20, seed=3)
    padded = torch.cat([states, torch.full((20, 3, 8), torch.nan, dtype=torch.float64)], 1)
    real = torch.cat([mask, torch.zeros(20, 3, dtype=torch.bool)], 1)
    torch.testing.assert_close(fitted.log_proba(padded.nan_to_num(7.0), real), fitted.log_proba(states, mask))
    flipped = fitted.log_proba(states.flip(1), mask)
    torch.testing.assert_close(flipped, fitted.log_proba(states, mask), rtol=1e-9, atol=1e-12)
    one, other = (
        fit_attentive_probe(x, m, labels, num_classes=2, num_heads=2, steps=20)
        for x, m in ((padded, real), (states, mask))
    )
    torch.testing.assert_close(one.log_proba(states, mask), other.log_proba(states, mask), rtol=1e-9, atol=1e-12)


def test_invalid_heads_masks_and_states_are_refused():
    for change, sentence in (
        ({"num_heads": 3}, "expected num_heads that divides the width 8, got 3"),
        ({"mask": torch.zeros(20, 6, dtype=torch.bool)}, "expected a real token for each of 20 rows"),
        ({"states": torch.full((20, 6, 8), torch.nan)}, "and finite states at all of them"),
    ):
        states, mask, labels = planted(rows=20)
        options = {"states": states, "mask": mask, "labels": labels, "num_heads": 2} | change
        with pytest.raises(ValueError, match=sentence):
            fit_attentive_probe(num_classes=2, steps=1, **options)
