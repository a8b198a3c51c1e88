import os

import pytest

from lit_layers.training.run_folder import saved_steps, step_folder, write_folder


def test_an_interrupted_save_leaves_no_folder(tmp_path):
    def fill(folder):
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(step_folder(tmp_path, 1), fill)
    assert saved_steps(tmp_path) == []
    write_folder(step_folder(tmp_path, 1), lambda folder: (folder / "whole").write_text("y"))
    assert saved_steps(tmp_path) == [1]
    assert [path.name for path in step_folder(tmp_path, 1).iterdir()] == ["whole"]


def test_an_older_folder_of_the_step_is_replaced_as_a_whole(tmp_path):
    for name in ("old", "new"):
        write_folder(step_folder(tmp_path, 3), lambda folder, name=name: (folder / name).touch())
    assert os.listdir(tmp_path) == ["step-000000003"]
    assert os.listdir(step_folder(tmp_path, 3)) == ["new"]


def test_other_folders_do_not_count_as_steps(tmp_path):
    for name in ("step-1", "step-abc", ".tmp-step-000000001", "wandb"):
        (tmp_path / name).mkdir()
    assert saved_steps(tmp_path) == []
