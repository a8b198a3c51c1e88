import pytest

from lit_layers.cli.recipes import one_sentence

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
            "unknown key kk in the recipe: no class given there has an option of that name",
        ),
        ("Parser key \"model.lr\":\n  Expected a <class 'float'>. Got value: abc", "model.lr: expected float, got abc"),
        ("Parser key \"config\": File does not exist: '/x/nope.yaml'", "config: File does not exist: '/x/nope.yaml'"),
        ("the following arguments are required: root", "missing: root; give it in the recipe or on the command line"),
        (
            'Parser key "steps":\n  Does not validate against any of the Union subtypes\n  Subtypes: '
            "[list[int], dict[str, int], <class 'str'>]\n  Errors:\n    - Expected a <class 'list'>\n"
            "  Given value type: <class 'dict'>\n  Given value: {'every': 'often'}",
            "steps: expected one of list[int], dict[str, int], str, got {'every': 'often'}",
        ),
        (
            'Parser key "data":\n  Does not validate against any of the Union subtypes\n  Subtypes: [A, NoneType]\n'
            "  Errors:\n    - x\n  Given value type: NestedArg\n  Given value: NestedArg(key='nonsense', val='3')",
            "unknown option --data.nonsense: the class given for data has none of that name",
        ),
        (
            'Parser key "data":\n  Does not validate against any of the Union subtypes\n  Subtypes: [A, NoneType]\n'
            "  Errors:\n    - kind: Expected a typing.Literal['a', 'b']. Got value: c\n"
            "    - Expected a <class 'NoneType'>\n"
            "  Given value type: NestedArg\n  Given value: NestedArg(key='kind', val='c')",
            "data.kind: expected one of 'a', 'b', got c",
        ),
        (
            'Parser key "wandb":\n  Does not validate against any of the Union subtypes\n  Subtypes: [A, NoneType]\n'
            "  Errors:\n    - mode: expected one of 'auto', 'online', got maybe\n    - Expected a <class 'NoneType'>\n"
            "  Given value type: <class 'dict'>\n  Given value: {'class_path': 'A', 'init_args': {'mode': 'maybe'}}",
            "wandb.mode: expected one of 'auto', 'online', got maybe",
        ),
        (
            'Parser key "analyses":\n  batches: Not a valid subclass of Batches. Got value: 3\n  Subclass types expect '
            "one of:\n    - a class path (str)",
            "analyses: batches: expected a Batches, by class_path, got 3",
        ),
        ('Parser key "tasks":\n  Not of type Names: expected names, got ,', "tasks: expected names, got ,"),
        ("Parser key \"x\":\n  Expected a <class 'bool'>. Got value: 3", "x: expected true or false, got 3"),
    ],
)  # fmt: skip
def test_a_parsers_complaint_becomes_one_sentence(raw, sentence):
    assert one_sentence(raw, OPTIONS) == sentence


def test_a_long_complaint_is_cut():
    assert len(one_sentence("word " * 1000)) < 410
