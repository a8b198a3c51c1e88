"""The contract of a layered view, checked on one tiny model of every family."""

import copy
import json
import tempfile
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import variants
from lit_layers.functional.jacobian.block_jacobians import block_jacobian
from lit_layers.models.build import quiet, save, untrained, weights_hash
from lit_layers.models.copies import truncate
from lit_layers.models.families import propose_blocks
from lit_layers.models.offload import Offload
from lit_layers.models.running_order import SharedPrefixes, running_order
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel, Trajectory, upcast
from tests.support.replay import replay
from tests.support.rounding import assert_rounded
from tests.support.tiny_configs import tiny_model
from tests.support.tiny_models import EVERY, HEADS, IMAGE, LAYERS, PICTURES, RECURRENT, sees_images, tiny, tiny_batch

# Architectures without a row in FAMILIES and without a tiny model: model type -> class of transformers.
ARCHITECTURES = {
    "opt": "OPTForCausalLM",
    "gptj": "GPTJForCausalLM",  # parallel attention and feed-forward
    "bloom": "BloomForCausalLM",  # ALiBi
    "phi3": "Phi3ForCausalLM",
    "stablelm": "StableLmForSequenceClassification",  # reads the last token that is not padding
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",  # parallel, sliding windows
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",  # norms after attention and feed-forward
    "smollm3": "SmolLM3ForCausalLM",
    "apertus": "ApertusForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",  # latent attention
    "electra": "ElectraForMaskedLM",
    "xlm-roberta": "XLMRobertaForMaskedLM",
    "olmoe": "OlmoeForCausalLM",  # experts, here and below
    "mixtral": "MixtralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",  # linear and full attention, here and below
    "falcon_h1": "FalconH1ForCausalLM",
    "jamba": "JambaForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
}
UNCUT = {
    "zamba2": "the blocks of this Zamba2ForCausalLM share weights, and it is not cut",
    "minicpm3": "MiniCPM3ForCausalLM is not cut: .* its blocks depend on how many there are",
}
# The matrix products of experts do not support float64.
ONLY_FLOAT32 = {"olmoe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_moe", "qwen3_next", "jamba"}
STATES_WITHOUT_EMBEDDING = {*RECURRENT, "falcon_mamba"}
EAGER_ONLY = {"gemma2", "gpt_neo", "mpt", *RECURRENT}
# Families whose norms, rotary tables or softmaxes compute in float32 in every dtype.
IN_FLOAT32 = ("llama", "mistral", "qwen", "olmo", "gemma", "granite", "gpt_neox", "phi", "falcon", "mpt")
IN_FLOAT32 += ("modernbert", "mamba")
# GPT-Neo multiplies queries and keys in float32, and MKL's result depends on their memory layout. The layout differs
# between the model's own call, which copies keys into a cache, and a prompt selected from a batch.
PRODUCTS_IN_FLOAT32 = {"gpt_neo": 5e-6}
ORDERS = [variant.schedule for variant in variants(LAYERS, seeds=(0, 1), loops=(3,), custom=["(2,3) 1", "3 (1,2,1) 3"])]
ORDERS += [(1, 3), (1, (3, 2)), (1, (2, 3), 1), (1, (2, 2, 3)), ((1, 2, 3), (1, 2, 3)), (3,), (1, 2, 3, 3), (1, 2)]
ORDERS += [(1, (3,)), ()]  # equal to an earlier one, and empty


def built(name: str, dtype: torch.dtype = torch.float32, attention: str | None = None) -> Any:
    if name in ARCHITECTURES:
        padding = {"pad_token_id": 0} if "Classification" in ARCHITECTURES[name] else {}
        return tiny_model(ARCHITECTURES[name], name, torch.float32 if name in ONLY_FLOAT32 else dtype, **padding)
    return tiny(name, dtype, attention=attention)


def attentions(name: str) -> tuple[str | None, ...]:
    return (None,) if name in ARCHITECTURES else ("eager",) if name in EAGER_ONLY else ("sdpa", "eager")


def paddings(name: str) -> tuple[str | None, ...]:
    return (None,) if sees_images(name) else (None, "left", "right")


def batch_of(name: str, padding: str | None) -> dict[str, Tensor]:
    """Return a batch of three prompts, or of HEADS prompts if unpadded, as ALiBi has one row per head."""
    return tiny_batch(name, batch=3 if padding else HEADS, padding=padding)


def tolerance_of(name: str) -> float:
    if name in ARCHITECTURES:
        return 1e-4
    return 1e-6 if name.startswith(IN_FLOAT32) else PRODUCTS_IN_FLOAT32.get(name, 1e-12)


def close(found: Tensor, expected: Tensor, atol: float, what: str, rtol: float = 0.0) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda message: f"{what}: {message}")


def check_family(name: str) -> None:
    """Check the contract of a view on a model of this family."""
    for attention in attentions(name):
        is_first = attention == attentions(name)[0]
        view = LayeredModel(built(name, torch.float64, attention))
        assert (view.num_layers, view.dim, view.max_tokens in (None, 63, 64)) == (depth_of(view), 32, True)
        check_own_numbers(name, view)
        for padding in paddings(name) if is_first else paddings(name)[-1:]:
            where = f"{name}, {attention}, padded {padding}"
            batch = batch_of(name, padding)
            trajectory = view.trajectory(batch)
            check_blocks(view, trajectory, where, tolerance_of(name))
            check_prompts(view, batch, trajectory, where, tolerance_of(name))
            if not sees_images(name):
                check_logits_when_asked(view, trajectory, where)
            if padding is None:
                check_running_orders(view, trajectory, where)
            if padding == "left" or sees_images(name):
                check_shared_prefixes(view, trajectory, where)
        check_jacobians(name, view, attention)
    check_precisions(name)
    check_cut(name)
    check_untrained(name)


def depth_of(view: LayeredModel) -> int:
    return getattr(getattr(view.model, "config", None), "num_hidden_layers", LAYERS)


def check_own_numbers(name: str, view: LayeredModel) -> None:
    """Compare states and logits with those of the model itself."""
    batch = tiny_batch(name)
    trajectory = view.trajectory(batch)
    atol = tolerance_of(name) if name in ARCHITECTURES else PRODUCTS_IN_FLOAT32.get(name, 1e-12)
    with torch.no_grad():
        logits, states = own_numbers(name, view.model, batch)
        norm = view.family.final_norm(view.model)
        last = trajectory.hidden[-1] if norm is None else norm(trajectory.hidden[-1])
    close(trajectory.logits, logits, atol, f"logits of {name}")
    assert view.predicts_next_token == type(view.model).__name__.endswith(("ForCausalLM", "LMHeadModel")), name
    if name in ARCHITECTURES:
        assert (view.origin, view.vocab_size) == ("structure", None if "Classification" in ARCHITECTURES[name] else 128)
    if name in PICTURES:
        close(trajectory.hidden, states, atol, f"states of {name}")
    elif sees_images(name):
        close(trajectory.hidden[1:], states, atol, f"states of {name}")
    elif name in STATES_WITHOUT_EMBEDDING:
        close(trajectory.hidden[0], view.model.get_input_embeddings()(batch["input_ids"]), 0, f"embedding of {name}")
        close(trajectory.hidden[1:], states[:-1], atol, f"states of {name}")
        close(last, states[-1], atol, f"normed state of {name}")
    elif len(states) == len(trajectory.hidden):
        close(trajectory.hidden[:-1], states[:-1], atol, f"states of {name}")
        close(last, states[-1], atol, f"normed state of {name}")
    if (name.startswith("picture") and name != "picture_mae") or (not sees_images(name) and name not in ARCHITECTURES):
        assert tuple(view.model.get_submodule(propose_blocks(view.model)).children()) == view.blocks, name


def own_numbers(name: str, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a model's own logits and states; a masked autoencoder runs as a copy that masks nothing."""
    if not sees_images(name):
        output = model(**batch, output_hidden_states=True, use_cache=False)
        logits = output.logits if hasattr(output, "logits") else output.last_hidden_state
        return logits, torch.stack(output.hidden_states)
    pixels = batch["pixel_values"].double()
    if name not in PICTURES:
        given = model.forward_intermediates(
            pixels, norm=False, output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True
        )
        tokens = [each if torch.is_tensor(each) else torch.cat([each[1], each[0]], dim=1) for each in given]
        return model(pixels), torch.stack(tokens)
    model, options = copy.deepcopy(model), {}
    if "mae" in name:
        model.config.mask_ratio = 0.0
        options["noise"] = torch.linspace(0, 1, (IMAGE // 4) ** 2).expand(len(pixels), -1)
    output = model(pixels, **options)
    states = model.base_model(pixels, **options, output_hidden_states=True).hidden_states
    named = ("logits", "image_embeds", "pooler_output" if name == "picture_clip" else "last_hidden_state")
    return next(getattr(output, each) for each in named if hasattr(output, each)), torch.stack(states)


def check_blocks(view: LayeredModel, trajectory: Trajectory, where: str, atol: float) -> None:
    """Check that blocks lead from layer to layer, and that the readout of the last layer gives the logits."""
    assert trajectory.hidden.isfinite().all(), where
    for layer, (before, after) in enumerate(pairwise(trajectory.hidden), start=1):
        with torch.no_grad():
            close(trajectory.block(layer)(before), after, atol, f"{where}: block {layer}")
        assert (after - before).norm() > 0.05 * before.norm(), "a block that does nothing proves nothing"
    with torch.no_grad():
        close(ending(trajectory, trajectory.hidden[-1]), trajectory.logits, atol, f"{where}: readout")
    everything = range(1, view.num_layers + 1)
    close(replay(view, trajectory, everything), trajectory.logits, atol, f"{where}: replay")


def ending(trajectory: Trajectory, hidden: Tensor) -> Tensor:
    return trajectory.pooled(hidden) if trajectory.pools_some else trajectory.model.readout(hidden)


def check_prompts(view: LayeredModel, batch: dict, trajectory: Trajectory, where: str, atol: float) -> None:
    """Check that each prompt has the states that it has alone, and that a selected prompt keeps its arguments."""
    seen: list[Tensor] = []
    view.pass_states(batch, lambda layer, hidden, mask: seen.append(hidden))
    assert torch.equal(torch.stack(seen), trajectory.hidden), where
    if "attention_mask" in batch:
        assert torch.equal(trajectory.mask, batch["attention_mask"].bool()), where
    everything = range(1, view.num_layers + 1)
    for index, mask in enumerate(trajectory.mask):
        prompt = trajectory.rows(index, index + 1)
        assert prompt.hidden.shape[1] == prompt.logits.shape[0] == prompt.mask.shape[0] == 1, where
        replayed = replay(view, prompt, everything)
        close(replayed, trajectory.logits[index : index + 1], 10 * atol, f"{where}: prompt {index} cut")
        if "input_ids" not in batch:
            continue
        alone = view.trajectory({"input_ids": batch["input_ids"][index : index + 1, mask]})
        least = max(atol, 1e-5)  # some softmaxes always compute in float32
        close(trajectory.hidden[:, index, mask], alone.hidden[:, 0], least, f"{where}: prompt {index} alone", least)
        logits = trajectory.logits[index]
        logits = logits[mask] if logits.ndim == 2 else logits
        close(logits, alone.logits[0], least, f"{where}: logits of prompt {index} alone", least)


def check_logits_when_asked(view: LayeredModel, trajectory: Trajectory, where: str) -> None:
    """Check that selected logits equal those rows of all logits, and that the head runs only on these rows."""
    rows: list[int] = []
    index = tuple(trajectory.mask.nonzero()[::3].T) if trajectory.logits.ndim == 3 else (torch.tensor([2, 0]),)
    generates = view.predicts_next_token
    if generates:
        handle = view.model.get_output_embeddings().register_forward_hook(
            lambda module, args, output: rows.append(args[0].shape[:-1].numel())
        )
    found = trajectory.logits_of(index)
    least = 1e-12 if view.dtype == torch.float64 else 1e-4
    close(found, trajectory.logits[index], least, f"{where}: logits when asked", least)
    assert rows == ([len(index[0])] if generates else []), f"{where}: all logits are there already"
    if generates:
        handle.remove()


def check_running_orders(view: LayeredModel, trajectory: Trajectory, where: str) -> None:
    """Check that a model in another order gives the logits of its blocks composed in that order."""
    least = 2e-4 if view.dtype == torch.float32 else 1e-6
    for schedule in ((1, 3), (2, 1, 3, 3), (1, (2, 3))):
        expected = replay(view, trajectory, schedule)
        with torch.no_grad(), running_order(view.model, schedule):
            found = view.family.logits(view.model, trajectory.inputs)
        close(found, expected, least, f"{where}: the model in order {schedule}", least)
        assert (expected - trajectory.logits).abs().max() > 1e-3, f"{where}: order {schedule} changes nothing"


def check_shared_prefixes(view: LayeredModel, trajectory: Trajectory, where: str) -> None:
    """Check that schedules with a common beginning give the same logits as each one alone."""
    least = 1e-9 if view.dtype == torch.float64 else 2e-4
    found = set()
    for indices, state in SharedPrefixes(ORDERS, view.num_layers).states(trajectory):
        found.update(indices)
        for schedule in {ORDERS[index] for index in indices}:
            expected = replay(view, trajectory, schedule)
            close(ending(trajectory, state), expected, least, f"{where}: order {schedule} with others", least)
    assert found == set(range(len(ORDERS))), where


def check_jacobians(name: str, view: LayeredModel, attention: str | None) -> None:
    """Check d (block(x) - x)[last token] / d x of all tokens by every route against plain autograd on one prompt."""
    exact = view.trajectory(tiny_batch(name, batch=2, tokens=6, padding=None if sees_images(name) else "left"))
    block, hidden, fewest = exact.block(2), exact.hidden[1], int(exact.mask.sum(1).min())
    asked: dict[str, Any] = {"mask": exact.mask, "out_tokens": -1, "in_tokens": range(-fewest, 0)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* computed by plain reverse mode")
        found = {route: block_jacobian(block, hidden, route=route, **asked) for route in ("auto", "plain")}
    rounded = name in (*ARCHITECTURES, *PRODUCTS_IN_FLOAT32) or name.startswith(IN_FLOAT32) or attention == "eager"
    for prompt, mask in enumerate(exact.mask):
        expected = derivative_of_the_branch(exact, 2, prompt)[mask][-fewest:]
        assert expected.abs().max() > 0.1 or name in ARCHITECTURES, f"{name}: a branch that does nothing"
        for route, jacobian in found.items():
            what = f"{name}, {attention}: Jacobian by route {route} of prompt {prompt}"
            if rounded:
                assert (jacobian[prompt, 0] - expected).norm() < 1e-5 * expected.norm(), what
            else:
                close(jacobian[prompt, 0], expected, 1e-11, what)


def derivative_of_the_branch(trajectory: Trajectory, layer: int, prompt: int) -> Tensor:
    """Differentiate one prompt's block, coordinate by coordinate: (tokens, dim, dim)."""
    alone = trajectory.rows(prompt, prompt + 1)
    last = alone.mask[0].nonzero().max()
    hidden = alone.hidden[layer - 1].detach().requires_grad_()
    update = (alone.block(layer)(hidden) - hidden)[0, last]
    rows = [torch.autograd.grad(value, hidden, retain_graph=True)[0][0] for value in update]
    return torch.stack(rows, dim=1)


def check_precisions(name: str) -> None:
    """Check that float32 and bfloat16 give nearly the same states, and that `upcast` keeps the weights."""
    if name in ARCHITECTURES:
        return
    whole = LayeredModel(tiny(name))
    batch = tiny_batch(name, padding=paddings(name)[-1])
    full = whole.trajectory(batch).hidden
    exact = LayeredModel(tiny(name, torch.float64)).trajectory(batch).hidden
    assert (full - exact).norm() < 1e-5 * exact.norm(), f"{name} in float32"
    half = LayeredModel(tiny(name, torch.bfloat16))
    states = half.trajectory(batch).hidden
    assert half.dtype == torch.bfloat16
    assert name in RECURRENT or states.dtype == torch.bfloat16
    assert (states.float() - full).norm() < 0.1 * full.norm(), f"{name} in bfloat16"
    wide = upcast(half)
    assert (wide.dtype, upcast(whole) is whole) == (torch.float32, True)
    held = wide.model.state_dict()
    assert all(torch.equal(value.float(), held[key]) for key, value in half.model.state_dict().items()), name


def check_cut(name: str) -> None:
    """Check that a truncated model has the same states and can be saved and loaded."""
    model = built(name)
    view = LayeredModel(model)
    if name in UNCUT:
        with pytest.raises(InputError, match=UNCUT[name]):
            truncate(model, 2)
        return
    before, settings = copy.deepcopy(model.state_dict()), str(getattr(model, "config", ""))
    batch = tiny_batch(name, padding=paddings(name)[-1])
    whole = view.trajectory(batch)
    for num_layers, head in ((1, True), (2, False)):
        cut = truncate(model, num_layers, head=head)
        seen = LayeredModel(cut)
        assert seen.num_layers == num_layers, name
        assert type(cut) is type(model) if head else seen.vocab_size is None, name
        states = seen.trajectory(batch).hidden
        assert torch.equal(states, whole.hidden[: num_layers + 1]), f"{name}: states of {num_layers} blocks"
    if hasattr(cut, "config"):
        check_saved(name, cut, batch)
    assert str(getattr(model, "config", "")) == settings, name
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items()), name


def check_saved(name: str, cut: Any, batch: dict[str, Tensor]) -> None:
    """Check that a saved truncated model states its depth in all config fields and loads whole or offloaded."""
    with tempfile.TemporaryDirectory() as folder:
        with quiet():
            save(cut, folder)
        settings = json.loads((Path(folder) / "config.json").read_text())
        assert {settings.get(field, 2) for field in ("num_hidden_layers", "n_layer", "n_layers", "num_layers")} == {2}
        assert {len(settings.get(field) or "..") for field in ("layer_types", "attention_layers")} == {2}, name
        if "attention_types" in settings:  # GPT-Neo: kinds of attention, and how often each pattern repeats
            kinds = [kind for kinds, times in settings["attention_types"] for kind in kinds * times]
            assert kinds == ["global", "local"]
        assert settings["architectures"] == [type(cut).__name__]
        again = load(Path(folder))  # refuses missing weights, such as those of a pooler
        offloaded = load(Path(folder), offload=Offload(Path(folder) / "scratch", torch.device("cpu")))
        views = [LayeredModel(each) for each in (cut, again, offloaded)]
        assert type(again) is type(cut)
        assert weights_hash(again) == weights_hash(cut), name
        assert views[2].family == views[1].family, name
        assert all(weight.is_meta for block in views[2].blocks for weight in block.parameters()), name
        expected, *found = (view.trajectory(batch).hidden for view in views)
        for states in found:
            assert_rounded(states, expected)


def check_untrained(name: str) -> None:
    """Check that `untrained` builds a model of transformers from its config, with other weights."""
    if name in ARCHITECTURES or name.startswith("vit"):
        return
    model = tiny(name)
    before, fresh = weights_hash(model), untrained(model)
    assert type(fresh) is type(model)
    found = fresh.config.to_json_string(use_diff=False).replace('"dtype": "float32"', '"dtype": null')
    assert found == model.config.to_json_string(use_diff=False), name
    assert fresh.config is not model.config
    assert LayeredModel(fresh).attention == LayeredModel(model).attention
    shapes = [{key: value.shape for key, value in each.state_dict().items()} for each in (fresh, model)]
    assert shapes[0] == shapes[1], name
    assert weights_hash(model) == before != weights_hash(fresh), name
    assert not fresh.training
    assert LayeredModel(fresh).trajectory(tiny_batch(name)).hidden.isfinite().all(), name


# One of each kind: rows of transformers and timm, causal and not, with a head that pools, found by structure, ALiBi.
QUICK = ("gpt2", "bert_classifier", "vit_average", "bloom")
# Similar to another model that CI runs.
NIGHTLY = ("llama_trunk", "qwen2", "olmo", "gemma", "phi", "falcon", "bert_tagger", "roberta_tagger", "roberta_trunk")
NIGHTLY += ("distilbert_classifier", "distilbert_tagger", "modernbert_trunk", "mamba_trunk", "picture_vit_trunk")
NIGHTLY += ("smollm3", "apertus", "cohere", "mixtral", "deepseek_v3", "qwen3_moe", "falcon_mamba")


MARKS = {name: [] if name in QUICK else [pytest.mark.soak] for name in (*EVERY, *ARCHITECTURES)}
MARKS |= {name: [pytest.mark.nightly] for name in NIGHTLY}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in MARKS.items()])
def test_a_family_fulfils_the_contract_of_a_view(name):
    check_family(name)


def test_an_empty_list_of_modules_is_no_list_of_blocks():
    model = tiny("llama")
    model.adapters = nn.ModuleList()
    assert propose_blocks(model) == "model.layers"
