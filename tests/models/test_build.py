"""Models are built as asked, and a saved model loads with the same weights and outputs."""

import random
import shutil
import stat

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_layers.errors import InputError
from lit_layers.models.build import causal_lm, save, true_vocab_size, vit, weights_hash
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from tests.support.rounding import assert_rounded
from tests.support.tiny_models import tiny, tiny_batch

GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
PLAIN = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
PLAIN |= {"intermediate_size": 64, "max_position_embeddings": 64}
KINDS = {"gpt2": GPT2, "llama": PLAIN}
VIT = {"depth": 2, "embed_dim": 32, "num_heads": 4, "img_size": 16, "patch_size": 4, "num_classes": 5}


def logits(model, batch):
    return LayeredModel(model).trajectory(batch).logits


def global_state():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("name", KINDS)
def test_weights_depend_only_on_the_seed_and_global_generators_do_not_change(name):
    torch.manual_seed(5)
    before = global_state()
    first = causal_lm(name, seed=1, **KINDS[name])
    assert global_state() == before
    torch.manual_seed(6)
    assert weights_hash(causal_lm(name, seed=1, **KINDS[name])) == weights_hash(first)
    assert weights_hash(causal_lm(name, seed=2, **KINDS[name])) != weights_hash(first)
    assert first.training
    assert first.config._attn_implementation == "sdpa"


def test_gpt2_uses_the_fused_activation_which_is_the_same_function():
    fused, spelt_out = causal_lm("gpt2", **GPT2), causal_lm("gpt2", activation_function="gelu_new", **GPT2)
    assert (fused.config.activation_function, spelt_out.config.activation_function) == ("gelu_pytorch_tanh", "gelu_new")
    batch = tiny_batch("gpt2")
    torch.testing.assert_close(logits(fused.double(), batch), logits(spelt_out.double(), batch), rtol=0, atol=1e-12)


def test_special_tokens_outside_a_smaller_vocabulary_are_dropped():
    assert causal_lm("gpt2", **GPT2).config.eos_token_id is None
    assert causal_lm("gpt2", **GPT2, eos_token_id=3).config.eos_token_id == 3
    assert causal_lm("llama", **PLAIN).config.eos_token_id == 2


def test_impossible_models_are_refused_in_one_sentence():
    for arguments, message in (
        ({"name": "gpt2", "n_layers": 2}, "'n_layers' is no option of gpt2; did you mean n_layer or num_hidden_layers"),
        ({"name": "gpt2", "model_type": "bert"}, "'model_type' is no option of gpt2"),
        ({"name": "gpt2", "n_embd": 30}, "cannot build gpt2 with {'n_embd': 30}: .*divisible"),
        ({"name": "gpt2", "n_layer": "two"}, "cannot build gpt2 with .*expected int, got str"),
        ({"name": "gpt2", "vocab_size": -1}, "cannot build gpt2 with {'vocab_size': -1}"),
        ({"name": "gpt3"}, "expected a model type or a folder with a config.json, got 'gpt3'; did you mean .*gpt2"),
        ({"name": "gpt2", "attention_implementation": "fast", **GPT2}, "cannot build gpt2 .*fast"),
    ):
        with pytest.raises(InputError, match=message) as refusal:
            causal_lm(**arguments)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", KINDS)
def test_padding_the_vocabulary_changes_no_logit_and_no_hash(name):
    plain, padded = causal_lm(name, seed=1, **KINDS[name]), causal_lm(name, seed=1, pad_vocab_to=64, **KINDS[name])
    assert (padded.config.vocab_size, padded.config.unpadded_vocab_size, true_vocab_size(padded)) == (64, 61, 61)
    assert padded.get_input_embeddings().weight.shape[0] == padded.get_output_embeddings().weight.shape[0] == 64
    batch = tiny_batch("gpt2")
    torch.testing.assert_close(logits(padded, batch), logits(plain, batch))
    assert padded(**batch).logits.shape[-1] == 64
    assert weights_hash(padded) == weights_hash(plain)
    assert all(parameter.requires_grad for parameter in padded.parameters())


@pytest.mark.parametrize("pad", [None, 64])
@pytest.mark.parametrize("name", KINDS)
def test_a_saved_folder_is_plain_transformers_and_gives_the_same_logits(name, pad, tmp_path, capsys):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    model = causal_lm(name, seed=3, pad_vocab_to=pad, **KINDS[name])
    with torch.no_grad():
        model.get_output_embeddings().weight[61:] += 1.0  # trained padding rows
    before, config, state = weights_hash(model), model.config.to_dict(), global_state()
    save(model, tmp_path / "new" / "folder")
    assert (model.config.to_dict(), global_state()) == (config, state)
    assert capsys.readouterr() == ("", "")

    logging.disable_progress_bar()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "folder")
    logging.enable_progress_bar()
    batch = tiny_batch("gpt2")
    with torch.no_grad():
        found = plain.eval()(**batch).logits
    assert plain.config.vocab_size == found.shape[-1] == 61
    assert not hasattr(plain.config, "unpadded_vocab_size")
    torch.testing.assert_close(logits(model, batch), found)

    again = load(tmp_path / "new" / "folder")
    assert capsys.readouterr() == ("", "")
    assert weights_hash(again) == weights_hash(plain) == before
    assert not again.training
    assert_rounded(logits(again, batch), found)
    assert load(tmp_path / "new" / "folder", dtype=torch.float64).dtype == torch.float64


@pytest.mark.soak
def test_a_compiled_model_and_one_in_bfloat16_can_be_saved(tmp_path):
    model = causal_lm("gpt2", **GPT2).to(torch.bfloat16)
    save(torch.compile(model), tmp_path)
    again = load(tmp_path, dtype=torch.bfloat16)
    assert weights_hash(again) == weights_hash(torch.compile(model)) == weights_hash(model)
    assert weights_hash(load(tmp_path)) != weights_hash(model), "another dtype is another hash"


def test_every_file_of_a_saved_folder_can_be_read_by_others(tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "tokenizer.json").chmod(0o600)
    save(causal_lm("gpt2", **GPT2), tmp_path / "model", tokenizer)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "model").iterdir()}
    assert modes.keys() >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert set(modes.values()) == {0o644}


def test_a_tokenizer_object_is_saved_with_the_model(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    save(causal_lm("gpt2", **GPT2), tmp_path, tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path)("b")["input_ids"] == [1]


def test_a_vit_comes_back_with_its_options(tmp_path):
    model = vit("deit_tiny_patch16_224", seed=3, **VIT)
    state = global_state()
    save(model, tmp_path)
    again = load(tmp_path)
    assert global_state() == state
    assert weights_hash(again) == weights_hash(model)
    assert_rounded(logits(again, tiny_batch("vit")), logits(model, tiny_batch("vit")))
    save(again, tmp_path / "twice")
    assert weights_hash(load(tmp_path / "twice")) == weights_hash(model)


def test_impossible_vits_are_refused_in_one_sentence(tmp_path):
    for name, options, message in (
        ("deit_tinny_patch16_224", {}, "no model named 'deit_tinny_patch16_224' in timm; did you mean deit_tiny"),
        ("deit_tiny_patch16_224", {"layers": 2}, "'layers' is no option of a vision transformer"),
        ("deit_tiny_patch16_224", {"embed_dim": 31}, "cannot build deit_tiny_patch16_224 with {'embed_dim': 31}"),
        ("resnet18", {}, "no layered view of ResNet"),
    ):
        with pytest.raises(InputError, match=message):
            vit(name, **options)
    with pytest.raises(InputError, match="cannot save this VisionTransformer as a Hugging Face folder, as nothing"):
        save(tiny("vit"), tmp_path)


@pytest.mark.filterwarnings("ignore:The PEFT config", "ignore:.*is_gradient_checkpointing")
def test_a_model_with_adapters_is_not_saved_as_if_it_were_whole(tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    injected = causal_lm("llama", seed=3, **PLAIN)
    injected.add_adapter(lora)  # method of transformers: keeps the class and adds modules
    for model in (peft.get_peft_model(causal_lm("llama", seed=3, **PLAIN), lora), injected):
        with pytest.raises(InputError, match=r"cannot save a model with adapters of peft .*, or merge them first"):
            save(model, tmp_path)
    save(peft.get_peft_model(causal_lm("llama", seed=3, **PLAIN), lora).merge_and_unload(), tmp_path)
    assert weights_hash(load(tmp_path)) == weights_hash(causal_lm("llama", seed=3, **PLAIN))  # new adapters add zeros


def test_weights_that_do_not_fill_the_model_are_refused(tmp_path):
    save(causal_lm("gpt2", **GPT2), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"do not fill GPT2LMHeadModel: missing_keys .*h\.1\.mlp\.c_fc\.weight"):
        load(tmp_path)


class Trap:
    def __reduce__(self):
        return print, ("the pickle ran",)


def test_a_pickle_is_read_without_running_its_code(tmp_path, capsys):
    save(causal_lm("gpt2", **GPT2), tmp_path)
    expected, weights = weights_hash(load(tmp_path)), load_file(tmp_path / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert weights_hash(load(tmp_path)) == expected
    torch.save({**weights, "trap": Trap()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"its weights hold print, and loading them would run code"):
        load(tmp_path)
    assert "the pickle ran" not in capsys.readouterr().out


def test_folders_without_a_model_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"expected a model in .*, found no config\.json there"):
        load(tmp_path)
    with pytest.raises(InputError, match=r"expected a folder with a model, .* does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="names neither a model_type"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT9Model"]}')
    with pytest.raises(InputError, match=r"has no GPT9Model, which .* asks for"):
        load(tmp_path)


def test_a_new_model_can_be_built_from_the_config_of_a_folder(tmp_path):
    save(causal_lm("gpt2", seed=1, **GPT2), tmp_path)
    model = causal_lm(tmp_path, seed=1, n_layer=1)
    assert (model.config.n_layer, model.config.n_embd) == (1, 32)
    shutil.rmtree(tmp_path)


def test_the_hash_sees_every_parameter_buffer_and_name():
    model = causal_lm("gpt_neox", **PLAIN)
    hashes = {weights_hash(model)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[-1] += 1
            hashes.add(weights_hash(model))
    model.register_buffer("extra", torch.zeros(1))
    hashes.add(weights_hash(model))
    assert len(hashes) == 2 + len(list(model.parameters()))
    assert all(len(value) == 16 and int(value, 16) >= 0 for value in hashes)


def test_a_config_with_invalid_values_is_returned_unchanged():
    """Config classes compute with their fields, such as a division by the number of heads."""
    from lit_layers.models.build import fill_defaults

    broken = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 0}
    assert fill_defaults(broken) == broken
    assert fill_defaults({"model_type": "gpt2", "n_layer": 3})["n_head"] == 12


@pytest.mark.parametrize("task", [None, "CAUSAL_LM", "FEATURE_EXTRACTION"])
@pytest.mark.filterwarnings("ignore:The PEFT config", "ignore:.*is_gradient_checkpointing")
def test_adapters_affect_the_measured_states_for_every_task(task):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type=task, init_lora_weights=False)
    adapted = peft.get_peft_model(causal_lm("llama", seed=3, **PLAIN), lora).eval()
    ids = torch.arange(1, 9)[None]
    seen = LayeredModel(adapted).trajectory({"input_ids": ids})
    with torch.no_grad():
        expected = adapted.get_base_model()(ids).logits
        assert not torch.allclose(expected, causal_lm("llama", seed=3, **PLAIN).eval()(ids).logits, atol=1e-4)
    assert torch.allclose(seen.logits, expected, atol=1e-5)
    assert weights_hash(adapted) != weights_hash(causal_lm("llama", seed=3, **PLAIN))


@pytest.mark.filterwarnings("ignore")
def test_packed_weights_of_a_quantised_model_are_refused_in_one_sentence():
    model = causal_lm("llama", seed=3, **PLAIN)
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(InputError, match="has weights that are no tensors"):
        weights_hash(quantised)
