"""Recipes of published figures can be run, and their numbers are found and compared correctly."""

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lit_layers.cli.main import main
from lit_layers.cli.options import parser_of
from lit_layers.papers import PAPERS, PaperRecipe, Step, compare, read_recipe
from lit_layers.records import Record
from tests.support.paper_tables import PAGE, ROOT, fill_tables, read, recipe_paths
from tests.support.written import write

RECIPES = {f"{path.parent.name}/{path.stem}": path for path in recipe_paths()}
FIELDS = {"paper": "coupling", "item": "Figure 0", "shows": "nothing", "status": "here"}
STEPS = [{"correlate": {"data": "published", "root": "<root>/c"}}]
PLACE = {"root": "run", "analysis": "coupling", "metric": "coupling"}


def steps_of(path: Path) -> Iterator[Step]:
    recipe = read(path)
    for reduced in (False, True) if recipe.reduced else (False,):
        yield from recipe.commands(Path("out"), path.parent, reduced=reduced)


def classes(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every class that options name, with its options."""
    if isinstance(value, dict) and "class_path" in value:
        yield value["class_path"], value.get("init_args", {})
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from classes(part)


def test_a_recipe_names_existing_commands_options_and_classes():
    for name, file in RECIPES.items():
        for verb, options, configs, _ in steps_of(file):
            assert all((ROOT / config).is_file() for config in configs), (name, configs)
            if verb == "fit":  # Lightning's parser has its options: a nightly test checks them
                continue
            known = parser_of(getattr(importlib.import_module(f"lit_layers.cli.verbs.{verb}"), verb)).get_defaults()
            assert options.keys() <= {*known.keys()}, (name, verb)
            for path, given in classes(options):
                module, _, kind = path.rpartition(".")
                made = getattr(importlib.import_module(module), kind)
                assert given.keys() <= inspect.signature(made).parameters.keys(), (name, path)


def test_every_paper_has_its_recipes_and_the_page_has_their_table():
    """`python -m tests.support.paper_tables` writes the table."""
    assert {path.parent.name for path in RECIPES.values()} <= {*PAPERS}
    assert all(read(path).paper == path.parent.name for path in RECIPES.values())
    assert fill_tables(PAGE.read_text()) == PAGE.read_text()


# ------------------------------------------------------------------------------------------------ the comparison


def recipe_of(*published: dict[str, Any], tmp_path: Path) -> PaperRecipe:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({**FIELDS, "steps": STEPS, "published": list(published)}))
    return read_recipe(path)


def measured(root: Path, *found: Record, **how: Any) -> None:
    (root / "run").mkdir(exist_ok=True)
    write(root / "run", "coupling", found, **{"run": "a", **how})


def verdicts(recipe: PaperRecipe, root: Path) -> list[str]:
    return [row.verdict for row in compare(recipe, root)]


def test_a_published_number_is_inside_the_interval_or_outside(tmp_path):
    whole = Record(metric="coupling", value=0.5, low=0.4, high=0.6, tags={"k": 8})
    measured(tmp_path, whole, Record(metric="coupling", value=0.9, layer=3, tags={"k": 8}))
    values = {"at the end": 0.6, "above": 0.61, "below": 0.39}
    recipe = recipe_of(*({"what": n, "value": v, "measured": PLACE} for n, v in values.items()), tmp_path=tmp_path)
    rows = compare(recipe, tmp_path)
    assert [row.verdict for row in rows] == ["inside", "outside", "outside"]
    assert [(row.measured, row.low, row.high) for row in rows] == [(0.5, 0.4, 0.6)] * 3
    read_off = [{"what": "read off", "value": v, "error": 0.02, "measured": PLACE} for v in (0.61, 0.63)]
    assert verdicts(recipe_of(*read_off, tmp_path=tmp_path), tmp_path) == ["inside", "outside"]
    at_layer = {"what": "layer", "value": 0.9, "measured": {**PLACE, "layer": 3}}
    assert verdicts(recipe_of(at_layer, tmp_path=tmp_path), tmp_path) == ["no interval"]


def test_a_number_inside_an_interval_wider_than_itself_is_not_inside(tmp_path):
    measured(tmp_path, Record(metric="coupling", value=1.0, low=-5.0, high=7.0))
    values = {2.0: "too wide", 6.9: "too wide", 7.1: "outside", -5.1: "outside", 0.0: "inside"}
    recipe = recipe_of(*({"what": "c", "value": v, "measured": PLACE} for v in values), tmp_path=tmp_path)
    assert verdicts(recipe, tmp_path) == [*values.values()]


def test_a_reduced_run_is_not_judged_and_what_it_lacks_is_one_row(tmp_path):
    measured(tmp_path, Record(metric="coupling", value=0.5, low=0.4, high=0.6), run="gpt2")
    models = {"gpt2": 0.5, "gpt2-xl": 0.5, "gpt2-large": 0.9, "gpt2-medium": 0.9}
    published = [
        {"what": "c", "over": "run", "values": models, "measured": PLACE},
        {"what": "b", "at_least": 0.7, "measured": {**PLACE, "run": "gpt2"}},
        {"what": "nowhere", "value": 1, "measured": {**PLACE, "root": "else"}},
    ]
    sizes = {"sizes": {"models": [*models]}, "reduced": {"models": ["gpt2", "gpt2-large"]}}
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({**FIELDS, **sizes, "steps": STEPS, "published": published}))
    rows = compare(read_recipe(path), tmp_path, reduced=True)
    assert [(row.what, row.verdict) for row in rows] == [
        ("c, gpt2", "reduced"),
        ("b", "reduced"),
        ("4 numbers that the reduced recipe lacks", "not measured"),
    ]
    assert len(compare(read_recipe(path), tmp_path)) == 6


def test_a_bound_is_judged_by_the_whole_interval(tmp_path):
    measured(tmp_path, Record(metric="coupling", value=0.5, low=0.4, high=0.6))
    bounds = [{"at_least": 0.3}, {"at_least": 0.5}, {"at_least": 0.7}, {"at_most": 0.7}, {"at_most": 0}]
    recipe = recipe_of(*({"what": "b", **bound, "measured": PLACE} for bound in bounds), tmp_path=tmp_path)
    assert verdicts(recipe, tmp_path) == ["holds", "undecided", "fails", "holds", "fails"]
    assert next(row.published for row in compare(recipe, tmp_path)) == "at least 0.3"


def test_several_values_are_looked_up_one_by_one_and_what_is_missing_is_named(tmp_path):
    measured(tmp_path, Record(metric="coupling", value=0.5, low=0.4, high=0.6, tags={"k": 8}), step=0)
    measured(tmp_path, Record(metric="coupling", value=0.7, low=0.6, high=0.8, tags={"k": 8}), step=128)
    measured(tmp_path, step=256, error="it broke")
    over_steps = {"what": "c", "over": "step", "values": {0: 0.5, 128: 0.5, 256: 0.5, 512: 0.5}, "measured": PLACE}
    over_tags = {"what": "c", "over": "k", "values": {8: 0.7, 9: 0.7}, "measured": {**PLACE, "step": 128}}
    rows = compare(recipe_of(over_steps, over_tags, tmp_path=tmp_path), tmp_path)
    assert [row.what for row in rows] == [*(f"c, step {s}" for s in (0, 128, 256, 512)), "c, k 8", "c, k 9"]
    assert [row.verdict for row in rows] == ["inside", "outside", *["not measured"] * 2, "inside", "not measured"]
    notes = [row.note for row in rows if row.note]
    assert notes == ["no rows of run/measurements.jsonl fit"] * 3


def test_an_ambiguous_number_is_not_guessed(tmp_path):
    measured(tmp_path, *(Record(metric="coupling", value=0.1 * k, tags={"k": k}) for k in (8, 16)))
    control = Record(metric="coupling", value=9, tags={"k": 8, "control": "random_labels"})
    measured(tmp_path, Record(metric="coupling", value=0.8, tags={"k": 8}), control, run="b")
    expected = {
        "two runs": ({}, None, "3 rows of run/measurements.jsonl fit"),
        "two k": ({"run": "a"}, None, "2 rows of run/measurements.jsonl fit"),
        "no control": ({"run": "b"}, 0.8, ""),
        "the control": ({"run": "b", "tags": {"control": "random_labels"}}, 9, ""),
        "nowhere": ({"root": "else"}, None, "there is no else/measurements.jsonl"),
    }
    rows = [{"what": what, "value": 1, "measured": PLACE | place} for what, (place, *_) in expected.items()]
    found = compare(recipe_of(*rows, tmp_path=tmp_path), tmp_path)
    assert {row.what: (row.measured, row.note) for row in found} == {
        what: (value, note) for what, (_, value, note) in expected.items()
    }


def test_numbers_of_files_are_found_by_row_and_by_keys(tmp_path):
    (tmp_path / "c.csv").write_text("of,name,value,low,high\nc,r,0.8,0.7,0.9\nd,r,,,\n")
    (tmp_path / "d.csv").write_text("of,last,last_low,last_high,low,high\nc,5,4,6,0,1\n")
    (tmp_path / "s.json").write_text(json.dumps({"layer": 5, "test": {"5": {"value": 0.9, "low": 0.8, "high": 1.0}}}))
    expected = {
        "row": (0.75, {"file": "c.csv", "column": "value", "row": {"of": "c"}}, "inside"),
        "none": (0.75, {"file": "c.csv", "column": "value", "row": {"of": "d"}}, "not measured"),
        "both": (0.75, {"file": "c.csv", "column": "value", "row": {"name": "r"}}, "not measured"),
        "own bounds": (4.5, {"file": "d.csv", "column": "last"}, "inside"),
        "layer": (5, {"file": "s.json", "column": "layer"}, "no interval"),
        "accuracy": (0.7, {"file": "s.json", "column": "test.5"}, "outside"),
        "absent": (0.7, {"file": "s.json", "column": "test.6"}, "not measured"),
    }
    rows = [{"what": what, "value": value, "measured": place} for what, (value, place, _) in expected.items()]
    over = {"what": "over", "over": "of", "values": {"c": 0.8}, "measured": {"file": "c.csv", "column": "value"}}
    found = {row.what: row for row in compare(recipe_of(*rows, over, tmp_path=tmp_path), tmp_path)}
    verdict_of = {what: verdict for what, (*_, verdict) in expected.items()}
    assert {what: row.verdict for what, row in found.items()} == {**verdict_of, "over, of c": "inside"}
    assert [*found["accuracy"].cells().values()] == ["accuracy", "0.7", "0.9", "0.8 to 1", "outside"]


# ------------------------------------------------------------------------------------------------ the command


WRONG = (
    ({"item": 1}, "item: Input should be a valid string, got 1"),
    ({"status": "maybe"}, "status: Input should be 'here', 'gpu' or 'cannot', got 'maybe'"),
    ({"sizses": {}}, "sizses: Unexpected keyword argument"),
    ({"steps": [{"rm": {}}]}, "steps: 1: expected one of analyze, correlate, "),
    ({"steps": [{"correlate": {}, "report": {}}]}, "got correlate, report"),
    ({"steps": [{"correlate": {"data": "<who>"}}]}, "steps: 1, correlate: <who> stands for nothing"),
    ({"steps": [{"correlate": {"root": "/etc"}}]}, "root: expected a folder below <root>, got /etc"),
    ({"steps": [{"correlate": {"root": "<root>/../x"}}]}, "root: expected a folder below <root>"),
    ({"steps": [{"correlate": {"dta": "published"}}]}, "correlate: unknown key dta in the recipe; did you mean data?"),
    ({"steps": [{"correlate": {"resamples": "many"}}]}, "correlate: resamples: Expected a int. Got value: many"),
    ({"published": [{"what": "x", "value": "1", "measured": PLACE}]}, "value: Input should be a valid number"),
    ({"status": "cannot", "steps": [], "why": "the data are secret"}, "cannot be measured: the data are secret"),
)


def test_a_wrong_recipe_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for change, sentence in WRONG:
        Path("r.yaml").write_text(yaml.safe_dump({**FIELDS, "steps": STEPS, **change}))
        assert main(["reproduce", "r.yaml", "--root", "out"]) == 2, sentence
        said = capsys.readouterr().err
        assert sentence in said
        assert said.count("\n") == 1, said
        assert not [*Path("out").glob("[!s]*")], sentence
    Path("r.yaml").write_text(yaml.safe_dump({**FIELDS, "steps": STEPS}))
    for words, sentence in (
        (["r.yaml", "--reduced"], "reduced: r.yaml has no sizes below the published ones"),
        (["no.yaml"], "no.yaml"),
    ):
        assert main(["reproduce", *words]) == 2
        assert sentence in capsys.readouterr().err


def test_the_steps_run_with_their_sizes_and_the_numbers_stand_side_by_side(tmp_path, monkeypatch, capsys):
    rows = [f"m{n},{n},{n + n % 2}" for n in range(5)]
    (tmp_path / "points.csv").write_text("\n".join(["model,metric,score", *(f"m{n},{n},{-n}" for n in range(5)), ""]))
    (tmp_path / "few.csv").write_text("\n".join(["model,metric,score", *rows, ""]))
    step = {"models": ["<here>/<file>.csv"], "metric": "metric", "score": "score", "resamples": 100, "root": "<root>/c"}
    place = {"file": "c/correlation.csv", "row": {"of": "metric", "name": "Pearson r"}, "column": "value"}
    recipe = {**FIELDS, "differs": "in all", "sizes": {"file": "points"}, "reduced": {"file": "few"}}
    recipe |= {"steps": [{"correlate": step}], "published": [{"what": "r", "at_least": 0.5, "measured": place}]}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_layers.correlate.pages.write_pictures", lambda *_: [])  # takes a second
    assert main(["reproduce", "r.yaml", "--reduced"]) == 0
    said = capsys.readouterr()
    assert "lit-layers correlate --config checkpoints/papers/coupling/r-reduced/steps/1-correlate.yaml" in said.err
    assert "Differs from the paper: in all" in said.out
    assert "Reduced: " in said.out
    assert ",reduced," in Path("checkpoints/papers/coupling/r-reduced/comparison.csv").read_text()
    assert main(["reproduce", "r.yaml"]) == 0
    assert "fails" in (said := capsys.readouterr().out)
    assert "Reduced: " not in said
    Path("checkpoints/papers/coupling/r/c/correlation.csv").unlink()
    Path("points.csv").unlink()  # a step that fails ends with its sentence, and the numbers that are there stand
    assert main(["reproduce", "r.yaml"]) == 2
    assert "not measured: there is no c/correlation.csv" in capsys.readouterr().out


def test_a_diverging_run_does_not_stop_the_others_and_a_signal_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quickstart = Path(__file__).parents[1] / "recipes" / "quickstart" / "gpt2.yaml"
    steps = [{"fit": {"root": "<root>/run", "config": [str(quickstart)]}}, {"report": {"runs": ["<root>/run"]}}]
    Path("r.yaml").write_text(yaml.safe_dump({**FIELDS, "steps": steps}))
    for code, verbs in ((143, ["fit"]), (3, ["fit", "report"])):
        ran, codes = [], {"fit": code, "report": 0}
        monkeypatch.setattr(
            "lit_layers.cli.verbs.reproduce.run_verb",
            lambda verb, *_, ran=ran, codes=codes, **__: ran.append(verb) or codes[verb],
        )
        assert main(["reproduce", "r.yaml", "--root", "out"]) == code
        assert ran == verbs
        assert Path("out/comparison.csv").exists() == (code == 3)


def test_sizes_keep_their_type_and_can_be_inside_texts(tmp_path):
    step = {"metric": "<metric>", "models": "<models>", "seed": "<seed>", "score": "<here>/<metric>.csv:x"}
    recipe = {**FIELDS, "sizes": {"metric": "a/b", "models": ["x", "y"], "seed": 3}, "steps": [{"correlate": step}]}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    (one,) = read_recipe(tmp_path / "r.yaml").commands(Path("out"), Path("where"), reduced=False)
    assert one.options == {"metric": "a/b", "models": ["x", "y"], "seed": 3, "score": "where/a/b.csv:x"}
    assert one.argv(Path("o.yaml")) == ["correlate", "--config", "o.yaml", "--root", "out/1-correlate"]
