"""Analyses of the same texts share forward passes, and each gives the numbers of a separate pass."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from lit_layers.analyses import (
    AttentionPatterns,
    Coupling,
    InContext,
    LabelProbe,
    LayerSimilarity,
    Lens,
    NextTokenResidual,
    NgramAgreement,
    PathsInPlane,
    PooledStates,
    Representation,
    StateGeometry,
    TokenCoupling,
    Trajectory,
)
from lit_layers.analyses.base import Analysis
from lit_layers.measuring import one_model
from lit_layers.measuring.one_model import measure, outcomes
from lit_layers.models.build import weights_hash
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record
from tests.support.listed_batches import Listed
from tests.support.tiny_models import LAYERS, tiny, tiny_batch

FACTS = {"run": "run", "step": 0, "weights_hash": "x"}


def texts(padding=None) -> dict[str, torch.Tensor]:
    return tiny_batch("gpt2", batch=8, tokens=16, padding=padding, seed=5)


def cut(batch, *sizes) -> Listed:
    """Return the batch split into batches of these sizes."""
    split = {name: values.split(list(sizes)) for name, values in batch.items()}
    return Listed(*(dict(zip(split, values, strict=True)) for values in zip(*split.values(), strict=True)))


def together(model, analyses, **options):
    facts = {name: value for name, value in FACTS.items() if name != "weights_hash"}
    found = outcomes(model, analyses, weights_hash="x", **options)
    return {each.analysis.name: each.measurement(**facts) for each in found}


def note_calls(module, note) -> None:
    """Call `note` with the first argument of each call; a hook would change how Jacobians are computed."""
    forward = module.forward

    def noted(*args, **kwargs):
        note(args[0] if args else next(iter(kwargs.values())))
        return forward(*args, **kwargs)

    module.forward = noted


def passed(model) -> list[Counter]:
    """Count by block how often each text, identified by its embedding, passes it."""
    assert LayeredModel(model).predicts_next_token  # found out by a pass, once for a model
    counts = [Counter() for _ in model.transformer.h]
    texts: list[tuple] = []

    def enter(module, args, kwargs):
        texts[:] = map(tuple, (args[0] if args else kwargs["input_ids"]).tolist())

    def count(number):
        return lambda _: counts[number].update(texts)

    model.transformer.register_forward_pre_hook(enter, with_kwargs=True)
    for number, block in enumerate(model.transformer.h):
        note_calls(block.attn, count(number))
    return counts


def several(batch) -> list[Analysis]:
    """Return analyses of the same texts, each with its own batch objects, or sharing those of the first."""
    return [
        Trajectory(batches=cut(batch, 4, 4)),
        Representation(batches=cut(batch, 4, 4)),
        Lens(batches=cut(batch, 4, 4)),
        LayerSimilarity(batches=cut(batch, 4, 4), num_tokens=2),
        PathsInPlane(batches=cut(batch, 4, 4), num_prompts=5),
        NextTokenResidual(batches=cut(batch, 4, 4), num_halves=0),
        Coupling(batches=cut(batch, 4, 4), k=(2, 5), num_prompts=7),
        TokenCoupling(batches=cut(batch, 4, 4), k=(2,), num_tokens=3, num_prompts=3),
    ]


@pytest.mark.parametrize("padding", ["left", "right"])
def test_each_text_passes_each_block_once(padding):
    model, batch = tiny("gpt2", torch.float64), texts(padding)
    counts = passed(model)
    found = together(
        model, [each for each in several(batch) if each.name not in ("lens", "coupling", "token_coupling")]
    )
    assert {name: each.error for name, each in found.items()} == dict.fromkeys(found)
    assert len(counts) == LAYERS
    for count in counts:  # padded texts reach the model after alignment
        assert len(count) == 8
        assert set(count.values()) == {1}


def test_the_mechanism_analyses_take_one_pass_and_the_weights_of_attention():
    model, data, calls = tiny("gpt2"), cut(texts(), 4, 4), Counter()
    for block in model.transformer.h:
        note_calls(block.attn, lambda _: calls.update(["attention"]))
        note_calls(block.mlp, lambda _: calls.update(["mlp"]))
    assert LayeredModel(model).predicts_next_token  # found out by a pass, once for a model
    calls.clear()
    of_texts = [kind(batches=data) for kind in (AttentionPatterns, StateGeometry, PooledStates)]
    of_texts += [InContext(batches=data, early=2, late=16), NgramAgreement(batches=data, corpus=data, num_tokens=2)]
    found = together(model, of_texts)
    assert {name: each.error for name, each in found.items()} == dict.fromkeys(found)
    assert calls == {"attention": 2 * 2 * LAYERS, "mlp": 2 * LAYERS}, "of two batches"


def test_images_and_a_probe_that_announces_its_batches_share():
    model, rows = tiny("vit", torch.float64), []
    batch = {**tiny_batch("vit", batch=8), "labels": torch.tensor([0, 1] * 4)}
    note_calls(model.blocks[0].attn, lambda states: rows.append(len(states)))
    probe = LabelProbe(
        train=cut(batch, 4, 4), test=Listed(tiny_batch("vit", batch=3, seed=9) | {"labels": torch.tensor([0, 1, 1])})
    )
    found = together(model, [probe, Trajectory(batches=cut(batch, 4, 4)), Lens(batches=cut(batch, 4, 4))])
    assert {name: each.error for name, each in found.items()} == dict.fromkeys(found)
    assert sum(rows) == 11


def test_the_head_reads_only_positions_that_an_analysis_scores():
    model, batch, rows = tiny("gpt2"), texts(), []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(args[0].shape[:-1].numel()))
    lens = Lens(batches=cut(batch, 4, 4))
    together(model, [analysis for analysis in several(batch) if analysis.name != "lens"])
    assert rows == [], "nobody reads logits"
    together(model, [Trajectory(batches=cut(batch, 4, 4)), lens])
    assert sum(rows) == 8 * 15 * (LAYERS + 1), "no text's last token is judged"


def test_large_batches_are_split(monkeypatch):
    model, batch = tiny("gpt2", torch.float64), texts("right")
    analyses = [Trajectory(batches=cut(batch, 8)), Lens(batches=cut(batch, 8)), Coupling(batches=cut(batch, 8), k=(2,))]
    expected = together(model, analyses)
    row = (LAYERS + 1) * 16 * 32 * 8
    monkeypatch.setattr(one_model, "STATE_BYTES", (3 * row, 0))
    sizes = []
    note_calls(model.transformer.h[0].attn, lambda states: sizes.append(len(states)))
    found = together(model, analyses[:2])
    assert sizes == [3, 3, 2]
    found |= together(model, analyses[2:])
    for name, whole in expected.items():
        for one, other in zip(found[name].records, whole.records, strict=True):
            assert one.value == pytest.approx(other.value, rel=1e-9, abs=1e-12)


@dataclass(kw_only=True)
class Doing(Analysis):
    """An analysis that acts at each batch and records the norm of its states and a random number."""

    batches: Listed
    name: str
    action: Callable

    def update(self, seen, batch):
        drawn, norm = torch.rand(()).item(), seen.hidden.norm()
        other = self.action(seen, batch)
        return {"norm": (norm if other is None else other)[None] + drawn}

    def compute(self, model, batches):
        return [Record(metric="norm", value=value) for value in batches["norm"].tolist()]

    def config(self):
        return {"name": self.name}


def fail(seen, batch):
    raise RuntimeError("here")


def spoil(seen, batch):
    """Change states and batch in place: only copies stay intact."""
    seen.model.blocks[1].register_forward_hook(lambda module, args, output: output * 2)
    next(seen.model.blocks[0].parameters()).data.zero_()
    with torch.no_grad():
        next(seen.model.blocks[0].parameters()).zero_()
    fail(seen, batch)


def write(seen, batch):
    seen.hidden[1:].zero_()


def write_unseen(seen, batch):
    seen.hidden.numpy()[1:] = 3
    seen.hidden.data.mul_(2)


def hook(seen, batch):
    with seen.model.blocks[1].register_forward_hook(lambda module, args, output: output * 2):
        return seen.model.trajectory(batch).hidden.norm()


def draw(seen, batch):
    torch.rand(7)


def written(found) -> dict[str, str]:
    return {name: repr(each.records) for name, each in found.items()}


def test_a_failing_or_writing_analysis_does_not_affect_the_others():
    model, batch = tiny("gpt2"), texts()
    before, plain = weights_hash(model), cut(batch, 4, 4)
    analyses = [
        Trajectory(batches=plain),
        *(Doing(batches=plain, name=do.__name__, action=do) for do in (fail, write, write_unseen, hook, draw)),
        Representation(batches=plain),
    ]
    alone = {analysis.name: measure(model, analysis, **FACTS) for analysis in analyses}
    for order in (analyses, analyses[::-1]):
        found = together(model, order)
        assert found["fail"].error == "RuntimeError: here"
        assert written(found) == written(alone)
    assert alone["hook"].records != alone["draw"].records
    assert weights_hash(model) == before


def test_a_half_precision_model_changed_by_one_analysis_is_restored_for_the_others():
    model, batch = tiny("gpt2").half(), texts()
    plain = cut(batch, 4, 4)
    spoiling = Doing(batches=plain, name="spoil", action=spoil)
    others = [Trajectory(batches=plain), NextTokenResidual(batches=plain, num_halves=0), Lens(batches=cut(batch, 8))]
    alone = {analysis.name: measure(model, analysis, **FACTS) for analysis in others}
    for order in ([spoiling, *others], [*others, spoiling]):
        found = together(LayeredModel(model), order)
        assert "must not write to the model; it also failed with RuntimeError: here" in found.pop("spoil").error
        assert written(found) == written(alone)


def test_extra_fields_of_a_batch_do_not_matter_to_the_pass():
    model, batch = tiny("gpt2", torch.float64), texts()
    named = Listed({**batch, "names": list("abcdefgh"), "scale": torch.tensor(2.0)})
    analyses = [Trajectory(batches=cut(batch, 3, 5)), Representation(batches=named), Lens(batches=cut(batch, 2, 6))]
    found = together(model, [analyses[2], *analyses[:2]])
    assert [each.error for each in found.values()] == [None] * 3


def test_the_seconds_of_a_shared_pass_are_divided_and_sum_to_its_duration(monkeypatch):
    model, batch, now = tiny("gpt2"), texts(), [0.0]

    def takes_a_tenth(*_: object) -> None:
        now[0] += 0.1

    model.transformer.h[0].attn.register_forward_hook(takes_a_tenth)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])  # other processes take no time
    analyses = several(batch)[:3]
    together(model, analyses)  # the first call computes what is cached
    now[0] = 0.0
    seconds = [each.seconds for each in together(model, analyses).values()]
    assert sum(seconds) == pytest.approx(now[0])
    assert min(seconds) > 0.199 / 3, "each bears its share of two passes of 0.1 s"


def test_each_analysis_reports_its_start_before_its_end_and_all_are_in_order():
    model, batch, heard = tiny("gpt2"), texts(), []
    analyses = [*several(batch), Representation(name="released", batches=cut(batch, 8), preset="released_code")]
    for number, outcome in enumerate(outcomes(model, analyses, None, heard.append, weights_hash="x")):
        assert outcome.analysis.name == analyses[number].name
        assert sum(each is analyses[number] for each in heard) == 1
    assert len(heard) == len(analyses) == number + 1
