"""One defect is planted in a healthy series of seven steps. It must be found at its step, and nothing else."""

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
from tests.series.trained_series import EVEN, VOCABULARY, Training, extreme_trainings, healthy_trainings, series

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


def file(root: Path, step: int, name: str = "model.safetensors") -> Path:
    return root / f"step-{step:09d}" / name


def edit(root: Path, step: int, change: Callable[[State], State | None]) -> None:
    state = load_file(file(root, step))
    save_file(change(state) or state, file(root, step), metadata={"format": "pt"})


def configure(root: Path, step: int, **fields) -> None:
    config = json.loads(file(root, step, "config.json").read_text())
    file(root, step, "config.json").write_text(json.dumps(config | fields))


def swap_steps(root: Path, one: int, other: int) -> None:
    file(root, one, "").rename(root / "aside")
    file(root, other, "").rename(file(root, one, ""))
    (root / "aside").rename(file(root, other, ""))


def rounded(state: State) -> State:
    return {name: tensor.bfloat16() for name, tensor in state.items()}


def round_to_8_bits(state: State) -> State:
    """Return integers times one scale per tensor."""
    scales = {name: (tensor.abs().max() / 127).clamp(min=1e-12) for name, tensor in state.items()}
    return {name: (tensor / scales[name]).round() * scales[name] for name, tensor in state.items()}


def set_value(state: State, value: float) -> None:
    state[ATTENTION][1, 2] = value


def remove_bias(state: State) -> None:
    del state["transformer.ln_f.bias"]


def permute(state: State) -> None:
    state[WTE] = state[WTE][torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))].contiguous()


def flip_bit(root: Path, step: int, bit: int) -> None:
    """Flip one bit of one weight in the file."""
    content = bytearray(file(root, step).read_bytes())
    (header,) = struct.unpack("<Q", content[:8])
    begin = json.loads(content[8 : 8 + header])[ATTENTION]["data_offsets"][0]
    offset = 8 + header + begin + 4 * 7
    (word,) = struct.unpack("<I", content[offset : offset + 4])
    content[offset : offset + 4] = struct.pack("<I", word ^ (1 << bit))
    file(root, step).write_bytes(content)


def split_into_shards(root: Path) -> None:
    for folder in root.glob("step-*"):
        state = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        shards = {f"model-0000{number}-of-00002.safetensors": sorted(state)[number - 1 :: 2] for number in (1, 2)}
        for name, held in shards.items():
            save_file({key: state[key] for key in held}, folder / name, metadata={"format": "pt"})
        where = {key: name for name, held in shards.items() for key in held}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def copy_shard(root: Path) -> None:
    split_into_shards(root)
    name = "model-00001-of-00002.safetensors"
    shutil.copy(file(root, 40, name), file(root, 80, name))


def remove_shard(root: Path) -> None:
    split_into_shards(root)
    file(root, 60, "model-00001-of-00002.safetensors").unlink()


def write_optimizer_file(root: Path) -> None:
    state = {f"state.{number}.exp_avg": torch.randn(16, 16) for number in range(4)}
    save_file(state, file(root, 60))


def write_other_tokenizer(root: Path) -> None:
    words = {f"w{number}": (number + 1) % VOCABULARY for number in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(file(root, 60, "tokenizer.json")))


def write_settings(root: Path, odd: dict[int, dict], **usual) -> None:
    for step in EVEN:
        settings = {"eos_token": "w1", "tokenizer_class": "GPT2Tokenizer"} | usual | odd.get(step, {})
        file(root, step, "tokenizer_config.json").write_text(json.dumps(settings))


def flip_header_bit(root: Path) -> None:
    content = bytearray(file(root, 60).read_bytes())
    content[7] ^= 1 << 6  # the length of the header
    file(root, 60).write_bytes(content)


def link_to_itself(root: Path) -> None:
    shutil.rmtree(file(root, 60, ""))
    os.symlink("step-000000060", root / "step-000000060")


def write_trainer_states(root: Path) -> None:
    for step in EVEN:
        recorded = 80 if step == 60 else step
        file(root, step, "trainer_state.json").write_text(json.dumps({"global_step": recorded}))


def copy_tensor(root: Path, name: str, source: int, *steps: int) -> None:
    for step in steps:
        edit(root, step, lambda state: state.update({name: load_file(file(root, source))[name]}))


def freeze_matrix(root: Path, odd: Path | None = None) -> None:
    """Give one matrix the values of step 0 at every step. At step 60 it can come from the series `odd`."""
    for step in EVEN:
        source = file(odd, step) if odd is not None and step == 60 else file(root, 0)
        edit(root, step, lambda state, source=source: state.update({WTE: load_file(source)[WTE]}))


PLANTS: dict[str, tuple[Callable[[Path], object], str, tuple[int, ...]]] = {
    "exact duplicate": (lambda run: shutil.copy(file(run, 40), file(run, 60)), "identical weights", (40, 60)),
    "final step early": (lambda run: shutil.copy(file(run, 120), file(run, 60)), "equal to the final step", (60,)),
    "shard of another step": (copy_shard, "shared shard", (40, 80)),
    "a shard missing": (remove_shard, "other tensors", (60,)),
    "no weights": (lambda run: file(run, 60).unlink(), "no weights", (60,)),
    "optimizer file as weights": (write_optimizer_file, "other tensors", (60,)),
    "cut short": (lambda run: os.truncate(file(run, 60), 5000), "damaged", (60,)),
    "header bit": (flip_header_bit, "damaged", (60,)),
    "no bytes": (lambda run: file(run, 60).write_bytes(b""), "damaged", (60,)),
    "only zero bytes": (lambda run: file(run, 60).write_bytes(bytes(file(run, 60).stat().st_size)), "damaged", (60,)),
    "config of another family": (
        lambda run: configure(run, 60, model_type="llama", architectures=["LlamaForCausalLM"]), "other config", (60,)),
    "a tensor missing": (lambda run: edit(run, 60, remove_bias), "other tensors", (60,)),
    "NaN": (lambda run: edit(run, 60, lambda s: set_value(s, float("nan"))), "not finite", (60,)),
    "all zeros": (lambda run: edit(run, 60, lambda s: {k: v * 0 for k, v in s.items()}), "zero weights", (60,)),
    "a norm's weights 0": (lambda run: edit(run, 60, lambda s: {**s, NORM: s[NORM] * 0}), "zero weights", (60,)),
    "biases of another step": (
        lambda run: edit(run, 60, lambda s: s | {k: v for k, v in load_file(file(run, 20)).items() if "bias" in k}),
        "out of line", (20, 60)),
    "steps swapped": (lambda run: swap_steps(run, 40, 80), "swapped", (40, 80)),
    "neighbours swapped": (lambda run: swap_steps(run, 60, 80), "swapped", (60, 80)),
    "far steps swapped": (lambda run: swap_steps(run, 20, 100), "swapped", (20, 100)),
    "a step swapped with the last": (lambda run: swap_steps(run, 40, 120), "swapped", (40, 120)),
    "other tokenizer": (write_other_tokenizer, "other tokenizer", (60,)),
    "another end of text": (lambda run: write_settings(run, {60: {"eos_token": "w2"}}), "other tokenizer", (60,)),
    "tokenizer settings that are no JSON": (
        lambda run: (write_settings(run, {}), file(run, 60, "tokenizer_config.json").write_text('{"eos_token')),
        "damaged", (60,)),
    "rows permuted": (lambda run: edit(run, 60, permute), "out of line", (60,)),
    "rows of the last step permuted": (lambda run: edit(run, 120, permute), "out of line", (120,)),
    "a matrix of another step": (
        lambda run: edit(run, 60, lambda s: s.update({ATTENTION: load_file(file(run, 20))[ATTENTION]})),
        "out of line", (20, 60)),
    "a matrix of another step, twice": (
        lambda run: copy_tensor(run, ATTENTION, 20, 60, 100), "out of line", (20, 60, 100)),
    "a matrix of another step at the last but one": (
        lambda run: copy_tensor(run, ATTENTION, 40, 100), "out of line", (40, 100)),
    "rows of the last step but one permuted": (lambda run: edit(run, 100, permute), "out of line", (100,)),
    "another step in bfloat16": (
        lambda run: save_file(rounded(load_file(file(run, 20))), file(run, 60)), "other precision", (60,)),
    "another step in bfloat16, stored in float32": (
        lambda run: save_file({k: v.float() for k, v in rounded(load_file(file(run, 20))).items()}, file(run, 60)),
        "other precision", (60,)),
    "saved again at another step": (
        lambda run: save_file(dict(reversed(load_file(file(run, 40)).items())), file(run, 60), metadata={"again": "1"}),
        "identical weights", (40, 60)),
    "one step in bfloat16": (lambda run: edit(run, 60, rounded), "other precision", (60,)),
    "heads 2 to 4": (lambda run: configure(run, 60, n_head=4), "other config", (60,)),
    "epsilon and activation": (
        lambda run: configure(run, 60, layer_norm_epsilon=1e-4, activation_function="relu"), "other config", (60,)),
    "rounded to 8 bits": (lambda run: edit(run, 60, round_to_8_bits), "other precision", (60,)),
    "one bit": (lambda run: flip_bit(run, 60, 30), "value out of range", (60,)),
    "removed folder": (lambda run: shutil.rmtree(file(run, 60, "")), "gap", (60,)),
    "symbolic link to itself": (link_to_itself, "gap", (60,)),
    "count of another step": (write_trainer_states, "other step", (60,)),
}  # fmt: skip


def suspect_findings(verdicts: Audit) -> set[tuple[str, tuple[int, ...]]]:
    return {(finding.kind, finding.steps) for finding in verdicts.findings if not finding.note}


KINDS: dict[str, list[str]] = {}
for name, (_, kind, _) in PLANTS.items():
    KINDS.setdefault(kind, []).append(name)
MOST = 2  # defects of each kind in the quick tier


def expect_found(names: list[str], healthy: Path, folder: Path) -> None:
    for number, name in enumerate(names):
        root = Path(shutil.copytree(healthy, folder / str(number)))
        plant, kind, steps = PLANTS[name]
        plant(root)
        found = suspect_findings(audit(StepFolders(root)))
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


def test_a_truncated_file_is_not_a_reference_for_the_other_step(root):
    """A training that removes old checkpoints and was killed while it wrote the last one leaves such files."""
    os.truncate(file(root, 80), file(root, 80).stat().st_size // 2)
    assert suspect_findings(audit(StepFolders(root, [60, 80]))) == {("damaged", (80,))}


def test_a_second_audit_reads_no_weights(root, monkeypatch):
    first = audit(StepFolders(root))
    for folder in root.glob("step-*"):
        (folder / "model.safetensors").touch()  # files are read again and have the same content
    assert audit(StepFolders(root)) == first
    monkeypatch.setattr("lit_layers.series.auditing.fingerprint", None)
    monkeypatch.setattr("lit_layers.series.checkpoint_sources.content_hash", None)
    assert audit(StepFolders(root)) == first


def test_an_exchange_of_the_last_two_steps_is_not_reported(root):
    swap_steps(root, 100, 120)  # an average of checkpoints at the end would look the same
    steps = StepFolders(root)
    found = audit(steps)
    assert suspect_findings(found) == set()
    assert {found.verdict(one) for one in steps} == {"clean (level: weights)"}


def test_each_checkpoint_has_its_level_and_an_audit_has_the_lowest(root, monkeypatch):
    memory, steps = Memory(root), StepFolders(root)
    audit(StepFolders(root, list(EVEN[:2])), memory=memory)
    monkeypatch.setattr(FolderSource, "is_here", False)  # as on a Hub, where two steps were read when they were cached
    found = audit(steps, memory=memory)
    assert found.level == "listing"
    assert found.levels == {one.name: "weights" if one.step in EVEN[:2] else "listing" for one in steps}
    assert found.verdict(steps.checkpoints[-1]) == "clean (level: listing)"
    assert found.verdict(steps.checkpoints[0]).startswith("clean (level: weights)")


def test_a_defect_that_no_check_finds_is_listed_as_unseen(root):
    edit(root, 60, lambda state: {name: 1.1 * tensor for name, tensor in state.items()})
    found = audit(StepFolders(root))
    assert (found.level, suspect_findings(found)) == ("weights", set())
    assert "scaled by one factor up to 2" in found.to_dict()["unseen"]


def test_a_lasting_change_is_a_note_and_a_setting_without_effect_is_not_reported(root):
    for step in (100, 120):
        configure(root, step, n_positions=32)
    found = audit(StepFolders(root))
    assert [(finding.kind, finding.steps, finding.note) for finding in found.findings] == [
        ("other config", (100, 120), True)
    ]
    for step in (20, 40):
        configure(root, step, transformers_version="4.0.0", use_cache=False, torch_dtype="float16")
    assert len(audit(StepFolders(root)).findings) == 1


def test_tokenizer_settings_that_change_no_token_are_not_reported(root):
    same = {"name_or_path": "elsewhere", "eos_token": {"content": "w1", "lstrip": False}, "sep_token": None}
    write_settings(root, {60: same | {"tokenizer_class": "GPT2TokenizerFast"}})
    assert audit(StepFolders(root)).findings == ()


HEALTHY = [*healthy_trainings(), *extreme_trainings()]


def expect_clean(tmp_path: Path, number: int) -> None:
    found = audit(StepFolders(series(tmp_path / str(number), HEALTHY[number])))
    assert (found.level, suspect_findings(found)) == ("weights", set()), HEALTHY[number]


def test_healthy_series_have_no_findings(tmp_path):
    for number in (6, -1):
        expect_clean(tmp_path, number)


@pytest.mark.soak
def test_every_healthy_series_has_no_findings(tmp_path):
    for number in range(len(HEALTHY)):
        expect_clean(tmp_path, number)


def test_the_smaller_part_of_a_series_of_two_trainings_is_suspect(healthy, other_seed, tmp_path):
    for step, suspects in ((60, (0, 20, 40)), (80, (80, 100, 120))):
        root = Path(shutil.copytree(healthy, tmp_path / str(step)))
        for later in EVEN[EVEN.index(step) :]:
            shutil.copy(file(other_seed, later), file(root, later))
        assert suspect_findings(audit(StepFolders(root))) == {("out of line", suspects)}, step


def test_a_step_of_another_seed_and_reordered_rows_are_found_at_every_step(healthy, other_seed, tmp_path):
    for number, step in enumerate((20, 80, 20, 120)):
        root = Path(shutil.copytree(healthy, tmp_path / str(number)))
        if number < 2:
            edit(root, step, permute)
        else:
            shutil.copy(file(other_seed, step), file(root, step))
        assert suspect_findings(audit(StepFolders(root))) == {("out of line", (step,))}, number


def random_series(origins: str, numbers: Sequence[int], speed: float = 0.1) -> audit_weights.Path:
    """Return a series whose steps belong to the trainings that `origins` names.

    Per step, weights drift by `speed` times their norm.
    """
    source, generator = FolderSource(Path()), torch.Generator().manual_seed(0)
    steps = [Checkpoint(series="s", name=f"s{step}", source=source, step=step) for step in numbers]
    at_first = {one: torch.randn(4, 32, 32, generator=generator) for one in sorted({*origins})}
    drifts = {one: torch.randn(4, 32, 32, generator=generator) for one in at_first}
    prints = {}
    for one, origin in zip(steps, origins, strict=True):
        weights = at_first[origin] + speed * (one.step or 0) * drifts[origin]
        prints[one.name] = fingerprint((f"w{index}", matrix) for index, matrix in enumerate(weights))
    return audit_weights.Path.make(steps, prints)


MIXED = {
    "AAABBBBB": (0, 1, 2),
    "AAAAAABB": (6, 7),
    "AAAABBBB": tuple(range(8)),  # equally many steps of both trainings
    "AABBBCCC": tuple(range(8)),
    "AAABBCCCC": (0, 1, 2, 3, 4),
    "AABABAAA": (2, 4),
    "ABABABAA": (1, 3, 5),
    "AAAAAAAA": (),
}


def test_mixed_trainings_are_separated():
    for origins, suspects in MIXED.items():
        found = [*audit_weights.outlying_steps(random_series(origins, range(len(origins))))]
        assert {step for each in found for step in each.steps} == {*suspects}, origins


def test_weights_that_lose_all_similarity_in_a_long_gap_are_not_another_training():
    numbers = (0, 1, 2, 4, 8, 400, 402, 404, 406)
    assert [*audit_weights.outlying_steps(random_series("A" * 9, numbers, speed=0.03))] == []
    assert [*audit_weights.outlying_steps(random_series("AAAAABBBB", numbers, speed=0.03))] == []  # undecidable
    (found,) = audit_weights.outlying_steps(random_series("AAAAAABBB", numbers, speed=0.03))
    assert {6, 7, 8} <= {numbers.index(step) for step in found.steps}


def test_other_defects_next_to_exchanged_steps_are_also_found(root):
    copy_tensor(root, WTE, 20, 100)
    swap_steps(root, 40, 80)
    assert suspect_findings(audit(StepFolders(root))) == {("out of line", (20, 100)), ("swapped", (40, 80))}


def test_healthy_steps_next_to_a_foreign_one_and_a_copy_are_not_suspect(root, other_seed):
    shutil.copy(file(root, 60), file(root, 80))
    shutil.copy(file(other_seed, 40), file(root, 40))
    assert suspect_findings(audit(StepFolders(root))) == {("identical weights", (60, 80)), ("out of line", (40,))}


def test_no_healthy_step_is_suspect_after_two_exchanges(healthy, tmp_path):
    for exchanges in (((0, 80), (40, 60)), ((20, 80), (60, 100))):
        root = Path(shutil.copytree(healthy, tmp_path / str(exchanges)))
        for one, other in exchanges:
            swap_steps(root, one, other)
        found = suspect_findings(audit(StepFolders(root)))
        assert found == {("out of line", ())}, "something is wrong, and nobody can say where"


def test_a_truncated_tokenizer_is_not_a_reference_for_the_other_step(root):
    whole = file(root, 60, "tokenizer.json").read_text()
    for odd in (60, 80):
        file(root, odd, "tokenizer.json").write_text('{"version": "1.0", "trunc')
        assert suspect_findings(audit(StepFolders(root, [60, 80]))) == {("damaged", (odd,))}
        file(root, odd, "tokenizer.json").write_text(whole)
    for step in (60, 80):
        file(root, step, "tokenizer.json").write_text(f'{{"version": "{step}.0"}}')
    assert suspect_findings(audit(StepFolders(root, [60, 80]))) == {("other tokenizer", (60, 80))}


def test_all_steps_are_named_if_both_halves_have_equally_many(root):
    """Which number of heads is correct is unknown. A step with a third number is wrong in any case."""
    for steps in ((60, 80), EVEN[3:]):
        for index, step in enumerate(steps):
            configure(root, step, n_head=(4, 2, 2, 4)[index])
        found = audit(StepFolders(root, steps))
        assert suspect_findings(found) == {("other config", steps)}
        assert found.findings[0].message.endswith("or those are wrong: as many steps have one as the other")
    configure(root, 0, n_head=8)
    assert suspect_findings(audit(StepFolders(root, (0, *steps)))) == {("other config", (0,)), ("other config", steps)}


def test_the_initial_model_of_a_training_may_have_another_precision(root):
    """A training in bfloat16 starts from a model in float32: neither of two steps is suspect."""
    steps = EVEN[3:]
    for step in steps[1:]:
        edit(root, step, rounded)
    for chosen in (steps[:2], steps):
        found = audit(StepFolders(root, chosen))
        assert suspect_findings(found) == set()
        assert [(each.kind, each.steps, each.note) for each in found.findings] == [("other precision", steps[:1], True)]


def test_each_step_of_three_precisions_is_reported_with_its_own(root):
    """One of float16 and bfloat16 is wrong. The first step in float32 may be the initial model."""
    first, *others = EVEN[3:6]
    for step, dtype in zip(others, (torch.float16, torch.bfloat16), strict=True):
        edit(root, step, lambda state, dtype=dtype: {name: value.to(dtype) for name, value in state.items()})
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


def test_no_step_is_suspect_if_another_exchange_explains_a_short_series_equally_well(root):
    swap_steps(root, 20, 60)
    found = audit(StepFolders(root, EVEN[:5]))
    assert suspect_findings(found) == {("swapped", ())}
    (each,) = found.findings
    assert all(pair in each.message for pair in ("step 20 and step 60", "step 0 and step 80"))


def test_the_one_of_the_last_two_steps_with_reordered_rows_is_suspect(tmp_path):
    few = series(tmp_path / "few", Training(steps=(0, 20, 100, 120)))
    for step in (100, 120):
        root = Path(shutil.copytree(few, tmp_path / str(step)))
        edit(root, step, permute)
        assert suspect_findings(audit(StepFolders(root))) - {("gap", (40, 60, 80))} == {("out of line", (step,))}


def test_both_last_steps_are_named_if_each_may_have_the_reordered_rows(tmp_path):
    """Three tensors move on a straight line.

    The tensor w of the last step is equally far from both steps before it, which are equally far from each other.
    """
    line = np.array([0.0, 1.0, 2.0, 2.1])
    distances = np.abs(line[:, None] - line)
    moved = distances.copy()
    moved[1, 3] = moved[3, 1] = 1.0
    moved[2, 3] = moved[3, 2] = 1.0
    steps = [Checkpoint(series="s", name=f"s{step}", source=FolderSource(tmp_path), step=step) for step in range(4)]
    per_tensor = dict.fromkeys("abc", distances) | {"w": moved}
    products = {name: 5.0**2 - distance**2 / 2 for name, distance in per_tensor.items()}
    products["bias"] = np.zeros((4, 4))  # a tensor that stays 0 has no path
    path = audit_weights.Path(steps, products, 1e-5)
    (found,) = audit_weights.outlying_steps(path)
    assert (found.steps, found.note) == ((2, 3), False)
    assert found.message == "only w jumps at step 2 or step 3: rows in another order?"


@pytest.mark.parametrize("num_moved", [1, 2, 3])
def test_tensors_are_named_only_if_at_most_half_of_them_leave_the_path(num_moved, tmp_path):
    line = np.arange(5.0)
    distances = np.abs(line[:, None] - line)
    off = np.hypot(distances, 4.0 * ((line == 2)[:, None] ^ (line == 2)))
    steps = [Checkpoint(series="s", name=f"s{step}", source=FolderSource(tmp_path), step=step) for step in range(5)]
    products = {name: 9.0**2 - (off if name < num_moved else distances) ** 2 / 2 for name in range(5)}
    path = audit_weights.Path(steps, {str(name): each for name, each in products.items()}, 1e-5)
    named = [each.message for each in audit_weights.outlying_steps(path) if each.message.startswith("only")]
    assert len(named) == (num_moved <= 2), named


def test_healthy_steps_next_to_a_foreign_one_are_not_suspect_if_a_matrix_is_frozen(healthy, other_seed, tmp_path):
    for foreign_matrix in (True, False):
        root = Path(shutil.copytree(healthy, tmp_path / str(foreign_matrix)))
        freeze_matrix(root, other_seed if foreign_matrix else None)
        if not foreign_matrix:
            shutil.copy(file(other_seed, 60), file(root, 60))
        assert suspect_findings(audit(StepFolders(root))) == {("out of line", (60,))}, foreign_matrix


def test_healthy_steps_next_to_a_foreign_one_are_not_suspect_if_biases_and_norms_are_frozen(root, other_seed):
    vectors = {name: value for name, value in load_file(file(root, 20)).items() if value.ndim == 1}
    for step in (60, 100):
        edit(root, step, lambda state: state | vectors)
    shutil.copy(file(other_seed, 60), file(root, 60))
    assert suspect_findings(audit(StepFolders(root, [20, 60, 100]))) == {("out of line", (60,))}


def test_a_matrix_that_is_copied_from_several_steps_names_all_of_them(tmp_path):
    """All tensors but one matrix are on a straight line: step 5 has that of step 1, steps 7 and 10 that of step 3."""
    line = np.arange(12.0)
    straight = np.abs(line[:, None] - line)
    line[[5, 7, 10]] = 1, 3, 3
    distances = np.abs(line[:, None] - line)
    source = FolderSource(tmp_path)
    steps = [Checkpoint(series="s", name=f"step{step}", source=source, step=step) for step in range(12)]
    products = {name: 20.0**2 - distance**2 / 2 for name, distance in {"v": straight, "w": distances}.items()}
    path = audit_weights.Path(steps, products, 1e-5)
    says = "hold the same w, which moved between: a part of another step's file?"
    assert [each.steps for each in audit_weights.outlying_steps(path) if says in each.message] == [(1, 5), (3, 7, 10)]
