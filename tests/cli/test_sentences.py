import pytest

from lit_layers.cli.main import main
from lit_layers.cli.options import one_sentence

OPTIONS = ["trainer.max_steps", "trainer.max_epochs", "model.lr", "steps"]


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ("unrecognized arguments: --model.lrr 3", "unknown option --model.lrr; did you mean --model.lr?"),
        (
            "Group 'trainer' does not accept option 'max_step'",
            "unknown key trainer.max_step in the recipe; did you mean trainer.max_steps?",
        ),
        (
            "Option 'kk' is not accepted",
            "unknown key kk in the recipe; see --help",
        ),
        ("Parser key \"lr\":\n  Expected a <class 'float'>. Got value: a", "lr: Expected a float. Got value: a"),
        ("Parser key \"config\": File does not exist: '/x/nope.yaml'", "config: File does not exist: '/x/nope.yaml'"),
        ("the following arguments are required: root", "missing: root; give it in the recipe or on the command line"),
        (
            'Parser key "steps":\n  Does not validate against any of the Union subtypes\n  Subtypes: '
            "[list[int], dict[str, int | list[int]], <class 'str'>]\n  Errors:\n    - Expected a <class 'list'>\n"
            "  Given value type: <class 'dict'>\n  Given value: {'every': 'often'}",
            "steps: expected one of list[int], dict[str, int | list[int]], str, got {'every': 'often'}",
        ),
        (
            'Parser key "analyses":\n  Expected a dot import path string: Trajectry',
            "analyses: Expected a dot import path string: Trajectry; did you mean Trajectory?",
        ),
    ],
)  # fmt: skip
def test_a_parsers_complaint_becomes_one_sentence(raw, sentence):
    assert one_sentence(raw, OPTIONS) == sentence


MODEL, TEXT = "class_path: lit_layers.training.LitCausalLM", "class_path: lit_layers.training.LitTextData"
CALLBACK = "class_path: lightning.pytorch.callbacks.LambdaCallback"


@pytest.mark.parametrize(
    ("recipe", "words", "sentence"),
    [
        ("model: {class_path: LitCausalML}", [], "string: LitCausalML; did you mean LitCausalLM?"),
        (
            "analyses: [{class_path: lit_layers.analyses.Couplings}]",
            [],
            "'lit_layers.analyses' has no attribute 'Couplings'; did you mean Coupling?",
        ),
        ("", ["--wandb.nonsense", "3"], "wandb: unknown key nonsense in the recipe"),
        (
            "",
            ["--wandb.mode", "maybe"],
            "wandb: mode: Expected a typing.Literal['auto'",
        ),
        (
            "wandb: {class_path: lit_layers.report.WandbMirror, init_args: {mode: no}}",
            [],
            "wandb: mode: Expected a typing.Literal",
        ),
        (
            f"model: {{{MODEL}, init_args: {{nonsense: 3}}}}",
            [],
            "model: unknown key nonsense in the recipe; the keys are arch",
        ),
        (f"data: {{{TEXT}, init_args: {{corpus: python}}}}", [], "data: missing: tokenizer; give it in the recipe or"),
        (
            f"trainer: {{callbacks: [{{{CALLBACK}, init_args: {{on_fit_start: {{class_path: os.system}}}}}}]}}",
            [],
            "trainer.callbacks: on_fit_start: a recipe names no os.system: only lit_layers, torch",
        ),
    ],
)
def test_what_a_class_inside_refuses_is_said_with_its_place(recipe, words, sentence, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(recipe or "{}")
    assert main(["fit", "--root", str(tmp_path / "run"), "--config", str(tmp_path / "recipe.yaml"), *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("lit-layers fit: error: ")
    assert sentence in said


def test_a_long_value_of_several_kinds_is_refused_in_our_words(capsys):
    value = "1 2," * 75_000
    assert main(["mteb", "model", f"--layers={value}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"lit-layers mteb: error: layers: expected one of Numbers, typing.Literal['all'], got {value[:100]}"
    )
    assert len(said) < 500


def test_a_long_complaint_is_cut():
    assert len(one_sentence("word " * 1000)) < 410
