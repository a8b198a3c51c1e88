"""Files of Jacobian lenses, as the reference implementation writes them and published collections hold them."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_layers.errors import InputError, refused
from lit_layers.files.durable import replace_file


def write_lens(
    path: str | Path,
    jacobians: Tensor,
    num_prompts: int,
    *,
    dtype: torch.dtype = torch.float16,
    about: Mapping[str, str | int | float] | None = None,
) -> None:
    """Writes a lens, whole or not at all.

    The format counts block outputs from 0: `J[l]` is that of our layer l + 1. It has no place for layer 0, the
    embedding, which is left out.

    Args:
        jacobians: (layers, dim, dim), of layers 0 to L - 1.
        num_prompts: how many it was averaged over.
        dtype: entries are of order one, and files that others publish are in float16.
        about: where it comes from, under the key `metadata`, which the reference ignores.

    Raises:
        InputError: the file cannot be written.
    """
    layers = range(1, len(jacobians))
    content: dict[str, Any] = {
        "J": {layer - 1: jacobians[layer].to("cpu", dtype).clone() for layer in layers},
        "n_prompts": num_prompts,
        "source_layers": [layer - 1 for layer in layers],
        "d_model": jacobians.shape[-1],
    }
    if about:
        content["metadata"] = dict(about)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with refused(f"cannot write {path}"):
        replace_file(Path(path), buffer.getvalue())


def read_lens(path: str | Path) -> tuple[dict[int, Tensor], int]:
    """The matrices of a lens by our layers (1 to L - 1), in float32, and the number of prompts behind them.

    Read with `weights_only`: nothing in it runs.

    Raises:
        InputError: no such file, or one that is no lens.
    """
    wrong = f"{path}: expected a Jacobian lens, a .pt file with J, n_prompts and d_model"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except Exception as error:  # of torch, zipfile and pickle: each has its own for a file that is none
        raise InputError(f"{wrong}; it cannot be read as weights alone") from error
    if not isinstance(content, Mapping) or not isinstance(content.get("J"), Mapping) or not content["J"]:
        raise InputError(wrong)
    dim, num_prompts = content.get("d_model"), content.get("n_prompts")
    for layer, matrix in content["J"].items():
        fits = isinstance(matrix, Tensor) and _is_whole(matrix) and matrix.shape == (dim, dim)
        if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0 or not fits:
            raise InputError(f"{wrong}; its layer {layer!r} is no matrix of {dim} x {dim}")
    if not isinstance(num_prompts, int) or num_prompts < 1:
        raise InputError(f"{wrong}; n_prompts is {num_prompts!r}")
    return {layer + 1: matrix.detach().float() for layer, matrix in sorted(content["J"].items())}, num_prompts


def _is_whole(matrix: Tensor) -> bool:
    """Whether all entries lie in the file: a few bytes can claim any size, which would be filled as it is widened."""
    if matrix.layout != torch.strided or matrix.device.type != "cpu" or not matrix.is_floating_point():
        return False
    return matrix.untyped_storage().nbytes() >= matrix.numel() * matrix.element_size()
