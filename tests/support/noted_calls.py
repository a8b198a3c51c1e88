"""What modules are called with, noted without hooks: of a model with some each state is passed by itself."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn


@contextmanager
def noted_calls(parts: Collection[nn.Module], note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Inside, `note` is given the first argument of each call of the parts, before it."""

    def noting(forward):
        def noted(part, *args, **kwargs):
            if part in parts:
                note(args[0] if args else next(iter(kwargs.values())))
            return forward(part, *args, **kwargs)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for kind in {type(part) for part in parts}:
            patch.setattr(kind, "forward", noting(kind.forward))
        yield
