"""Every analysis there is, on models and data of which something is broken: the rest keeps its numbers.

What the numbers must be comes from runs in which nothing is broken: of the model cut off before the broken block, and
of the data without the broken prompt.
"""

import ast
import copy
import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import lit_layers
from lit_layers import analyses, plots
from lit_layers.analyses import Analysis
from lit_layers.data import GivenTexts
from lit_layers.data.tokenization import load_tokenizer
from lit_layers.data.word_pairs import WordPairs
from lit_layers.functional.entropy import effective_rank
from lit_layers.measuring.one_model import measure
from lit_layers.metrics import is_in
from lit_layers.models.view import LayeredModel
from lit_layers.records import Measurement, frame
from lit_layers.tasks.probe_task import ProbeTask
from tests.support.charts import line
from tests.support.labelled_texts import labelled, saved_gpt2
from tests.support.listed_batches import Listed
from tests.support.tiny_models import tiny
from tests.tasks.tiny_tasks import task, write_tiny_data

BLOCKS, BROKEN = 4, 3  # layers 0 to 2 are healthy
TEXTS = [text for text, _ in labelled(24)]
STRANGE = "§" * 6  # of tokens that no other text has
WORDS = [("up", "down"), ("before", "after"), ("in", "out"), ("merry", "sad"), ("song", "songs")]


class Data:
    """Texts as every analysis takes them; `extra` is one prompt more, as the last."""

    def __init__(self, home: Path, num_layers: int = BLOCKS, extra: str | list[int] | None = None) -> None:
        self.home, self.num_layers, self.extra = home, num_layers, extra
        tokenizer = load_tokenizer(str(home / "model")).tokenizer
        self.rows = [tokenizer.encode(text).ids[: 8 + number] for number, text in enumerate(TEXTS[:5])]
        self.texts = list(TEXTS[:5])
        if extra is not None:
            self.rows.append(tokenizer.encode(extra).ids if isinstance(extra, str) else extra)
            self.texts.append(extra if isinstance(extra, str) else tokenizer.decode(extra))

    def batches(self, rows: list[list[int]] | None = None, size: int = 3, **columns: list[int]) -> Listed:
        rows, found = rows or self.rows, []
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in part], batch_first=True)
            mask = torch.tensor([[1] * len(row) + [0] * (ids.shape[1] - len(row)) for row in part])
            more = {name: torch.tensor(values[start : start + size]) for name, values in columns.items()}
            found.append({"input_ids": ids, "attention_mask": mask, **more})
        return Listed(*found)

    def train(self) -> list[list[int]]:
        tokenizer = load_tokenizer(str(self.home / "model")).tokenizer
        return [tokenizer.encode(text).ids[:9] for text in TEXTS[8:]]

    def task(self) -> dict[str, Any]:
        """The options of an analysis on a task, whose last test row is the extra one."""
        folder = self.home / f"task-{abs(hash(str(self.extra)))}"
        rows = {"train": TEXTS[8:], "test": self.texts}
        folder.mkdir(exist_ok=True)
        for part, texts in rows.items():
            lines = [{"text": text, "label": str(number % 2)} for number, text in enumerate(texts)]
            (folder / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        fit: dict[str, Any] = {"tolerance": 1e-3, "max_iterations": 100}
        return {"task": ProbeTask("halves", str(folder)), "tokenizer": str(self.home / "model"), **fit}

    def words(self) -> WordPairs:
        pairs = [*WORDS, ("up", self.extra)] if isinstance(self.extra, str) else WORDS
        path = self.home / f"words-{abs(hash(str(self.extra)))}.parquet"
        rows = [
            {"group": "D", "category_id": f"D{number}", "category": name, "word": one, "answers": [other]}
            for number, (name, kept) in enumerate({"all": pairs, "some": WORDS[:4]}.items())
            for one, other in kept
        ]
        pd.DataFrame(rows).to_parquet(path)
        return WordPairs(str(path), str(self.home / "model"), batch_size=4)


MAKERS: dict[str, Callable[[Data], Analysis]] = {
    "AttentionPatterns": lambda data: analyses.AttentionPatterns(batches=data.batches()),
    "ConceptAlignment": lambda data: analyses.ConceptAlignment(words=data.words()),
    "Coupling": lambda data: analyses.Coupling(batches=data.batches(), k=(2, 4), num_prompts=6),
    "CouplingMatrices": lambda data: analyses.CouplingMatrices(
        batches=data.batches(), k=2, num_prompts=6, pairs=[(1, 2), (2, 1), (1, data.num_layers)][: data.num_layers - 1]
    ),
    "CrossTokenInfluence": lambda data: analyses.CrossTokenInfluence(
        batches=data.batches(), num_prompts=6, num_inputs=2
    ),
    "InContext": lambda data: analyses.InContext(batches=data.batches(), early=2, late=4),
    "Induction": lambda data: analyses.Induction(num_prompts=6, num_tokens=4, repeats=2),
    "Interventions": lambda data: analyses.Interventions(batches=data.batches(), seeds=(0, 1), loops=(2,)),
    "Invariance": lambda data: analyses.Invariance(
        texts=GivenTexts(data.texts), tokenizer=str(data.home / "model"), num_views=3, num_halves=2, permutations=2
    ),
    "AttentiveProbe": lambda data: analyses.AttentiveProbe(
        train=data.batches(data.train(), labels=[n % 2 for n in range(16)]),
        test=data.batches(labels=[n % 2 for n in range(len(data.rows))]),
        steps=3,
    ),
    "JacobianLens": lambda data: analyses.JacobianLens(batches=data.batches(), num_prompts=2, skip_first=0),
    "LabelProbe": lambda data: analyses.LabelProbe(
        train=data.batches(data.train(), labels=[n % 2 for n in range(16)]),
        test=data.batches(labels=[n % 2 for n in range(len(data.rows))]),
        tolerance=1e-3,
    ),
    "LayerSimilarity": lambda data: analyses.LayerSimilarity(batches=data.batches()),
    "Lens": lambda data: analyses.Lens(batches=data.batches()),
    "OrderStates": lambda data: analyses.OrderStates(batches=data.batches(), variants=("skip",)),
    "MtebTask": lambda data: task(
        "STSBenchmark", data.home / "data", data.home / "model", data.home / f"of-{data.num_layers}"
    ),
    "NextTokenProbe": lambda data: analyses.NextTokenProbe(
        train=data.batches(data.train()), test=data.batches(), num_classes=5, min_context=1, tolerance=1e-3
    ),
    "NgramAgreement": lambda data: analyses.NgramAgreement(
        batches=data.batches(), corpus=data.batches(data.train()), orders=(1, 2), num_tokens=3
    ),
    "NextTokenResidual": lambda data: analyses.NextTokenResidual(batches=data.batches(), num_halves=2),
    "PathsInPlane": lambda data: analyses.PathsInPlane(batches=data.batches(), num_prompts=6, num_tokens=3),
    "PooledStates": lambda data: analyses.PooledStates(batches=data.batches(), num_halves=2),
    "Probe": lambda data: analyses.Probe(**data.task()),
    "PromptStudies": lambda data: analyses.PromptStudies(batches=data.batches(), p=(0.0, 0.5), lengths=(4,)),
    "Representation": lambda data: analyses.Representation(batches=data.batches(), num_halves=2, rankme=True),
    "SampleSizeSweep": lambda data: analyses.SampleSizeSweep(**data.task(), num_seeds=2),
    "StateGeometry": lambda data: analyses.StateGeometry(batches=data.batches(), first_rank=1, num_halves=2),
    "StateMetric": lambda data: analyses.StateMetric(
        metric=effective_rank, batches=data.batches(), options={"undefined": "nan"}
    ),
    "TokenCoupling": lambda data: analyses.TokenCoupling(
        batches=data.batches(), k=(2,), pairs="all", tables=("token",), num_tokens=2, num_prompts=6
    ),
    "Trajectory": lambda data: analyses.Trajectory(batches=data.batches()),
}
# The plane is that of the last layer, and an order is one of all blocks, or of all but some.
OF_THE_WHOLE = ("PathsInPlane", "Interventions", "OrderStates", "InContext", "JacobianLens")
# What compares with the last layer.
OF_THE_LAST = ("kl_to_final",)
# What is a matter of tokens or of labels.
NOT_OF_LAYERS = ("changed_fraction", "infonce_chance", "infonce_chance_of_half", "coverage")
# What a mean over other blocks would pass for.
OF_ALL_BLOCKS = ("line_shape_score", "coupling", "coupling_with_diagonal", "excess_coupling", "random_coupling")
OF_ALL_BLOCKS += ("spectrum_slope", "spectrum_r_squared")


# What runs a whole model in another way, or trains it, or is refused: there is no layer to tell from another.
WITHOUT_LAYERS = {"BenchmarkScores", "GlueScores", "Speed", "TaskFinetuning"}


def every_analysis() -> set[str]:
    """The names of all classes of the package that are analyses with a `run` of their own or of a parent's."""
    bases: dict[str, set[str]] = {}
    abstract = set()
    for file in Path(lit_layers.__file__).parent.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                # `Name`, or `module.Name`
                parents = {ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases}
                bases[node.name] = bases.get(node.name, set()) | parents  # some names are those of several classes
                marks = [ast.unparse(mark) for each in node.body for mark in getattr(each, "decorator_list", [])]
                if "abstractmethod" in marks:
                    abstract.add(node.name)
    found = {"Analysis"}
    while more := {name for name, parents in bases.items() if parents & found} - found:
        found |= more
    shared = {
        "Analysis",
        "ProbeAnalysis",
        *(name for name in found if name.startswith("_")),
    }  # parents of several
    return found - abstract - shared


def test_no_analysis_is_forgotten_here():
    assert every_analysis() == MAKERS.keys() | WITHOUT_LAYERS
    assert {*analyses.__all__} - {"Analysis", "Jobs", "Rows", "Values"} <= MAKERS.keys()


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undefined")
    saved_gpt2(folder / "model", n_layer=BLOCKS, n_embd=16, tie_word_embeddings=False)
    write_tiny_data(folder / "data")
    return folder


@functools.cache
def saved(home: Path) -> Any:
    return saved_gpt2(home / "model", tokenizer=False, n_layer=BLOCKS, n_embd=16, tie_word_embeddings=False)


def model_of(home: Path, num_layers: int = BLOCKS) -> Any:
    model = copy.deepcopy(saved(home))
    model.transformer.h = model.transformer.h[:num_layers]
    model.config.n_layer = num_layers
    return model


def kill_(model: Any) -> None:
    """Makes a block pass on what comes in."""
    block = model.transformer.h[BROKEN - 1]
    for part in (block.attn.c_proj, block.mlp.c_proj):
        torch.nn.init.zeros_(part.weight)
        torch.nn.init.zeros_(part.bias)


def spoil_(model: Any) -> None:
    torch.nn.init.constant_(model.transformer.h[BROKEN - 1].mlp.c_proj.weight, torch.nan)


def taken(name: str, model: Any, data: Data) -> Measurement:
    return measure(LayeredModel(model), MAKERS[name](data), run="run", step=0, weights_hash=f"{id(model)}")


def by_key(found: Measurement, *, layers: int | None = None) -> dict[tuple, Any]:
    """The records by what they are of; with `layers` those of layers up to there alone."""
    records = {}
    for record in found.records:
        places = [place for place in (record.layer, record.other_layer) if place is not None]
        if layers is not None and (not places or max(places) > layers):
            continue
        tags = sorted((tag, value) for tag, value in record.tags.items() if not tag.startswith("num_"))
        records[record.metric, record.layer, record.other_layer, *tags] = record
    return records


def numbers_left_out(record: Any) -> dict[str, int]:
    return {tag: number for tag, number in record.tags.items() if tag.startswith("num_undefined")}


@pytest.mark.parametrize("name", sorted(set(MAKERS) - set(OF_THE_WHOLE)))
def test_layers_before_a_broken_block_keep_their_numbers_and_the_others_are_gaps_that_say_so(home, name):
    prefix = taken(name, model_of(home, BROKEN - 1), Data(home, num_layers=BROKEN - 1))
    assert prefix.error is None
    expected = by_key(prefix, layers=BROKEN - 1)
    assert expected
    for break_ in (kill_, spoil_):
        broken = model_of(home)
        break_(broken)
        found = taken(name, broken, Data(home))
        assert found.error is None
        records = by_key(found)
        for key, record in expected.items():
            if key[0] not in NOT_OF_LAYERS + OF_THE_LAST:
                assert records[key].value == pytest.approx(record.value, rel=1e-6, abs=1e-9), key
                assert records[key].n == record.n, key
        check_the_rest(records, nothing_is_finite=break_ is spoil_)


def check_the_rest(records: dict[tuple, Any], *, nothing_is_finite: bool) -> None:
    """What is not of healthy layers alone is absent, NaN or says what it leaves out."""
    for key, record in records.items():
        if record.metric in OF_ALL_BLOCKS and record.layer is None:
            assert math.isnan(record.value), key
            assert numbers_left_out(record), key
        assert record.metric not in OF_THE_LAST or not nothing_is_finite, key
        if nothing_is_finite and record.metric not in NOT_OF_LAYERS and "reference" not in record.tags:
            places = [place for place in (record.layer, record.other_layer) if place is not None]
            if places:
                assert max(places) < BROKEN + is_in(record.metric, "attention"), key  # what a block is given is whole
            else:
                assert math.isnan(record.value) or numbers_left_out(record), key
                assert record.n or math.isnan(record.value), key


def test_orders_without_a_broken_block_keep_their_numbers_and_paths_that_end_nowhere_have_no_plane(home):
    broken = model_of(home)
    spoil_(broken)
    whole, found = (by_key(taken("Interventions", model, Data(home))) for model in (model_of(home), broken))
    skipped = ("variant_loss", BROKEN, None, ("variant", "skip_one"))
    assert found[skipped].value == whole[skipped].value
    for key, record in found.items():
        if key != skipped and record.metric in ("variant_loss", "variant_accuracy"):
            complete = record.tags["variant"] != "skip" and record.layer != BROKEN
            assert math.isnan(record.value) == (complete and record.layer is None), key
        assert record.metric != "kl_to_full" or math.isnan(record.value)
    failed = taken("PathsInPlane", broken, Data(home))
    assert failed.error is not None
    assert "paths_in_plane is undefined for every prompt at every layer" in failed.error


def test_a_lens_of_a_broken_model_has_the_ranks_that_need_no_later_layer(home):
    """The model's own output is undefined, and with it all divergences and Jacobians."""
    broken = model_of(home)
    spoil_(broken)
    prefix = by_key(taken("JacobianLens", model_of(home, BROKEN - 1), Data(home)))
    found = taken("JacobianLens", broken, Data(home))
    assert found.error is None
    records = by_key(found)
    assert records.keys() == {("lens_rank", layer, None, ("lens", "logit")) for layer in range(BROKEN)}
    for layer in range(BROKEN - 1):
        key = ("lens_rank", layer, None, ("lens", "logit"))
        assert records[key].value == pytest.approx(prefix[key].value, rel=1e-6)
        assert records[key].n == prefix[key].n


def extras(home: Path) -> Iterator[tuple[str, str | list[int]]]:
    (letter,) = load_tokenizer(str(home / "model")).tokenizer.encode("g").ids
    yield "NaN", STRANGE
    yield "one token", [letter]
    yield "constant", [letter] * 10


NO_PROMPTS = ("CouplingMatrices", "Induction")  # no mean over them, or none but its own
LONG = ("TokenCoupling", "CouplingMatrices", "SampleSizeSweep")  # as CrossTokenInfluence, Coupling, Probe


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.soak] * (name in LONG))
        for name in sorted(set(MAKERS) - {"MtebTask"})  # whose texts are the task's
    ],
)
def test_a_broken_prompt_is_left_out_of_a_number_and_counted_or_is_in_it(home, name):
    model = model_of(home)
    strange = load_tokenizer(str(home / "model")).tokenizer.encode(STRANGE).ids
    with torch.no_grad():
        model.transformer.wte.weight[strange] = torch.nan
    whole = taken(name, model, Data(home))
    assert whole.error is None
    expected = by_key(whole)
    for kind, extra in extras(home):
        if (name, kind) == ("Invariance", "one token"):
            continue  # a letter has no two views that differ, which is refused
        found = taken(name, model, Data(home, extra=extra))
        assert found.error is None, kind
        records, left_out = by_key(found), 0
        for key, record in records.items():
            counted = "num_undefined" in numbers_left_out(record)
            left_out += counted
            if key in expected and record.metric not in NOT_OF_LAYERS and (counted or kind == "NaN"):
                # Batches of other sizes take other products: a small divergence of float32 logits moves by 2e-6.
                assert record.value == pytest.approx(expected[key].value, rel=1e-5, abs=1e-8), (kind, key)
        assert left_out or kind != "NaN" or name in NO_PROMPTS
        assert expected.keys() <= records.keys(), kind


def test_a_prompt_of_one_repeated_token_leaves_a_gap_at_the_layer_that_sees_no_positions():
    """In a rotary model all its states are equal at layer 0, where a prompt has no curvature and no spread."""
    batch = {"input_ids": torch.full((1, 9), 7)}
    model = tiny("llama", torch.float64)
    for kind in (analyses.Representation, analyses.LayerSimilarity, analyses.Trajectory):
        found = measure(model, kind(batches=Listed(batch)), run="run", step=0)
        assert found.error is None
        assert {record.metric for record in found.records}
    found = measure(model, analyses.Representation(batches=Listed(batch)), run="run", step=0)
    assert not [r for r in found.records if r.metric == "token_curvature" and r.layer == 0]
    assert [r for r in found.records if r.metric == "effective_rank" and r.layer == 0]


def test_a_text_of_one_token_is_in_no_normalization_of_the_entropy():
    lengths = (1, 6, 5)
    ids = torch.randint(3, 60, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * length + [0] * (6 - length) for length in lengths])
    model = tiny("gpt2", torch.float64)
    for alpha2 in ("spectrum", "frobenius"):
        options: dict[str, Any] = {"alpha": 2.0, "alpha2": alpha2, "drop_first": (0, 4)}
        given = analyses.Representation(batches=Listed({"input_ids": ids, "attention_mask": mask}), **options)
        found = [r for r in measure(model, given, run="run", step=0).records if r.metric == "prompt_entropy"]
        assert {(r.tags["drop_first"], r.n, r.tags.get("num_undefined")) for r in found} == {(0, 2, 1), (4, 1, 2)}
        assert {r.tags["normalization"] for r in found} == {"raw", "maxEntropy"}
    studies = analyses.PromptStudies(
        batches=Listed({"input_ids": ids, "attention_mask": mask}), studies=("repetition",), p=(0.0,), drop_first=(0,)
    )
    assert {r.n for r in measure(model, studies, run="run", step=0).records} == {2}
    one = entropy_of_rows(model, ids[1])
    both = one + entropy_of_rows(model, ids[2][:5])
    (raw,) = [
        r
        for r in measure(model, studies, run="run", step=0).records
        if r.layer == 2 and r.tags["normalization"] == "raw"
    ]
    assert raw.value == pytest.approx(both / 2, rel=1e-9)


def entropy_of_rows(model: Any, ids: Tensor) -> float:
    hidden = LayeredModel(model).trajectory({"input_ids": ids[None]}).hidden[2, 0]
    share = torch.linalg.svdvals(hidden) ** 2
    share = share / share.sum()
    return -(share * share.log()).sum().item()


def test_figures_of_numbers_with_gaps_have_lines_that_break_off(home):
    broken = model_of(home)
    spoil_(broken)
    found = []
    for step, model in ((0, model_of(home)), (1, broken), (2, model_of(home))):
        for name in ("Representation", "Coupling", "LayerSimilarity"):
            found.append(measure(model, MAKERS[name](Data(home)), run="run", step=step, weights_hash=f"{step}"))
    table = frame(found)
    profile = plots.layer_profile(table, "effective_rank")
    gappy = line(profile, "step 1")
    assert [value is None for value in gappy.y] == [layer >= BROKEN for layer in range(BLOCKS + 1)]
    curve = plots.emergence_curves(table, "coupling", tags={"k": 2})
    (whole,) = curve.series
    assert [value is None for value in whole.y] == [False, True, False]
    plots.layer_matrix(table, "coupling_pair", tags={"k": 2})
    plots.emergence_curves(table[table["step"] == 1], "num_middle")
    plots.change_table(table)


@pytest.mark.parametrize("name", ["LabelProbe", "AttentiveProbe", "LayerSimilarity"])
def test_where_no_prompt_that_is_looked_at_has_a_value_the_analysis_says_that_and_nothing_else(home, name):
    model, data = model_of(home), Data(home)
    token = data.rows[0][0]
    data.rows = [[token] * 8]
    model.transformer.wte.weight.data[token] = torch.nan
    error = taken(name, model, data).error
    assert error is not None
    assert "is undefined for every prompt at every layer" in error


@pytest.mark.parametrize("name", ["NextTokenProbe", "NextTokenResidual"])
def test_where_too_few_prompts_are_left_it_is_refused_as_other_data_would_be(home, name):
    model, data = model_of(home), Data(home, extra=STRANGE)
    strange = data.rows[-1][0]
    data.rows = data.rows[-2:]
    if name == "NextTokenProbe":  # the healthy text's next token is one that no text of training has
        rare = min({*range(200)} - {token for row in data.train() for token in row} - {strange})
        data.rows = [*([strange, *row] for row in data.train()[:6]), [rare] * 10]
    model.transformer.wte.weight.data[strange] = torch.nan
    error = taken(name, model, data).error
    assert error is not None
    assert error.startswith("InputError: ")


def test_stages_of_layers_count_the_prompts_that_they_are_of(home):
    data = Data(home, extra=STRANGE)
    broken = load_tokenizer(str(home / "model")).tokenizer.encode(STRANGE).ids[0]
    model = model_of(home)
    model.transformer.wte.weight.data[broken] = torch.nan
    found, healthy = (taken("LayerSimilarity", model, each) for each in (data, Data(home)))
    for one, other in zip(found.records, healthy.records, strict=True):
        assert (one.metric, one.value, one.n) == (other.metric, pytest.approx(other.value, rel=1e-5), other.n)
        assert one.tags["num_undefined"] == 1, one


@pytest.mark.parametrize("name", ["LabelProbe", "AttentiveProbe", "Probe"])
def test_the_reference_of_a_probe_counts_the_rows_that_are_left_out_of_it_too(home, name):
    broken = load_tokenizer(str(home / "model")).tokenizer.encode(STRANGE).ids[0]
    model = model_of(home)
    model.transformer.wte.weight.data[broken] = torch.nan
    found = taken(name, model, Data(home, extra=STRANGE))
    assert found.error is None
    assert [record.tags["num_undefined"] for record in found.records] == [1] * len(found.records)
    of_test = [record for record in found.records if record.tags.get("split") != "train"]
    assert {record.n for record in of_test if record.metric == "accuracy"} == {5}
