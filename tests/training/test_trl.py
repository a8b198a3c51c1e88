"""TRL's trainer accepts the callback for transformers, and weights are measured with their adapters merged."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from lit_layers import records
from lit_layers.analyses import Lens
from lit_layers.data import GivenTexts, TextBatches
from lit_layers.integrations import EmergenceTrainerCallback
from tests.support.labelled_texts import labelled, saved_gpt2

# TRL takes seconds to import, and uses functions that transformers and peft warn about.
pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]

TEXTS = [text for text, _ in labelled(24)]


def test_supervised_fine_tuning_of_adapters_is_measured_and_does_not_change(tmp_path):
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    saved_gpt2(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.pad_token = tokenizer.eos_token
    held_out = TextBatches(GivenTexts(TEXTS[:1]), str(tmp_path / "model"))

    def trained(root: Path | None) -> torch.nn.Module:
        torch.manual_seed(0)
        arguments = SFTConfig(
            str(tmp_path / "hf"), max_steps=3, per_device_train_batch_size=4, learning_rate=0.05, report_to=[],
            use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no", max_length=24, seed=7,
        )  # fmt: skip
        lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        trainer = SFTTrainer(
            str(tmp_path / "model"),
            arguments,
            train_dataset=Dataset.from_dict({"text": TEXTS[1:]}),
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[EmergenceTrainerCallback([Lens(batches=held_out)], [0], root)] if root else [],
        )
        trainer.train()
        return trainer.model.eval()

    watched, alone = trained(tmp_path / "run"), trained(None).state_dict()
    assert all(torch.equal(value, alone[name]) for name, value in watched.state_dict().items())
    losses = {
        m.step: next(r.value for r in m.records if r.metric == "logit_lens_loss" and r.layer == 3)
        for m in records.read(tmp_path / "run" / "measurements.jsonl")
    }
    # The readout of the last layer is the model's output: its loss on the text follows from the logits.
    (batch,) = held_out
    with torch.no_grad():
        logits = watched.merge_and_unload()(**batch).logits[0, :-1].double()
    expected = torch.nn.functional.cross_entropy(logits, batch["input_ids"][0, 1:]).item()
    assert losses[3] == pytest.approx(expected, rel=1e-5)  # float32, and merged weights are sums in another order
    assert abs(losses[0] - losses[3]) > 1e-3, "training changed nothing"
