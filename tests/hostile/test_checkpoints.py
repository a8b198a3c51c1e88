"""Untrusted checkpoints: weights are tensors from the folder itself, and none of its code is executed."""

import hashlib
import json
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lit_layers.cli.main import main
from lit_layers.data.tokenization import load_tokenizer
from lit_layers.errors import InputError
from lit_layers.models.build import causal_lm, save
from lit_layers.models.offload import Offload
from lit_layers.models.saved import INDEX, PICKLED, load, outline, read_config
from lit_layers.series.local_series import StepFolders
from tests.hostile.test_recipes import refused
from tests.support.exports import saved_tokenizer
from tests.support.saved_models import saved, saved_vit

GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 300}
SMALL = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 8, "vocab_size": 32}


class Payload:
    """An object that writes the canary when it is unpickled without restrictions."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self):
        return exec, (self.code,)


def test_an_index_that_names_files_outside_its_folder_is_refused(tmp_path):
    for index in (INDEX, PICKLED):
        folder, other = tmp_path / index / "model", tmp_path / index / "other"
        saved(folder)
        saved(other)
        content = json.loads((folder / INDEX).read_text())
        (folder / INDEX).unlink()
        name, shard = next(iter(content["weight_map"].items()))
        if index != INDEX:
            for file in folder.glob("*.safetensors"):
                torch.save(load_file(file), file.with_suffix(".bin"))
                file.unlink()
            for key, file in content["weight_map"].items():
                content["weight_map"][key] = file.replace(".safetensors", ".bin")
        step = tmp_path / index / "series" / "step-000000000"
        paths = (f"../other/{shard}", str(other / shard), f"x/../../other/{shard}", f"..\\other\\{shard}", "/")
        for elsewhere in paths:
            content["weight_map"][name] = elsewhere
            (folder / index).write_text(json.dumps(content))
            shutil.copytree(folder, step, dirs_exist_ok=True)
            for opened in (load, lambda folder, step=step: StepFolders(step.parent).checkpoints[0].load()):
                with pytest.raises(InputError, match=r"names .*, a file outside its folder"):
                    opened(folder)


def test_links_like_those_of_the_hub_cache_are_followed(tmp_path):
    model = saved(tmp_path / "model")
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted((tmp_path / "model").iterdir())):
        shutil.move(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    loaded = load(snapshot).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


@pytest.fixture
def armed(tmp_path, payload) -> Path:
    """A tiny GPT-2 with Python files that its config, its tokenizer or the import system could execute."""
    folder = tmp_path / "armed"
    save(causal_lm("gpt2", **GPT2), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}, "trust_remote_code": True}
    config |= {"custom_generate": "evil", "use_cache": True}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}, "trust_remote_code": True, "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for name in ("evil", "plotly", "yaml", "torch", "numpy", "sitecustomize", "usercustomize", "conftest", "tokenizer"):
        (folder / f"{name}.py").write_text(payload)
    return folder


def test_code_next_to_a_model_is_not_executed(armed, corpus, tmp_path, canary, monkeypatch):
    monkeypatch.chdir(armed)
    options = ["--tokenizer", "bpe:300", "--root", str(tmp_path / "root")]
    recipe = tmp_path / "one.yaml"
    text = {"class_path": "lit_layers.data.EvalText", "init_args": {"corpus": "${corpus}", "tokenizer": "${tokenizer}"}}
    text["init_args"] |= {"num_sequences": 2, "num_tokens": 8}
    trajectory = {"class_path": "lit_layers.analyses.Trajectory", "init_args": {"batches": text}}
    recipe.write_text(json.dumps({"corpus": str(corpus), "analyses": [trajectory]}))
    assert main(["analyze", ".", *options, "--config", str(recipe)]) == 0
    assert str(armed) not in sys.path
    assert not canary.exists()


def test_a_config_cannot_request_code_of_the_hub(armed, canary):
    config = json.loads((armed / "config.json").read_text())
    for asked in ("kernels-community/flash-attn", "somebody/evil@main:attack", {"": "somebody/evil"}):
        (armed / "config.json").write_text(json.dumps({**config, "attn_implementation": asked}))
        with pytest.raises(InputError, match="expected attn_implementation sdpa or eager in its config.json, got"):
            load(armed)
    assert not canary.exists()


def write_pickles(folder: Path, payload: str) -> Iterator[None]:
    """Replace the weights of a model by pickles that would execute code, one pickle per iteration."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for content in ({**weights, "x": Payload(payload)}, Payload(payload), [Payload(payload)]):
        for zipped in (True, False):
            torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
            yield
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(payload), protocol=2))
    yield


def test_pickled_weights_execute_nothing(tmp_path, payload, canary):
    save(causal_lm("gpt2", **GPT2), tmp_path / "gpt2")
    saved_vit(tmp_path / "vit")
    for name in ("gpt2", "vit"):
        for _ in write_pickles(tmp_path / name, payload):
            with pytest.raises(InputError, match="nothing was run"):
                load(tmp_path / name)
    assert not canary.exists()
    pickle.loads((tmp_path / "gpt2" / "pytorch_model.bin").read_bytes())
    assert canary.exists(), "it would have"


@pytest.mark.soak  # slow because of the imports of the commands
def test_every_command_refuses_pickles_in_one_sentence(corpus, tmp_path, payload, canary, capsys):
    options = ["--tokenizer", str(corpus / "tokenizer"), "--root", str(tmp_path / "root")]
    folder = tmp_path / "run" / "step-000000001"
    save(causal_lm("gpt2", **GPT2), folder)
    # Without a corpus, `intervene` would first read the thousands of task files of lm-eval.
    more = {"analyze": options, "intervene": [*options, "--corpus", str(corpus)], "mteb": options[:2]}
    for _ in write_pickles(folder, payload):
        pass
    for command, words in more.items():
        assert "nothing was run" in refused([command, str(folder), *words], capsys), command
    assert not canary.exists()


@pytest.mark.soak
def test_a_state_to_resume_from_may_hold_only_tensors(corpus, tmp_path, payload, canary, capsys):
    from tests.cli.test_fit import RECIPE

    recipe, root = tmp_path / "recipe.yaml", tmp_path / "run"
    content = {**RECIPE, "corpus": str(corpus), "root": str(root), "steps": [0], "analyses": []}
    recipe.write_text(json.dumps({**content, "trainer": {**RECIPE["trainer"], "max_steps": 1}}))
    assert main(["fit", "--config", str(recipe)]) == 0
    (state,) = root.glob("resume/*/trainer.ckpt")
    content = torch.load(state, weights_only=False)
    for hidden in ({**content, "x": Payload(payload)}, {**content, "callbacks": {"x": Payload(payload)}}):
        torch.save(hidden, state)
        (facts,) = state.parent.glob("*.json")
        stored = json.loads(facts.read_text())
        key = next(name for name, value in stored.items() if isinstance(value, str) and len(value) == 64)
        facts.write_text(json.dumps({**stored, key: hashlib.sha256(state.read_bytes()).hexdigest()}))
        capsys.readouterr()
        main_code = main(["fit", "--config", str(recipe), "--resume", "last", "--trainer.max_steps", "2"])
        assert main_code == 2
        assert "Traceback" not in capsys.readouterr().err
    assert not canary.exists()


def _offloaded(folder: str) -> torch.nn.Module:
    return load(folder, offload=Offload(Path(folder) / "scratch", torch.device("cpu")))


_OPENING = (load, _offloaded, lambda folder: outline(read_config(Path(folder)), folder))
_NAMED = {  # keys are the field that the error names
    "attn_implementation": (
        {"attn_implementation": "evil/kernel"},
        {"attn_implementation": {"": "evil/kernel"}},
        {"_attn_implementation": "paged|evil/kernel"},
        {"_attn_implementation_internal": "evil/kernel"},
        {"text_config": {"_attn_implementation": "evil/kernel"}},
        {"parts": [{"_attn_implementation": "evil/kernel"}]},
    ),
    "experts_implementation": ({"_experts_implementation": "evil/kernel"},),
    "attribute_map": ({"attribute_map": {"colour": "_attn_implementation"}, "colour": "evil/kernel"},),
}


def test_a_config_that_requests_kernels_of_the_hub_is_refused(tmp_path, monkeypatch):
    """transformers would download and import these kernels if the package `kernels` is installed."""
    hub = "transformers.integrations.hub_kernels"
    monkeypatch.setattr(f"{hub}.get_kernel", lambda *_, **__: pytest.fail("it is fetched"))
    monkeypatch.setattr(f"{hub}.is_kernels_available", lambda *_: True)
    save(causal_lm("gpt2", **SMALL), tmp_path)
    plain = json.loads((tmp_path / "config.json").read_text())
    for named, more in [(field, more) for field, cases in _NAMED.items() for more in cases]:
        (tmp_path / "config.json").write_text(json.dumps(plain | more))
        for opened in (*_OPENING, causal_lm):
            with pytest.raises(InputError, match=rf"{named}.* in its config.json"):
                opened(str(tmp_path))
    for harmless in ({"attn_implementation": "eager"}, {"_attn_implementation": None}, {"quantization_config": None}):
        (tmp_path / "config.json").write_text(json.dumps(plain | harmless))
        for opened in (*_OPENING, causal_lm):
            opened(str(tmp_path))


def test_an_adapter_next_to_a_model_is_refused_because_only_some_machines_would_apply_it(tmp_path):
    save(causal_lm("gpt2", **SMALL), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "evil/model"}))
    with pytest.raises(InputError, match="found an adapter beside it"):
        load(str(tmp_path))


def change_config(folder: Path, **changes: object) -> dict:
    """Write the config of a saved model with these changes and return it. None removes a field."""
    config = {key: value for key, value in {**read_config(folder), **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return config


def test_a_config_that_does_not_fit_its_weights_or_names_unknown_classes_is_refused_in_our_words(tmp_path):
    others = "cannot be loaded: .*its weights have other shapes than its config.json says$"
    unknown = "expected model_type that this transformers knows, got nonsense$"
    for odd, value, sentence in (
        ("n_positions", 4, others),
        ("n_inner", 10**12, others),
        ("vocab_size", 10**12, "cannot be loaded: .*its weights take at least .* are free$"),
        ("model_type", "nonsense", unknown),
    ):
        save(causal_lm("gpt2", **SMALL), tmp_path / odd)
        config = change_config(tmp_path / odd, **{odd: value})
        with pytest.raises(InputError, match=sentence):
            load(tmp_path / odd)
    with pytest.raises(InputError, match=unknown):
        outline(config, "x")
    settings = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **GPT2}
    for odd, sentence in (
        ({"activation_function": "os.system"}, "KeyError: 'os.system'"),
        ({"architectures": ["utils"]}, "AttributeError: module 'transformers.utils' has no attribute"),
    ):
        with pytest.raises(InputError, match=f"^the config.json of x describes no model: .*{sentence}"):
            outline({**settings, **odd}, "x")


def test_a_config_without_a_class_is_read_as_a_language_model(tmp_path):
    model = causal_lm("gpt2", **SMALL)
    save(model, tmp_path)
    change_config(tmp_path, architectures=None)
    loaded = load(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_a_tokenizer_whose_end_of_text_is_not_a_string_uses_the_default(tmp_path):
    saved_tokenizer(tmp_path)
    for content in ({"eos_token": 7}, {"eos_token": {"content": [1]}}, {"eos_token": {"x": 1}}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
        assert load_tokenizer(str(tmp_path)).end_of_text == "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(InputError, match=r"Input should be an object, got \[1\]"):
        load_tokenizer(str(tmp_path))
