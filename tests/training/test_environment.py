"""Cluster plugins, the first rank, and the defaults of a Trainer."""

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

from lit_layers.errors import InputError
from lit_layers.training.trainer import cluster_plugins, is_first_rank, new_trainer


@pytest.fixture
def slurm(monkeypatch):
    for name, value in {"NTASKS": "2", "NTASKS_PER_NODE": "2", "JOB_NAME": "train", "JOB_ID": "7"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_under_slurm_the_job_script_requeues_and_not_lightning(slurm):
    (plugin,) = cluster_plugins(None)
    assert isinstance(plugin, SLURMEnvironment)
    assert not plugin.auto_requeue
    other = LightningEnvironment()
    assert [type(each) for each in cluster_plugins([other])] == [LightningEnvironment, SLURMEnvironment]


def test_unusable_options_of_a_slurm_job_are_reported(slurm, monkeypatch):
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    with pytest.raises(InputError, match="SLURM: You set `--ntasks=2`"):
        cluster_plugins(None)


def test_a_cluster_environment_of_the_user_stays(slurm):
    mine = SLURMEnvironment(auto_requeue=True)
    assert cluster_plugins([mine]) == [mine]


def test_outside_slurm_no_plugin_is_added(monkeypatch):
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    assert cluster_plugins(None) is None


RANKS = (
    ({}, True),
    ({"RANK": "0", "LOCAL_RANK": "0"}, True),
    ({"RANK": "4", "LOCAL_RANK": "0"}, False),  # torchrun: the first rank of another node
    ({"LOCAL_RANK": "1"}, False),  # started by Lightning itself
    ({"NODE_RANK": "1"}, False),
    ({"SLURM_PROCID": "3"}, False),
    ({"JSM_NAMESPACE_RANK": "2"}, False),  # LSF
    ({"JSM_NAMESPACE_RANK": "0"}, True),
)


def test_the_first_rank_is_known_from_the_environment(monkeypatch):
    for environment, is_first in RANKS:
        for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert is_first_rank() == is_first, environment


def test_a_trainer_logs_and_shows_nothing_by_default(tmp_path):
    trainer = new_trainer(max_steps=1, accelerator="cpu", default_root_dir=tmp_path)
    own = (ModelCheckpoint, ModelSummary, ProgressBar)
    assert not [each for each in trainer.callbacks if isinstance(each, own)]
    assert trainer.loggers == []
    assert trainer.log_every_n_steps == 10
