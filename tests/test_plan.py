"""What is planned is what is done: counts are held against runs that are watched, and what cannot end is refused."""

import functools
import json
import math
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lit_layers.analyses import (
    Analysis,
    AttentiveProbe,
    ConceptAlignment,
    Coupling,
    CouplingMatrices,
    CrossTokenInfluence,
    Interventions,
    LabelProbe,
    LayerSimilarity,
    Lens,
    NextTokenProbe,
    NextTokenResidual,
    OrderStates,
    PathsInPlane,
    PooledStates,
    PromptStudies,
    Representation,
    StateGeometry,
    StateMetric,
    TokenCoupling,
    Trajectory,
    depth_coupling,
    token_jacobians,
)
from lit_layers.analyses.speed import Speed, peak_of_call
from lit_layers.data.batches import EvalText, Size
from lit_layers.data.word_pairs import WordPairs
from lit_layers.errors import InputError
from lit_layers.functional.entropy import effective_rank
from lit_layers.measuring import calibration
from lit_layers.measuring import plan as planning
from lit_layers.measuring.one_model import in_one_pass
from lit_layers.measuring.plan import Plan, Row, planned, share_of, stride_within
from lit_layers.models.build import causal_lm, vit
from lit_layers.models.saved import outline
from lit_layers.models.view import LayeredModel
from lit_layers.models.workload import Part, bytes_of, flop
from lit_layers.records import Record
from lit_layers.schedule import Schedule
from lit_layers.tasks.benchmark_scores import BenchmarkScores
from lit_layers.tasks.catalogue import resolve
from lit_layers.tasks.embedding_store import Store
from lit_layers.tasks.mteb_scores import MtebTask
from lit_layers.tasks.mteb_tasks import Sources
from lit_layers.training.tuning.finetuning import Finetuning, TaskFinetuning
from lit_layers.training.tuning.sequence_tasks import GlueScores
from tests.support.every_analysis import kinds, save_inputs
from tests.support.labelled_texts import labelled, saved_gpt2
from tests.support.listed_batches import Listed
from tests.support.tiny_models import DIM, IMAGE, VOCAB, sees_images, tiny

CPU, ROOT = torch.device("cpu"), Path(__file__).parents[1]


class Windows(Listed):
    """Random texts (or images) that say how many they are."""

    def __init__(self, texts: int, tokens: int | None, batch: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._size = Size(texts, tokens, batch)
        batches = []
        for _ in range(texts // batch):
            if tokens is None:
                labels = torch.arange(batch) % 3
                pixels = torch.randn(batch, 3, IMAGE, IMAGE, generator=generator)
                batches.append({"pixel_values": pixels, "labels": labels})
            else:
                ids = torch.randint(3, VOCAB, (batch, tokens), generator=generator)
                batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        super().__init__(*batches)

    def size(self) -> Size:
        return self._size


def counted(model: LayeredModel, analysis: Analysis, run=None) -> tuple[int, float]:
    """Passes of a text through one block, as hooks see them, and FLOP of matrix products, as torch counts them."""
    runs = 0

    def note(module, args, kwargs, output):
        nonlocal runs
        if "forward" not in vars(module):  # an ending is read off blocks that only hand on what they are given
            runs += len(args[0] if args else kwargs["hidden_states"])

    handles = [block.register_forward_hook(note, with_kwargs=True) for block in model.blocks]
    try:
        with FlopCounterMode(display=False) as counter:
            list(analysis.run(model) if run is None else run())
    finally:
        for handle in handles:
            handle.remove()
    return runs, counter.get_total_flops()


TEXTS = Windows(8, 24, 4)
PICTURES = Windows(12, None, 6)
FIXED = {"min_context": 8, "tolerance": 1e-12, "max_iterations": 40}  # it stops at the limit
# Decompositions are no matrix products, and a Jacobian calls its block in ways of its own.
EXACT = [
    ("gpt2", Trajectory(batches=TEXTS)),
    ("gpt2", Representation(batches=TEXTS)),
    ("gpt2", StateGeometry(batches=TEXTS)),
    ("gpt2", PooledStates(batches=TEXTS)),
    ("gpt2", Lens(batches=TEXTS)),
    ("gpt2", Interventions(batches=TEXTS, variants=("skip", "reverse", "random"), seeds=(0, 1))),
    ("gpt2", Lens(batches=TEXTS, dtype="bfloat16")),  # all of these texts in float32, too
    ("gpt2", Interventions(batches=TEXTS, variants=("skip", "reverse"), dtype="bfloat16")),
    ("gpt2", LayerSimilarity(batches=TEXTS)),
    ("gpt2", OrderStates(batches=TEXTS, variants=("skip", "reverse", "random"), seeds=(0, 1))),
    ("gpt2", PathsInPlane(batches=TEXTS)),
    ("gpt2", StateMetric(metric=effective_rank, batches=TEXTS)),
    ("gpt2", NextTokenResidual(batches=TEXTS, num_halves=2)),
    ("vit", Trajectory(batches=PICTURES)),
    ("vit", LabelProbe(train=PICTURES, test=Windows(6, None, 6, seed=1), estimator="watch", random_labels=False)),
]


@pytest.mark.parametrize(("name", "analysis"), EXACT, ids=lambda each: getattr(each, "name", each))
def test_the_block_runs_of_a_plan_are_those_that_a_run_makes(name, analysis):
    model = LayeredModel(tiny(name))
    runs, _ = counted(model, analysis)
    assert analysis.work(model).block_runs() == runs


def test_every_analysis_of_the_package_says_its_work():
    others = {Speed, BenchmarkScores, Finetuning, GlueScores, TaskFinetuning}
    methods = ("work", "extra_work")
    silent = [kind for kind in {*kinds(), *others} if all(getattr(kind, n) is getattr(Analysis, n) for n in methods)]
    assert not silent


def test_words_are_counted_by_their_file_without_a_tokenizer(tmp_path):
    """Of 9 words, 3 pairs in either category, and cosines of each two pairs, the shuffled ones included."""
    save_inputs(tmp_path)
    words = WordPairs(str(tmp_path / "pairs.parquet"), "none")
    model, analysis = LayeredModel(tiny("gpt2")), ConceptAlignment(words=words, shuffles=4)
    work = analysis.work(model)
    assert (work.texts, work.block_runs()) == (12, 12 * model.num_layers)
    (cosines,) = [part for part in work.parts if part.kind == "wide products"]
    assert cosines.count == 2 * DIM * (model.num_layers + 1) * 5 * (3**2 + 3**2)


def test_a_metric_of_ones_own_is_timed_as_it_is(monkeypatch):
    """On states of as many rows as a prompt has, in float64."""
    seen = []

    def mine(states):
        seen.append((tuple(states.shape), states.dtype))
        return states.square().mean()

    monkeypatch.setattr(calibration, "_TIMED", {})
    plan = planned(LayeredModel(tiny("gpt2")), [StateMetric(metric=mine, batches=TEXTS)], device=CPU)
    assert seen[-1] == ((24, DIM), torch.float64)
    assert plan.rows[0].how.split(", ")[-2].startswith("32 calls of 24 rows")  # 8 texts, 4 layers


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpt2", {"custom": ("1 (2,3)",), "num_tokens": 24, "batch_size": 4}), ("vit", {"batch_size": 1})],
)
def test_passes_that_are_timed_are_counted_as_torch_counts_them(name, options):
    """Within a tenth: what makes embeddings of patches is no block."""
    model, analysis = LayeredModel(tiny(name)), Speed(variants=("skip",), num_rounds=3, num_warm_up=1, **options)
    _, operations = counted(model, analysis)
    assert sum(flop(model, part) for part in analysis.work(model).parts) == pytest.approx(operations, rel=0.1)


@pytest.mark.soak
def test_texts_that_a_study_leaves_as_they_are_may_be_passed_once_for_all_levels():
    model, analysis = LayeredModel(tiny("gpt2")), PromptStudies(batches=TEXTS)
    runs, _ = counted(model, analysis)
    assert runs <= analysis.work(model).block_runs() < 1.3 * runs


@pytest.mark.parametrize(
    "analysis",
    [
        Trajectory(batches=TEXTS),
        Lens(batches=TEXTS),
        Interventions(batches=TEXTS, variants=("skip", "reverse"), seeds=(0,)),
        pytest.param(
            NextTokenProbe(train=Windows(96, 24, 24), test=Windows(48, 24, 24, seed=1), num_classes=8, **FIXED),
            marks=pytest.mark.soak,
        ),
    ],
    ids=lambda each: each.name,
)
def test_the_operations_of_a_plan_are_those_of_a_run_within_a_factor_of_two(analysis):
    model = LayeredModel(tiny("gpt2", n_embd=64))
    _, operations = counted(model, analysis)
    kinds = {"directions", "spectra"}  # which torch does not count
    parts = [part for part in analysis.work(model).parts if part.kind not in kinds]
    assert 0.5 < sum(flop(model, part) for part in parts) / operations < 2


@pytest.mark.parametrize(
    "analysis",
    [
        Coupling(batches=TEXTS, k=(4,)),
        CouplingMatrices(batches=TEXTS, pairs=[(1, 2)], k=4),
        TokenCoupling(batches=TEXTS, num_tokens=4, num_prompts=2, k=(4,)),
        CrossTokenInfluence(batches=TEXTS, num_inputs=4, num_prompts=2),
    ],
    ids=lambda each: each.name,
)
def test_the_jacobians_and_decompositions_of_a_plan_are_those_of_a_run(monkeypatch, analysis):
    made = {"jacobians": 0, "decompositions": 0}

    def counting(what, function):
        def call(*args, **options):
            result = function(*args, **options)
            made[what] += (result if what == "jacobians" else args[0]).shape[:-2].numel()
            return result

        return call

    for module in (token_jacobians, depth_coupling):
        monkeypatch.setattr(module, "block_jacobian", counting("jacobians", module.block_jacobian))
        for place, name in ((module, "singular_factors"), (module.functional, "singular_factors")):
            if not hasattr(getattr(place, name), "counts"):
                function = counting("decompositions", getattr(place, name))
                function.counts = True
                monkeypatch.setattr(place, name, function)
    if analysis.name == "cross_token_influence":
        monkeypatch.setattr(
            token_jacobians, "cross_token_influence", counting("decompositions", token_jacobians.cross_token_influence)
        )
    model = LayeredModel(tiny("gpt2"))
    list(analysis.run(model))
    counts = {part.kind: part.count for part in analysis.work(model).parts}
    assert counts["jacobians"] == made["jacobians"]
    assert counts.get("directions", counts.get("spectra")) == made["decompositions"]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_a_pass_is_counted_as_torch_counts_it(name):
    """Within a tenth: embeddings, a final norm and the head of a classifier are no block."""
    model = LayeredModel(tiny(name))
    data = PICTURES if name == "vit" else TEXTS
    with FlopCounterMode(display=False) as counter:
        for batch in data:
            model.pass_states(batch, lambda layer, hidden, mask: None)
    part = Trajectory(batches=data).work(model).parts[0]
    assert flop(model, part) == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_a_model_that_is_only_planned_has_no_weights():
    with torch.device("meta"):
        made = causal_lm("gpt2", n_layer=1, n_embd=8, n_head=1), vit("vit_tiny_patch16_224", depth=1)
    assert {parameter.device.type for model in made for parameter in model.parameters()} == {"meta"}


def test_a_model_without_weights_has_the_plan_of_the_real_one():
    model = tiny("gpt2")
    empty = LayeredModel(
        outline(json.loads(model.config.to_json_string()) | {"architectures": ["GPT2LMHeadModel"]}, "it")
    )
    assert empty.device.type == "meta"
    for analysis in (Lens(batches=TEXTS), Coupling(batches=TEXTS)):
        assert analysis.work(empty) == analysis.work(LayeredModel(model))


def test_a_config_with_an_infinite_number_or_a_wrong_kind_is_read_or_refused():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 8, "vocab_size": 64}
    settings = {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], **sizes}
    model: Any = outline(settings | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}, "it")
    assert tuple(model.config.time_step_limit) == (0.0, math.inf)
    with pytest.raises(InputError, match="the config.json of it describes no model"):
        outline(settings | {"time_step_limit": [0.0, "much"]}, "it")


def test_seconds_are_those_of_the_parts_and_memory_that_of_the_largest():
    model, others = LayeredModel(tiny("gpt2", vocab_size=2**15)), Windows(8, 24, 4, seed=2)
    plan = planned(model, [Trajectory(batches=TEXTS), Lens(batches=others)], device=CPU, num_checkpoints=3)
    trajectory, lens = plan.rows
    assert plan.costliest() is lens
    assert 0 < trajectory.seconds < lens.seconds
    assert plan.whole.texts == 16
    assert plan.whole.device == lens.work.device > trajectory.work.device
    *_, one, three = plan.table()
    assert (one["texts"], three["texts"]) == ("16", "48")
    assert one["device"] == three["device"]
    assert any("trajectory: 24 block runs" in note for note in plan.notes())


@dataclass(kw_only=True)
class Mine(Analysis):
    name: str = "mine"

    def run(self, model):
        yield Record(metric="one", value=1.0)


def test_an_analysis_of_ones_own_is_unknown_and_the_others_are_planned():
    plan = planned(LayeredModel(tiny("gpt2")), [Mine(), Trajectory(batches=TEXTS)], device=CPU)
    assert plan.unknown == ["mine"]
    assert plan.table()[0]["texts"] == planning.UNKNOWN
    assert plan.whole.texts == 8


@pytest.mark.parametrize(("what", "limit"), [("memory", "free_memory"), ("disk", "free_disk")])
def test_what_is_not_there_is_refused_with_its_analysis(monkeypatch, tmp_path, what, limit):
    class Large(Mine):
        def work(self, model):
            return planning.Work(texts=1, tokens=1, host=5e9, disk=5e9)

    plan = planned(LayeredModel(tiny("gpt2")), [Large()], device=CPU)
    monkeypatch.setattr(planning, "free_memory", lambda device: 1e12)
    monkeypatch.setattr(planning, "free_disk", lambda folder: 1e12)
    plan.refuse(tmp_path)
    monkeypatch.setattr(planning, limit, lambda place: 1e9)
    with pytest.raises(InputError, match=f"mine: takes 5 GB of {what}, and 1 GB are free"):
        plan.refuse(tmp_path)


def test_a_corpus_that_nobody_prepared_counts_as_asked_for_and_a_prepared_one_as_it_is(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"{n} one {n * n} two {n**3}\n<|endoftext|>\n" for n in range(400)))
    options = {"num_sequences": 20_000, "min_sequences": 2, "num_tokens": 4, "batch_size": 2}
    text = EvalText(str(tmp_path / "text.txt"), "bpe:270", split="train", **options)
    assert text.size() == Size(20_000, 4, 2, exact=False)
    number = len(text.windows())
    assert text.size() == Size(number, 4, 2)
    assert number < 20_000
    with pytest.raises(InputError, match="num_sequences is 20000"):
        EvalText(str(tmp_path / "text.txt"), "bpe:270", split="train", num_sequences=20_000, num_tokens=4).size()


def test_a_head_counts_its_vocabulary():
    assert flop(LayeredModel(tiny("gpt2")), Part("head", 3)) == 3 * 2 * DIM * VOCAB


@pytest.mark.parametrize(("budget", "stride"), [("100%", 1), (0.11, 1), ("6%", 2), ("4%", 4), ("3%", 8), ("2%", 16)])
def test_a_budget_measures_as_many_scheduled_steps_as_it_has_time_for(budget, stride):
    row = Row(name="slow", work=planning.Work(), seconds=1.0)
    plan = Plan(model=LayeredModel(tiny("gpt2")), device=CPU, rows=[row], num_checkpoints=11)
    trained = Row(name="training", work=planning.Work(), seconds=100.0)
    assert stride_within(budget, plan, trained) == stride
    kept = [step for step in range(101) if step in Schedule({"every": 10}).thinned(stride, 100)]
    assert {*kept, 100} == {*range(0, 101, 10 * stride), 100}  # the last one is always measured
    assert len({*kept, 100}) <= share_of(budget) * 100


def test_a_budget_too_small_for_two_steps_is_refused_with_the_costliest_analysis():
    rows = [Row(name=name, work=planning.Work(), seconds=each) for name, each in (("quick", 1.0), ("slow", 9.0))]
    plan = Plan(model=LayeredModel(tiny("gpt2")), device=CPU, rows=rows, num_checkpoints=11)
    with pytest.raises(InputError, match="first and the last step takes 20 s of the 100 s .* most is slow, 9 s"):
        stride_within("10%", plan, Row(name="training", work=planning.Work(), seconds=100.0))


def mteb_task(tmp_path, **store) -> MtebTask:
    (spec,) = resolve(["ArxivClusteringS2S"])
    store = Store(tmp_path / "cache", **store)
    return MtebTask(
        task=spec, tokenizer=str(tmp_path / "model"), sources=Sources(), store=store, results=tmp_path / "results"
    )


def test_a_task_of_mteb_that_does_not_fit_the_cache_is_refused_before_its_first_text(tmp_path):
    """628,078 titles, by mteb's own account, x 4 layers x 32 x 4 B = 0.32 GB."""
    saved_gpt2(tmp_path / "model")  # whose tokenizer it is
    model = LayeredModel(tiny("gpt2"))
    mteb_task(tmp_path, max_bytes=0.33e9).check_options(model)
    small = mteb_task(tmp_path, max_bytes=0.2e9)
    assert small.work(model).disk == 628_078 * 4 * 32 * 4
    refusal = r"cache_gb: the embeddings of ArxivClusteringS2S take 0.322 GB \(628,078 texts x 4 layers x 32\)"
    with pytest.raises(InputError, match=refusal):
        small.check_options(model)
    with pytest.raises(InputError, match=refusal):
        planned(model, [small], device=CPU)
    mteb_task(tmp_path, max_bytes=0.2e9, dtype="bfloat16").check_options(model)
    scored = tmp_path / "results" / "weights" / "ArxivClusteringS2S" / "key" / "layer-000.json"
    scored.parent.mkdir(parents=True)
    scored.write_text("{}")
    small.check_options(model)  # it was scored before, in more room


def test_texts_of_a_local_copy_are_counted_once_each(tmp_path):
    (spec,) = resolve(["STSBenchmark"])
    sources = Sources(folder=save_inputs(tmp_path) / "mteb")
    songs = {text for text, _ in labelled(20)}
    assert sources.num_texts(spec) == (len(songs), sum(map(len, songs)) / len(songs))


@pytest.mark.parametrize("name", ["vit", "llama", "bert"])
def test_every_part_can_be_timed_on_other_families(name):
    data = PICTURES if sees_images(name) else TEXTS
    plan = planned(LayeredModel(tiny(name)), [Coupling(batches=data, k=(4,)), Representation(batches=data)], device=CPU)
    assert all(row.seconds > 0 for row in plan.rows)


@pytest.mark.parametrize("name", ["gpt2", "llama", "olmo2", "vit"])
def test_a_model_in_half_precision_is_timed_in_float32_and_left_as_it_is(name, monkeypatch):
    monkeypatch.setattr(calibration, "_TIMED", {})
    data, model = PICTURES if sees_images(name) else TEXTS, tiny(name).bfloat16()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rows = planned(LayeredModel(model), [Coupling(batches=data, k=(4,)), Trajectory(batches=data)], device=CPU).rows
    assert all(row.seconds > 0 for row in rows)
    assert {key[-1] for key in calibration._TIMED if len(key) > 2} == {torch.float32}
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) and value.dtype == after[key].dtype for key, value in before.items())


@pytest.mark.parametrize("name", ["gpt2", "llama", "olmo2", "vit"])
def test_a_model_in_float64_is_timed_in_float64(name, monkeypatch):
    monkeypatch.setattr(calibration, "_TIMED", {})
    data, model = PICTURES if sees_images(name) else TEXTS, tiny(name)
    analyses = [Coupling(batches=data, k=(4,)), Representation(batches=data)]
    analyses += [] if sees_images(name) else [Lens(batches=data)]
    narrow = planned(LayeredModel(model), analyses, device=CPU).weights
    in_float32 = set(calibration._TIMED)
    wide = planned(LayeredModel(model.double()), analyses, device=CPU)
    assert all(row.seconds > 0 for row in wide.rows)
    assert wide.weights == 2 * narrow == 8 * sum(each.numel() for each in model.parameters())
    of_blocks = {key[:-1] for key in in_float32 if key[-1] == torch.float32}
    assert of_blocks
    assert set(calibration._TIMED) - in_float32 == {(*key, torch.float64) for key in of_blocks}


@pytest.mark.parametrize("left", [0.0, math.nan])
def test_a_model_without_weights_is_timed_whatever_its_memory_holds(monkeypatch, left):
    """Of a family that is proven on its weights, in memory that is as it comes: a new process' is of zeros."""
    to_empty = torch.nn.Module.to_empty

    def as_it_comes(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        for tensor in (made := to_empty(model, **options)).state_dict().values():
            tensor.fill_(left if tensor.is_floating_point() else 0)
        return made

    monkeypatch.setattr(torch.nn.Module, "to_empty", as_it_comes)
    monkeypatch.setattr(calibration, "_TIMED", {})
    empty = LayeredModel(tiny("olmo2").to("meta"))
    assert empty.origin == "structure"
    (row,) = planned(empty, [Representation(batches=TEXTS)], device=CPU).rows
    assert row.seconds > 0


def test_planning_takes_no_random_number_of_a_training_that_waits(monkeypatch):
    """Those of dropout and of the order of data, of which a run with a budget must have the same as one without."""
    monkeypatch.setattr(calibration, "_TIMED", {})
    model, before = LayeredModel(tiny("gpt2")), torch.random.get_rng_state()
    planned(model, [Coupling(batches=TEXTS, k=(4,)), Representation(batches=TEXTS)], device=CPU)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_texts_of_several_analyses_count_once_as_they_are_passed_once():
    model, others = LayeredModel(tiny("gpt2")), Windows(4, 24, 4, seed=2)
    facts = {"run": "it", "step": 0, "weights_hash": "0"}
    analyses = [Trajectory(batches=TEXTS), Lens(batches=TEXTS), Representation(batches=TEXTS)]
    analyses.append(LayerSimilarity(batches=others))
    runs, _ = counted(model, analyses[0], lambda: in_one_pass(model, analyses, lambda analysis: None, **facts))
    plan = planned(model, analyses, device=CPU)
    assert plan.whole.block_runs() == runs == (8 + 4) * 3
    assert any(note.startswith("lens: passes of trajectory, 768 rows through the head") for note in plan.notes())


@pytest.mark.parametrize("beside", [False, True])
def test_probes_of_labels_share_the_first_pass_of_rows_that_either_reads(beside):
    """With one another, and with what looks at the training rows alone; one that attends passes them for each layer."""
    model, test = LayeredModel(tiny("vit")), Windows(6, None, 6, seed=1)
    facts = {"run": "it", "step": 0, "weights_hash": "0"}
    linear = LabelProbe(train=PICTURES, test=test, estimator="watch")
    analyses = [linear, AttentiveProbe(train=PICTURES, test=test, steps=2)]
    if beside:
        analyses.insert(0, Trajectory(batches=PICTURES))
    runs, _ = counted(model, linear, lambda: in_one_pass(model, analyses, lambda analysis: None, **facts))
    plan = planned(model, analyses, device=CPU)
    layers, shared = model.num_layers, "trajectory and label_probe" if beside else "label_probe"
    assert plan.whole.block_runs() == runs == (12 + 6) * layers * (1 + layers + 1)
    assert any(note.startswith(f"attentive_probe: passes of {shared}, ") for note in plan.notes())


def test_blocks_in_bfloat16_are_timed_so_in_passes_of_their_own_and_a_sample_besides():
    model, rounded = LayeredModel(tiny("gpt2")), Lens(batches=TEXTS, dtype="bfloat16", name="rounded")
    plan = planned(model, [Lens(batches=TEXTS), rounded, replace(rounded, batches=Windows(64, 24, 4))], device=CPU)
    plain, short, long = plan.rows
    assert [row.work.block_runs() for row in plan.rows] == [8 * 3, (8 + 8) * 3, (64 + 16) * 3]
    assert short.work.device - plain.work.device == sum(map(bytes_of, model.blocks)) / 2
    assert "rounded: blocks in bfloat16: 24 block runs on texts of 24 tokens" in plan.notes()[3]
    assert "; a sample in float32: 24 block runs" in plan.notes()[3]
    times = {key[1]: seconds for key, seconds in calibration._TIMED.items() if key[4:6] == ("blocks", (4, 24))}
    assert times[True] != times[False]
    assert long.seconds > short.seconds > plain.seconds


def test_plans_of_six_recipes_were_within_a_factor_of_two_of_what_was_measured():
    """Of seconds, memory and disk, as `python benchmarks/plan.py --save` left it; the counts are held above."""
    for run in json.loads((ROOT / "benchmarks" / "results" / "plan.json").read_text())["runs"]:
        rows = {row["what"].partition(":")[0]: row["values"] for row in run["rows"]}
        assert len({what.split(",")[0] for what in rows}) == 6
        assert {what.split(", ")[1] for what in rows} == {"seconds", "memory", "disk"}
        assert all(statistics.median(values) <= 2 for values in rows.values())


def cpu_seconds(monkeypatch, model: LayeredModel, analysis: Analysis) -> tuple[float, float]:
    """Planned and measured, of the processor: others use the machine, too. The median of three measurements."""
    monkeypatch.setattr(calibration, "_TIMED", {})
    monkeypatch.setattr(calibration, "clock", time.process_time)
    facts, seconds = {"run": "it", "step": 0, "weights_hash": "0"}, []
    for _ in range(4):  # what a first run makes is no part
        started = time.process_time()
        (done,) = in_one_pass(model, [analysis], lambda analysis: None, **facts)
        seconds.append(time.process_time() - started)
        assert done.error is None
    return planned(model, [analysis], device=CPU).seconds, statistics.median(seconds[1:])


@pytest.mark.soak
def test_seconds_of_each_analysis_on_a_narrow_model_are_those_of_its_plan_within_a_factor_of_two(monkeypatch):
    """Where much of the time is what no FLOP count has: without their small steps some would be a fifth of it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from plan import build, single

    model, ratios = build(64), {}
    for name, analysis in single().items():
        for _ in range(3):  # what else uses the cores slows the calibration or the analysis for seconds
            planned_seconds, seconds = cpu_seconds(monkeypatch, model, analysis)
            ratios[name] = planned_seconds / seconds
            if 0.5 < ratios[name] < 2:
                break
    assert all(0.5 < ratio < 2 for ratio in ratios.values()), ratios


@pytest.mark.soak
@pytest.mark.parametrize("name", ["text", "images", "coupling", "interventions", "representation", "stream"])
def test_seconds_of_a_recipe_are_those_of_a_plan_within_a_factor_of_two(name, tmp_path, monkeypatch):
    """Of the processor, at reduced size: as `benchmarks/plan.py` keeps them, on whatever machine this is."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(calibration, "clock", time.process_time)
    monkeypatch.setattr(calibration, "_TIMED", {})
    from plan import Case

    case = Case(f"analyses/{name}.yaml", tmp_path)  # measures once, to warm up
    assert 0.5 < case.plan().seconds / case.measure() < 2


@pytest.mark.soak
def test_memory_is_that_of_torch_within_a_factor_of_two():
    model, probe = LayeredModel(tiny("gpt2", n_embd=128)), {"num_classes": 8, "estimator": "watch", "min_context": 8}
    texts = Windows(32, 48, 16)
    for analysis in (
        Trajectory(batches=texts),
        Representation(batches=texts),
        Lens(batches=texts),
        Interventions(batches=texts, variants=("skip",)),
        NextTokenProbe(train=Windows(512, 24, 64), test=Windows(256, 24, 64, seed=1), **probe),
    ):
        list(analysis.run(model))  # what a first run makes is not its working memory
        work = analysis.work(model)
        peak = peak_of_call(functools.partial(lambda each: list(each.run(model)), analysis))
        assert 0.5 < (work.device + work.host) / peak < 2, analysis.name
