"""How often blocks run while their order is changed."""

import torch

from lit_layers.models.running_order import running_order
from lit_layers.models.structure import family_of
from tests.support.benchmark_rows import tiny_speaker


def test_many_orders_of_one_model_run_their_steps():
    model = tiny_speaker(blocks=6, seed=3).eval()
    calls = []
    for block in family_of(model).block_list(model):
        plain = block.forward
        block.forward = lambda *args, plain=plain, **kwargs: (calls.append(1), plain(*args, **kwargs))[1]
    orders = [(1, 2, 6), (6, 5, 4, 3, 2, 1), (1, (2, 3, 4, 5), 6)]
    with torch.no_grad():
        for order in orders:
            with running_order(model, order):
                model(torch.arange(8)[None])
    assert len(calls) == 3 + 6 + 6
