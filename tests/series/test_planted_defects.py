"""One defect planted in a healthy series of seven steps: found, at the step where it is, and nowhere else."""

import json
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from lit_layers.series import Audit, StepFolders, audit, audit_weights
from lit_layers.series.checkpoint import Checkpoint
from lit_layers.series.checkpoint_sources import FolderSource, Memory, fingerprint
from tests.series.trained_series import EVEN, VOCABULARY, Training, harsh, healthy_trainings, series

WTE, ATTENTION = "transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"
NORM = "transformer.h.1.ln_1.weight"
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Path:
    return series(tmp_path_factory.mktemp("healthy") / "run", Training())


@pytest.fixture(scope="module")
def other_seed(tmp_path_factory) -> Path:
    return series(tmp_path_factory.mktemp("other") / "run", Training(seed=9))


@pytest.fixture
def root(healthy, tmp_path) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "run"))


def at(root: Path, step: int, name: str = "model.safetensors") -> Path:
    return root / f"step-{step:09d}" / name


def changed(root: Path, step: int, change: Callable[[State], State | None]) -> None:
    state = load_file(at(root, step))
    save_file(change(state) or state, at(root, step), metadata={"format": "pt"})


def configured(root: Path, step: int, **fields) -> None:
    config = json.loads(at(root, step, "config.json").read_text())
    at(root, step, "config.json").write_text(json.dumps(config | fields))


def exchanged(root: Path, one: int, other: int) -> None:
    at(root, one, "").rename(root / "aside")
    at(root, other, "").rename(at(root, one, ""))
    (root / "aside").rename(at(root, other, ""))


def rounded(state: State) -> State:
    return {name: tensor.bfloat16() for name, tensor in state.items()}


def of_8_bits(state: State) -> State:
    """Whole numbers times a scale of each tensor."""
    scales = {name: (tensor.abs().max() / 127).clamp(min=1e-12) for name, tensor in state.items()}
    return {name: (tensor / scales[name]).round() * scales[name] for name, tensor in state.items()}


def with_value(state: State, value: float) -> None:
    state[ATTENTION][1, 2] = value


def without_bias(state: State) -> None:
    del state["transformer.ln_f.bias"]


def permuted(state: State) -> None:
    state[WTE] = state[WTE][torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))].contiguous()


def flipped(root: Path, step: int, bit: int) -> None:
    """One bit of one weight, in the file."""
    content = bytearray(at(root, step).read_bytes())
    (header,) = struct.unpack("<Q", content[:8])
    begin = json.loads(content[8 : 8 + header])[ATTENTION]["data_offsets"][0]
    place = 8 + header + begin + 4 * 7
    (word,) = struct.unpack("<I", content[place : place + 4])
    content[place : place + 4] = struct.pack("<I", word ^ (1 << bit))
    at(root, step).write_bytes(content)


def in_shards(root: Path) -> None:
    for folder in root.glob("step-*"):
        state = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        shards = {f"model-0000{number}-of-00002.safetensors": sorted(state)[number - 1 :: 2] for number in (1, 2)}
        for name, held in shards.items():
            save_file({key: state[key] for key in held}, folder / name, metadata={"format": "pt"})
        where = {key: name for name, held in shards.items() for key in held}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def shard_of_another(root: Path) -> None:
    in_shards(root)
    name = "model-00001-of-00002.safetensors"
    shutil.copy(at(root, 40, name), at(root, 80, name))


def shard_missing(root: Path) -> None:
    in_shards(root)
    at(root, 60, "model-00001-of-00002.safetensors").unlink()


def optimizer_file(root: Path) -> None:
    state = {f"state.{number}.exp_avg": torch.randn(16, 16) for number in range(4)}
    save_file(state, at(root, 60))


def other_tokenizer(root: Path) -> None:
    words = {f"w{number}": (number + 1) % VOCABULARY for number in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(at(root, 60, "tokenizer.json")))


def tokenizer_settings(root: Path, odd: dict[int, dict], **usual) -> None:
    for step in EVEN:
        settings = {"eos_token": "w1", "tokenizer_class": "GPT2Tokenizer"} | usual | odd.get(step, {})
        at(root, step, "tokenizer_config.json").write_text(json.dumps(settings))


def header_bit(root: Path) -> None:
    content = bytearray(at(root, 60).read_bytes())
    content[7] ^= 1 << 6  # the length of the header
    at(root, 60).write_bytes(content)


def looped(root: Path) -> None:
    shutil.rmtree(at(root, 60, ""))
    os.symlink("step-000000060", root / "step-000000060")


def trainer_states(root: Path) -> None:
    for step in EVEN:
        said = 80 if step == 60 else step
        at(root, step, "trainer_state.json").write_text(json.dumps({"global_step": said}))


def borrowed(root: Path, name: str, source: int, *steps: int) -> None:
    for step in steps:
        changed(root, step, lambda state: state.update({name: load_file(at(root, source))[name]}))


def frozen(root: Path, odd: Path | None = None) -> None:
    """One matrix is that of step 0 everywhere, but at step 60 where this is another's."""
    for step in EVEN:
        source = at(odd, step) if odd is not None and step == 60 else at(root, 0)
        changed(root, step, lambda state, source=source: state.update({WTE: load_file(source)[WTE]}))


PLANTS: dict[str, tuple[Callable[[Path], object], str, tuple[int, ...]]] = {
    "exact duplicate": (lambda root: shutil.copy(at(root, 40), at(root, 60)), "identical weights", (40, 60)),
    "final step early": (lambda root: shutil.copy(at(root, 120), at(root, 60)), "equal to the final step", (60,)),
    "shard of another step": (shard_of_another, "shared shard", (40, 80)),
    "a shard missing": (shard_missing, "other tensors", (60,)),
    "no weights": (lambda root: at(root, 60).unlink(), "no weights", (60,)),
    "optimizer file as weights": (optimizer_file, "other tensors", (60,)),
    "cut short": (lambda root: os.truncate(at(root, 60), 5000), "damaged", (60,)),
    "header bit": (header_bit, "damaged", (60,)),
    "no bytes": (lambda root: at(root, 60).write_bytes(b""), "damaged", (60,)),
    "only zero bytes": (lambda root: at(root, 60).write_bytes(bytes(at(root, 60).stat().st_size)), "damaged", (60,)),
    "config of another family": (
        lambda root: configured(root, 60, model_type="llama", architectures=["LlamaForCausalLM"]),
        "other config",
        (60,),
    ),
    "a tensor missing": (lambda root: changed(root, 60, without_bias), "other tensors", (60,)),
    "NaN": (lambda root: changed(root, 60, lambda s: with_value(s, float("nan"))), "not finite", (60,)),
    "all zeros": (lambda root: changed(root, 60, lambda s: {k: v * 0 for k, v in s.items()}), "zero weights", (60,)),
    "a norm's weights 0": (lambda root: changed(root, 60, lambda s: {**s, NORM: s[NORM] * 0}), "zero weights", (60,)),
    "biases of another step": (
        lambda root: changed(root, 60, lambda s: s | {k: v for k, v in load_file(at(root, 20)).items() if "bias" in k}),
        "out of line",
        (20, 60),
    ),
    "steps swapped": (lambda root: exchanged(root, 40, 80), "swapped", (40, 80)),
    "neighbours swapped": (lambda root: exchanged(root, 60, 80), "swapped", (60, 80)),
    "far steps swapped": (lambda root: exchanged(root, 20, 100), "swapped", (20, 100)),
    "a step swapped with the last": (lambda root: exchanged(root, 40, 120), "swapped", (40, 120)),
    "other tokenizer": (other_tokenizer, "other tokenizer", (60,)),
    "another end of text": (
        lambda root: tokenizer_settings(root, {60: {"eos_token": "w2"}}),
        "other tokenizer",
        (60,),
    ),
    "tokenizer settings that are no JSON": (
        lambda root: (tokenizer_settings(root, {}), at(root, 60, "tokenizer_config.json").write_text('{"eos_token')),
        "damaged",
        (60,),
    ),
    "rows permuted": (lambda root: changed(root, 60, permuted), "out of line", (60,)),
    "rows of the last step permuted": (lambda root: changed(root, 120, permuted), "out of line", (120,)),
    "a matrix of another step": (
        lambda root: changed(root, 60, lambda s: s.update({ATTENTION: load_file(at(root, 20))[ATTENTION]})),
        "out of line",
        (20, 60),
    ),
    "a matrix of another step, twice": (
        lambda root: borrowed(root, ATTENTION, 20, 60, 100),
        "out of line",
        (20, 60, 100),
    ),
    "a matrix of another step at the last but one": (
        lambda root: borrowed(root, ATTENTION, 40, 100),
        "out of line",
        (40, 100),
    ),
    "rows of the last step but one permuted": (lambda root: changed(root, 100, permuted), "out of line", (100,)),
    "another step in bfloat16": (
        lambda root: save_file(rounded(load_file(at(root, 20))), at(root, 60)),
        "other precision",
        (60,),
    ),
    "another step in bfloat16, stored in float32": (
        lambda root: save_file({k: v.float() for k, v in rounded(load_file(at(root, 20))).items()}, at(root, 60)),
        "other precision",
        (60,),
    ),
    "saved again at another step": (
        lambda root: save_file(dict(reversed(load_file(at(root, 40)).items())), at(root, 60), metadata={"again": "1"}),
        "identical weights",
        (40, 60),
    ),
    "one step in bfloat16": (lambda root: changed(root, 60, rounded), "other precision", (60,)),
    "heads 2 to 4": (lambda root: configured(root, 60, n_head=4), "other config", (60,)),
    "epsilon and activation": (
        lambda root: configured(root, 60, layer_norm_epsilon=1e-4, activation_function="relu"),
        "other config",
        (60,),
    ),
    "rounded to 8 bits": (lambda root: changed(root, 60, of_8_bits), "other precision", (60,)),
    "one bit": (lambda root: flipped(root, 60, 30), "value out of range", (60,)),
    "removed folder": (lambda root: shutil.rmtree(at(root, 60, "")), "gap", (60,)),
    "symbolic link to itself": (looped, "gap", (60,)),
    "count of another step": (trainer_states, "other step", (60,)),
}  # fmt: skip


def found_in(verdicts: Audit) -> set[tuple[str, tuple[int, ...]]]:
    return {(finding.kind, finding.steps) for finding in verdicts.findings if not finding.note}


KINDS: dict[str, list[str]] = {}
for name, (_, kind, _) in PLANTS.items():
    KINDS.setdefault(kind, []).append(name)
MOST = 2  # of each kind in the quick tier


def expect_found(names: list[str], healthy: Path, folder: Path) -> None:
    for number, name in enumerate(names):
        root = Path(shutil.copytree(healthy, folder / str(number)))
        plant, kind, steps = PLANTS[name]
        plant(root)
        found = found_in(audit(StepFolders(root)))
        assert (kind, steps) in found, (name, found)
        assert {step for _, suspects in found for step in suspects} == set(steps), (name, found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_defect_of_each_kind_is_found_and_nothing_else(kind, healthy, tmp_path):
    expect_found(KINDS[kind][:MOST], healthy, tmp_path)


@pytest.mark.soak
def test_every_other_defect_is_found_and_nothing_else(healthy, tmp_path):
    others = [name for names in KINDS.values() for name in names[MOST:]]
    assert len(others) > 10
    expect_found(others, healthy, tmp_path)


def test_a_file_that_is_cut_short_is_no_measure_for_the_one_beside_it(root):
    """As beside a training that removes old checkpoints and was killed while it wrote the last one."""
    os.truncate(at(root, 80), at(root, 80).stat().st_size // 2)
    assert found_in(audit(StepFolders(root, [60, 80]))) == {("damaged", (80,))}


def test_a_second_audit_reads_no_weights(root, monkeypatch):
    first = audit(StepFolders(root))
    for folder in root.glob("step-*"):
        (folder / "model.safetensors").touch()  # read again, and found the same
    assert audit(StepFolders(root)) == first
    monkeypatch.setattr("lit_layers.series.auditing.fingerprint", None)
    monkeypatch.setattr("lit_layers.series.checkpoint_sources.content_hash", None)
    assert audit(StepFolders(root)) == first


def test_the_order_of_the_last_two_steps_is_not_judged(root):
    exchanged(root, 100, 120)  # an average at the end would look the same
    steps = StepFolders(root)
    found = audit(steps)
    assert found_in(found) == set()
    assert {found.verdict(one) for one in steps} == {"clean (level: weights)"}


def test_the_level_is_of_each_checkpoint_and_an_audit_has_the_lowest_of_them(root, monkeypatch):
    memory, steps = Memory(root), StepFolders(root)
    audit(StepFolders(root, list(EVEN[:2])), memory=memory)
    monkeypatch.setattr(FolderSource, "is_here", False)  # as of a Hub: two of them were read when they were here
    found = audit(steps, memory=memory)
    assert found.level == "listing"
    assert found.levels == {one.name: "weights" if one.step in EVEN[:2] else "listing" for one in steps}
    assert found.verdict(steps.checkpoints[-1]) == "clean (level: listing)"
    assert found.verdict(steps.checkpoints[0]).startswith("clean (level: weights)")


def test_what_no_check_sees_is_said_to_be_unseen(root):
    changed(root, 60, lambda state: {name: 1.1 * tensor for name, tensor in state.items()})
    found = audit(StepFolders(root))
    assert (found.level, found_in(found)) == ("weights", set())
    assert "scaled by one factor up to 2" in found.to_dict()["unseen"]


def test_a_change_that_stays_is_a_note_and_what_changes_no_number_is_none(root):
    for step in (100, 120):
        configured(root, step, n_positions=32)
    found = audit(StepFolders(root))
    assert [(finding.kind, finding.steps, finding.note) for finding in found.findings] == [
        ("other config", (100, 120), True)
    ]
    for step in (20, 40):
        configured(root, step, transformers_version="4.0.0", use_cache=False, torch_dtype="float16")
    assert len(audit(StepFolders(root)).findings) == 1


def test_settings_of_a_tokenizer_that_change_no_token_are_no_finding(root):
    same = {"name_or_path": "elsewhere", "eos_token": {"content": "w1", "lstrip": False}, "sep_token": None}
    tokenizer_settings(root, {60: same | {"tokenizer_class": "GPT2TokenizerFast"}})
    assert audit(StepFolders(root)).findings == ()


HEALTHY = [*healthy_trainings(), *harsh()]


def judged_clean(tmp_path: Path, number: int) -> None:
    found = audit(StepFolders(series(tmp_path / str(number), HEALTHY[number])))
    assert (found.level, found_in(found)) == ("weights", set()), HEALTHY[number]


def test_healthy_series_are_accused_of_nothing(tmp_path):
    for number in (6, -1):
        judged_clean(tmp_path, number)


@pytest.mark.soak
def test_every_healthy_series_is_accused_of_nothing(tmp_path):
    for number in range(len(HEALTHY)):
        judged_clean(tmp_path, number)


def test_of_a_series_of_two_trainings_the_smaller_part_is_suspect(healthy, other_seed, tmp_path):
    for step, suspects in ((60, (0, 20, 40)), (80, (80, 100, 120))):
        root = Path(shutil.copytree(healthy, tmp_path / str(step)))
        for later in EVEN[EVEN.index(step) :]:
            shutil.copy(at(other_seed, later), at(root, later))
        assert found_in(audit(StepFolders(root))) == {("out of line", suspects)}, step


def test_a_step_of_another_seed_and_rows_in_another_order_are_found_at_every_step(healthy, other_seed, tmp_path):
    for number, step in enumerate((20, 80, 20, 120)):
        root = Path(shutil.copytree(healthy, tmp_path / str(number)))
        if number < 2:
            changed(root, step, permuted)
        else:
            shutil.copy(at(other_seed, step), at(root, step))
        assert found_in(audit(StepFolders(root))) == {("out of line", (step,))}, number


def walks(origins: str, numbers: Sequence[int], speed: float = 0.1) -> audit_weights.Path:
    """A series whose steps are of the trainings that `origins` names; weights drift by `speed` of their norm a step."""
    source, generator = FolderSource(Path()), torch.Generator().manual_seed(0)
    steps = [Checkpoint(series="s", name=f"s{step}", source=source, step=step) for step in numbers]
    at_first = {one: torch.randn(4, 32, 32, generator=generator) for one in sorted({*origins})}
    drifts = {one: torch.randn(4, 32, 32, generator=generator) for one in at_first}
    prints = {}
    for one, origin in zip(steps, origins, strict=True):
        weights = at_first[origin] + speed * (one.step or 0) * drifts[origin]
        prints[one.name] = fingerprint((f"w{place}", matrix) for place, matrix in enumerate(weights))
    return audit_weights.Path.make(steps, prints)


MIXED = {
    "AAABBBBB": (0, 1, 2),
    "AAAAAABB": (6, 7),
    "AAAABBBB": tuple(range(8)),  # as many are of one as of the other
    "AABBBCCC": tuple(range(8)),
    "AAABBCCCC": (0, 1, 2, 3, 4),
    "AABABAAA": (2, 4),
    "ABABABAA": (1, 3, 5),
    "AAAAAAAA": (),
}


def test_trainings_are_told_apart_however_they_are_mixed():
    for origins, suspects in MIXED.items():
        found = [*audit_weights.outlying_steps(walks(origins, range(len(origins))))]
        assert {step for each in found for step in each.steps} == {*suspects}, origins


def test_weights_that_lose_all_likeness_in_a_long_gap_are_no_other_training():
    numbers = (0, 1, 2, 4, 8, 400, 402, 404, 406)
    assert [*audit_weights.outlying_steps(walks("A" * 9, numbers, speed=0.03))] == []
    assert [*audit_weights.outlying_steps(walks("AAAAABBBB", numbers, speed=0.03))] == []  # nobody can tell
    (found,) = audit_weights.outlying_steps(walks("AAAAAABBB", numbers, speed=0.03))
    assert {6, 7, 8} <= {numbers.index(step) for step in found.steps}


def test_what_is_wrong_beside_exchanged_steps_is_found_too(root):
    borrowed(root, WTE, 20, 100)
    exchanged(root, 40, 80)
    assert found_in(audit(StepFolders(root))) == {("out of line", (20, 100)), ("swapped", (40, 80))}


def test_healthy_steps_beside_a_strange_one_and_a_copy_are_not_accused(root, other_seed):
    shutil.copy(at(root, 60), at(root, 80))
    shutil.copy(at(other_seed, 40), at(root, 40))
    assert found_in(audit(StepFolders(root))) == {("identical weights", (60, 80)), ("out of line", (40,))}


def test_of_two_exchanges_no_step_is_accused_that_is_right(healthy, tmp_path):
    for exchanges in (((0, 80), (40, 60)), ((20, 80), (60, 100))):
        root = Path(shutil.copytree(healthy, tmp_path / str(exchanges)))
        for one, other in exchanges:
            exchanged(root, one, other)
        found = found_in(audit(StepFolders(root)))
        assert found == {("out of line", ())}, "something is wrong, and nobody can say where"


def test_a_tokenizer_that_is_cut_short_is_no_measure_for_the_one_beside_it(root):
    whole = at(root, 60, "tokenizer.json").read_text()
    for odd in (60, 80):
        at(root, odd, "tokenizer.json").write_text('{"version": "1.0", "trunc')
        assert found_in(audit(StepFolders(root, [60, 80]))) == {("damaged", (odd,))}
        at(root, odd, "tokenizer.json").write_text(whole)
    for step in (60, 80):
        at(root, step, "tokenizer.json").write_text(f'{{"version": "{step}.0"}}')
    assert found_in(audit(StepFolders(root, [60, 80]))) == {("other tokenizer", (60, 80))}


def test_where_as_many_steps_have_one_as_the_other_all_are_named(root):
    """Nobody can say which two heads are right; the step that has a third number of them is wrong in any case."""
    for steps in ((60, 80), EVEN[3:]):
        for place, step in enumerate(steps):
            configured(root, step, n_head=(4, 2, 2, 4)[place])
        found = audit(StepFolders(root, steps))
        assert found_in(found) == {("other config", steps)}
        assert found.findings[0].message.endswith("or those are wrong: as many steps have one as the other")
    configured(root, 0, n_head=8)
    assert found_in(audit(StepFolders(root, (0, *steps)))) == {("other config", (0,)), ("other config", steps)}


def test_a_model_that_training_began_with_may_have_another_precision(root):
    """A training in bfloat16 of a model in float32: of two steps neither is accused."""
    steps = EVEN[3:]
    for step in steps[1:]:
        changed(root, step, rounded)
    for chosen in (steps[:2], steps):
        found = audit(StepFolders(root, chosen))
        assert found_in(found) == set()
        assert [(each.kind, each.steps, each.note) for each in found.findings] == [("other precision", steps[:1], True)]


def test_of_three_precisions_each_step_is_said_to_have_its_own(root):
    """Of float16 and bfloat16 one is wrong; float32 at the first step may be another model, and is no float16."""
    first, *others = EVEN[3:6]
    for step, dtype in zip(others, (torch.float16, torch.bfloat16), strict=True):
        changed(root, step, lambda state, dtype=dtype: {name: value.to(dtype) for name, value in state.items()})
    found = audit(StepFolders(root, [first, *others]))
    assert [(each.kind, each.steps, each.note, each.message) for each in found.findings] == [
        (
            "other precision",
            tuple(others),
            False,
            "precision is float16, not bfloat16, as at the other steps, or those are wrong: as many steps have one as "
            "the other",
        ),
        ("other precision", (first,), True, "precision is float32, not bfloat16, as at the other steps"),
    ]


def test_of_few_steps_none_is_accused_where_two_others_make_the_same_way_backwards(root):
    exchanged(root, 20, 60)
    found = audit(StepFolders(root, EVEN[:5]))
    assert found_in(found) == {("swapped", ())}
    (each,) = found.findings
    assert all(pair in each.message for pair in ("step 20 and step 60", "step 0 and step 80"))


def test_of_the_last_two_steps_the_one_with_other_rows_is_accused(tmp_path):
    few = series(tmp_path / "few", Training(steps=(0, 20, 100, 120)))
    for step in (100, 120):
        root = Path(shutil.copytree(few, tmp_path / str(step)))
        changed(root, step, permuted)
        assert found_in(audit(StepFolders(root))) - {("gap", (40, 60, 80))} == {("out of line", (step,))}


def test_where_each_of_the_last_two_steps_may_have_the_other_rows_both_are_named(tmp_path):
    """Four matrices on a straight way; one is as far from the last step as from the last but one, and these from each
    other.
    """
    line = np.array([0.0, 1.0, 2.0, 2.1])
    apart = np.abs(line[:, None] - line)
    turned = apart.copy()
    turned[1, 3] = turned[3, 1] = 1.0
    turned[2, 3] = turned[3, 2] = 1.0
    steps = [Checkpoint(series="s", name=f"s{step}", source=FolderSource(tmp_path), step=step) for step in range(4)]
    of_tensor = dict.fromkeys("abc", apart) | {"w": turned}
    products = {name: 5.0**2 - distance**2 / 2 for name, distance in of_tensor.items()}
    products["bias"] = np.zeros((4, 4))  # one that stays 0 has no way
    path = audit_weights.Path(steps, products, 1e-5)
    (found,) = audit_weights.outlying_steps(path)
    assert (found.steps, found.note) == ((2, 3), False)
    assert found.message == "only w jumps at step 2 or step 3: rows in another order?"


@pytest.mark.parametrize("turned", [1, 2, 3])
def test_tensors_are_named_only_where_at_most_half_of_them_are_off_the_way(turned, tmp_path):
    line = np.arange(5.0)
    apart = np.abs(line[:, None] - line)
    off = np.hypot(apart, 4.0 * ((line == 2)[:, None] ^ (line == 2)))
    steps = [Checkpoint(series="s", name=f"s{step}", source=FolderSource(tmp_path), step=step) for step in range(5)]
    products = {name: 9.0**2 - (off if name < turned else apart) ** 2 / 2 for name in range(5)}
    path = audit_weights.Path(steps, {str(name): each for name, each in products.items()}, 1e-5)
    named = [each.message for each in audit_weights.outlying_steps(path) if each.message.startswith("only")]
    assert len(named) == (turned <= 2), named


def test_healthy_steps_beside_a_strange_one_are_not_accused_where_a_matrix_is_frozen(healthy, other_seed, tmp_path):
    for alone in (True, False):
        root = Path(shutil.copytree(healthy, tmp_path / str(alone)))
        frozen(root, other_seed if alone else None)
        if not alone:
            shutil.copy(at(other_seed, 60), at(root, 60))
        assert found_in(audit(StepFolders(root))) == {("out of line", (60,))}, alone


def test_healthy_steps_beside_a_strange_one_are_not_accused_where_biases_and_norms_are_frozen(root, other_seed):
    vectors = {name: value for name, value in load_file(at(root, 20)).items() if value.ndim == 1}
    for step in (60, 100):
        changed(root, step, lambda state: state | vectors)
    shutil.copy(at(other_seed, 60), at(root, 60))
    assert found_in(audit(StepFolders(root, [20, 60, 100]))) == {("out of line", (60,))}


def test_a_matrix_that_comes_from_several_steps_names_all_of_them(tmp_path):
    """All is on a straight way but one matrix: step 5 has that of 1, and 7 and 10 have that of 3."""
    line = np.arange(12.0)
    whole = np.abs(line[:, None] - line)
    line[[5, 7, 10]] = 1, 3, 3
    apart = np.abs(line[:, None] - line)
    source = FolderSource(tmp_path)
    steps = [Checkpoint(series="s", name=f"step{step}", source=source, step=step) for step in range(12)]
    products = {name: 20.0**2 - distance**2 / 2 for name, distance in {"v": whole, "w": apart}.items()}
    path = audit_weights.Path(steps, products, 1e-5)
    says = "hold the same w, which moved between: a part of another step's file?"
    assert [each.steps for each in audit_weights.outlying_steps(path) if says in each.message] == [(1, 5), (3, 7, 10)]
