"""Models without a row in FAMILIES: their blocks are found by structure and accepted only if all checks pass."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GemmaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from lit_layers.analyses import Interventions, Lens
from lit_layers.analyses import Trajectory as TrajectoryAnalysis
from lit_layers.errors import InputError
from lit_layers.measuring.one_model import measure
from lit_layers.models.proof import Unproven
from lit_layers.models.structure import infer_family, untouched
from lit_layers.models.view import LayeredModel
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_configs import LAYERS, scale_up_, tiny_model
from tests.support.tiny_models import tiny


def texts(*, padding: str | None = None) -> dict[str, torch.Tensor]:
    """Return three texts of 10 tokens, or of 10, 8 and 6 tokens with padding."""
    ids = torch.randint(3, 100, (3, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[place < 10 - 2 * row * bool(padding) for place in range(10)] for row in range(3)]).long()
    return {"input_ids": ids, "attention_mask": mask.flip(-1) if padding == "left" else mask}


def test_blocks_with_more_tokens_than_the_text_are_refused():
    with pytest.raises(InputError, match=r"the states of longformer.encoder.layer are \(3, 24, 32\) for an input of"):
        LayeredModel(tiny_model("LongformerForMaskedLM", "longformer", attention_window=[24] * LAYERS))


def test_a_forward_with_only_ids_and_mask_gets_no_cache_option_and_computes_no_scores():
    class Plain(GemmaForCausalLM):
        def forward(self, input_ids, attention_mask=None, return_dict=True):
            return super().forward(input_ids, attention_mask, use_cache=False)

    model = Plain(tiny_model("GemmaForCausalLM", "gemma").config).eval()
    assert model.config.use_cache
    batch = {**texts(), "input_ids": texts()["input_ids"] % 40 + 3}
    view, scored = LayeredModel(model), []
    view.trajectory(batch)  # also runs the checks
    model.lm_head.register_forward_hook(lambda *_: scored.append(1))
    trajectory = view.trajectory(batch)
    assert not scored, "a pass computes no scores that nobody reads"
    torch.testing.assert_close(trajectory.logits, model(**batch).logits)


@pytest.mark.soak
def test_models_of_images_of_any_size_are_refused():
    with pytest.raises(InputError, match=r"neither texts \(input_ids\) nor images of a size that its config says"):
        LayeredModel(tiny_model("ResNetForImageClassification", "resnet"))


@pytest.mark.soak
def test_models_with_several_sequences_of_blocks_are_refused():
    with pytest.raises(InputError, match="an encoder and a decoder are two rows of blocks: its states pass several"):
        LayeredModel(tiny_model("BartForConditionalGeneration", "bart"))
    with pytest.raises(InputError, match=r"several rows of blocks: funnel\.encoder\.blocks\.0, funnel\.dec"):
        LayeredModel(tiny_model("FunnelForMaskedLM", "funnel"))


def test_blocks_of_an_image_model_are_found_by_structure():
    model = tiny_model("DeiTForImageClassification", "deit")
    view, pixels = LayeredModel(model), torch.randn(2, 3, 16, 16)
    trajectory = view.trajectory({"pixel_values": pixels})
    with torch.no_grad():
        output = model(pixels, output_hidden_states=True)
    torch.testing.assert_close(trajectory.hidden, torch.stack(output.hidden_states), rtol=0, atol=1e-5)
    torch.testing.assert_close(view.readout(trajectory.hidden[-1]), output.logits, rtol=0, atol=1e-5)
    assert (view.num_prefix_tokens, view.num_patches(), view.has_class_token, view.image_size) == (2, 16, True, 16)


@pytest.mark.soak
def test_the_longest_text_is_found_from_position_lookups():
    kinds = {"opt": "OPTForCausalLM", "xlm-roberta": "XLMRobertaForMaskedLM", "bloom": "BloomForCausalLM"}
    limits = {name: LayeredModel(tiny_model(kind, name)).max_tokens for name, kind in kinds.items()}
    assert limits == {"opt": 64, "xlm-roberta": 63, "bloom": None}
    view = LayeredModel(tiny_model("XLMRobertaForMaskedLM", "xlm-roberta"))
    view.trajectory({"input_ids": torch.full((1, 63), 5)})
    with pytest.raises(InputError, match="takes at most 63 tokens, got 64"):
        view.trajectory({"input_ids": torch.full((1, 64), 5)})


class ToyConfig(PreTrainedConfig):
    model_type = "toy"

    def __init__(
        self, fault: str = "", vocab_size: int = 40, hidden_size: int = 8, num_hidden_layers: int = 3, **options
    ):
        self.fault, self.vocab_size, self.hidden_size = fault, vocab_size, hidden_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**options)


class ToyBlock(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.fault, self.inner, self.calls = config.fault, nn.Linear(8, 8), 0
        self.register_buffer("count", torch.zeros(()))
        self.board: dict[str, torch.Tensor] = {}  # shared by the model and its blocks

    def forward(
        self, hidden_states: torch.Tensor, earlier: dict[str, torch.Tensor], scale: torch.Tensor
    ) -> torch.Tensor:
        self.calls += 1
        hidden = hidden_states + torch.tanh(self.inner(hidden_states)) * scale
        if self.fault == "leaks":
            hidden = hidden + earlier.get("mean", 0)
            earlier["mean"] = hidden_states.mean(-1, keepdim=True)
        if self.fault == "forgets":
            hidden = hidden * self.calls  # the number of calls is no argument
        if self.fault == "counts":
            self.count += 1
        if self.fault == "remembers":  # every later block adds the first input of block 1
            self.board.setdefault("given", hidden_states)
            hidden = hidden + self.board["given"].mean(-1, keepdim=True)
        if self.fault == "tells" and self.is_first:  # every later block adds the last input of block 1
            self.board["told"] = hidden_states.mean(-1, keepdim=True).mean()
        elif self.fault == "tells":
            hidden = hidden + self.board["told"]
        if self.fault == "hands" and self.is_first:  # the same, by an argument
            earlier["told"] = hidden_states.mean()
        elif self.fault == "hands":
            hidden = hidden + earlier.get("told", 0)
        if self.fault == "finds":
            hidden = hidden + self.board["places"]
        if self.fault == "draws":
            hidden = hidden + torch.randn_like(hidden)
        return hidden


class ToyLM(PreTrainedModel):
    """Simple blocks; `fault` says why they are no sequence of blocks."""

    config_class = ToyConfig
    base_model_prefix = "model"
    _tied_weights_keys = None

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.embed, self.head = nn.Embedding(config.vocab_size, 8), nn.Linear(8, config.vocab_size)
        self.gate = nn.Parameter(torch.zeros(()))
        self.layers = nn.ModuleList(ToyBlock(config) for _ in range(config.num_hidden_layers))
        for layer in self.layers:
            layer.board, layer.is_first = self.layers[0].board, layer is self.layers[0]
        self.post_init()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_) -> CausalLMOutput:
        fault, embedded = self.config.fault, self.embed(input_ids)
        self.layers[0].board.clear()
        self.layers[0].board["places"] = input_ids[..., None] / 40
        hidden, earlier = embedded, {}
        for number, layer in enumerate(self.layers):
            scale = hidden.std() if fault == "scales" else torch.ones(())
            hidden = layer(hidden, earlier, scale)
            hidden = hidden / 2 if fault == "halves" and number == 1 else hidden
        if fault == "twice":
            hidden = self.layers[0](hidden, earlier, scale)
        if fault == "skips":
            hidden = hidden + embedded
        if fault == "gated":
            hidden = hidden + self.gate * embedded
        if fault == "pads" and attention_mask is not None:
            hidden = hidden + attention_mask.sum()
        return CausalLMOutput(logits=self.head(embedded if fault == "ignores" else hidden))


def toy(fault: str = "") -> ToyLM:
    torch.manual_seed(0)
    model = ToyLM(ToyConfig(fault)).eval()
    scale_up_(model)
    return model


def test_an_unknown_class_that_passes_all_checks_is_accepted():
    view = LayeredModel(toy())
    assert repr(view).startswith("LayeredModel(ToyLM, num_layers=3, dim=8, origin='structure', proof=blocks: layers; ")
    assert "replay: 0.0" in repr(view) or "e-0" in repr(view)
    assert view.max_tokens is None


FAULTS = {
    "halves": "module 3 of layers takes something else than module 2 gives",
    "twice": "the 3 modules of layers run 4 times in one pass, not once each, in order",
    "forgets": r"block \d called again gives another state",
    "draws": r"block \d called again gives another state",
    "counts": "its own call writes to its weights or buffers",
    "remembers": "its blocks cannot be called again",
    "finds": "its blocks cannot be called again",
    "tells": r"block \d called again gives another state",
    "hands": r"block \d (called again gives another state|is called with something .* that blocks before it have made)",
    "leaks": r"block \d (called again gives another state|is called with something .* that blocks before it have made)",
    "scales": r"block 2 is called with something \(1\) that blocks before it have made",
    "skips": "the readout of the last state gives other logits",
    "ignores": "the readout of the last state gives other logits",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_is_no_sequence_of_blocks_is_refused_with_the_failed_check(fault):
    with pytest.raises(InputError, match=rf"^no layered view of ToyLM: .*{FAULTS[fault]}"):
        LayeredModel(toy(fault))


@pytest.mark.parametrize("fault", ["", "counts", "skips"])
def test_offloaded_weights_are_checked_in_the_same_way(fault, tmp_path):
    offloaded = pytest.importorskip("accelerate").disk_offload(toy(fault), tmp_path, execution_device="cpu")
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    if not fault:
        assert infer_family(offloaded) == infer_family(toy())
        return
    with pytest.raises(InputError, match=rf"^no layered view of ToyLM: .*{FAULTS[fault]}"):
        LayeredModel(offloaded)


def test_a_head_of_zeros_is_checked_again_once_it_has_weights():
    infer_family.__globals__["_FOUND"].pop(ToyLM, None)
    model = toy("ignores")
    head = model.head.weight.detach().clone()
    nn.init.zeros_(model.head.weight)
    logits = LayeredModel(model).trajectory({"input_ids": torch.tensor([[3, 4, 5]])}).logits
    assert torch.equal(logits, model.head.bias.detach().expand_as(logits))
    with torch.no_grad():
        model.head.weight.copy_(head)
    with pytest.raises(InputError, match=FAULTS["ignores"]):
        LayeredModel(model)


def test_states_that_are_not_finite_do_not_decide_about_the_class():
    model = toy()
    broken = copy.deepcopy(model)
    nn.init.constant_(broken.embed.weight, float("nan"))
    infer_family.__globals__["_FOUND"].pop(ToyLM, None)
    with pytest.raises(InputError, match="not finite on these weights, and nothing can be shown"):
        LayeredModel(broken)
    LayeredModel(model)
    assert LayeredModel(broken).num_layers == 3, "shown by other weights of the same config"


def test_checks_run_once_for_unchanged_weights_and_leave_no_trace():
    model = toy().train()
    infer_family.__globals__["_FOUND"].pop(ToyLM, None)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    LayeredModel(model)
    passes = model.layers[0].calls
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training and not module._forward_hooks for module in model.modules())
    LayeredModel(model)
    assert model.layers[0].calls == passes > 0


def test_padding_that_changes_states_is_refused_even_if_another_model_of_the_config_takes_it():
    class Counting(ToyLM):
        def forward(self, input_ids, attention_mask=None, **options):
            if attention_mask is not None:  # counts all positions as tokens
                input_ids = (input_ids + (self.gate * attention_mask.sum(-1, keepdim=True)).long()) % 40
            return super().forward(input_ids, None, **options)

    counts, plain = Counting(ToyConfig()).eval(), Counting(ToyConfig()).eval()
    with torch.no_grad():
        counts.gate.fill_(1.0)
    assert [LayeredModel(each).family.takes_padding for each in (counts, plain, counts)] == [False, True, False]
    view, ids = LayeredModel(counts), texts()["input_ids"] % 40
    view.trajectory({"input_ids": ids})
    sentence = "its states or scores are others with padding behind the texts: give texts of one length"
    with pytest.raises(InputError, match=sentence):
        view.trajectory({**texts(padding="left"), "input_ids": ids})


def test_a_head_that_uses_positions_gets_whole_texts():
    class Placed(ToyLM):
        def forward(self, input_ids, attention_mask=None, **options):
            logits = super().forward(input_ids).logits
            return CausalLMOutput(logits=logits * torch.arange(1, 1 + input_ids.shape[1])[:, None])

        def can_generate(self):
            return True

        def get_output_embeddings(self):
            return self.head

    trajectory = LayeredModel(Placed(ToyConfig()).eval()).trajectory({"input_ids": texts()["input_ids"] % 40})
    assert trajectory.model.predicts_next_token
    index = trajectory.mask.nonzero(as_tuple=True)
    torch.testing.assert_close(trajectory.logits_of(index), trajectory.logits[index])


def test_the_results_of_the_checks_are_in_the_provenance():
    view = LayeredModel(tiny_model("OPTForCausalLM", "opt"))
    found = measure(view, TrajectoryAnalysis(batches=Listed(texts())), run="opt", step=0)
    assert found.error is None
    assert found.provenance["origin"] == "structure"
    assert found.provenance["proof"]["blocks"] == "model.decoder.layers"
    assert max(found.provenance["proof"][name] for name in ("replay", "changed_chain", "readout")) < 1e-4
    assert {"padding": True, "causal": True}.items() <= found.provenance["proof"].items()


def phi3(length: int):
    """Return a Phi 3.5 with other rotary frequencies for texts of more than `length` tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": length}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
    options = {"rope_parameters": rope, "original_max_position_embeddings": length, "max_position_embeddings": 131072}
    return tiny_model("Phi3ForCausalLM", "phi3", **options)


def test_a_call_that_writes_equal_values_into_a_buffer_is_accepted():
    """Phi 3.5 writes its rotary frequencies at each call. They differ only for texts of more than 4,096 tokens."""
    view = LayeredModel(phi3(4096))
    assert view.origin == "structure"
    batch = {"input_ids": torch.arange(18).reshape(2, 9) + 3}
    found = measure(view, TrajectoryAnalysis(batches=Listed(batch)), run="phi3", step=0)
    assert found.error is None, "writing what stands there is no disturbance"
    expected = view.model(**batch, use_cache=False).logits
    torch.testing.assert_close(view.trajectory(batch).logits, expected)


def test_replacing_a_buffer_by_equal_values_is_accepted():
    """In transformers 5.17, Phi 3.5 registers its stored buffer of original frequencies again at each call."""

    def model() -> nn.Module:
        made = nn.Linear(2, 2)
        made.weight = nn.Parameter(torch.arange(4.0).reshape(2, 2))
        for name in ("frequencies", "original"):
            made.register_buffer(name, torch.arange(3.0))
        return made

    with untouched(admitted := model()):
        admitted.register_buffer("frequencies", admitted.original)
    for write in (
        lambda model: model.register_buffer("frequencies", torch.ones(3)),
        lambda model: model.frequencies.fill_(1),
        lambda model: model.register_buffer("more", model.original),
        lambda model: delattr(model, "frequencies"),
        lambda model: setattr(model, "weight", nn.Parameter(torch.ones(2, 2))),  # same version counter as before
    ):
        with pytest.raises(Unproven, match="writes to its weights or buffers"), untouched(refused := model()):
            write(refused)


def test_texts_beyond_the_length_where_frequencies_change_are_refused():
    """The longest text of a batch decides for all of its texts."""
    view = LayeredModel(phi3(16))
    assert view.max_tokens == 16
    with pytest.raises(InputError, match="takes at most 16 tokens, got 20"):
        view.trajectory({"input_ids": torch.arange(40).reshape(2, 20) + 3})


@pytest.mark.soak
def test_blocks_that_use_keys_of_earlier_blocks_are_refused():
    """In Gemma 4, the last blocks attend to keys of earlier blocks, which are in a dict that all blocks get."""
    kinds = ["sliding_attention", "full_attention"] * 3
    options = {"num_hidden_layers": 6, "layer_types": kinds, "num_kv_shared_layers": 2, "sliding_window": 8}
    model = tiny_model("Gemma4ForCausalLM", "gemma4_text", **options)
    with pytest.raises(InputError, match=r"block 5 is called with something \(shared_kv_states\) that blocks before"):
        LayeredModel(model)


def test_a_path_hidden_by_a_zero_weight_is_found_once_the_weight_changes():
    model = toy("gated")
    with torch.no_grad():
        model.gate.zero_()
    assert LayeredModel(model).origin == "structure"
    with torch.no_grad():
        model.gate.fill_(1.0)
    with pytest.raises(InputError, match="the readout of the last state gives other logits"):
        LayeredModel(model)
    with torch.no_grad():
        model.gate.zero_()
    assert LayeredModel(model).origin == "structure"


def test_a_diverged_model_keeps_its_family():
    model = toy()
    assert LayeredModel(model).num_layers == 3
    with torch.no_grad():
        model.embed.weight.fill_(torch.nan)
    assert LayeredModel(model).num_layers == 3


@pytest.mark.parametrize("kind", ["without a row", "llama"])
def test_a_model_under_autocast_of_accelerate_is_measured_in_the_dtype_of_its_weights(kind):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model: Any = tiny(kind) if kind == "llama" else tiny_model("OPTForCausalLM", "opt")
    batch = {"input_ids": torch.arange(18).reshape(2, 9) + 3}
    expected = LayeredModel(model).trajectory(batch)
    AcceleratorState._reset_state(reset_partial_state=True)  # may be set by a Trainer of another test file
    try:
        prepared: Any = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(copy.deepcopy(model))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    rounded = prepared(**batch).logits
    found = LayeredModel(prepared).trajectory(batch)
    torch.testing.assert_close(found.hidden, expected.hidden, rtol=0, atol=0)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=0)
    assert (rounded - expected.logits).abs().max() > 1e-3, "else nothing is shown"
    torch.testing.assert_close(prepared(**batch).logits, rounded, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_checks_in_float32_find_what_16_bits_would_hide(dtype):
    model = toy("gated").to(dtype)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.gate.zero_()
    assert ("computed", "float32") in LayeredModel(model).family.proof.items()
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name != "gate")
    with torch.no_grad():
        model.gate.fill_(0.005)
    with pytest.raises(InputError, match="the readout of the last state gives other logits"):
        LayeredModel(model)


@pytest.mark.soak
def test_padding_reaches_no_text_in_a_class_without_a_mask_or_is_refused():
    from transformers import FNetConfig, FNetForMaskedLM, xLSTMConfig, xLSTMForCausalLM

    ids = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    batch = {"input_ids": ids, "attention_mask": mask}
    kernels = {"chunkwise_kernel": "chunkwise--native_autograd", "sequence_kernel": "native_sequence__native"}
    sizes = {"vocab_size": 40, "embedding_dim": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}
    recurrent = LayeredModel(xLSTMForCausalLM(xLSTMConfig(**sizes, **kernels, step_kernel="native")).eval())
    seen, alone = recurrent.trajectory(batch), recurrent.trajectory({"input_ids": ids[1:, 3:]})
    assert torch.equal(seen.mask, mask.bool())
    torch.testing.assert_close(seen.hidden[:, 1, 3:], alone.hidden[:, 0])
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    mixing = LayeredModel(FNetForMaskedLM(FNetConfig(**sizes)).eval())  # mixes all positions
    with pytest.raises(InputError, match="its states or scores are others with padding behind the texts: give texts"):
        mixing.trajectory(batch)


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_one_number_per_token_is_not_a_prediction_of_the_text(padding):
    """The discriminator of ELECTRA returns one number per token, (batch, tokens)."""
    view = LayeredModel(tiny_model("ElectraForPreTraining", "electra", torch.float64))
    batch = texts(padding=padding)
    logits = view.trajectory(batch).logits  # (batch, tokens, 1)
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)):
        with torch.no_grad():
            torch.testing.assert_close(logits[row][mask][:, 0], view.model(input_ids=ids[mask][None]).logits[0])
    for analysis in (Lens, Interventions):
        with pytest.raises(InputError, match="ElectraForPreTraining gives one number, a regression, and no classes"):
            records_of(analysis(batches=Listed(batch)), view)


def test_projected_states_are_not_class_scores():
    for kind, model_type in [("CLIPTextModelWithProjection", "clip"), ("AltCLIPTextModel", "altclip")]:
        view = LayeredModel(tiny_model(kind, model_type))
        with pytest.raises(InputError, match=f"lens: {kind} has no head to read its layers with"):
            records_of(Lens(batches=Listed({"input_ids": texts()["input_ids"]})), view)


def test_a_missing_output_or_config_field_is_named():
    for kind, model_type, reason in (
        ("DPRQuestionEncoder", "dpr", "neither logits nor last_hidden_state, but pooler_output: open the model inside"),
        ("GPT2ForQuestionAnswering", "gpt2", "neither logits nor last_hidden_state, but start_logits, end_logits"),
        ("CanineModel", "canine", "its config says no vocab_size"),
    ):
        with pytest.raises(InputError, match=f"^no layered view of {kind}: .*{reason}"):
            LayeredModel(tiny_model(kind, model_type))
