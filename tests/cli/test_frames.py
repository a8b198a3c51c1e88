"""How far the calls go down from the command line to a metric."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import lit_layers
from lit_layers.cli.main import main
from lit_layers.models.build import causal_lm

PACKAGE = str(Path(lit_layers.__file__).parent)
ANALYSES = "trajectory,representation,coupling,lens"


def test_at_most_fifteen_frames_lead_from_a_command_to_a_metric(corpus: Path, tmp_path: Path) -> None:
    model = causal_lm("gpt2", n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=300)
    model.save_pretrained(tmp_path / "model")
    longest = list[str]()

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(f"{PACKAGE}/functional/"):
            return
        names, there = list[str](), frame
        while there is not None:
            if there.f_code.co_filename.startswith(PACKAGE):
                names.append(f"{there.f_code.co_filename.removeprefix(PACKAGE)}:{there.f_code.co_name}")
            there = there.f_back
        within = ("/functional/", "/models/")  # a metric's own arithmetic, and the model that runs
        is_entered = not any(name.startswith(within) for name in names[1:])
        if is_entered and len(names) > len(longest) and not any(name.endswith("<module>") for name in names):
            longest[:] = names[::-1]

    words = ["--corpus", str(corpus), "--tokenizer", "bpe:300", "--metrics", ANALYSES, "--device", "cpu"]
    sys.setprofile(called)
    try:
        assert main(["analyze", str(tmp_path / "model"), *words, "--root", str(tmp_path / "run")]) == 0
    finally:
        sys.setprofile(None)
    assert longest[0] == "/cli/main.py:main"
    assert len(longest) <= 15, "\n".join(longest)
