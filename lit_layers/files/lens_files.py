"""Files of Jacobian lenses, in the format that the reference implementation writes and others publish.

A file of `torch.save`: `J` is a dictionary of the matrices (dim, dim) by the number of the block, counted from 0, whose
output they carry to that of the last block (our layers are one more; layer 0 has no place); `n_prompts`, over how many
prompts they are means; `source_layers`, the keys of `J` in order; `d_model`, their dim. Others add where a lens comes
from, TransformerLens as `metadata` and Neuronpedia as `provenance`; of this we read what says that the matrices are of
other states or of another model, which none of their shapes would show.
"""

import io
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_layers.errors import InputError, refused
from lit_layers.files.durable import replace_file

# What a file may say of its matrices, and what it says where they are those that are read here.
_MEANS = {"capture_point": "block_output", "stream_reduce": "none", "estimator": "jacobian_lens"}
# Where a file has its model's config: what no copy of that model has otherwise, and under which keys its name stands.
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_SIZES = (
    "hidden_size",
    "n_embd",
    "intermediate_size",
    "n_inner",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
)
_OF_A_MODEL = ("model_type", "vocab_size", *_DEPTHS, *_SIZES)
_NAMES = ("model_name", "model_id", "model", "_name_or_path")


def write_lens(
    path: str | Path,
    jacobians: Tensor,
    num_prompts: int,
    *,
    dtype: torch.dtype = torch.float16,
    about: Mapping[str, str | int | float] | None = None,
) -> None:
    """Writes a lens, whole or not at all. A layer that is not finite is left out, as layer 0 is.

    Args:
        jacobians: (layers, dim, dim), of layers 0 to L - 1.
        num_prompts: how many it was averaged over.
        dtype: entries are mostly of order one, and files that others publish are in float16.
        about: where it comes from, under the key `metadata`, which the reference ignores.

    Raises:
        InputError: the file cannot be written, no layer is finite, or an entry is too large for `dtype`.
    """
    matrices = {layer: jacobians[layer] for layer in range(1, len(jacobians)) if jacobians[layer].isfinite().all()}
    if not matrices:
        raise InputError(f"cannot write {path}: no layer from 1 on has a finite Jacobian")
    for layer, matrix in matrices.items():
        if (largest := matrix.abs().max()) > torch.finfo(dtype).max:
            raise InputError(
                f"cannot write {path}: dtype: layer {layer} has entries up to {largest:.3g}, more than {dtype} holds: "
                "use torch.float32"
            )
    content: dict[str, Any] = {
        "J": {layer - 1: matrix.to("cpu", dtype).clone() for layer, matrix in matrices.items()},
        "n_prompts": num_prompts,
        "source_layers": [layer - 1 for layer in matrices],
        "d_model": jacobians.shape[-1],
    }
    if about:
        content["metadata"] = dict(about)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with refused(f"cannot write {path}"):
        replace_file(Path(path), buffer.getvalue())


def read_lens(
    path: str | Path, num_layers: int, *, config: Mapping[str, Any] | None = None
) -> tuple[dict[int, Tensor], int]:
    """The matrices of a lens by our layers (1 to L - 1), in float32, and the number of prompts behind them.

    Read with `weights_only`: nothing in it runs. A matrix of the last block, which some files have, is the identity
    and left out.

    Args:
        num_layers: the blocks of the model that it is to be read with.
        config: of that model: a file that has another one (`config_json`) is refused, one that has another name of it
            is read with a warning, as a copy of a model has a name of its own.

    Raises:
        InputError: no such file, one that is no lens, whose matrices are not finite, or a lens of other states or of
            another model.
    """
    content = _loaded(path)
    dim, num_prompts, matrices = content.get("d_model"), content.get("n_prompts"), content["J"]
    for layer, matrix in matrices.items():
        fits = isinstance(dim, int) and isinstance(matrix, Tensor) and _is_whole(matrix) and matrix.shape == (dim, dim)
        if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0 or not fits:
            raise InputError(f"{_wrong(path)}; its layer {layer!r} is no matrix of {dim} x {dim}")
        if not matrix.float().isfinite().all():
            raise InputError(
                f"{path}: expected matrices of finite numbers, got NaN or infinity in that of block {layer}"
            )
    if not isinstance(num_prompts, int) or num_prompts < 1:
        raise InputError(f"{_wrong(path)}; n_prompts is {num_prompts!r}")
    listed = content.get("source_layers", [*matrices])
    if not isinstance(listed, list | tuple) or {*map(repr, listed)} != {*map(repr, matrices)}:
        raise InputError(f"{_wrong(path)}; source_layers are {listed!r}, and its matrices of {sorted(matrices)}")
    _check_states(path, content, num_layers)
    _check_model(path, content, num_layers, config or {})
    widened = {layer + 1: matrix.detach().float() for layer, matrix in sorted(matrices.items())}
    last = widened.pop(num_layers, None)
    if widened and max(widened) > num_layers:
        raise InputError(
            f"{path}: expected a lens of a model with {num_layers} blocks, got one with more than {max(widened) - 1}"
        )
    if not widened or (last is not None and not torch.allclose(last, torch.eye(len(last)), atol=1e-2)):
        raise InputError(
            f"{path}: expected matrices that carry outputs of blocks 0 to {num_layers - 2} to that of the last, of "
            f"{num_layers}, got {'another of the last' if widened else 'none of them'}: it is of another model"
        )
    return widened, num_prompts


def _loaded(path: str | Path) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except Exception as error:  # of torch, zipfile and pickle: each has its own for a file that is none
        raise InputError(f"{_wrong(path)}; it cannot be read as weights alone") from error
    if not isinstance(content, Mapping) or not isinstance(content.get("J"), Mapping) or not content["J"]:
        raise InputError(_wrong(path))
    return content


def _wrong(path: str | Path) -> str:
    return f"{path}: expected a Jacobian lens, a .pt file with J, n_prompts and d_model"


def _check_states(path: str | Path, content: Mapping[str, Any], num_layers: int) -> None:
    """Refuses matrices of other states than the outputs of blocks, or that carry them elsewhere than to the last."""
    for name in ("metadata", "provenance"):
        about = content.get(name)
        if not isinstance(about, Mapping):
            continue
        for key, expected in _MEANS.items():
            if about.get(key, expected) not in (expected, None):
                raise InputError(f"{path}: {name}: expected {key} to be {expected}, got {about[key]!r}")
        target = about.get("target_layer")
        if target is not None and not (isinstance(target, int) and target == num_layers - 1):
            raise InputError(
                f"{path}: {name}: expected target_layer to be {num_layers - 1}, the last block of the model counted "
                f"from 0, got {target!r}: the final norm reads no other"
            )


def _check_model(path: str | Path, content: Mapping[str, Any], num_layers: int, config: Mapping[str, Any]) -> None:
    """Refuses a lens whose file has the config of another model, and says where it has another name."""
    for where, told in _told(content):
        for key in _OF_A_MODEL if where.endswith("config_json") else ():
            value, own = told.get(key), num_layers if key in _DEPTHS else config.get(key)
            if isinstance(value, str | int) and own not in (value, None):
                raise InputError(
                    f"{path}: {where}: expected {key} to be {own!r}, as of the model that it is read with, "
                    f"got {value!r}"
                )
        own = config.get("_name_or_path")
        for name in (told.get(key) for key in _NAMES):
            if own and isinstance(name, str) and _short(name) != _short(own):
                warnings.warn(f"{path}: {where} says that it is of {name}, but it is read with {own}", stacklevel=2)


def _told(content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What a file says about its model, with the place where it stands; a config is a dictionary or JSON of one."""
    for name in ("metadata", "provenance"):
        about = content.get(name)
        if isinstance(about, Mapping):
            yield name, about
            config = about.get("config_json")
            if isinstance(config, str | bytes):
                try:
                    config = json.loads(config)
                except (ValueError, RecursionError):
                    continue  # a note in other words
            if isinstance(config, Mapping):
                yield f"{name}.config_json", config


def _short(name: str) -> str:
    """A model's name without its owner or folder."""
    return name.rstrip("/").rsplit("/", 1)[-1].lower()


def _is_whole(matrix: Tensor) -> bool:
    """Whether all entries lie in the file: a few bytes can claim any size, which would be filled as it is widened."""
    if matrix.layout != torch.strided or matrix.device.type != "cpu" or not matrix.is_floating_point():
        return False
    return matrix.untyped_storage().nbytes() >= matrix.numel() * matrix.element_size()
