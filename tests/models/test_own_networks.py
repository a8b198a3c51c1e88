"""The user's own networks: measured as those of transformers, or refused with the failed check.

A handwritten GPT-2 is compared with the GPT-2 of transformers with the same weights. Other networks are compared with
their own states, which hooks of the test record.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lit_layers
from lit_layers.analyses import Coupling, Lens, Trajectory
from lit_layers.errors import InputError
from lit_layers.functional import block_jacobian
from lit_layers.functional.jacobian.block_call import read_attention
from lit_layers.models.build import save, untrained
from lit_layers.models.copies import truncate
from lit_layers.models.view import LayeredModel
from tests.support.every_analysis import VOCABULARY, prompts
from tests.support.measured import records_of
from tests.support.rounding import check_records
from tests.support.tiny_models import tiny

WIDTH, WORDS, PLACES = 32, 40, 16
IDS = torch.randint(WORDS, (3, 10), generator=torch.Generator().manual_seed(5))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.queries_keys_values(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Scores only the token after the last one, or every token if targets are passed (as nanoGPT)."""

    def __init__(
        self, vocab_size: int, block_size: int, width: int, heads: int, depth: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, -1:]), None
        scores = self.head(x)
        return scores, F.cross_entropy(scores.view(-1, scores.shape[-1]), targets.view(-1))


def handwritten(model: nn.Module) -> GPT:
    """Return the same function as a GPT2LMHeadModel."""
    config, theirs = model.config, model.state_dict()
    own = GPT(config.vocab_size, config.n_positions, config.n_embd, config.n_head, config.n_layer)
    names = {"norm_1": "ln_1", "norm_2": "ln_2", "queries_keys_values": "attn.c_attn", "out": "attn.c_proj"}
    names |= {"wide": "mlp.c_fc", "narrow": "mlp.c_proj"}
    state = {"tokens": "wte", "places": "wpe", "norm": "ln_f"}
    for number in range(config.n_layer):
        state |= {f"blocks.{number}.{mine}": f"h.{number}.{name}" for mine, name in names.items()}
    with torch.no_grad():
        for mine, name in state.items():
            for kind, parameter in own.get_submodule(mine).named_parameters():
                value = theirs[f"transformer.{name}.{kind}"]
                parameter.copy_(value.T if value.ndim == 2 and mine.startswith("blocks") else value)
    return own.train(model.training)


def pair(**options) -> tuple[nn.Module, GPT]:
    """Return a GPT-2 of transformers without special tokens, and a handwritten network with the same weights."""
    model = tiny("gpt2", vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **options)
    return model, handwritten(model)


def test_a_handwritten_gpt2_has_the_numbers_of_the_one_in_transformers():
    model, own = (each.double() for each in pair())
    batches = prompts()  # with padding, which is after the texts
    for analysis in (
        Trajectory(batches=batches),
        Lens(batches=batches),
        Coupling(batches=batches, k=(2,), num_prompts=1),
    ):
        theirs, mine = (records_of(analysis, each) for each in (model, own))
        assert mine
        check_records(mine, theirs, torch.float64)


def test_a_list_of_parts_inside_each_block_is_not_the_list_of_blocks():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(Block(WIDTH, 2, 0.0) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x)
            return x

    own = GPT(WORDS, PLACES, WIDTH, 2, 0)
    own.blocks.extend(Halves() for _ in range(3))
    assert [*LayeredModel(own).blocks] == [*own.blocks]


def test_tensors_created_in_the_first_call_can_be_used_in_training():
    own, made = GPT(WORDS, PLACES, WIDTH, 2, 2), []

    def scale(module, args, output):
        made[:] = made or [torch.ones(WIDTH)]
        return output * made[0]

    own.tokens.register_forward_hook(scale)
    LayeredModel(own)
    own(IDS, IDS)[1].backward()
    assert own.tokens.weight.grad.any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_in_a_network_without_a_mask(side):
    _, own = pair()
    view, ids = LayeredModel(own), torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1] if side == "left" else [1, 1, 0, 0]])
    seen = view.trajectory({"input_ids": ids, "attention_mask": mask})
    assert seen.mask.tolist() == mask.bool().tolist()
    real = slice(2, 4) if side == "left" else slice(0, 2)
    alone = view.trajectory({"input_ids": ids[1:, real]})
    torch.testing.assert_close(seen.hidden[:, 1, real], alone.hidden[:, 0])
    torch.testing.assert_close(seen.logits[1, real], alone.logits[0])


def _blocks(count: int = 3, **options) -> list[nn.Module]:
    return [nn.TransformerEncoderLayer(WIDTH, 2, 48, **{"batch_first": True, **options}) for _ in range(count)]


def _causal(length: int) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length)


class Encoder(nn.Module):
    """The encoder of torch with a position parameter instead of an embedding; `head` says what it returns."""

    def __init__(self, head: str = "words", causal: bool = False) -> None:
        super().__init__()
        self.head, self.causal = head, causal
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(1, PLACES, WIDTH))
        self.encoder = nn.TransformerEncoder(_blocks(1)[0], 3, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 5 if head == "classes" else WORDS)

    def forward(self, tokens):
        x = self.embed(tokens) + self.places[:, : tokens.shape[1]]
        x = self.encoder(x, mask=_causal(tokens.shape[1]) if self.causal else None)
        if self.head == "classes":
            return self.out(x.mean(1))
        if self.head == "tied":
            return {"loss": None, "logits": x @ self.embed.weight.T}
        return (self.out(x), None) if self.head == "tuple" else self.out(x)


class Masked(nn.Module):
    """A network that requires a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(_blocks())
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=attention_mask == 0)
        return SimpleNamespace(logits=self.out(x))


class Pictures(nn.Module):
    """A ViT whose head is initialized with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.image_size, self.patch_size = 16, 4
        self.patches, self.first = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks, self.out = nn.Sequential(*_blocks()), nn.Linear(WIDTH, 7)
        nn.init.zeros_(self.out.weight)

    def forward(self, image):
        x = self.patches(image).flatten(2).mT
        return self.out(self.blocks(torch.cat([self.first.expand(len(x), -1, -1), x], 1))[:, 0])


NETWORKS = {
    "encoder": (Encoder, False, 3),
    "decoder": (lambda: Encoder(causal=True), True, 3),
    "tuple": (lambda: Encoder("tuple", causal=True), True, 3),
    "tied": (lambda: Encoder("tied", causal=True), True, 3),
    "classes": (lambda: Encoder("classes"), False, 2),
    "masked": (Masked, False, 3),
    "pictures": (Pictures, False, 2),
    "pictures by patch_embed": (lambda: Embedded(), False, 2),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_states_and_scores_equal_those_of_the_networks_own_call(name):
    make, predicts, ndim = NETWORKS[name]
    torch.manual_seed(0)
    network = make().eval()
    view = LayeredModel(network)
    batch = {"pixel_values": torch.randn(3, 3, 16, 16)} if name.startswith("pictures") else {"input_ids": IDS}
    seen, states = view.trajectory(batch), []
    handles = [
        block.register_forward_hook(lambda module, args, output: states.extend([args[0], output]))
        for block in view.blocks
    ]
    arguments = list(batch.values()) + ([torch.ones_like(IDS)] if name == "masked" else [])
    with torch.no_grad():
        output = network(*arguments)
    for handle in handles:
        handle.remove()
    logits = output if isinstance(output, torch.Tensor) else None
    if logits is None:
        logits = output[0] if isinstance(output, tuple) else dict(getattr(output, "__dict__", output))["logits"]
    caught = [states[0], *states[1::2]]
    for layer, state in enumerate(caught):  # the view's pass may use other kernels
        torch.testing.assert_close(seen.hidden[layer], state, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen.logits, logits, rtol=1e-4, atol=1e-5)
    assert (view.num_layers, view.origin, logits.ndim) == (3, "structure", ndim)
    assert view.predicts_next_token is predicts
    if name.startswith("pictures"):
        assert (view.num_classes, view.num_patches(), view.has_class_token) == (7, 16, True)
    else:
        assert view.vocab_size == (None if name == "classes" else WORDS)


class Embedded(Pictures):
    """The image and patch size are attributes of the patch embedding, as in DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = self.patches
        self.patch_embed.img_size, self.patch_embed.patch_size = self.image_size, self.patch_size
        del self.image_size, self.patch_size


class Returning(Encoder):
    """Returns other values before or after its scores, as scripts do."""

    def __init__(self, returned: str) -> None:
        super().__init__(causal=True)
        self.returned, self.segments = returned, nn.Embedding(3, WIDTH)

    def forward(self, tokens, targets=None):
        x = self.embed(tokens) + self.places[:, : tokens.shape[1]] + self.segments(torch.zeros_like(tokens))
        x = self.encoder(x, mask=_causal(tokens.shape[1]))
        scores = self.out(x)
        losses = nn.functional.cross_entropy(scores.mT, tokens, reduction="none")
        if targets is not None:
            targets[:] = -100
        tokens[:, 0] = 0  # the network may write to its input
        last = scores[:, -1] if targets is None else scores
        return {
            "states first": (x, scores),
            "losses first": (losses, scores),
            "named": {"states": x, "words": scores},
            "last of two axes": (last, None),
            "states and last": (x, last),
        }[self.returned]


@pytest.mark.parametrize("returned", ["states first", "losses first", "named", "last of two axes", "states and last"])
def test_scores_are_found_among_other_outputs_and_inputs_do_not_change(returned):
    torch.manual_seed(0)
    network, kept = Returning(returned).eval(), IDS.clone()
    view = LayeredModel(network)
    logits = view.trajectory({"input_ids": IDS}).logits
    with torch.no_grad():
        output = network(IDS.clone(), IDS.clone())
    expected = output["words"] if isinstance(output, dict) else output[1 if returned != "last of two axes" else 0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert (view.vocab_size, view.predicts_next_token) == (WORDS, True)
    assert torch.equal(IDS, kept)


class CausalUnlessMasked(Encoder):
    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for block in self.encoder.layers:
            if attention_mask is None:
                x = block(x, src_mask=_causal(input_ids.shape[1]))
            else:
                x = block(x, src_key_padding_mask=attention_mask == 0)
        return self.out(x)


def test_an_optional_mask_is_passed_only_with_padding():
    torch.manual_seed(0)
    view = LayeredModel(network := CausalUnlessMasked().eval())
    with torch.no_grad():
        torch.testing.assert_close(view.trajectory({"input_ids": IDS}).logits, network(IDS))
    assert view.predicts_next_token
    mask = torch.ones_like(IDS)
    mask[0, -2:] = 0
    with pytest.raises(InputError, match="its states or scores are others with padding behind the texts"):
        view.trajectory({"input_ids": IDS, "attention_mask": mask})


@pytest.mark.parametrize("pooled", [lambda x: x.mean(1), lambda x: x[:, -1]], ids=["mean", "last"])
def test_padding_is_refused_if_the_head_would_count_it(pooled):
    torch.manual_seed(0)
    view = LayeredModel(network := Reshaped(pooled, causal=True).eval())
    mask = torch.ones_like(IDS)
    mask[0, -2:] = 0
    with pytest.raises(InputError, match="give texts of one length"):
        view.trajectory({"input_ids": IDS, "attention_mask": mask})
    with torch.no_grad():
        torch.testing.assert_close(view.trajectory({"input_ids": IDS}).logits, network(IDS))
    assert view.vocab_size is None  # the scores are classes of a text, although there are as many as words


def test_a_norm_and_dropout_in_one_sequential_with_blocks_are_not_blocks():
    torch.manual_seed(0)
    network = Encoder(causal=False)
    network.encoder = nn.Sequential(nn.Dropout(0.1), *_blocks(), nn.LayerNorm(WIDTH))
    network.encoder.forward = lambda x, mask: nn.Sequential.forward(network.encoder, x)
    view, states = LayeredModel(network.eval()), []
    handles = [block.register_forward_hook(lambda *call: states.append(call[2])) for block in network.encoder[1:4]]
    with torch.no_grad():
        logits = network(IDS)
    for handle in handles:
        handle.remove()
    seen = view.trajectory({"input_ids": IDS})
    assert view.num_layers == 3
    torch.testing.assert_close(seen.hidden[1:], torch.stack(states))
    torch.testing.assert_close(seen.logits, logits)


class Turning(nn.Module):
    """A block without submodules: its matrix is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x):
        return x + torch.tanh(x @ self.weight)


def test_blocks_may_hold_their_matrices_as_parameters():
    torch.manual_seed(0)
    network = Encoder()
    network.encoder = nn.Sequential(Turning(), Turning(), nn.LayerNorm(WIDTH))
    network.encoder.forward = lambda x, mask: nn.Sequential.forward(network.encoder, x)
    assert LayeredModel(network.eval()).num_layers == 2


def test_a_text_beyond_an_unstated_limit_is_refused_in_one_sentence():
    torch.manual_seed(0)
    view = LayeredModel(Encoder().eval())
    with pytest.raises(InputError, match=r"Encoder cannot be called with input_ids of shape \(3, 20\) \(RuntimeError"):
        view.trajectory({"input_ids": IDS.repeat(1, 2)})


def test_a_class_derived_from_one_with_a_row_has_that_row():
    from timm.models.vision_transformer import VisionTransformer

    class Mine(VisionTransformer):
        pass

    network = Mine(img_size=16, patch_size=4, embed_dim=WIDTH, depth=2, num_heads=2, num_classes=5)
    assert (LayeredModel(network).origin, LayeredModel(network).model) == ("row", network)


class LearnsASkip(Encoder):
    def __init__(self, skip: float = 0.0) -> None:
        super().__init__()
        self.skip = nn.Parameter(torch.tensor(skip))

    def forward(self, tokens):
        x = first = self.embed(tokens)
        for block in self.encoder.layers:
            x = block(x + self.skip * first)
        return self.out(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.cells = nn.LSTM(WIDTH, WIDTH, 3, batch_first=True)

    def forward(self, x):
        return self.out(self.cells(self.embed(x))[0])


class LastAlone(Encoder):
    def forward(self, tokens):
        return super().forward(tokens)[:, -2:]


class OneHot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.embed = nn.Linear(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens):
        return self.out(nn.functional.one_hot(tokens, WORDS).float())


class Reshaped(Encoder):
    """Returns `made(scores)`."""

    def __init__(self, made, **options) -> None:
        super().__init__(**options)
        self.made = made

    def forward(self, tokens):
        return self.made(super().forward(tokens))


class TokensFirst(nn.Module):
    """Takes (tokens, batch), as the tutorial of torch does, so that it takes texts for tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)
        self.encoder = nn.TransformerEncoder(_blocks(1, batch_first=False)[0], 3, enable_nested_tensor=False)

    def forward(self, x):
        places = self.places(torch.arange(len(x)))[:, None]
        return self.out(self.encoder(self.embed(x) + places, mask=_causal(len(x))))


class Drawing(Encoder):
    def forward(self, tokens):
        x = nn.functional.dropout(self.embed(tokens), 0.2)  # the function drops values also in evaluation mode
        return self.out(self.encoder(x, mask=_causal(tokens.shape[1])))


class GivenTheFirst(nn.Module):
    """Passes layer 0 to each block as an additional argument."""

    class Block(nn.TransformerEncoderLayer):
        def forward(self, x, first):
            return super().forward(0.8 * x + 0.5 * first)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(self.Block(WIDTH, 2, 48, batch_first=True) for _ in range(3))

    def forward(self, tokens):
        x = first = self.embed(tokens)
        for block in self.blocks:
            x = block(x, first)
        return self.out(x)


class TwoInputs(Encoder):
    def forward(self, tokens, segments):
        return super().forward(tokens + segments)


REFUSED = {
    "skips": (lambda: LearnsASkip(1.0), "module 2 of network.encoder.layers takes something else than module 1"),
    "recurrent": (Recurrent, "no list of its modules runs in its own call"),
    "last alone": (LastAlone, r"for ids of shape \(2, 6\) it returns \(2, 2, 40\), expected \(2, 6, scores\) or"),
    "number each": (lambda: Reshaped(lambda x: x.mean(-1)), "what it returns is one number for each token"),
    "several heads": (lambda: Reshaped(lambda x: x[:, :, None]), r"it returns \(2, 6, 1, 40\), expected"),
    "two scores": (lambda: Reshaped(lambda x: (x, -x)), r"which of what it returns are its scores \(\(2, 6, 40\), "),
    "tokens first": (TokensFirst, "passed alone, one of its batch has another state behind block 0"),
    "drawing": (Drawing, "states depend on what else is in a batch, or on chance"),
    "given the first": (GivenTheFirst, "block 1 is called with layer 0 besides its state"),
    "one hot": (OneHot, "it looks up the token ids in no table of embeddings"),
    "floats": (lambda: nn.Sequential(nn.Linear(3, 4)), "it has no table of embeddings of tokens"),
    "two inputs": (TwoInputs, r"it cannot be called with token ids alone \(TypeError: .*missing 1 required"),
    "no weights": (lambda: Encoder().to("meta"), "it has no weights here"),
    "nothing": (nn.Module, "it has no weights here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_network_that_is_no_sequence_of_blocks_is_refused_with_the_failed_check(name):
    make, sentence = REFUSED[name]
    torch.manual_seed(0)
    with pytest.raises(InputError, match=f"^no layered view of {type(network := make()).__name__}: .*{sentence}"):
        LayeredModel(network)


def test_library_models_inside_a_network_are_named_but_single_layers_are_not():
    from timm.layers.patch_embed import PatchEmbed
    from timm.models.vision_transformer import Block, VisionTransformer

    def vit() -> nn.Module:
        return VisionTransformer(img_size=16, patch_size=4, embed_dim=WIDTH, depth=1, num_heads=2, num_classes=5)

    network = nn.Module()
    network.patches, network.block, network.out = PatchEmbed(16, 4, 3, WIDTH), Block(WIDTH, 2), nn.Linear(WIDTH, 2)
    with pytest.raises(InputError, match="says no image_size$"):
        LayeredModel(network)
    network.student = vit()
    with pytest.raises(InputError, match="VisionTransformer as 'student': give that part alone, or name it, model='s"):
        LayeredModel(network)
    network.teacher = vit()
    with pytest.raises(InputError, match="VisionTransformer as 'teacher': give one of them alone, or name it"):
        LayeredModel(network)


def test_own_networks_are_not_saved_truncated_or_rebuilt(tmp_path):
    _, own = pair()
    for refused in (
        lambda: save(own, tmp_path / "m"),
        lambda: truncate(own, 1),
        lambda: untrained(LayeredModel(own).model),
    ):
        with pytest.raises(InputError, match="neither of transformers nor of timm|neither transformers nor timm"):
            refused()


def test_a_network_that_changes_its_vocabulary_is_inspected_again():
    torch.manual_seed(0)
    network = Encoder(causal=True).eval()
    assert LayeredModel(network).vocab_size == WORDS
    network.embed, network.out = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
    assert LayeredModel(network).vocab_size == 50


def test_training_continues_when_a_network_is_no_longer_a_sequence_of_blocks(tmp_path):
    torch.manual_seed(0)
    network = LearnsASkip()
    with lit_layers.watch(network, [Trajectory(batches=[IDS])], steps={"every": 1}, root=tmp_path / "run") as watched:
        watched.step()
        nn.init.ones_(network.skip)
        watched.step()
        nn.init.zeros_(network.skip)
        watched.step()
    errors = [m.error for m in lit_layers.records.read(tmp_path / "run" / "measurements.jsonl")]
    assert errors[:2] + errors[3:] == [None] * 3
    assert "no layered view of LearnsASkip: module 2 of" in errors[2]


def test_saving_steps_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(InputError, match="cannot save this GPT as a Hugging Face folder"):
        lit_layers.watch(pair()[1], [Lens(batches=[IDS])], steps=[1], root=tmp_path / "run", save=True)


@pytest.mark.parametrize("name", ["encoder", "decoder", "masked"])
def test_jacobians_of_torch_attention_equal_reverse_mode(name):
    torch.manual_seed(0)
    view = LayeredModel(NETWORKS[name][0]().double().eval())
    seen = view.trajectory({"input_ids": IDS})
    for places in ([4], [0, 9]):
        found, expected = (
            block_jacobian(seen.block(2), seen.hidden[1], route=way, out_tokens=places, in_tokens=[0, 4])
            for way in ("cut", "plain")
        )
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_maps_of_torch_equal_those_that_it_returns(causal):
    torch.manual_seed(0)
    network = Encoder(causal=causal).eval()
    view = LayeredModel(network)
    seen = view.trajectory({"input_ids": IDS})
    layer, states = network.encoder.layers[1], seen.hidden[1]
    mask = _causal(IDS.shape[1]) if causal else None
    _, expected = layer.self_attn(states, states, states, attn_mask=mask, average_attn_weights=False)
    attention = read_attention(seen.block(2), states)
    for prompt in range(len(IDS)):
        torch.testing.assert_close(attention.pattern(prompt), expected[prompt].detach(), rtol=1e-4, atol=1e-6)
