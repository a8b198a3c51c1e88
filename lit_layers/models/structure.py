"""Find the blocks, norm and head of model classes that the table `FAMILIES` does not list, by watching one call.

Hooks watch one call of the model. Its blocks are the list of modules that run once each, in order, each with the output
of the block before as its input. Checks on the actual weights (`proof`) then show that nothing else happens between
layer 0 and the logits. A model that fails a check is refused. Final norm and head are never called separately. To read
out a state, the model itself is called, with blocks that return this state.
"""

import copy
import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_layers.errors import InputError, kind_and_words
from lit_layers.functional.jacobian.block_call import evaluating, is_cache
from lit_layers.models.block_calls import num_values
from lit_layers.models.discovery import (
    TWO_ROWS,
    FoundFamily,
    find_blocks,
    is_encoder_decoder,
    scores_of,
)
from lit_layers.models.families import (
    TIMM,
    TRANSFORMERS,
    Family,
    Network,
    Vision,
    call_maskless,
    call_trunk,
    row_of,
    text_config,
    timm_features,
    trunk_of,
)
from lit_layers.models.offload import execution_device
from lit_layers.models.own_networks import OwnNetwork, is_known, network_of
from lit_layers.models.proof import (
    CANNOT_CALL,
    Evidence,
    NotFinite,
    PositionTables,
    Probe,
    SeenCall,
    Unproven,
    is_timm,
    probe_of,
    rel_error,
    watch,
)


def family_of(model: nn.Module) -> Family:
    """Return the row of `FAMILIES` for a model's class, or if there is none, the family that `infer_family` finds.

    Raises:
        InputError: if the model is not a sequence of blocks. The message says which check fails, and where.
    """
    return row_of(model) or infer_family(model)


# Caches of `infer_family`. _FOUND: class -> `_digest` of a model -> family that last passed the checks. _PROVEN: model
# -> ((`_digest`, `_versions`) at its last check, family). The second cache is needed because checks depend on weights.
_FOUND: "weakref.WeakKeyDictionary[type, dict[str, Family]]" = weakref.WeakKeyDictionary()
_PROVEN: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, Family]]" = weakref.WeakKeyDictionary()


def infer_family(model: Network) -> Family:
    """Return the family of a model whose class has no row in `FAMILIES`, after checking it on the model's weights.

    The checks run again whenever the weights have changed: a weight of 0 at the first step may hide a second path
    between blocks, which appears later in training. Nothing can be checked on states that are not finite. A diverged
    model therefore gets the family that was last found for its class and config. The model and the random state do not
    change.

    Raises:
        InputError: if the model is not a sequence of blocks, or cannot be checked, for example without weights in
            memory. The message says why.
    """
    kind = type(model).__name__
    if kind == "CLIPModel":
        raise InputError(
            "no layered view of CLIPModel: images and texts pass two rows of blocks; save the one of the images with "
            "CLIPVisionModel.from_pretrained(...).save_pretrained(folder) and open that"
        )
    if not is_known(model):
        raise InputError(
            f"{kind} is neither of transformers nor of timm: it can be measured, and not be saved, cut or run in "
            "another order"
        )
    if execution_device(model).type == "meta":
        raise InputError(f"no layered view of {kind}: it has no weights here")
    families = _FOUND.setdefault(type(model), {})
    key = _digest(model)
    network = network_of(model)
    now, proof = (key, _versions(model)), _PROVEN.get(network)
    if key not in families or proof is None or proof[0] != now:
        try:
            families[key] = _prove_float32(model)
        except Unproven as reason:
            if not (isinstance(reason, NotFinite) and key in families):
                raise InputError(
                    f"no layered view of {kind}: {reason}; nor has its class a row in lit_layers/models/families.py"
                ) from reason
        _PROVEN[network] = proof = now, families[key]
    return proof[1]


def _versions(model: Network) -> tuple[int, ...]:
    """Return numbers that change if a weight is replaced or written to.

    `infer_family` repeats its checks of the model after such a change. Buffers are left out, because the forward pass
    of some models writes to them.
    """
    tensors = [tensor for tensor in model.parameters() if not tensor.is_inference()]
    return len(tensors), sum(tensor._version for tensor in tensors), hash(tuple(t.data_ptr() for t in tensors))


def _digest(model: Network) -> str:
    """Return a hash of what determines the family: parameter names and shapes, config, attention implementation."""
    shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in model.named_parameters()]
    config = getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", "")
    options = "" if config is None else config.to_json_string(use_diff=False)
    return hashlib.blake2b("\n".join([*shapes, options, str(attention)]).encode()).hexdigest()


def _prove_float32(model: Network) -> FoundFamily:
    """Run all checks of `prove` on a model; if a weight has 16 bits, on a float32 copy of the model.

    In float32, the checks allow only small rounding errors, so they also detect small differences. A model with weights
    offloaded to disk is checked as it is, without a copy.
    """
    if any(each.is_meta for each in model.parameters()) or all(each.dtype.itemsize != 2 for each in model.parameters()):
        return prove(model)
    family = prove(copy.deepcopy(model).float())
    return replace(family, checks=(*family.checks, ("computed", "float32")))


def prove(model: Network) -> FoundFamily:
    """Run all checks on the weights of a model and return its family.

    Raises:
        Unproven: if a check fails, or the checks change the model.
    """
    with untouched(model):
        return _prove(model)


@contextmanager
def untouched(model: Network) -> Iterator[None]:
    """Check that the code inside changes no weight, no buffer value and no module of a model.

    Raises:
        Unproven: if something changed.
    """
    before, buffers = _tensors(model), {n: b.clone() for n, b in model.named_buffers(remove_duplicate=False)}
    versions = {name: tensor._version for name, tensor in before.items()}
    modules = [id(module) for module in model.modules()]
    yield
    after = _tensors(model)
    # Collect the tensors that were written to or replaced. A buffer may be rewritten with equal values, because models
    # that scale rotary frequencies for long texts rewrite these buffers at each call.
    written = [
        name for name, each in after.items() if each is not before.get(name) or each._version != versions.get(name)
    ]
    if before.keys() != after.keys() or not all(
        name in buffers and torch.equal(buffers[name], after[name]) for name in written
    ):
        raise Unproven("its own call writes to its weights or buffers")
    if modules != [id(module) for module in model.modules()]:
        raise Unproven("its own call exchanges its modules")


def _prove(model: Network) -> FoundFamily:
    device = execution_device(model)
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        evaluating(model),
    ):
        probe = probe_of(model)
        family, calls, output = _discover(model, probe)
        try:
            return _checked(Evidence(model, family, probe, calls, output))
        except torch.OutOfMemoryError:
            raise
        except CANNOT_CALL as error:
            if isinstance(error, InputError) and not isinstance(model, OwnNetwork):
                raise
            raise Unproven(f"its blocks cannot be called again ({kind_and_words(error)[:240]})") from error


def _tensors(model: Network) -> dict[str, Tensor]:
    parts = (model.named_parameters, model.named_buffers)
    both = {name: tensor for part in parts for name, tensor in part(remove_duplicate=False)}
    # Offloaded tensors (meta) are left out: accelerate replaces them at each call.
    return {name: tensor for name, tensor in both.items() if not tensor.is_inference() and not tensor.is_meta}


def _checked(evidence: Evidence) -> FoundFamily:
    """Check the recorded block calls of a model, and return its family with the results of the checks filled in."""
    family, probe = evidence.family, evidence.probe
    if is_own := isinstance(evidence.model, OwnNetwork):
        evidence.check_alone()
        evidence.check_layer_0()
    replayed = evidence.check_replay()
    evidence.check_args()
    followed = evidence.check_chain()
    read_out, needs_all = evidence.check_readout()
    if family.features is not family.call and not evidence.trunk_agrees():
        family = evidence.family = replace(family, features=family.call)
    padding = evidence.takes_padding()
    if is_own and padding:
        padding = evidence.scores_take_padding()
    causal = evidence.is_causal()
    limits = [family.limit, _config_limit(evidence.model.config)] if probe.is_text else []
    positive = [limit for limit in limits if limit and limit > 0]
    proof = {
        "blocks": family.blocks,
        "probe": " x ".join(map(str, probe.needed.shape)),
        "replay": replayed,
        "changed_chain": followed,
        "readout": read_out,
        "padding": padding,
        "causal": causal,
    }
    return replace(
        family,
        limit=min(positive) if positive else None,
        is_causal=causal,
        takes_padding=padding,
        needs_all=needs_all,
        checks=tuple(
            (name, float(f"{value:.1e}") if isinstance(value, float) else value) for name, value in proof.items()
        ),
    )


def _config_limit(config: Any) -> int | None:
    """Return the maximum number of tokens per text according to a config; None if the config states none.

    For `longrope` this is the original length (Phi 3.5: 4,096 tokens). Longer texts use other rotary frequencies, so
    one long text would change the states of all other texts in its batch.
    """
    config = text_config(config)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # `rope` may have a dict per layer type
    lengths = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    if lengths:
        return min(lengths)
    # The config of MPT names this limit `max_seq_len`.
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def rebuilt_error(model: Network) -> float:
    """Return the largest relative difference between a truncated model's states and those of a rebuilt copy.

    The copy has the same weights, but is built from the config, which states the smaller depth. The difference is large
    if a block computes with the number of blocks, for example a scale of 1 / sqrt(depth). The truncated model still has
    the scale of the original depth.
    """
    again = rebuilt(model)
    with torch.no_grad(), evaluating(model):
        probe, states = probe_of(model), []
        for each in (model, again):
            with watch(infer_family(each).block_list(each)) as calls:
                probe.call(each, probe.inputs, dict(probe.options))
            states.append([call.result for call in calls])
    return max(rel_error(one, other) for one, other in zip(*states, strict=True))


def rebuilt(model: Network) -> Network:
    """Return a transformers model that is built from the config of `model`, in evaluation mode, with its weights."""
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        again = type(model)._from_config(model.config, dtype=next(model.parameters()).dtype).to(device).eval()
        again.load_state_dict(model.state_dict(), assign=True)
        again.tie_weights()  # `assign` makes a parameter of each name
        old = dict(model.named_buffers())
        # Give each buffer of `again` the dtype that it has in `model`: `half()` may have cast the rotary tables there.
        for name, buffer in again.named_buffers():
            buffer.data = buffer.to(old[name].dtype if name in old else buffer.dtype)
    return again


# Find the modules that are the blocks.


def _lists(model: Network) -> dict[str, list[nn.Module]]:
    """Return the modules in every non-empty ModuleList and Sequential, keyed by path, outer lists first."""
    kinds = nn.ModuleList, nn.Sequential
    return {path: list(module) for path, module in model.named_modules() if isinstance(module, kinds) and len(module)}


def _discover(model: Network, probe: Probe) -> tuple[FoundFamily, list[SeenCall], Any]:
    """Watch one call of a model; return its family, not yet checked, the calls of its blocks and the model's output.

    Raises:
        Unproven: if the model cannot be called, or no list of modules is a sequence of blocks.
    """
    lists = _lists(model)
    outside = [module for module in model.modules() if "Norm" in type(module).__name__]
    tables = PositionTables(probe.needed.shape[1])
    watched = dict.fromkeys([*(module for members in lists.values() for module in members), *outside])
    with watch(watched) as calls, tables:
        try:
            output = probe.call(model, probe.inputs, dict(probe.options))
        except torch.OutOfMemoryError:
            raise
        except CANNOT_CALL as error:
            two_rows, why = f"{TWO_ROWS}, and " if is_encoder_decoder(model) else "", kind_and_words(error)[:240]
            raise Unproven(f"{two_rows}it cannot be called with {probe.columns[0]} alone ({why})") from error
    path, row = find_blocks(model, calls, lists, probe)
    if any(is_cache(value) for call in row for value in (*call.args, *call.kwargs.values())):
        raise Unproven("its blocks are given a cache of keys and values, and use_cache=False does not keep it away")
    if is_timm(model):
        features, package = timm_features, "timm"
    else:
        features, package = call_trunk, "transformers"
    trunk = trunk_of(model)
    family = FoundFamily(
        name=type(model).__name__,
        classes=(type(model).__name__,),
        blocks=path,
        norm=_final_norm(model, row, calls),
        package=package,
        inputs=probe.columns,
        options=probe.options,
        vision=None if probe.is_text else _vision(model, row, probe, output),
        call=probe.call,
        features=probe.call
        if (trunk is model and package == "transformers") or probe.call is call_maskless
        else features,
        returned=tuple(num_values(call.output) for call in row),
        dim=row[-1].result.shape[-1],
        limit=tables.limit,
        order=tuple(lists[path].index(call.module) for call in row),
        **scores_of(model, output, probe),
        filler=int(probe.needed[0, 0]) if probe.is_text else 0,
    )
    return family, row, output


def _final_norm(model: Network, row: list[SeenCall], calls: list[SeenCall]) -> str | None:
    """Return the path of the norm whose input is the output of the last block; None if there is no such norm."""
    last = row[-1].result
    inside = {id(part) for call in row for part in call.module.modules()}
    for call in calls:
        if call.state is last and id(call.module) not in inside and "Norm" in type(call.module).__name__:
            return next(path for path, module in model.named_modules() if module is call.module)
    return None


def _vision(model: Network, row: list[SeenCall], probe: Probe, output: Any) -> Vision:
    """Return the image properties of a model. All tokens that are not patches count as prefix tokens.

    Raises:
        Unproven: if the patch size is unknown, or the blocks take fewer tokens than there are patches.
    """
    state, pixels = row[0].state, probe.needed
    if is_timm(model):
        patches = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    else:
        patches = getattr(getattr(model.config, "vision_config", model.config), "patch_size", None)
    if patches is None:
        raise Unproven("nothing says the size of its patches")
    side = int(patches if isinstance(patches, int) else patches[0])
    prefix = state.shape[1] - (pixels.shape[-1] // side) ** 2
    if prefix < 0:
        raise Unproven(f"its blocks take {state.shape[1]} tokens for {(pixels.shape[-1] // side) ** 2} patches")
    logits = getattr(output, "logits", None) if not isinstance(output, Tensor) else output
    num_classes = 0 if logits is None else logits.shape[-1]
    # At layer 0, a class token has the same state in all images.
    has_class_token = prefix > 0 and torch.equal(state[0, 0], state[1, 0])
    if is_timm(model):
        return replace(TIMM, prefix=lambda model: prefix, class_token=lambda model: has_class_token)
    return replace(
        TRANSFORMERS,
        width=lambda model: state.shape[-1],
        fixed_side=lambda model: pixels.shape[-1],
        usual_side=lambda model: pixels.shape[-1],
        patch_side=lambda model: side,
        channels=lambda model: pixels.shape[1],
        class_token=lambda model: has_class_token,
        prefix=lambda model: prefix,
        classes=lambda model: num_classes,
    )
