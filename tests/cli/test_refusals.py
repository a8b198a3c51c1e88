"""What each command refuses: one sentence, exit code 2, and no file is written.

A row has the words of the command, which runs in the folder of the fixture `workdir`, and a part of the expected
sentence. A word `<...>` stands for a file with that text, NEW for a folder that does not exist. One row is enough for a
mistake that several options share. Other refusals of `report`, `emerge` and `reproduce` are tested in tests/.
"""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lit_layers.cli.main import main
from lit_layers.data.images import image_source
from lit_layers.models.build import save, vit
from tests.cli import test_fit_images
from tests.cli.test_fit import RECIPE
from tests.data.test_image_sources import write_arrays
from tests.support.benchmark_rows import write_tasks
from tests.support.glue_files import saved_bert_of_pairs, write_glue
from tests.support.labelled_texts import labelled, saved_gpt2, write_banking77, write_csv
from tests.support.runs import make_models, make_run
from tests.tasks.tiny_tasks import write_tiny_data

VIT = {"img_size": 8, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4, "num_classes": 10}
MUCH = "100000000000000000000"
TEXT_DATA = "class_path: lit_layers.training.LitTextData"
TEXT_MODEL = "class_path: lit_layers.training.LitCausalLM"
OWN = "--text title --label mood"
ROWS = "--corpus corpus.jsonl --num_sequences 2 --num_tokens 10"
SEEN = "--corpus arrays --data.num_validation_images 8 --analyses []"
STEPS = "--series StepFolders --series.root trained"

# `intervene nothing` makes lm-eval read all its tasks, which takes ten seconds. The others read a recipe per row, which
# takes half a second.
SOAK = ("intervene nothing", "fit --config images.yaml", "fit --config fit.yaml", "fit --config plain.yaml --root NEW")
SOAK += ("fit --config fit.yaml --root trained",)
QUANTISED = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
ODD_CONFIGS: list[Any] = [QUANTISED, {"n_layer": "two"}, {"n_layer": 10**20}, {"n_layer": -1}]
ODD_CONFIGS += [b"[1]", b"\xff\xfe{", b"", b'"\xe9"', b"{" * 5000]

REFUSED: dict[str, list[tuple[str, str]]] = {
    "": [
        ("fti", "unknown command 'fti'; did you mean fit?"),
        ("xyz", "unknown command 'xyz'; expected one of analyze, audit, "),
        ("audit 'a\nb'", "expected a folder, ORGANIZATION/NAME on the Hub or a manifest, a b does not exist"),
    ],
    "analyze": [
        ("", "model: expected a model, a series of its checkpoints or --series"),
        ("nowhere/at/all", "expected a folder with a model or a name on the Hub, nowhere/at/all does not exist"),
        ("model --ofload x", "unknown option --ofload; did you mean --offload?"),
        ("model --revision step1", "is a local folder and has no revision 'step1': leave it out"),
        ("model --dtype bfloat16", "float32"),
        ("model --tokenizer no/such/thing", "no tokenizer 'no/such/thing'"),
        ("model --metrics lens --offload x --dtype bfloat16", "offload: --dtype bfloat16 needs"),
        ("model --metrics lenss", "metrics: unknown name 'lenss'; did you mean lens"),
        ("model --metrics lens --config analyses.yaml", "metrics and analyses: expected one of them, got both"),
        ("model --analyses+=Coupling", "batches"),
        ("model --metrics lens --null blocks --offload x", "null: needs the weights in memory: leave --offload out"),
        ("trained --follow --null blocks", "null: is measured on the last checkpoint: leave it out of --follow"),
        ("model --metrics lens --null labels", "null: labels permutes the labels of probes, and no"),
        ("model --untrained 0 --offload x", "untrained: new weights are in no file that --offload could read"),
        ("model --untrained 0 --steps all", "untrained: is for one model, and model is a series"),
        ("model --root ~nosuchuser", "root: expected one of Path, NoneType, got ~nosuchuser"),
        ("model --code=~", "--code: expected an importable package or module, or a folder such"),
        ("model --code=null", "or a folder such as ., got 'null'"),
        ("model --config '<code: [evil]>' --code json", "unknown key code in the recipe"),
        ("model --config analyses.yaml --analyses.k [99]", "99"),
        ("model --config long.yaml --corpus long.jsonl", "num_tokens: GPT2LMHeadModel takes at most 32 tokens"),
        ("bare --config analyses.yaml", "tokenizer: bare carries none; name one with --tokenizer"),
        ("vit", "analyses: vit is a model of images: name what to measure"),
        ("vits --metrics lens", "analyses: vits is a model of images: name what to measure"),
        ("trained --follow --patience=-1", "patience: expected"),
        ("nowhere --follow --patience 0", "follow: expected a folder, without --steps and --plan, got"),
        ("trained --follow --patience 0 --steps all", "follow: expected a folder, without --steps and --plan"),
        ("trained --follow --patience 0 --metrics banana", "metrics: unknown name 'banana'"),
        ("trained --steps 0,9", "steps: trained has no step 9"),
        ("trained --shard 4/4", "i from 0 to n - 1, such as 0/4, got '4/4'"),
        ("trained --revision step0", "revision: is for one model"),
        ("model --series Models --series.models [a]", "expected a model, a series of its checkpoints or --series"),
        ("--series HubRevisions", "missing: repo"),
        ("--series Models --series.model [a]", "unknown key model"),
        ("--series Models --series.models []", "models: expected a list of folders or names on the"),
        ("--series StepFolders --series.root nowhere", "expected a folder with checkpoints, nowhere"),
        (f"{STEPS} --steps 0,1", "steps: the class of --series has options of its own"),
        (f"{STEPS} --untrained 1", "untrained: the class of --series"),
        *((f"odd{number} --config analyses.yaml", f"odd{number}") for number in range(len(ODD_CONFIGS))),
        *((f"hostile{n}", f"the analyses of hostile{n}, as its run.json has them: ") for n in range(3)),
    ],
    "audit": [
        ("", "missing: series; give it in the recipe or on the command line"),
        ("none", "expected a folder, ORGANIZATION/NAME on the Hub or a manifest, none does not exist"),
        ("org/tiny", "cannot list the branches of org/tiny"),
        ("none.yaml", "cannot read none.yaml: no such file or directory"),
        ("models", "models holds no folder that is a step"),
        ("trained --steps '{log_spaced: 1}'", "steps.log_spaced: expected at least 2, got 1"),
        ("trained --json trained", "json: cannot write trained: is a directory"),
        ("x --config '<gramar: step>'", "unknown key gramar in the recipe; did you mean grammar?"),
        ("x --config '<kk: 3>'", "unknown key kk in the recipe; see `lit-layers audit --help`"),
        ("x --config '<grammar: ${nothing}>'", "config: Interpolation key 'nothing' not found full_key: grammar"),
        ("x --config '<grammar: ${oc.env:WANDB_API_KEY}>'", "a recipe reads no variable that may hold a secret"),
        ("x --config '<- series>'", "expected a recipe of KEY: VALUE lines, got - series"),
        ("x --config '<series: [>'", "Problems parsing config"),
    ],
    "correlate": [
        ("", "models: expected run folders or a file, or --data published, and not both"),
        ("--data published models", "and not both"),
        ("models.csv --metric width --step 1 --score score", "layer and step: a table has none: leave them out"),
        ("models --score models.csv:score", "over models: expected --metric and --score"),
        ("models --metrics coupling", "over layers: expected --metrics and --scores"),
        ("models --metric coupling[k=12] --score models.csv:scor", "no column 'scor'; did you mean score?"),
        ("models --metric copling --score models.csv:score", "did you mean coupling/"),
        ("models models.csv --metric coupling --score score", "models: expected one file, got 2 places"),
        ("models.csv --metric coupling --score nothing", "models.csv has no column 'nothing'"),
        ("elsewhere --metric coupling --score a", "got elsewhere: no such folder"),
        ("--data published --resamples 3", "resamples: expected at least 100, got 3"),
        ("--data published --resamples 10000000", "resamples: expected at most 1,000,000"),
        ("--data published --resamples 100 --root models.csv", "cannot write to models.csv: not a directory"),
        ("--data published --given size", "given: no column 'size'"),
        ("models.csv --metric coupling --score score --root .", "root: models.csv, which is read, would be replaced"),
        ("nameless.csv --metric coupling --score score", "nameless.csv: row 2 has no name in column model"),
    ],
    "emerge": [
        ("EleutherAI/pythia-70m", "is not there: measure it first, by lit-layers analyze EleutherAI/pythia-70m"),
        ("times.csv --root .", "times.csv, which is read, would be replaced in"),
    ],
    "fit --config fit.yaml": [
        ("--foo.bar=3", "unknown option --foo.bar; see `lit-layers fit --help`"),
        ("--trainer.max_steps 0", "trainer.max_steps: expected at least 1, got 0"),
        (f"--trainer.max_steps {MUCH}", "trainer.max_steps: expected at most"),
        ("--trainer.max_epochs 0", "trainer: no step was trained: max_steps, max_epochs or max_time ends the run"),
        ("--trainer.accumulate_grad_batches -1", "trainer.accumulate_grad_batches: expected at least 1, got -1"),
        ("--trainer.devices -2", "trainer: `devices` selected with `CPUAccelerator` should be an int > 0"),
        ("--steps [0,-5]", "steps: expected at least 0, got [0, -5]"),
        (f"--steps [{MUCH}]", "steps: expected at most"),
        ("--root=", "root: Not of type Path: expected a file or folder, got ''"),
        ("--root /proc/nowhere", "cannot write to /proc/nowhere"),
        ("--seed_everything -1", "seed_everything: expected at least 0, got -1"),
        ("--resume_every 0", "resume_every: expected at least 1, got 0"),
        ("--resume yesterday", "expected last or a step, got 'yesterday'; a .ckpt file is named by --ckpt_path"),
        ("--model.lr -1", "model.lr: expected more than 0, got -1"),
        ("--model.lr 2.5", "model.lr: expected less than 1, got 2.5"),
        ("--model.config.n_layers 4", "n_layers"),
        ("--model.config.vocab_size 50", "model.config.vocab_size: expected at least the tokenizer's 300"),
        ("--model.architecture gpt22", "gpt22"),
        ("--model.init_from /nowhere/model", "NAME@REVISION of the Hub, /nowhere/model is neither"),
        ("--data.num_workers -1", "data.num_workers: expected at least 0, got -1"),
        ("--data.global_batch_size 5 --trainer.accumulate_grad_batches 2", "take a multiple of 2"),
        ("--data.num_tokens 17", "data.num_tokens: expected at most 16, the context of model.config, got 17"),
        ("--corpus /nowhere/text", "/nowhere/text"),
        ("--analyses.k [99]", "99"),
        ("--analyses.name trajectory", "two are named 'trajectory'"),
        ("--config long.yaml", "trajectory: num_tokens: GPT2LMHeadModel takes at most 16 tokens, got 33"),
        ("--config '<trainer: 3>'", "trainer: expected the options of a Trainer"),
        ("--config '<trainer: {max_step: 3}>'", "unknown key trainer.max_step in the recipe; did you mean trainer.max"),
        ("--config utf16.yaml", "config: 'utf-8' codec can't decode byte"),
        ("--config '<model: {class_path: LitCausalML}>'", "string: LitCausalML; did you mean LitCausalLM?"),
        (f"--config '<model: {{{TEXT_MODEL}, init_args: {{nonsense: 3}}}}>'", "model: unknown key nonsense in the"),
    ],
    "fit": [
        ("--config fit.yaml --trainer.max_step 3", "unknown option --trainer.max_step; did you mean --trainer.max_st"),
        ("--config fit.yaml --root trained", "already holds a run with checkpoints up to step 3"),
        ("--root out --config '<null: blocks>'", 'the key null is written with quotes in a recipe: "null": blocks'),
        ("quickstart/gtp2", "no recipe 'quickstart/gtp2', neither a file nor one that comes with the package; did"),
        (f"--root out --config '<data: {{{TEXT_DATA}, init_args: {{corpus: python}}}}>'", "data: missing: tokenizer"),
    ],
    "fit --config plain.yaml --root NEW": [
        ("--optimizer=SGD --optimizer.beta=1", "optimizer: unknown key beta"),
        ("--optimizer=SGD --optimizer.lr=-1", "optimizer: Invalid learning rate: -1.0"),
        ("--ckpt_path=CHECKPOINT --optimizer=SGD --trainer.max_steps 5", "saved with another optimizer than SGD"),
        ("--ckpt_path=CHECKPOINT --model.config.n_embd=8 --trainer.max_steps 5", "ckpt_path: Error(s) in"),
        ("--ckpt_path=CHECKPOINT --trainer.max_steps=3", "trainer: no step was trained"),
        ("--ckpt_path=weights.ckpt", "holds weights only: begin with them, by --model.init_from"),
        ("--ckpt_path=evil.ckpt", "loading them would run code"),
        ("--ckpt_path=/nowhere.ckpt", "/nowhere.ckpt cannot be read"),
    ],
    "fit --config fit.yaml --root trained": [
        ("--config '<if_exists: overwrite>'", "--resume last or --if_exists overwrite"),  # only the user may do this
        ("--if_exists overwrite --data.num_tokens 400", "data.num_tokens: expected at most 16"),
        ("--resume 4", "no resume checkpoint of step 4 in"),
        ("--resume last --model.lr 0.1", "model.lr: the run in"),
        ("--resume last --seed_everything 3", "seed_everything: the run in"),
        ("--resume last --trainer.max_steps 30", "the learning rate of the run in"),
        ("--resume last --trainer.gradient_clip_val 0.5", "trainer.gradient_clip_val: the run in"),
        ("--resume 2 --trainer.precision 64-true", "trainer.precision: the run in"),
        ("--resume last --optimizer Adam", "optimizer"),
    ],
    "fit --config images.yaml": [
        ("--model.patch_size 3", "model.patch_size: expected a divisor of the image size 8, got 3"),
        ("--model.architecture vit_tini", "no model named 'vit_tini' in timm"),
        ("--model.config.embed_dims 16", "embed_dims"),
        ("--model.config.num_heads 3", "cannot build vit_tiny_patch16_224"),
        ("--model.config.num_classes 3", "model.config.num_classes: the module or the data says it"),
        ("--model.mixup -1", "model.mixup: expected at least 0, got -1"),
        ("--model.label_smoothing 1.0", "model.label_smoothing: expected less than 1"),
        ("--data.erasing 2", "data.erasing: expected at most 1, got 2"),
        ("--data.global_batch_size 0", "data.global_batch_size: expected at least 1, got 0"),
        ("--data.num_repeats 0", "data.num_repeats: expected at least 1, got 0"),
        ("--data.num_validation_images 0", "data.num_validation_images: expected at least 1, got 0"),
        ("--data.rand_augment strong", "data.rand_augment: timm does not know"),
        ("--analyses.init_args.batches.num_images 356", "356"),
        (f"{SEEN} --root seen --resume last --trainer.max_steps 4", "data.source: the run in"),
    ],
    "intervene": [
        ("model --variants skipped", "variants: there is no 'skipped'; choose from baseline, middle_repeat"),
        (f"model {ROWS} --middles 2", "middles: of 4 blocks the middle has 1, 3 blocks, got 2"),
        (f"model {ROWS} --schedule '1 (,2)'", "expected numbers and groups such as 1 2 (3,4,5) 6, got '1 (,2)'"),
        ("model --loops 0", "loops: expected at least 1, got 0"),
        ("model --limit 0", "limit: expected at least 1, got 0"),
        ("model --tasks lambda --folder data", "task: there is no 'lambda'; did you mean lambada"),
        ("model --tasks lambada --folder nowhere", "folder: expected a folder of data, nowhere is none"),
        ("model --tasks arc_challenge,winogrande --folder less", "winogrande_validation.parquet, there is no such f"),
        ("model --finetune '<{task: arc_challenge, steps: 2}>'", "steps: Unexpected keyword argument, got 2; "),
        ("model --finetune finetune.yaml --folder data", "holds the rows that are scored: list files of tra"),
        ("model --finetune '<{task: arc_challenge, batch_size: 0}>'", "recipe: batch_size: expected at least 1, got 0"),
        ("model --finetune '<{task: arc_challenge, precision: x}>'", "recipe: precision: Precision 'x' is invalid"),
        ("model --finetune '<{task: arc_challenge, num_tokens: 33}>'", "num_tokens: GPT2LMHeadModel takes at most 32"),
        ("bert --finetune finetune.yaml", "model: expected a causal language model, which predicts the next"),
        ("trained --finetune finetune.yaml", "finetune: trains one model, and a series was named: name one of its"),
        ("model --glue glue.yaml --folder data", "glue: expected an encoder (bert, roberta, distilbert,"),
        ("bert --glue '<{tasks: [cola]}>' --folder data", "num_tokens: BertForMaskedLM takes at most 32 tokens"),
        ("bert --glue glue.yaml --folder data --revision a", "glue: it opens bert as it is"),
        ("bert --glue glue.yaml --untrained 0", "glue: it opens bert as it is"),
        ("bert --glue glue.yaml --dtype float64", "glue: it opens bert as it is"),
        ("model --images digits", "images: model is a language model: take --tasks, --corpus, --glue or --speed"),
        (f"vit {ROWS}", "corpus: vit is a model of images: take --images or --speed"),
        ("vit", "tasks: vit is a model of images: take --images or --speed"),
        ("vit --images digits --num_images 9999", "'digits' has 355 images in its test split, and num_images is 9999"),
        ("vit --images digits --image_size 16", "expected an image_size of 8, which the model takes, got images of 16"),
        ("model --config '<tasks: [glue.yaml]>'", "tasks: a recipe names no task file, which is code, got glue.yaml"),
    ],
    "intervene nothing": [("--tasks rows.csv", "rows.csv")],
    "mteb": [
        ("model --tasks STS18", "task: there is no 'STS18'; did you mean"),
        ("model --tasks local", "tasks: local means all tasks whose data lie in --folder, there are none"),
        ("model --config '<layers: [-1]>'", "layers: expected one of Numbers, typing.Literal['all'], got [-1]"),
        ("model --tasks STSBenchmark --folder songs --layers 7", "layers: this model has layers 0 to 4, got 7"),
        ("model --max_tokens 0", "max_tokens: expected at least 1, got 0"),
        ("model --pooling mean --modules all", "pooling: with --modules all it is the model's own, and mean was given"),
        ("bare --tasks STSBenchmark --folder songs", "carries none; name one with --tokenizer"),
        (f"model '--layers={'1 2,' * 9_000}'", f"expected one of Numbers, typing.Literal['all'], got {'1 2,' * 25}"),
    ],
    "prepare --root NEW": [
        ("", "missing: source, tokenizer; give it in the recipe or on the command line"),
        ("--source= --tokenizer bpe:300", "source: expected a name or a path, got ''"),
        ("--source no/such/place.txt --tokenizer bpe:300", "no corpus 'no/such/place.txt'"),
        ("--source corpus.jsonl --tokenizer bpe:300 --column nope", "has no column 'nope'"),
        ("--source text.txt --tokenizer bpe:300 --root /dev/null/out", "cannot prepare /dev/null/out"),
        *(
            (f"--source text.txt --tokenizer bpe:{size}", "expected bpe:SIZE with a size over 256")
            for size in ("99999999999", "2000001", "256", "-300", "٣٠٠")
        ),
    ],
    "report": [
        ("torn", "measurements.jsonl, line 2: not valid JSON"),
        ("", "missing: runs: expected a run's folder, or several"),
        ("damaged", "run.json: not valid JSON"),
        ("RUN --config '<wandb: maybe>'", "wandb: expected true or false, got 'maybe'"),
    ],
    "reproduce": [("papers/coupling/nope", "no recipe 'papers/coupling/nope'")],
    "select": [
        ("model", "task: expected --task NAME, or --images SOURCE for a vision model, and not both"),
        ("model --task banking77 --images digits", "and not both"),
        ("model --task banking", "'banking'; did you mean banking77?; or name a .parquet, .csv, .jsonl file"),
        ("model --task no/such.csv", "task: expected labelled texts in no/such.csv, which does not exist"),
        ("model --task ./nothing", "task: expected labelled texts in nothing, which does not exist"),
        ("model --task text", "task text: source: expected a .parquet, .csv, .jsonl file, got text"),
        ("model --task songs.csv", "task songs: text: songs.csv has no column 'text': it has title, mood"),
        ("model --task songs.csv --text title", "task songs: label: songs.csv has no column 'label'"),
        (f"model --task songs.csv {OWN} --regression", "a regression needs finite numbers"),
        ("model --task songs.csv --text {title --label mood", "text: expected {column} or"),
        ("model --task emotion --folder data", "emotion"),
        ("model --task banking77 --export taken", "taken is there already: choose another folder, or allow to"),
        ("model --task banking77 --export taken --overwrite", "taken is no earlier export (it has no probe.json)"),
        ("model --task banking77 --tolerance -0.1", "tolerance: expected at least 0, got -0.1"),
        ("model --task banking77 --max_tokens 0", "max_tokens: expected at least 1, got 0"),
        ("model --task banking77 --rounds 0", "rounds: expected at least 1, got 0"),
        ("model --images digits", "images: model is a model of texts (GPT2LMHeadModel): name its texts"),
        ("vit --task banking77 --folder moods", "task: vit is a vision model (VisionTransformer): name its images"),
        ("vit --images digits --num_train 1", "num_train: expected 2 to 1442 images, got 1"),
        ("model bare --task banking77 --export new", "export: expected one model, got 2"),
        ("model vit/../model --task banking77", "models: two are called model"),
        ("bare broken --task banking77 --folder moods", "bare: tokenizer: bare carries none; name one with --tokeni"),
        ("trained --task banking77", "expected a model in trained, found no config.json there"),
        ("broken --task banking77", "broken cannot be loaded: "),
        ("model --task models.csv --root .", "models.csv, which is read, would be replaced in"),
        ("model --without 2 --export new", "without: expected one model, --corpus TEXT and --export FOLDER"),
        ("model --without 0 --corpus text.txt --export new", "some of the blocks 1..4 of this GPT2LMHeadModel"),
        ("model --without 2,x --corpus text.txt --export new", "for the N least harmful ones, got 2,x"),
        ("model --without least:4 --corpus text.txt --export new", "for the N least harmful ones, got least:4"),
        ("bare --without 1 --corpus text.txt --export new", "tokenizer: bare carries none; name one with --tokenizer"),
        ("bert --without 1 --corpus text.txt --export new", "expected a model that predicts the next token, got Bert"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory, corpus: Path, trained: tuple[Path, str]) -> Path:
    """A folder with all files that the rows name."""
    workdir = tmp_path_factory.mktemp("place")
    shutil.copytree(trained[0], workdir / "trained")
    write_models(workdir)
    write_tables(workdir)
    write_runs(workdir)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workdir)
        patch.setattr("lit_layers.cli.verbs.fit.write_report", lambda root: root / "report.html")
        write_recipes(workdir, corpus)
        write_trainings(workdir)
    return workdir


def write_models(workdir: Path) -> None:
    saved_gpt2(workdir / "model", n_layer=4)
    saved_gpt2(workdir / "bare", tokenizer=False)
    saved_bert_of_pairs(workdir / "bert")
    network = vit("vit_tiny_patch16_224", **VIT).eval()
    save(network, workdir / "vit")
    save(network, workdir / "vits" / "step-000000007")
    (workdir / "broken").mkdir()
    shutil.copy(workdir / "model" / "config.json", workdir / "broken")
    config = json.loads((workdir / "model" / "config.json").read_text())
    for number, odd in enumerate(ODD_CONFIGS):
        shutil.copytree(workdir / "model", workdir / f"odd{number}")
        content = odd if isinstance(odd, bytes) else json.dumps({**config, **odd}).encode()
        (workdir / f"odd{number}" / "config.json").write_bytes(content)
    hostile = {"class_path": "subprocess.Popen", "init_args": {"args": "touch ran", "shell": True}}
    inside = {"class_path": "lit_layers.analyses.Lens", "init_args": {"batches": hostile}}
    for number, analyses in enumerate(([hostile], [inside], [7])):
        shutil.copytree(workdir / "model", workdir / f"hostile{number}" / "step-000000000")
        about = {"run": "run", "config": {"analyses": analyses, "tokenizer": "bpe:300", "corpus": "python"}}
        (workdir / f"hostile{number}" / "run.json").write_text(json.dumps(about))


def write_tables(workdir: Path) -> None:
    write_glue(workdir / "data")
    write_tasks(workdir / "data" / "benchmarks")
    write_tasks(workdir / "less" / "benchmarks")
    (workdir / "less" / "benchmarks" / "winogrande_validation.parquet").unlink()
    write_banking77(workdir / "moods", labelled(60), labelled(20, first=60))
    write_tiny_data(workdir / "songs")
    write_csv(workdir / "songs.csv", labelled(90), ("title", "mood"))
    (workdir / "models.csv").write_text("model,coupling,score\na,1,2\nb,2,1\nc,3,5\n")
    (workdir / "nameless.csv").write_text("model,coupling,score\na,1,2\n,2,1\nc,3,5\n")
    (workdir / "times.csv").write_text("step,loss\n0,3\n1,2\n")
    (workdir / "text.txt").write_text("Some text.\n" * 20)
    (workdir / "text").write_text("a file")
    (workdir / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text, _ in labelled(1500)))
    long = [json.dumps({"text": f"Some words of text {n}. " * 20}) for n in range(400)]
    (workdir / "long.jsonl").write_text("\n".join(long))
    (workdir / "taken").mkdir()
    (workdir / "taken" / "notes.txt").write_text("mine")


def write_runs(workdir: Path) -> None:
    run = make_run(workdir / "RUN", steps=(0, 1), analyses=("coupling",), layers=2)
    for name in ("torn", "damaged"):
        shutil.copytree(run, workdir / name)
    first = (run / "measurements.jsonl").read_text().splitlines()[0]
    (workdir / "torn" / "measurements.jsonl").write_text("\n".join([first, '{"run": ', ""]))
    (workdir / "damaged" / "run.json").write_text((run / "run.json").read_text()[:100])
    make_models(workdir / "models", models={f"org/m{n}": 4 + n for n in range(6)}, analyses=("coupling",))


def write_recipes(workdir: Path, corpus: Path) -> None:
    recipes: dict[str, Any] = {"fit": {**RECIPE, "corpus": str(corpus), "root": "out", "resume_every": 1}}
    recipes["plain"] = {**recipes["fit"], "analyses": [], "steps": {"every": 9}}
    recipes["images"] = {**test_fit_images.RECIPE, "root": "out"}
    recipes["analyses"] = {"analyses": RECIPE["analyses"], "corpus": "corpus.jsonl"}
    long = json.loads(json.dumps(RECIPE["analyses"][:1]).replace('"num_tokens": 16', '"num_tokens": 33'))
    recipes["long"] = {"analyses": long}
    recipes["finetune"] = {"task": "arc_challenge", "batch_size": 4, "num_tokens": 12}
    recipes["glue"] = {"tasks": ["cola", "mrpc"], "max_steps": 2, "batch_size": 4, "num_tokens": 30}
    for name, recipe in recipes.items():
        (workdir / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    (workdir / "utf16.yaml").write_bytes("root: é".encode("utf-16"))


def write_trainings(workdir: Path) -> None:
    """Write files of a text training, and train on images that change afterwards."""
    (checkpoint,) = workdir.glob("trained/resume/step-000000003/*.ckpt")
    content = torch.load(checkpoint, weights_only=True)
    shutil.copy(checkpoint, workdir / "CHECKPOINT")
    del content["optimizer_states"], content["lr_schedulers"]
    torch.save(content, workdir / "weights.ckpt")
    torch.save({"state_dict": Path("x"), "global_step": 1}, workdir / "evil.ckpt")
    generator, labels = np.random.default_rng(0), np.arange(12) % 3
    for _ in range(2):
        images = generator.integers(0, 256, (12, 8, 8), dtype=np.uint8)
        write_arrays(workdir / "arrays", (images, labels), (images, labels))
        if not (workdir / "seen").exists():
            assert main(["fit", "--config", "images.yaml", "--root", "seen", *SEEN.split()]) == 0
            image_source.cache_clear()


def files_in(folder: Path) -> set[tuple[str, int, int]]:
    """Return the files without the cache of an audit."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != ".audit"]
    return {(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def trouble(command: str, words: str, sentence: str, written: Path, capsys: pytest.CaptureFixture[str]) -> str | None:
    """Return what is wrong with the end of one command, None for a refusal with the expected sentence."""
    argv, named = shlex.split(command) + shlex.split(words), shlex.split(command)[:1]
    new = written / str(len([*written.iterdir()]))
    for number, word in enumerate(argv):
        if word.startswith("<"):
            new.write_text(word[1:-1])
        argv[number] = str(new) if word == "NEW" or word.startswith("<") else word
    try:
        code = main(argv)
    except BaseException as error:
        error.add_note(f"by {command} {words}")
        raise
    output = capsys.readouterr().err
    errors = [line for line in output.splitlines() if line.startswith("lit-layers")]
    begin = "".join(f"lit-layers {verb}: error: " for verb in named) or "lit-layers"
    if code == 2 and len(errors) == 1 and errors[0].startswith(begin) and sentence in errors[0]:
        return "a traceback" if "Traceback" in output else "too long" if len(errors[0]) > 600 else None
    return f"code {code}, {errors or output[-500:]}"


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=[pytest.mark.soak] if each in SOAK else []) for each in REFUSED]
)
def test_invalid_input_is_refused_and_nothing_is_written(command, workdir, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(workdir)
    wrong, before = [], files_in(workdir)
    for words, sentence in REFUSED[command]:
        if problem := trouble(command, words, sentence, tmp_path, capsys):
            wrong.append(f"{command} {words}: expected {sentence!r}, {problem}")
        if (now := files_in(workdir)) != before:
            wrong.append(f"{command} {words}: written {now ^ before}")
            before = now
    assert not wrong, "\n".join(wrong)
