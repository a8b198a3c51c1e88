"""Measuring block by block gives the records of measuring the whole model, however often it is interrupted.

Up to rounding: the whole model's weights lie elsewhere in memory, here at odd offsets, than those read block by block
(`tests.support.rounding`). Two walks over the blocks have the same weights at the same places and are compared by `==`.
"""

from dataclasses import dataclass

import pytest
import torch

from lit_layers.analyses import Coupling, Lens, PooledStates, Representation, StateGeometry, Trajectory
from lit_layers.analyses.blockwise import LayerwiseAnalysis, LayerwiseRun, TensorFolder, layerwise, walk
from lit_layers.analyses.depth_coupling import _Run
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.models import load
from lit_layers.models.shard_files import ShardFiles
from lit_layers.models.streaming import StreamedModel
from lit_layers.models.view import BlockCall, LayeredModel
from lit_layers.records import Record
from tests.support.listed_batches import Listed
from tests.support.rounding import close_records, move_
from tests.support.saved_models import saved, saved_vit
from tests.support.tiny_models import FAMILIES, LAYERS, tiny_batch

IMAGES = ("vit", "vit_average", "vit_headless")
TEXT = [name for name in FAMILIES if name not in IMAGES]


def batches(name: str) -> Listed:
    """Two of different sizes, padded on either side where they are text."""
    sides = (None, None) if name in IMAGES else ("left", "right")
    first = tiny_batch(name, batch=3, tokens=9, padding=sides[0], seed=1)
    return Listed(first, tiny_batch(name, batch=2, tokens=7, padding=sides[1], seed=2))


def three(data: Batches) -> list[LayerwiseAnalysis]:
    return [Trajectory(batches=data), Representation(batches=data), Coupling(batches=data, k=(0.1, 8), num_prompts=4)]


def opened(folder, dtype=torch.float32) -> StreamedModel:
    return StreamedModel(ShardFiles(folder), device=torch.device("cpu"), dtype=dtype)


def expected(folder, analyses, dtype=torch.float32) -> dict[str, list[Record]]:
    whole = LayeredModel(move_(load(folder, dtype=dtype)))
    return {analysis.name: list(analysis.run(whole)) for analysis in analyses}


def found(folder, analyses, work, dtype=torch.float32) -> dict[str, list[Record]]:
    model = opened(folder, dtype)
    try:
        results = walk(model, analyses, work)
    finally:
        model.close()
    assert {name: result.error for name, result in results.items()} == dict.fromkeys(results)
    return {name: result.records for name, result in results.items()}


def assert_close(records: dict[str, list[Record]], whole: dict[str, list[Record]], dtype=torch.float32) -> None:
    assert records.keys() == whole.keys()
    for name, expected in whole.items():
        close_records(records[name], expected, dtype)


# Norms before and after, rotary positions, windows, one norm for two branches, images; states of all: `test_streaming`.
QUICK = ("gemma2", "bert", "vit")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.soak) for name in [*TEXT, "vit"]]
)
def test_every_family_gives_the_records_of_the_whole_model(tmp_path, name):
    model = tmp_path / "model"
    saved_vit(model) if name == "vit" else saved(model, name)
    analyses = three(batches(name))
    assert_close(found(model, analyses, tmp_path / "work"), expected(model, analyses))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.soak), torch.float64])
def test_every_option_gives_the_records_of_the_whole_model(tmp_path, dtype):
    saved(tmp_path / "model", "gpt2")
    data = batches("gpt2")
    analyses = [
        Trajectory(batches=data, preset="paper"),
        Trajectory(name="last", batches=data, tokens="last", drop_first=0),
        Representation(batches=data, preset="released_code"),
        StateGeometry(batches=data, num_halves=2),
        PooledStates(batches=data, num_halves=2),
        Representation(name="rankme", batches=data, rankme=True, states="hf", alpha=2.0),
        Coupling(batches=data, k=(5,), states="hf", sign="absolute", skip_last=True, token="first"),
        Coupling(name="wide", batches=data, k=(32,), num_singular_values=40, num_prompts=3),
    ]
    records = found(tmp_path / "model", analyses, tmp_path / "work", dtype)
    assert_close(records, expected(tmp_path / "model", analyses, dtype), dtype)


def test_ties_are_counted_as_for_the_whole_model(tmp_path):
    network = saved(tmp_path / "model", "gpt2")
    torch.nn.init.zeros_(network.transformer.h[1].mlp.c_proj.weight)
    torch.nn.init.zeros_(network.transformer.h[1].attn.c_proj.weight[:, 3:])  # of rank 3: the sixth and seventh are 0
    network.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    analyses = [Coupling(batches=Listed(tiny_batch("gpt2", batch=2)), k=(6,))]
    records = found(tmp_path / "model", analyses, tmp_path / "work")
    assert_close(records, expected(tmp_path / "model", analyses))
    values = {record.metric: record.value for record in records["coupling"]}
    assert values["num_tied"] == 2
    assert values["min_gap"] == 0


def test_a_text_meets_each_block_once_in_whatever_batches_analyses_cut_it(tmp_path):
    """Two passes over the blocks, as coupling needs them; the second is for its texts alone."""
    saved(tmp_path / "model", "gpt2")
    batch = tiny_batch("gpt2", batch=5, tokens=9, padding="left", seed=1)
    parts = {size: zip(*(values.split(size) for values in batch.values()), strict=True) for size in (2, 3)}
    twos, threes = (Listed(*(dict(zip(batch, each, strict=True)) for each in part)) for part in parts.values())
    analyses = [
        Coupling(batches=Listed(batch), k=(8,), num_prompts=4),
        Trajectory(batches=twos),
        Representation(batches=threes),
    ]
    model, texts = opened(tmp_path / "model"), [0] * LAYERS
    original = BlockCall.__call__

    def counted(call, hidden):
        if call.alignment is None:  # one with padding before its texts calls the like without
            texts[list(model.blocks).index(call.module)] += len(hidden)
        return original(call, hidden)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BlockCall, "__call__", counted)
        patched.setattr(_Run, "_jacobian", lambda run, visit: torch.eye(32).expand(len(visit.before), 32, 32))
        walk(model, analyses, tmp_path / "counted")
    model.close()
    assert texts == [5 + 4] * LAYERS
    assert_close(found(tmp_path / "model", analyses, tmp_path / "work"), expected(tmp_path / "model", analyses))


class Killed(BaseException):
    """The end of a process, as far as a test may have it."""


@pytest.mark.parametrize("every", [LAYERS + 1, pytest.param(1, marks=pytest.mark.soak)])  # once in either pass
def test_an_interrupted_measurement_goes_on_behind_the_last_finished_block(tmp_path, every):
    saved(tmp_path / "model", "llama")
    analyses = three(batches("llama"))
    uninterrupted = found(tmp_path / "model", analyses, tmp_path / "uninterrupted")
    assert_close(uninterrupted, expected(tmp_path / "model", analyses))
    for stop in range(every, 2 * LAYERS + 1, every):
        loads = []

        def killed(done, total, what, stop=stop):
            if done == stop - 1 and what:  # while that block is next
                raise Killed

        for progress in (killed, None):
            model = opened(tmp_path / "model")
            try:
                results = walk(model, analyses, tmp_path / f"work{stop}", progress)
            except Killed:
                results = {}
            finally:
                loads.append(model.num_loads)
                model.close()
        assert loads == [stop - 1, 2 * LAYERS - (stop - 1)]
        assert {name: result.records for name, result in results.items()} == uninterrupted, stop


def test_a_kill_in_the_middle_of_a_block_repeats_that_block_alone(tmp_path, monkeypatch):
    saved(tmp_path / "model", "gpt2")
    analyses = three(batches("gpt2"))
    model, uninterrupted = opened(tmp_path / "model"), found(tmp_path / "model", analyses, tmp_path / "uninterrupted")
    begin, visited = Coupling.begin, []

    def beginning(self, model, store=None):
        run = begin(self, model, store)
        visit = run.visit

        def visiting(one):
            visited.append((one.layer, one.batch))
            if len(visited) == 4:
                raise Killed
            visit(one)

        run.visit = visiting
        return run

    monkeypatch.setattr(Coupling, "begin", beginning)
    with pytest.raises(Killed):
        walk(model, analyses, tmp_path / "work")
    assert visited[-1] == (2, 1)
    assert found(tmp_path / "model", analyses, tmp_path / "work") == uninterrupted
    assert visited.count((1, 0)) == visited.count((1, 1)) == 1
    assert visited.count((2, 0)) == visited.count((2, 1)) == 2
    model.close()


def test_one_pass_is_enough_without_coupling(tmp_path):
    saved(tmp_path / "model", "gpt2")
    data = batches("gpt2")
    model = opened(tmp_path / "model")
    walk(model, [Trajectory(batches=data), Representation(batches=data)], tmp_path / "work")
    assert model.num_loads == LAYERS
    model.close()


def test_analyses_of_the_same_batches_share_the_calls_of_the_blocks(tmp_path):
    saved(tmp_path / "model", "gpt2")
    model = opened(tmp_path / "model")
    calls = []
    model.blocks[0].register_forward_hook(lambda *a: calls.append(1))
    walk(model, [Trajectory(batches=batches("gpt2")), Representation(batches=batches("gpt2"))], tmp_path / "work")
    assert len(calls) == 4  # per batch once on the way in and once for its states
    model.close()


@dataclass(kw_only=True)
class FailsAtTwo(LayerwiseAnalysis):
    batches: Batches
    name: str = "fails"

    def begin(self, model, store=None):
        class Run(LayerwiseRun):
            def start(self, batch, hidden, mask):
                pass

            def visit(self, visit):
                if visit.layer == 2:
                    raise ArithmeticError("no value\nhere")

            def records(self):
                yield Record(metric="none", value=0.0)

        return Run()


def test_an_analysis_that_fails_is_left_out_and_the_others_go_on(tmp_path):
    saved(tmp_path / "model", "gpt2")
    data = batches("gpt2")
    model, analyses = opened(tmp_path / "model"), [FailsAtTwo(batches=data), Trajectory(batches=data)]
    results = walk(model, analyses, tmp_path / "work")
    model.close()
    assert results["fails"].error == "ArithmeticError: no value here"
    assert results["fails"].records == []
    assert_close({"trajectory": results["trajectory"].records}, expected(tmp_path / "model", analyses[1:]))


def test_what_needs_the_whole_model_is_refused_by_name(tmp_path):
    data = batches("gpt2")
    with pytest.raises(
        InputError, match=r"^lens: Lens needs the whole model and cannot be streamed; those that can are T"
    ):
        layerwise([Trajectory(batches=data), Lens(batches=data)])


def test_empty_data_is_refused(tmp_path):
    saved(tmp_path / "model", "gpt2")
    model = opened(tmp_path / "model")
    with pytest.raises(InputError, match="trajectory: the data holds no prompts"):
        walk(model, [Trajectory(batches=Listed())], tmp_path / "work")
    model.close()


def test_a_folder_of_tensors_holds_what_was_put_there_last(tmp_path):
    folder = TensorFolder(tmp_path / "tensors")
    for name, value in (("0/1/left", 1.5), ("0/2/left", 2.5), ("0/1/left", 3.5)):
        folder[name] = torch.full((2,), value)
    assert {name: folder[name].tolist() for name in ("0/1/left", "0/2/left")} == {
        "0/1/left": [3.5, 3.5],
        "0/2/left": [2.5, 2.5],
    }


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    saved(tmp_path / "model", "gpt2")
    model = opened(tmp_path / "model")
    with pytest.raises(InputError, match="^cannot write .*file.*: "):
        walk(model, three(batches("gpt2")), tmp_path / "file")
    model.close()
