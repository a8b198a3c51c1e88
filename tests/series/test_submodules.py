"""Which submodule of a Lightning checkpoint is the network. Only its tensors are used."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.models.build import weights_hash
from lit_layers.series import LightningCheckpoints, audit
from tests.support.measured_series import new_recipe
from tests.support.saved_models import saved, saved_vit

STEPS = (20, 40, 60)


def moved_state(model: nn.Module, by: float) -> dict[str, torch.Tensor]:
    """Change the matrices of the model and return its state. Tied matrices stay tied."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def write_project(root: Path, model: nn.Module, *names: str, other: float = 0.0) -> tuple[Path, list[str]]:
    """Write files of a module that holds `model` under each of `names`.

    `other` is added to the weights of all but the first.
    """
    files, hashes = root / "files", []
    files.mkdir()
    for step in STEPS:
        state = moved_state(model, 0.01)
        hashes.append(weights_hash(model))
        content = {"loss.weight": torch.ones(3)}
        for number, name in enumerate(names):
            content |= {name.format(key): tensor + other * (number > 0) for key, tensor in state.items()}
        torch.save({"state_dict": content, "global_step": step}, files / f"{step}.ckpt")
    return files, hashes


def test_the_network_is_found_under_any_name(tmp_path):
    for number, name in enumerate(("model.{}", "{}", "model._orig_mod.{}", "net._fsdp_wrapped_module.{}", "a.0.b.{}")):
        folder = tmp_path / str(number) / "step-000000000"
        model = saved(folder, "gpt2", shard="1GB") if number else saved_vit(folder)
        files, hashes = write_project(folder.parent, model, name)
        series = LightningCheckpoints(files)
        assert [weights_hash(checkpoint.load()) for checkpoint in series] == hashes, name
        assert audit(series).is_clean, name
    content = torch.load(files / "20.ckpt")
    torch.save(content | {"global_step": 50}, files / "40.ckpt")
    assert audit(LightningCheckpoints(files)).suspect_steps == (20, 50)


def test_a_network_and_its_average_must_be_distinguished_by_name(tmp_path, capsys):
    model = saved(tmp_path / "step-000000000", "gpt2", shard="1GB")
    files, hashes = write_project(tmp_path, model, "net.{}", "ema.{}", other=0.5)
    with pytest.raises(InputError, match=r"20.ckpt: the submodules 'net' and 'ema' each hold a GPT2LMHeadModel"):
        list(LightningCheckpoints(files))
    assert main(["audit", str(files)]) == 2
    assert "name one with model=" in capsys.readouterr().err
    assert main(["audit", str(files), "--submodule", "net"]) == 0
    loaded = [weights_hash(checkpoint.load()) for checkpoint in LightningCheckpoints(files, model="net")]
    assert loaded == hashes
    assert weights_hash(LightningCheckpoints(files, model="ema").checkpoints[0].load()) not in hashes
    assert main(["audit", str(files), "--submodule", "nett"]) == 2
    output = capsys.readouterr().err
    assert "in the submodule 'nett', found it in 'net' and 'ema'" in output


def test_an_averaged_model_of_torch_is_read_by_its_name(tmp_path):
    """Its state has an additional tensor, which counts the averaged steps."""
    model = saved(tmp_path / "step-000000000", "gpt2", shard="1GB")
    average = torch.optim.swa_utils.AveragedModel(model)
    files, hashes = tmp_path / "files", []
    files.mkdir()
    for step in STEPS:
        state = moved_state(model, 0.01)
        average.update_parameters(model)
        hashes.append(weights_hash(average.module))
        content = {f"net.{name}": tensor for name, tensor in state.items()}
        content |= {f"average.{name}": tensor.clone() for name, tensor in average.state_dict().items()}
        torch.save({"state_dict": content, "global_step": step}, files / f"{step}.ckpt")
    with pytest.raises(InputError, match="the submodules 'net' and 'average' each hold a GPT2LMHeadModel"):
        list(LightningCheckpoints(files))
    series = LightningCheckpoints(files, model="average")
    assert [weights_hash(checkpoint.load()) for checkpoint in series] == hashes
    assert hashes[-1] != weights_hash(model)


def test_an_average_that_starts_as_a_copy_must_also_be_named(tmp_path):
    """An exponential mean of the weights starts as a copy."""
    model = saved(tmp_path / "step-000000000", "gpt2", shard="1GB")
    files, _ = write_project(tmp_path, model, "ema.{}", "net.{}", other=0.5)
    first = torch.load(files / f"{STEPS[0]}.ckpt")
    state = first["state_dict"]
    copied = {name: state[name.replace("ema.", "net.")] for name in state}
    torch.save(first | {"state_dict": copied}, files / f"{STEPS[0]}.ckpt")
    with pytest.raises(InputError, match=rf"{STEPS[-1]}.ckpt: the submodules 'ema' and 'net' each hold a GPT2LMHead"):
        list(LightningCheckpoints(files))


def test_the_config_may_be_next_to_the_files_and_a_compiled_copy_is_not_a_second_network(tmp_path):
    model = saved(tmp_path / "step-000000000", "gpt2", shard="1GB")
    files, hashes = write_project(tmp_path, model, "net.{}", "fast._orig_mod.{}")
    (tmp_path / "step-000000000" / "config.json").rename(files / "config.json")
    assert [weights_hash(checkpoint.load()) for checkpoint in LightningCheckpoints(files)] == hashes


def test_tensors_that_match_nothing_are_refused_and_not_hashed(tmp_path, capsys):
    model = saved(tmp_path / "step-000000000", "gpt2", shard="1GB")
    files, _ = write_project(tmp_path, model, "net.{}")
    for name in STEPS:
        content = torch.load(files / f"{name}.ckpt")
        other = {"head.weight": torch.full((2, 2), float(name))}
        torch.save(content | {"state_dict": other}, files / f"{name}.ckpt")
    assert main(["audit", str(files)]) == 2
    output = capsys.readouterr()
    assert "20.ckpt: expected a GPT2LMHeadModel" in output.err
    assert "equal" not in output.out
    files.rename(tmp_path / "old")
    files, _ = write_project(tmp_path, model, "net.{}")
    content = torch.load(files / "40.ckpt")
    del content["state_dict"]["net.transformer.ln_f.bias"]
    torch.save(content, files / "40.ckpt")
    assert main(["audit", str(files)]) == 2
    assert "40.ckpt: its submodule 'net' does not fit the config.json of" in capsys.readouterr().err
    assert main(["audit", str(tmp_path / "none"), "--submodule", "net"]) == 2


def test_two_networks_of_one_project_are_never_one_curve(tmp_path, capsys):
    model = saved(tmp_path / "step-000000000", "gpt2", shard="1GB")
    files, _ = write_project(tmp_path, model, "student.{}", "teacher.{}", other=0.5)
    (files / "config.json").write_bytes((tmp_path / "step-000000000" / "config.json").read_bytes())
    command = ["analyze", str(files), "--config", str(new_recipe(tmp_path)), "--root", str(tmp_path / "numbers")]

    def run_command(*options: str) -> str:  # a folder of .ckpt files is a series, with or without --steps
        code = main([*command, *options])
        output = capsys.readouterr()
        return f"{code}: {output.out}{output.err}"

    assert "2: " in (refused := run_command())
    assert "name one with model= (--submodule)" in refused
    assert "0: " in run_command("--submodule", "student")
    lines = (tmp_path / "numbers" / "measurements.jsonl").read_bytes()
    refused = run_command("--submodule", "teacher")
    assert f"holds measurements of {files}: student, and {files}: teacher would be drawn" in refused
    assert (tmp_path / "numbers" / "measurements.jsonl").read_bytes() == lines
    assert "0 measured" in run_command("--submodule", "student")
