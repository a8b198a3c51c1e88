"""Plant one fault at a time in the package, run the tests of its room, and say whether one of them fails.

    python -m tests.support.mutants [--tier quick|ci|nightly] [--only NUMBER,...] [--out FILE]

A mutant replaces one piece of code. A failing test of its room, or a failing collection, kills it. Files are restored
after each mutant; the checkout must have no other changes in the package.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).parents[2]
TIERS = {"quick": "not soak and not nightly", "ci": "not nightly", "nightly": "nightly or soak or not soak"}
LIMIT = 1800  # seconds; a mutant that hangs the tests is killed


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    tests: str  # paths below tests/, the nearest first


MUTANTS = (
    Mutant(
        "functional/trajectory.py",
        "scores = (number / distances).clamp(min=1.0)",
        "scores = (number / distances).clamp(max=1.0)",
        "functional/test_trajectory.py",
    ),
    Mutant(
        "functional/trajectory.py",
        "zero[1:] | zero[:-1]",
        "zero[1:]",
        "functional/test_trajectory.py",
    ),
    Mutant(
        "functional/trajectory.py",
        "(len(values) - correction)",
        "len(values)",
        "functional/test_trajectory.py",
    ),
    Mutant(
        "functional/entropy.py",
        "/ (1 - alpha)",
        "/ (alpha - 1)",
        "functional/test_entropy.py",
    ),
    Mutant(
        "functional/entropy.py",
        "num_rows - 1 if center else num_rows",
        "ranks = [num_rows if center else num_rows",
        "functional/test_entropy.py functional",
    ),
    Mutant(
        "functional/coupling.py",
        "math.floor(k * dim + 1e-9)",
        "math.floor(k * dim)",
        "functional/test_coupling.py",
    ),
    Mutant(
        "functional/coupling.py",
        "square = square - 2 * math.sqrt(2 / math.pi)",
        "square = square - math.sqrt(2 / math.pi)",
        "functional/test_coupling.py",
    ),
    Mutant(
        "functional/coupling.py",
        "distance == apart",
        "distance <= apart",
        "functional/test_coupling.py",
    ),
    Mutant(
        "functional/geometry.py",
        "(4 * _EPS if unit else 0.0)",
        "0.0",
        "functional/test_geometry.py functional",
    ),
    Mutant(
        "functional/geometry.py",
        "return 2 * torch.atan2(apart, together)",
        "return torch.atan2(apart, together)",
        "functional/test_geometry.py",
    ),
    Mutant(
        "functional/geometry.py",
        "last = (count - 1).clamp(min=0)",
        "last = count.clamp(min=0)",
        "functional/test_pooling.py functional/test_geometry.py",
    ),
    Mutant(
        "functional/geometry.py",
        "(scale[..., None] * scale[..., None, :])",
        "(scale[..., None] * scale[..., None, :]).sqrt()",
        "functional",
    ),
    Mutant(
        "functional/curves.py",
        "values >= (1 - tolerance) * last - slack",
        "values >= (1 - tolerance) * last + slack",
        "functional/test_curves.py",
    ),
    Mutant(
        "functional/correlation.py",
        "df = len(x) - len(numbers) - 1",
        "df = len(x) - len(numbers) - 2",
        "functional/test_correlation.py functional",
    ),
    Mutant(
        "functional/block_schedules.py",
        "return range(start + 2, num_blocks - start + 1)",
        "return range(start + 1, num_blocks - start + 1)",
        "functional/test_block_schedules.py",
    ),
    Mutant(
        "functional/emergence/curve_times.py",
        "off > EDGE",
        "off >= 2 * EDGE",
        "functional/test_emergence.py",
    ),
    Mutant(
        "functional/jacobian/block_call.py",
        "scale = 1 / math.sqrt(query.shape[-1]) if scale is None",
        "scale = 1 / query.shape[-1] if scale is None",
        "functional/test_jacobian.py models/test_jacobians_of_families.py",
    ),
    Mutant(
        "models/view.py",
        "(side // vision.patch_side(self.model)) ** 2",
        "(side // vision.patch_side(self.model) + 1) ** 2",
        "models/test_view.py models/test_pictures_end_to_end.py models",
    ),
    Mutant(
        "models/view.py",
        "torch.stack(outputs).mean(0)",
        "torch.stack(outputs).sum(0)",
        "models/test_view.py models/test_shared_prefixes.py",
    ),
    Mutant(
        "models/view.py",
        "device=ids.device).expand_as(ids) + first)",
        "device=ids.device).expand_as(ids))",
        "models/test_families.py models/test_view.py",
    ),
    Mutant(
        "models/view.py",
        "rows = self.hidden[-1][index][None]",
        "rows = self.hidden[-2][index][None]",
        "models/test_logits_when_asked.py models",
    ),
    Mutant(
        "models/view.py",
        "return logits[..., : self.vocab_size]",
        "return logits",
        "models/test_logits_when_asked.py models",
    ),
    Mutant(
        "models/block_calls.py",
        "value[index : index + 1] if value.ndim and value.shape[0] == batch_size",
        "value[index : index + 1] if value.ndim",
        "models/test_families.py models",
    ),
    Mutant(
        "models/block_calls.py",
        "hidden.new_ones(hidden.shape[:2], dtype=torch.bool) if mask is None",
        "hidden.new_ones(hidden.shape[:2], dtype=torch.bool) if mask is not None",
        "models/test_view.py",
    ),
    Mutant(
        "models/copies.py",
        "if not difference < 1e-2:",
        "if not difference < 1e9:",
        "models/test_truncation.py models",
    ),
    Mutant(
        "models/running_order.py",
        "layer = value.layers[number - 1]",
        "layer = value.layers[number]",
        "models/test_running_order.py models/test_running_order_runs.py",
    ),
    Mutant(
        "models/saved.py",
        'settings.get("num_classes", 0) > 0',
        'settings.get("num_classes", 0) >= 0',
        "models/test_saved.py models select/test_export.py",
    ),
    Mutant(
        "series/checkpoint.py",
        '(1000 if text.endswith("T") else 1)',
        "1",
        "series/test_names.py series",
    ),
    Mutant(
        "series/opening.py",
        "tokens_per_step=facts.tokens_per_step, warm_up=0",
        "tokens_per_step=facts.tokens_per_step",
        "series/test_hub_revisions.py series/test_manifests.py series",
    ),
    Mutant(
        "series/checkpoint.py",
        "before + (self.step - first) * tokens_per_step",
        "(self.step - first) * tokens_per_step",
        "series/test_lightning_checkpoints.py series",
    ),
    Mutant(
        "series/audit_weights.py",
        "facts.norm > OUTSIZED * max(norms)",
        "facts.norm > 1e99 * OUTSIZED * max(norms)",
        "series/test_planted_defects.py series/test_audit_series.py",
    ),
    Mutant(
        "series/auditing.py",
        "if last and main and is_said is not False and",
        "if last and main and",
        "series/test_audit_series.py series",
    ),
    Mutant(
        "series/audit_weights.py",
        "STRANGER = 0.9",
        "STRANGER = 1.9",
        "series/test_planted_defects.py series",
    ),
    Mutant(
        "series/auditing.py",
        '(whole and "(level: listing)" not in today)',
        "whole",
        "series/test_verdicts.py series",
    ),
    Mutant(
        "measuring/undisturbed.py",
        "parameter.requires_grad_(requires_grad)",
        "parameter.requires_grad_(True)",
        "test_undisturbed.py",
    ),
    Mutant(
        "measuring/undisturbed.py",
        "model.set_attn_implementation(implementation)",
        "pass",
        "test_undisturbed.py",
    ),
    Mutant(
        "measuring/one_model.py",
        "visit.analyses, weights_hash=weights)",
        "visit.analyses)",
        "test_one_pass.py test_offline.py test_offline_series.py test_records.py",
    ),
    Mutant(
        "measuring/offline.py",
        "and not self.options.allow_suspect]",
        "]",
        "test_offline_series.py test_offline.py cli/test_analyze_series.py",
    ),
    Mutant(
        "training/modules.py",
        "return (step + 1) / warmup_steps\n        return max(0.0",
        "return step / warmup_steps\n        return max(0.0",
        "training/test_modules.py training",
    ),
    Mutant(
        "training/modules.py",
        "decayed = [each for name, each in trained if each.ndim >= 2 and name not in spared]",
        "decayed = [each for name, each in trained if each.ndim >= 1 and name not in spared]",
        "training/test_modules.py training",
    ),
    Mutant(
        "training/losses.py",
        "return torch.stack(losses).sum() / len(targets)",
        "return torch.stack(losses).sum() / (len(targets) - 1)",
        "training/test_loss.py",
    ),
    Mutant(
        "training/datamodules.py",
        "crop = RandomCrop(tuple(images.pixels.shape[2:]), padding=self.crop_padding)",
        "crop = RandomCrop(tuple(images.pixels.shape[2:]))",
        "training/test_image_data.py",
    ),
    Mutant(
        "training/run_folder.py",
        "return self.tokens + (step - self.step) * tokens_per_step",
        "return (step - self.step) * tokens_per_step",
        "training",
    ),
    Mutant(
        "training/trainer.py",
        "if epoch != self._epoch:",
        "if self._epoch < 0:",
        "training/test_sampler.py training",
    ),
    Mutant(
        "training/sharding.py",
        "sizes = [tensor.numel() * tensor.element_size() for tensor in (*skeleton.parameters(), *skeleton.buffers())]",
        "sizes = [tensor.numel() * tensor.element_size() for tensor in (*skeleton.parameters(),)]",
        "training/test_sharding.py",
    ),
    Mutant(
        "training/resuming.py",
        'hashes = {STATE: facts["sha256"], **facts.get("shards", {})}',
        'hashes = {STATE: facts["sha256"]}',
        "training/test_resume_writer.py training/test_sharded_resume.py cli/test_resume.py",
    ),
    Mutant(
        "schedule.py",
        "return then_every is not None and step % then_every == 0",
        "return then_every is not None",
        "test_schedule.py",
    ),
)


def killer_of(mutant: Mutant, tier: str) -> str | None:
    """The first test that fails with the mutant planted, or None if it survives."""
    path = REPO / "lit_layers" / mutant.file
    source = path.read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file}: expected {mutant.old!r} once, found it {source.count(mutant.old)} times")
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    tests = [f"tests/{each}" for each in mutant.tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--tb=no", "-m", TIERS[tier], *tests]
    try:
        done = subprocess.run(
            command,
            cwd=REPO,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "time limit"
    finally:
        path.write_text(source, encoding="utf-8")
    if done.returncode in (0, 5):  # 5: no test of this tier
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    return failed[1] if failed else f"exit code {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=TIERS, default="quick")
    parser.add_argument("--only", type=lambda text: [int(number) for number in text.split(",")], default=None)
    parser.add_argument("--out", type=Path, default=None)
    chosen = parser.parse_args()
    numbers = range(len(MUTANTS)) if chosen.only is None else chosen.only
    lived = 0
    for number in numbers:
        mutant, started = MUTANTS[number], time.monotonic()
        killer = killer_of(mutant, chosen.tier)
        lived += killer is None
        line = (
            f"{number:3} {time.monotonic() - started:6.0f} s  {mutant.file}: {mutant.new[:60]}  <-  {killer or 'LIVES'}"
        )
        print(line, flush=True)  # noqa: T201
        if chosen.out is not None:
            with chosen.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    print(f"{len(numbers) - lived} of {len(numbers)} killed by the {chosen.tier} tier")  # noqa: T201


if __name__ == "__main__":
    main()
