"""How far the calls go down from the command line to a metric."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml

import lit_layers
from lit_layers.cli.main import main
from lit_layers.measuring.one_model import outcomes
from lit_layers.models.build import causal_lm
from tests.cli.test_fit import RECIPE
from tests.support import every_analysis
from tests.support.tiny_models import tiny

PACKAGE = str(Path(lit_layers.__file__).parent)
MOST = 15  # of our functions, from `main` to one of `functional`
MOST_OF_ANALYSES = 7  # from `outcomes`, which is the ninth of `fit`
ANALYSES = "trajectory,representation,coupling,lens"


@contextmanager
def longest_chain() -> Iterator[list[str]]:
    """Give the longest chain of our functions that enters `functional` within; comprehensions are no functions."""
    longest = list[str]()

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(f"{PACKAGE}/functional/"):
            return
        names, there = list[str](), frame
        while there is not None:
            name = there.f_code.co_name
            if there.f_code.co_filename.startswith(PACKAGE) and name not in ("<listcomp>", "<setcomp>", "<dictcomp>"):
                names.append(f"{there.f_code.co_filename.removeprefix(PACKAGE)}:{name}")
            there = there.f_back
        within = ("/functional/", "/models/")  # a metric's own arithmetic, and the model that runs
        is_entered = not any(name.startswith(within) for name in names[1:])
        if is_entered and len(names) > len(longest) and not any(name.endswith("<module>") for name in names):
            longest[:] = names[::-1]

    sys.setprofile(called)
    try:
        yield longest
    finally:
        sys.setprofile(None)


def test_at_most_fifteen_functions_lead_from_analyze_to_a_metric(corpus: Path, tmp_path: Path) -> None:
    model: Any = causal_lm("gpt2", n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=300)
    model.save_pretrained(tmp_path / "model")
    words = ["--corpus", str(corpus), "--tokenizer", "bpe:300", "--metrics", ANALYSES, "--device", "cpu"]
    with longest_chain() as longest:
        assert main(["analyze", str(tmp_path / "model"), *words, "--root", str(tmp_path / "run")]) == 0
    assert longest[0] == "/cli/main.py:main"
    assert len(longest) <= MOST, "\n".join(longest)


@pytest.mark.soak
@pytest.mark.usefixtures("no_page")
def test_at_most_fifteen_functions_lead_from_fit_to_a_metric(corpus: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "corpus": str(corpus), "root": str(tmp_path / "run")}))
    with longest_chain() as longest:
        assert main(["fit", "--config", str(recipe)]) == 0
    assert longest[0] == "/cli/main.py:main"
    assert len(longest) <= MOST, "\n".join(longest)
    assert longest.index("/measuring/one_model.py:outcomes") + MOST_OF_ANALYSES <= MOST, "\n".join(longest)


@pytest.mark.soak
def test_every_analysis_reaches_its_metrics_from_the_pass_in_few_calls(tmp_path: Path) -> None:
    model = tiny("gpt2", vocab_size=every_analysis.VOCABULARY)
    for analysis in every_analysis.of_text(every_analysis.save_inputs(tmp_path)):
        with longest_chain() as longest:
            (outcome,) = outcomes(model, [analysis], weights_hash="")
        assert outcome.error is None
        assert 1 < len(longest) <= MOST_OF_ANALYSES, "\n".join([analysis.name, *longest])
