"""Training ends in the same bits with analyses and without, for everything an analysis may do."""

import importlib.metadata
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import lit_layers
from lit_layers.analyses import Representation
from lit_layers.analyses.base import Analysis, Rows, describe
from lit_layers.data.batches import Batches, EvalText
from lit_layers.data.preparing import prepare
from lit_layers.errors import InputError
from lit_layers.identity import versions
from lit_layers.measuring.one_model import measure
from lit_layers.measuring.undisturbed import full_float32_precision, undisturbed
from lit_layers.models.build import weights_hash
from lit_layers.models.view import LayeredModel
from lit_layers.records import Measurement, Record
from tests.support.tiny_models import LAYERS, POSITIONS, VOCAB, tiny, tiny_batch


class OneBatch(Batches):
    def __iter__(self):
        yield tiny_batch("gpt2", padding="left")

    def __len__(self):
        return 1

    def content_hash(self):
        random.random()  # loading data may draw random numbers
        return "one batch"


@dataclass(kw_only=True)
class Doing(Analysis):
    """An analysis that acts on the model and returns one record per layer."""

    action: Callable[[LayeredModel], object] = lambda model: None
    name: str = "doing"
    batches: Batches = field(default_factory=OneBatch)

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        return {}

    def compute(self, model: LayeredModel) -> Iterable[Record]:
        self.action(model)
        for batch in self.batches:
            for layer, hidden in enumerate(model.trajectory(batch).hidden):
                yield Record(metric="norm", layer=layer, value=hidden.norm().item())

    def config(self):
        return {"name": self.name}


def draw(model):
    torch.randn(7), np.random.rand(3), random.random()
    torch.manual_seed(123)
    random.seed(5)


def fail(model):
    draw(model)
    model.model.train()
    raise ValueError("half way\nthrough")


def leave_gradients(model):
    for parameter in model.model.parameters():
        assert parameter.grad is None
        parameter.requires_grad_(True)
    model.model(**tiny_batch("gpt2")).logits.sum().backward()
    assert model.model.lm_head.weight.grad.abs().sum() > 0


def change_gradients_it_kept(model):
    model.model.requires_grad_(True)
    leave_gradients(model)
    for parameter in model.model.parameters():
        parameter.grad.mul_(100)
        parameter.requires_grad_(False)


def differentiate_blocks(model):
    trajectory = model.trajectory(tiny_batch("gpt2"))
    point = trajectory.hidden[1].clone().requires_grad_(True)
    trajectory.block(2)(point).square().sum().backward()
    assert point.grad.abs().sum() > 0


def switch_modes_and_settings(model):
    model.model.train()
    model.model.transformer.h[0].eval()
    model.model.set_attn_implementation("eager")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.autograd.set_grad_enabled(False)


def leave_a_hook(model):
    model.blocks[1].register_forward_hook(lambda module, args, output: output * 2)


GENTLE = [fail, change_gradients_it_kept, differentiate_blocks, switch_modes_and_settings, leave_a_hook]


def train(action: Callable | None, steps: int = 4, accumulate: int = 2) -> dict:
    """Train a small model with dropout, accumulation and every random generator, measured within and between steps."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    model = tiny("gpt2", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2).train()
    model.transformer.wpe.requires_grad_(False)
    model.transformer.h[2].mlp.eval()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses, measurements = [], []

    def look(step: int) -> None:
        if action is not None:
            measurements.append(measure(model, Doing(action=action), run="run", step=step))

    look(0)
    for step in range(1, steps + 1):
        for _ in range(accumulate):
            ids = torch.randint(3, 61 - random.randrange(2), (4, 10 + np.random.randint(2)))
            loss = F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            (loss / accumulate).backward()
            losses.append(loss.item())
            look(step)  # .grad has the gradients of a part of the batch here
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        look(step)
    modes = [part.training for part in model.modules()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    states = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    settings = model.config._attn_implementation, torch.get_default_dtype(), torch.is_grad_enabled()
    return {
        "bits": (losses, weights_hash(model), modes, flags, states, settings),
        "moments": [state["exp_avg"] for state in optimizer.state.values()],
        "measurements": measurements,
    }


@pytest.fixture(scope="module")
def alone() -> dict:
    return train(None)


@pytest.mark.parametrize("action", GENTLE, ids=lambda action: action.__name__)
def test_training_with_an_analysis_ends_in_the_same_bits(action, alone):
    beside = train(action)
    assert beside["bits"] == alone["bits"]
    assert all(map(torch.equal, beside["moments"], alone["moments"]))
    errors = {measurement.error for measurement in beside["measurements"]}
    expected = {
        fail: "ValueError: half way through",
        leave_a_hook: "DisturbedError: the analysis left hooks on transformer.h.1: remove every hook that is added",
    }
    assert errors == {expected.get(action)}


def test_gradients_come_back_as_the_same_tensors():
    model = tiny("gpt2")
    model(**tiny_batch("gpt2")).logits.logsumexp(-1).sum().backward()
    model.transformer.wpe.weight.grad = None
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    values = {name: grad.clone() for name, grad in kept.items() if grad is not None}
    with undisturbed(model):
        leave_gradients(LayeredModel(model))
    for name, parameter in model.named_parameters():
        assert parameter.grad is kept[name]
        assert parameter.grad is None or torch.equal(parameter.grad, values[name])


def test_numbers_do_not_depend_on_the_random_state_of_training():
    model, found = tiny("gpt2", resid_pdrop=0.5), []
    analysis = Doing(action=lambda view: found.append((torch.rand(1).item(), np.random.rand(), random.random())))
    records = [measure(model, analysis, run="", step=0).records]
    model.train()
    torch.randn(3), np.random.rand(2), random.random()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        records.append(measure(model, analysis, run="", step=0).records)
    assert records[0] == records[1]
    assert found[0] == found[1]


def test_analyses_run_with_gradients_on_and_reduced_precision_off():
    model = tiny("gpt2").train()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), undisturbed(model):
            assert not torch.is_autocast_enabled("cpu")
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            assert torch.get_default_dtype() == torch.float32
            assert not any(part.training for part in model.modules())
            assert not any(parameter.requires_grad for parameter in model.parameters())
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.training


def precision() -> tuple:
    """Return every setting of float32 matrix products, from both of torch's interfaces."""
    backends = torch.backends
    parts = (backends, backends.cuda.matmul, backends.cudnn, backends.cudnn.conv, backends.cudnn.rnn)
    parts += (backends.mkldnn, backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
    return tuple(part.fp32_precision for part in parts), tuple(map(answer, OLDER_INTERFACE))


OLDER_INTERFACE = (
    torch.get_float32_matmul_precision,
    lambda: torch.backends.cuda.matmul.allow_tf32,
    lambda: torch.backends.cudnn.allow_tf32,
)


def answer(ask):
    try:
        return ask()
    except RuntimeError:  # the newer interface was used
        return None


SWITCHES = (
    lambda: None,
    lambda: torch.set_float32_matmul_precision("medium"),
    lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
)


@pytest.mark.parametrize("switch_on", SWITCHES)
def test_analyses_run_without_tf32_and_its_setting_is_restored(switch_on):
    with full_float32_precision():  # brings back what this test sets
        switch_on()
        before = precision()
        with full_float32_precision():
            inside, older = precision()
            assert not {inside[index] for index in (1, 3, 4, 6, 7, 8)} & {"tf32", "bf16"}
            assert all(now is not None for now, then in zip(older, before[1], strict=True) if then is not None)
        assert precision() == before
        torch.backends.fp32_precision = "none"


WRITES = {
    "ln_f.weight": lambda model: model.transformer.ln_f.weight.detach().mul_(2),
    "transformer.h.1.mlp.c_fc.bias": lambda model: model.transformer.h[1].mlp.c_fc.bias.detach().zero_(),
    "wpe.weight": lambda model: setattr(model.transformer.wpe, "weight", torch.nn.Parameter(torch.zeros(64, 32))),
    "transformer.wpe.weight": lambda model: setattr(model.transformer.wpe.weight, "data", torch.zeros(64, 32)),
    "note": lambda model: model.register_buffer("note", torch.ones(1)),
    "counter": lambda model: model.counter.add_(1),
}


def test_a_write_to_the_model_is_reported_with_the_name_of_the_tensor():
    for named, write in WRITES.items():
        model = tiny("gpt2")
        model.register_buffer("counter", torch.zeros(1))
        measurement = measure(model, Doing(action=lambda view, write=write: write(view.model)), run="", step=0)
        said, _, rest = str(measurement.error).partition(f"{named}: ")
        assert measurement.records == []
        assert said.startswith("DisturbedError: the analysis changed "), (named, measurement.error)
        assert rest == "an analysis must not write to the model", (named, measurement.error)


def test_a_write_is_reported_even_by_an_analysis_that_fails_and_many_are_counted():
    def ruin(view):
        with torch.no_grad():
            for parameter in view.model.parameters():
                parameter.zero_()
        raise KeyError("x")

    error = measure(tiny("gpt2"), Doing(action=ruin), run="", step=0).error
    assert error.startswith("DisturbedError: the analysis changed transformer.wte.weight, transformer.wpe.weight, ")
    assert error.endswith("and 37 more: an analysis must not write to the model; it also failed with KeyError: 'x'")


def test_an_interrupt_passes_and_everything_is_restored():
    model = tiny("gpt2").train()

    def interrupt(view):
        draw(view)
        view.model.transformer.ln_f.weight.detach().mul_(1)
        raise KeyboardInterrupt

    state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        measure(model, Doing(action=interrupt), run="", step=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_measurement_records_its_model_options_and_data():
    model = tiny("gpt2", attention="eager")
    analysis = Doing(name="norms")
    given = {"revision": "step5", "device": "the one in the corner"}
    measurement = measure(model, analysis, run="quick", step=5, tokens=640, provenance=given)
    assert isinstance(measurement, Measurement)
    assert (measurement.run, measurement.step, measurement.tokens, measurement.analysis) == ("quick", 5, 640, "norms")
    assert [record.layer for record in measurement.records] == list(range(LAYERS + 1))
    assert measurement.error is None
    assert 0 < measurement.seconds < 60
    assert measurement.provenance == {
        "weights_hash": weights_hash(model),
        "config_hash": analysis.config_hash(),
        "data_hash": analysis.data_hash(),
        "tokenizer_hash": None,
        "origin": "row",
        "width": 32,
        "depth": 3,
        # embeddings and two norms a block; of a block 4 x 32 x 32 of attention, 8 x 32 x 32 around it, and biases
        "parameters": (VOCAB + POSITIONS) * 32 + 3 * (12 * 32 * 32 + 13 * 32) + 2 * 32,
        "dtype": "float32",
        "attention": "eager",
        "device": "the one in the corner",
        "versions": versions(),
        "revision": "step5",
    }
    assert {"python", "torch", "transformers", "timm"} <= versions().keys()
    for package in ("lightning", "tokenizers", "safetensors", "numpy", "scipy"):  # what numbers and training depend on
        assert versions()[package] == importlib.metadata.version(package)
    known = measure(LayeredModel(model), analysis, run="quick", step=5, weights_hash="0123456789abcdef")
    assert known.provenance["weights_hash"] == "0123456789abcdef"
    assert known.records == measurement.records


class Tokenized(OneBatch):
    def __init__(self, found: str | None):
        self.found = found

    def tokenizer_hash(self):
        return self.found


@dataclass(kw_only=True)
class OfTwo(Doing):
    others: Batches = field(default_factory=OneBatch)
    tokenizer: str = "not data, though it is called so"


def test_a_measurement_names_the_tokenizers_of_its_data():
    for one, other, expected in (("ab", None, "ab"), ("ab", "ab", "ab"), ("ab", "cd", "ab, cd"), (None, None, None)):
        analysis = OfTwo(batches=Tokenized(one), others=Tokenized(other))
        assert measure(tiny("gpt2"), analysis, run="", step=0).provenance["tokenizer_hash"] == expected


def test_text_names_the_tokenizer_of_the_shards_that_it_is_cut_from(tmp_path):
    lines = [json.dumps({"text": f"layer {number} and block {number} of the model"}) for number in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    found = set()
    for size in (258, 259):
        prepare(str(tmp_path / "text.jsonl"), f"bpe:{size}", tmp_path / str(size), validation=0.5)
        text = EvalText(str(tmp_path / str(size)), f"bpe:{size}", num_sequences=2, num_tokens=3)
        before = Doing(batches=text).config_hash()
        header = json.loads((tmp_path / str(size) / "meta.json").read_text())
        assert Doing(batches=text).tokenizer_hash() == header["tokenizer"]["hash"]
        assert describe(text).keys() == {"class_path", "init_args"}
        assert not [name for name in describe(text)["init_args"] if name.startswith("_")], "no part of its options"
        assert Doing(batches=text).config_hash() == before
        found.add(text.tokenizer_hash())
    assert len(found) == 2


def test_numpy_scalars_hash_like_python_numbers_and_other_arrays_and_sets_differ():
    plain = Representation(batches=OneBatch(), alpha=0.5, num_halves=2).config()
    assert plain["init_args"].items() >= {"alpha": 0.5, "num_halves": 2}.items()
    for half in (np.float16(0.5), np.float64(0.5)):
        assert Representation(batches=OneBatch(), alpha=half, num_halves=np.int64(2)).config() == plain
    assert json.dumps(describe((np.float32(0.5), np.True_, np.str_("a")))) == '[0.5, true, "a"]'
    values = torch.arange(6.0).reshape(2, 3)
    others = [values.numpy(), values.double(), values.reshape(3, 2), values + 1, values.bfloat16(), values[:, :2]]
    told = [json.dumps(describe(Choice(each))) for each in (values, *others, values.tolist(), {"a"}, {"a", "b"}, set())]
    assert len({*told}) == len(told)
    assert describe(Choice(values.clone().requires_grad_())) == describe(Choice(values))
    one, other = OneBatch(), OneBatch()
    one.images, other.images = values, values + 1
    assert describe(one) == describe(other), "what data hold is in the hash of their content"
    assert describe(Choice({"b", "a"})) == describe(Choice(["a", "b"])), "whatever order the set has in this process"


@dataclass(frozen=True)
class Choice:
    """An option of a user's analysis."""

    directions: Any


def test_vits_are_not_changed_and_an_analysis_without_records_or_family_is_an_error():
    model = tiny("vit").train()

    @dataclass(kw_only=True)
    class Unfused(Analysis):
        name: str = "unfused"
        gives: bool = True

        def compute(self, model):
            for block in model.blocks:
                block.attn.fused_attn = False
            if self.gives:
                yield Record(metric="classes", value=model.trajectory(tiny_batch("vit")).logits.shape[-1])

    assert measure(model, Unfused(), run="", step=0).records == [Record(metric="classes", value=7)]
    assert all(block.attn.fused_attn for block in model.blocks)
    assert model.training
    assert measure(model, Unfused(gives=False), run="", step=0).error == "ValueError: unfused gave no record"
    with pytest.raises(InputError, match="no layered view of Linear"):
        measure(torch.nn.Linear(2, 2), Doing(), run="", step=0)


def test_the_package_exports_everything_an_analysis_needs():
    assert {lit_layers.Analysis, lit_layers.Record, lit_layers.LayeredModel} == {Analysis, Record, LayeredModel}
    assert lit_layers.measure is measure
    assert all(getattr(lit_layers, name) is not None for name in lit_layers.__all__)
    with pytest.raises(AttributeError, match="module 'lit_layers' has no attribute 'Layered'"):
        lit_layers.Layered  # noqa: B018
