"""Convert a GGUF file to a model folder with transformers, as docs/families.md describes."""

from pathlib import Path


def gguf_folder(file: Path, folder: Path) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    del quantised.config.quantization_config
    plain = type(quantised)(quantised.config)
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return folder
