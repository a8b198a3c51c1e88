"""The contract of every analysis, with one case each, on a model of texts or of images.

The file of each analysis tests its numbers. Here they are compared with the numbers of other runs: of only this
analysis, of one process, of the data without the broken prompt, and of the model cut off before the broken block.
"""

import copy
import dataclasses
import math
import random
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from lit_layers import analyses
from lit_layers.analyses import Analysis, changed_texts
from lit_layers.analyses.probes import next_token_residual, task_probes
from lit_layers.data import GivenTexts
from lit_layers.data.tokenization import load_tokenizer
from lit_layers.data.word_pairs import WordPairs
from lit_layers.errors import InputError
from lit_layers.measuring.one_model import measure, outcomes
from lit_layers.metrics import METRICS, is_in
from lit_layers.models.build import weights_hash
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record
from lit_layers.tasks.mteb_scores import MtebTask
from lit_layers.tasks.probe_task import ProbeTask
from tests.support import every_analysis
from tests.support.distilled import distilled
from tests.support.labelled_texts import labelled, write_csv
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.thread_ranks import outcomes_on_ranks
from tests.support.tiny_models import tiny

BLOCKS, BROKEN = 4, 3  # layers 0 to 2 are healthy
STRANGE = "§" * 6  # made of tokens that no other text has
# Analyses that take a second or more.
LONG = ("MtebTask", "NextTokenProbe", "PromptStudies", "AttentiveProbe", "TokenCoupling", "CrossTokenInfluence")
LONG += ("AttentionPatterns", "CouplingMatrices", "Representation", "StateGeometry", "OrderStates", "SampleSizeSweep")
LONG += ("Probe", "NextTokenResidual", "JacobianLens", "Coupling", "LabelProbe", "Interventions", "Benchmarks")
KINDS = [
    pytest.param(name, marks=[pytest.mark.soak] * (name in LONG))
    for name in sorted(each.__name__ for each in every_analysis.analysis_classes())
]

# Metrics that compare with the last layer.
LAST_LAYER = ("kl_to_final",)
# Metrics of tokens or labels, which do not depend on layers.
LAYERLESS = ("changed_fraction", "infonce_chance", "infonce_chance_of_half", "coverage")
# Metrics over all blocks, for which a mean over only some blocks would be wrong.
ALL_BLOCKS = ("line_shape_score", "coupling", "coupling_with_diagonal", "excess_coupling", "random_coupling")
ALL_BLOCKS += ("spectrum_slope", "spectrum_r_squared")
# Analyses of the whole model: the plane is that of the last layer, and orders have all or most blocks.
WHOLE_MODEL = ("Benchmarks", "PathsInPlane", "Interventions", "OrderStates", "InContext", "JacobianLens")
WHOLE_MODEL = (*WHOLE_MODEL, "EffectiveDepth")
UNDEFINED = "num_undefined"
SAME_PROMPTS = (analyses.LayerSimilarity, analyses.LabelProbe, analyses.AttentiveProbe, analyses.Probe)
# Their texts are drawn or belong to the task, so no broken text can be added.
OWN_TEXTS = ("Induction", "MtebTask", "Benchmarks")


class World(NamedTuple):
    """A model, its analyses, and the records of those that have run together."""

    model: nn.Module
    analyses: list[Analysis]
    together: dict[str, list[Record]]

    def records_of_kind(self, kind: str) -> list[tuple[Analysis, list[Record]]]:
        """Return the analyses of a class and their records, from one pass of all fast or of all slow analyses."""
        wanted = [each for each in self.analyses if type(each).__name__ == kind]
        if any(each.name not in self.together for each in wanted):
            same_speed = [each for each in self.analyses if (type(each).__name__ in LONG) == (kind in LONG)]
            found = [*outcomes(self.model, same_speed, weights_hash="x")]
            assert [each.error for each in found] == [None] * len(found)
            assert [each.analysis.name for each in found] == [each.name for each in same_speed]
            self.together.update((each.analysis.name, each.records) for each in found)
        return [(each, self.together[each.name]) for each in wanted]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return every_analysis.save_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def worlds(folder) -> list[World]:
    """Return both models in training mode with dropout or drop-path, because analyses must use evaluation mode."""
    texts = World(text_model().train(), text_analyses(folder), {})
    return [texts, World(distilled(), every_analysis.image_analyses(), {})]


def text_model(num_layers: int = BLOCKS) -> Any:
    """Return the first blocks of a GPT-2 with an untied head."""
    options = {"vocab_size": every_analysis.VOCABULARY, "n_layer": BLOCKS, "tie_word_embeddings": False}
    model: Any = tiny("gpt2", torch.float64, **options)
    model.transformer.h = model.transformer.h[:num_layers]
    model.config.n_layer = num_layers
    return model


def text_analyses(folder: Path, name: str = "results") -> list[Analysis]:
    """Return the analyses of text, with MTEB scores in the folder `name`."""
    found = every_analysis.text_analyses(folder)
    return [dataclasses.replace(a, results=folder / name) if isinstance(a, MtebTask) else a for a in found]


@pytest.mark.parametrize("kind", KINDS)
def test_an_analysis_keeps_the_contract(worlds, folder, kind):
    given = [(world, *found) for world in worlds for found in world.records_of_kind(kind)]
    assert given, "add it to tests/support/every_analysis.py"
    for world, analysis, together in given:
        before = state_of(world.model)
        analysis.check(LayeredModel(world.model))
        single = records_of(analysis, world.model)
        assert state_of(world.model) == before, "the model, its gradients and modes or a random generator changed"
        check_rows(single)
        assert text_of(single) == text_of(together), "the numbers depend on other analyses"
        if world is worlds[0]:
            (shared,), _ = outcomes_on_ranks(world.model, [analysis], 3)
            assert shared.error is None
            assert text_of(shared.records) == text_of(single), "three ranks found something else"
            if kind not in OWN_TEXTS:
                check_a_broken_prompt_is_left_out(analysis, single, folder)
            if any(isinstance(value, Listed) for value in vars(analysis).values()):
                check_padding(analysis, single, world.model)
                check_broken_prompts_give_no_value(analysis, folder)
        check_refusals(analysis, world.model)


# Analyses that send states to other processes, with the module that limits their size.
SENDS = {"Invariance": changed_texts, "NextTokenResidual": next_token_residual}
SENDS |= {"Probe": task_probes, "SampleSizeSweep": task_probes}


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=[pytest.mark.soak] * (name != "Invariance")) for name in SENDS]
)
def test_states_too_large_to_send_are_computed_by_each_process(worlds, kind, monkeypatch):
    (analysis,) = (each for each in worlds[0].analyses if type(each).__name__ == kind)
    view = LayeredModel(worlds[0].model)
    expected = records_of(analysis, view)
    monkeypatch.setattr(SENDS[kind], "MAX_SENT", 0)
    assert analysis.reads(view) == {}
    check_equal_to_rounding(analysis, expected, records_of(analysis, view))


def text_of(records: list[Record]) -> list[str]:
    """Return the text of each record, which is equal also if it has NaN."""
    return [repr(record) for record in records]


def state_of(model: nn.Module) -> tuple:
    modes = [module.training for module in model.modules()]
    gradients = [(parameter.grad is None, parameter.requires_grad) for parameter in model.parameters()]
    drawn = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
    return weights_hash(model), modes, gradients, drawn


def check_rows(records: Iterable[Record]) -> None:
    for record in records:
        assert record.metric in METRICS, record
        row, room = METRICS[record.metric], 1e-6 * max(1, abs(record.value))  # rounding at the ends of a range
        assert math.isnan(record.value) or row.low - room <= record.value <= row.high + room, record
        if record.layer is not None and record.other_layer is None and "variant" not in record.tags:
            assert record.layer >= (math.inf if row.first_layer is None else row.first_layer), record


def check_padding(analysis: Any, single: list[Record], model: nn.Module) -> None:
    """Measure the same prompts in other batches, padded on the left with real token ids."""
    options = {
        name: Listed(*padded_on_the_left(value, 1 if name == "batches" else 100))
        for name, value in vars(analysis).items()
        if isinstance(value, Listed)
    }
    found = records_of(dataclasses.replace(analysis, **options), model)
    check_equal_to_rounding(analysis, single, found)


def check_equal_to_rounding(analysis: Analysis, expected: list[Record], found: list[Record]) -> None:
    """Compare records of other batches, whose numbers are rounded differently."""
    rel = 1e-4 if hasattr(analysis, "tolerance") or hasattr(analysis, "steps") else 1e-6  # tolerance of fits
    for one, other in zip(expected, found, strict=True):
        assert (one.metric, one.layer, one.other_layer, one.tags, one.n) == (
            *(other.metric, other.layer, other.other_layer, other.tags, other.n),
        )
        assert other.value == pytest.approx(one.value, rel=rel, abs=1e-8, nan_ok=True), one


def padded_on_the_left(batches: Listed, size: int) -> Iterator[dict[str, Tensor]]:
    for batch in batches:
        mask = torch.nn.functional.pad(batch["attention_mask"].flip(-1), (1, 0))
        ids = torch.full_like(mask, 7)
        ids[mask.bool()] = batch["input_ids"][batch["attention_mask"].bool()]
        moved = {**batch, "input_ids": ids, "attention_mask": mask}
        for start in range(0, len(ids), size):
            yield {name: values[start : start + size] for name, values in moved.items()}


# --------------------------------------------------------------------------------------------------- broken prompts


def check_a_broken_prompt_is_left_out(analysis: Analysis, whole: list[Record], folder: Path) -> None:
    """Add a prompt of tokens whose embeddings are NaN."""
    model, strange = text_model(), strange_tokens(folder)
    model.transformer.wte.weight.data[strange] = torch.nan
    found = records_by_key(records_of(add_broken_prompt(analysis, strange, folder), model))
    expected = records_by_key(whole)
    assert expected.keys() == found.keys()
    counted = [record for record in found.values() if record.tags.get(UNDEFINED)]
    assert counted or isinstance(analysis, analyses.CouplingMatrices), "no record counts the prompt that is left out"
    if isinstance(analysis, SAME_PROMPTS):
        assert len(counted) == len(found), "records compare different prompts"
    for key, record in found.items():
        # the study of random tokens also draws the broken ones
        if record.metric not in LAYERLESS and record.tags.get("study") != "randomness":
            assert record.n == expected[key].n or not record.tags.get(UNDEFINED), key
            assert record.value == pytest.approx(expected[key].value, rel=1e-7, abs=1e-9, nan_ok=True), key


def strange_tokens(folder: Path) -> list[int]:
    return load_tokenizer(str(folder / "tokenizer")).tokenizer.encode(STRANGE).ids


def check_broken_prompts_give_no_value(analysis: Any, folder: Path) -> None:
    model, strange = text_model(), strange_tokens(folder)
    model.transformer.wte.weight.data[strange] = torch.nan
    more = {"input_ids": torch.tensor([strange]), "labels": torch.tensor([0])}
    options = {name: Listed(more) for name in ("batches", "test") if isinstance(getattr(analysis, name, None), Listed)}
    found = measure(model, dataclasses.replace(analysis, **options), run="run", step=0)
    if found.error is not None:
        assert re.search("is undefined for every prompt|InputError: ", found.error), found.error
    # Orders have distances without any prompt, and the study of random tokens replaces the broken ones.
    others = [r for r in found.records if r.metric != "kendall_distance" and r.tags.get("study") != "randomness"]
    assert all(math.isnan(record.value) for record in others)


def add_broken_prompt(analysis: Any, strange: list[int], folder: Path) -> Analysis:
    """Return the analysis of the prompts that it reads, followed by the broken one."""
    options: dict[str, Any] = {}
    count = None if isinstance(analysis, analyses.JacobianLens) else getattr(analysis, "num_prompts", None)
    for name in ("batches", "test"):
        if isinstance(batches := getattr(analysis, name, None), Listed):
            more = {"input_ids": torch.tensor([strange]), "attention_mask": torch.ones(1, len(strange)).long()}
            more |= {"labels": torch.tensor([0])} if "labels" in batches.batches[0] else {}
            options[name] = Listed(*first_rows(batches, count), more)
            options |= {"num_prompts": count + 1} if count else {}
    if isinstance(texts := getattr(analysis, "texts", None), GivenTexts):
        options["texts"] = GivenTexts([*texts.texts(), STRANGE])
    if hasattr(analysis, "task"):
        shutil.copytree(folder / "moods", folder / "strange", dirs_exist_ok=True)
        write_csv(folder / "strange" / "test.csv", [*labelled(18, first=36), (STRANGE, "sad")])
        options["task"] = ProbeTask("moods", str(folder / "strange"))
    if isinstance(analysis, analyses.MinimalPairs):
        (folder / "strange.csv").write_text(f"{Path(analysis.pairs).read_text()}{STRANGE},{STRANGE}.,verb\n")
        options["pairs"] = str(folder / "strange.csv")
    if isinstance(words := getattr(analysis, "words", None), WordPairs):
        table = pd.read_parquet(words.source)
        table.loc[len(table)] = {**table.loc[0], "word": "sing", "answers": [STRANGE]}
        table.to_parquet(folder / "strange.parquet")
        options["words"] = dataclasses.replace(words, source=str(folder / "strange.parquet"))
    assert options, "nothing to which a prompt could be added"
    return dataclasses.replace(analysis, **options)


def first_rows(batches: Listed, count: int | None) -> Iterator[dict[str, Tensor]]:
    left = math.inf if count is None else count
    for batch in batches:
        if left > 0:
            yield {name: values[: int(min(left, len(values)))] for name, values in batch.items()}
        left -= len(batch["input_ids"])


def records_by_key(records: Iterable[Record], *, layers: int | None = None) -> dict[tuple, Record]:
    """Return the records by metric, layers and tags, if `layers` is given only up to that layer."""
    found = {}
    for record in records:
        if layers is not None and not (record_layers(record) and max(record_layers(record)) <= layers):
            continue
        tags = sorted((tag, value) for tag, value in record.tags.items() if not tag.startswith("num_"))
        key = record.metric, record.layer, record.other_layer, *tags
        assert key not in found, "two records have the same key"
        found[key] = record
    return found


def record_layers(record: Record) -> list[int]:
    return [layer for layer in (record.layer, record.other_layer) if layer is not None]


# --------------------------------------------------------------------------------------------------------- refusals


def check_refusals(analysis: Any, model: nn.Module) -> None:
    name = re.escape(analysis.name)

    def refused(given: Analysis, network: nn.Module, sentence: str) -> None:
        with pytest.raises(InputError, match=sentence):
            given.check_options(LayeredModel(network))

    if analysis.SEES == "text":
        refused(analysis, tiny("vit"), f"^{name}: expected a model of text, got VisionTransformer")
    if analysis.NEXT_TOKEN:
        message = f"^{name}: expected a model that predicts the next token, got BertForMaskedLM"
        refused(analysis, tiny("bert"), message)
    for field in dataclasses.fields(analysis):
        value = getattr(analysis, field.name)
        if "Literal" in str(field.type) and "Literal[1" not in str(field.type):
            several = isinstance(value, list | tuple) and field.name != "pairs"
            wrong = dataclasses.replace(analysis, **{field.name: ["nonsense"] if several else "nonsense"})
            refused(wrong, model, f"^{name}: expected {field.name} to be one of .*, got 'nonsense'")
    for option, least in analysis.LEAST.items():
        for number in (0.9 * least if least else -1, math.nan):
            wrong = dataclasses.replace(analysis, **{option: number})
            refused(wrong, model, f"^{name}: expected {option} of at least {least}, got {number}")
        dataclasses.replace(analysis, **{option: least}).check_fields()
    if isinstance(getattr(analysis, "batches", None), Listed):
        sentence = "the data holds no prompts|no text|no prompt|is undefined for every prompt"
        with pytest.raises((InputError, ValueError), match=sentence):
            records_of(dataclasses.replace(analysis, batches=Listed()), model)


# ---------------------------------------------------------------------------------------------------- broken blocks


def kill_(model: Any) -> None:
    """Make the broken block return its input."""
    block = model.transformer.h[BROKEN - 1]
    for projection in (block.attn.c_proj, block.mlp.c_proj):
        torch.nn.init.zeros_(projection.weight)
        torch.nn.init.zeros_(projection.bias)


def spoil_(model: Any) -> None:
    torch.nn.init.constant_(model.transformer.h[BROKEN - 1].mlp.c_proj.weight, torch.nan)


@pytest.mark.soak
@pytest.mark.parametrize("kind", [name for name in KINDS if name.values[0] not in WHOLE_MODEL])
def test_layers_before_a_broken_block_keep_their_numbers_and_others_report_missing_values(folder, kind):
    model_records = []
    for number, break_ in enumerate((None, kill_, spoil_)):
        model = text_model(BROKEN - 1 if break_ is None else BLOCKS)
        if break_ is not None:
            break_(model)
        every = text_analyses(folder, f"results-{number}")
        given = [each for each in every if type(each).__name__ == kind and getattr(each, "states", "") != "hf"]
        model_records.append([records_of(analysis, model) for analysis in given])
    for prefix, killed, spoiled in zip(*model_records, strict=True):
        expected = records_by_key(prefix, layers=BROKEN - 1)
        assert expected
        for found, is_spoiled in ((records_by_key(killed), False), (records_by_key(spoiled), True)):
            for key, record in expected.items():
                if key[0] not in LAYERLESS + LAST_LAYER:
                    assert found[key].value == pytest.approx(record.value, rel=1e-6, abs=1e-9), key
                    assert found[key].n == record.n, key
            check_the_rest(found, nothing_is_finite=is_spoiled)


def check_the_rest(records: dict[tuple, Record], *, nothing_is_finite: bool) -> None:
    """Check that records of broken layers are absent, NaN or count what they leave out."""
    for key, record in records.items():
        left_out = any(tag.startswith(UNDEFINED) for tag in record.tags)
        if record.metric in ALL_BLOCKS and record.layer is None:
            assert math.isnan(record.value), key
            assert left_out, key
        assert record.metric not in LAST_LAYER or not nothing_is_finite, key
        if nothing_is_finite and record.metric not in LAYERLESS and "reference" not in record.tags:
            if layers := record_layers(record):
                assert max(layers) < BROKEN + is_in(record.metric, "attention"), key  # the input of a block is valid
            else:
                assert math.isnan(record.value) or left_out, key
                assert record.n or math.isnan(record.value), key


def test_orders_without_a_broken_block_keep_their_numbers_and_paths_have_no_plane(folder):
    whole, broken = text_model(), text_model()
    spoil_(broken)
    orders = analyses.Interventions(batches=every_analysis.prompts(), seeds=(0, 1), loops=(2,))
    expected, found = (records_by_key(records_of(orders, model)) for model in (whole, broken))
    skipped = ("variant_loss", BROKEN, None, ("variant", "skip_one"))
    assert found[skipped].value == expected[skipped].value
    for key, record in found.items():
        if key != skipped and record.metric in ("variant_loss", "variant_accuracy"):
            complete = record.tags["variant"] != "skip" and record.layer != BROKEN
            assert math.isnan(record.value) == (complete and record.layer is None), key
        assert record.metric != "kl_to_full" or math.isnan(record.value), key
    with pytest.raises(ValueError, match="paths_in_plane is undefined for every prompt at every layer"):
        records_of(analyses.PathsInPlane(batches=every_analysis.prompts()), broken)


def test_a_lens_of_a_broken_model_has_only_ranks_of_layers_before_the_broken_block():
    """All divergences and Jacobians are undefined, because the output of the model is."""
    broken = text_model()
    spoil_(broken)
    lens = analyses.JacobianLens(batches=every_analysis.prompts(), num_prompts=2, skip_first=0)
    prefix, found = (records_by_key(records_of(lens, model)) for model in (text_model(BROKEN - 1), broken))
    assert found.keys() == {("lens_rank", layer, None, ("lens", "logit")) for layer in range(BROKEN)}
    for layer in range(BROKEN - 1):
        key = ("lens_rank", layer, None, ("lens", "logit"))
        assert (found[key].value, found[key].n) == (pytest.approx(prefix[key].value, rel=1e-6), prefix[key].n)


# --------------------------------------------------------------------------------------------------- half precision


@pytest.mark.soak
def test_a_model_in_half_precision_is_measured_in_float32(folder):
    """Lens, Interventions and benchmarks run in the model's own precision and have tests in their own files."""
    own = ("Lens", "Interventions", "MinimalPairs", "Benchmarks", "MtebTask", "NextTokenProbe")
    given = [each for each in every_analysis.text_analyses(folder) if type(each).__name__ not in own]
    half = tiny("gpt2", torch.bfloat16, vocab_size=every_analysis.VOCABULARY)
    half_results, float_results = (list(outcomes(each, given)) for each in (half, copy.deepcopy(half).float()))
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    for one, other in zip(half_results, float_results, strict=True):
        assert (one.error, other.error) == (None, None), one.analysis.name
        assert text_of(one.records) == text_of(other.records), one.analysis.name
