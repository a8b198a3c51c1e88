"""Names under which modules were known before they moved: recipes, run folders and hashes still say them."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# As recipes and hashes name it -> where it is now; of several files, the first one that has the name asked for.
MOVED = {
    "lit_layers.data.hub_errors": "lit_layers.downloads",
    "lit_layers.emergence": "lit_layers.undisturbed",
    "lit_layers.foreign_weights": "lit_layers.downloads",
    "lit_layers.hub_errors": "lit_layers.downloads",
    "lit_layers.ranges": "lit_layers.schema",
    "lit_layers.analyses.compressions": "lit_layers.analyses.depth_coupling",
    "lit_layers.analyses.concept_alignment": "lit_layers.analyses.linear_structure",
    "lit_layers.analyses.coupling": "lit_layers.analyses.depth_coupling",
    "lit_layers.analyses.cross_token_influence": "lit_layers.analyses.token_jacobians",
    "lit_layers.analyses.encoded_task": "lit_layers.analyses.features",
    "lit_layers.analyses.halves": "lit_layers.analyses.statistics",
    "lit_layers.analyses.interventions": "lit_layers.analyses.readout_scores",
    "lit_layers.analyses.invariance": "lit_layers.analyses.text_invariance",
    "lit_layers.analyses.layer_similarity": "lit_layers.analyses.layer_geometry",
    "lit_layers.analyses.lens": "lit_layers.analyses.readout_scores",
    "lit_layers.analyses.next_token_rows": "lit_layers.analyses.next_token_probe",
    "lit_layers.analyses.on_task": "lit_layers.analyses.task_probes",
    "lit_layers.analyses.paths_in_plane": "lit_layers.analyses.layer_geometry",
    "lit_layers.analyses.pixels": "lit_layers.analyses.base",
    "lit_layers.analyses.prediction_residual": "lit_layers.analyses.linear_structure",
    "lit_layers.analyses.probe": "lit_layers.analyses.task_probes",
    "lit_layers.analyses.probe_scores": "lit_layers.analyses.label_probe",
    "lit_layers.analyses.prompt_studies": "lit_layers.analyses.representation",
    "lit_layers.analyses.ratios": "lit_layers.analyses.statistics",
    "lit_layers.analyses.readout_rows": "lit_layers.analyses.readout_scores",
    "lit_layers.analyses.sample_sizes": "lit_layers.analyses.task_probes",
    "lit_layers.analyses.states": "lit_layers.analyses.base",
    "lit_layers.analyses.summary": "lit_layers.analyses.statistics",
    "lit_layers.analyses.token_coupling": "lit_layers.analyses.token_jacobians",
    "lit_layers.analyses.trajectory": "lit_layers.analyses.layer_geometry",
    "lit_layers.correlate.over_layers": "lit_layers.correlate",
    "lit_layers.data.benchmarks": "lit_layers.data.prompt_texts",
    "lit_layers.data.encoded_texts": "lit_layers.data.batches",
    "lit_layers.data.image_sources": "lit_layers.data.images",
    "lit_layers.data.pictures": "lit_layers.data.image_files",
    "lit_layers.data.tasks": "lit_layers.tasks.probe_task lit_layers.tasks.catalogue lit_layers.tasks.labelled_rows",
    "lit_layers.data.training_text": "lit_layers.data.text",
    "lit_layers.data.views": "lit_layers.data.typo_views",
    "lit_layers.embeddings": "lit_layers.tasks.mteb_scores lit_layers.tasks.catalogue lit_layers.tasks.mteb_tasks",
    "lit_layers.embeddings.analysis": "lit_layers.tasks.mteb_scores",
    "lit_layers.embeddings.store": "lit_layers.tasks.embedding_store",
    "lit_layers.embeddings.task_list": "lit_layers.tasks.catalogue",
    "lit_layers.embeddings.task_sources": "lit_layers.tasks.mteb_tasks",
    "lit_layers.functional.block_call": "lit_layers.functional.attention",
    "lit_layers.functional.cka_matrix": "lit_layers.functional.geometry",
    "lit_layers.functional.class_scores": "lit_layers.functional.layer_selection",
    "lit_layers.functional.concepts": "lit_layers.functional.geometry",
    "lit_layers.functional.exponential": "lit_layers.functional.curves",
    "lit_layers.functional.layer_choice": "lit_layers.functional.curves",
    "lit_layers.functional.layer_stages": "lit_layers.functional.trajectory",
    "lit_layers.functional.linear_cut": "lit_layers.functional.one_token",
    "lit_layers.functional.pooling": "lit_layers.functional.geometry",
    "lit_layers.functional.prediction_residual": "lit_layers.functional.regression",
    "lit_layers.functional.principal_paths": "lit_layers.functional.trajectory",
    "lit_layers.functional.renyi": "lit_layers.functional.entropy",
    "lit_layers.functional.reverse_mode": "lit_layers.functional.attention",
    "lit_layers.functional.ridge": "lit_layers.functional.regression",
    "lit_layers.functional.singular": "lit_layers.functional.coupling",
    "lit_layers.functional.variants": "lit_layers.functional.block_schedules",
    "lit_layers.intervene": "lit_layers.tasks.benchmark_scores lit_layers.tasks.catalogue",
    "lit_layers.intervene.benchmark_scores": "lit_layers.tasks.benchmark_scores",
    "lit_layers.intervene.speed": "lit_layers.analyses.speed",
    "lit_layers.models.attention": "lit_layers.models.families",
    "lit_layers.models.block_memory": "lit_layers.models.shard_files",
    "lit_layers.models.layer_latency": "lit_layers.models.costs",
    "lit_layers.models.pixel_statistics": "lit_layers.models.pixels",
    "lit_layers.models.recipe_parts": "lit_layers.models.pixels",
    "lit_layers.models.sequence_classifier": "lit_layers.models.plain",
    "lit_layers.models.shared_prefixes": "lit_layers.models.running_order",
    "lit_layers.models.skeleton": "lit_layers.models.streaming",
    "lit_layers.models.vision": "lit_layers.models.families",
    "lit_layers.models.vocabulary": "lit_layers.models.build",
    "lit_layers.select.card": "lit_layers.select.export",
    "lit_layers.select.comparison": "lit_layers.select.export",
    "lit_layers.select.head": "lit_layers.select.classifier",
    "lit_layers.select.predict": "lit_layers.select.classifier",
    "lit_layers.select.rows": "lit_layers.select.choosing",
    "lit_layers.select.table": "lit_layers.select.export",
    "lit_layers.series.findings": "lit_layers.series.audit_files",
    "lit_layers.series.fingerprints": "lit_layers.series.weight_files",
    "lit_layers.series.hub": "lit_layers.series.hub_series",
    "lit_layers.series.lightning_files": "lit_layers.series.local_series",
    "lit_layers.series.local": "lit_layers.series.local_series",
    "lit_layers.series.manifests": "lit_layers.series.hub_series",
    "lit_layers.series.pretrained": "lit_layers.series.opening",
    "lit_layers.series.retrying": "lit_layers.series.checkpoint_sources",
    "lit_layers.series.single": "lit_layers.series.opening",
    "lit_layers.series.sources": "lit_layers.series.checkpoint_sources",
    "lit_layers.sweep.gpus": "lit_layers.sweep.cells",
    "lit_layers.sweep.locks": "lit_layers.sweep.cells",
    "lit_layers.sweep.running": "lit_layers.sweep.cells",
    "lit_layers.sweep.table": "lit_layers.sweep.cells",
    "lit_layers.tasks.glue": "lit_layers.tasks.glue_rows",
    "lit_layers.tasks.probe": "lit_layers.tasks.probe_task lit_layers.tasks.catalogue lit_layers.tasks.labelled_rows",
    "lit_layers.training.averaging": "lit_layers.training.image_classifier",
    "lit_layers.training.checkpoint_io": "lit_layers.training.checkpoints",
    "lit_layers.training.dealing": "lit_layers.training.callbacks",
    "lit_layers.training.divergence": "lit_layers.training.checkpoints",
    "lit_layers.training.draws": "lit_layers.training.augmentation",
    "lit_layers.training.environment": "lit_layers.training.trainer",
    "lit_layers.training.glue": "lit_layers.training.sequence_tasks",
    "lit_layers.training.image_data": "lit_layers.training.datamodules",
    "lit_layers.training.images": "lit_layers.training.image_classifier",
    "lit_layers.training.loss": "lit_layers.training.modules",
    "lit_layers.training.optim": "lit_layers.training.modules",
    "lit_layers.training.origin": "lit_layers.training.checkpoints",
    "lit_layers.training.progress": "lit_layers.training.run_log",
    "lit_layers.training.rand_augment": "lit_layers.training.augmentation",
    "lit_layers.training.sampler": "lit_layers.training.datamodules",
    "lit_layers.training.termination": "lit_layers.training.resume",
    "lit_layers.training.trained_variants": "lit_layers.training.finetuning lit_layers.training.sequence_tasks",
    "lit_layers.training.weighted_mean": "lit_layers.training.modules",
}
# Each was a file of some figures; all are in one room now.
_PLOTS = "concepts curve_pictures emergence graph layers matrices models paths sample_sizes scatter similarity surfaces"
_PLOTS += " tables task_means training variant_figures variant_pictures variant_scores"
MOVED |= {f"lit_layers.plots.{name}": "lit_layers.plots" for name in _PLOTS.split()}
# Where files became one: the class that recipes and hashes call by the former name. The others hold helpers alone.
_CLASSES = {
    "lit_layers.analyses.compressions": "CouplingMatrices",
    "lit_layers.analyses.concept_alignment": "ConceptAlignment",
    "lit_layers.analyses.coupling": "Coupling",
    "lit_layers.analyses.cross_token_influence": "CrossTokenInfluence",
    "lit_layers.analyses.interventions": "Interventions",
    "lit_layers.analyses.invariance": "Invariance",
    "lit_layers.analyses.layer_similarity": "LayerSimilarity",
    "lit_layers.analyses.lens": "Lens",
    "lit_layers.analyses.paths_in_plane": "PathsInPlane",
    "lit_layers.analyses.prediction_residual": "NextTokenResidual",
    "lit_layers.analyses.probe": "Probe",
    "lit_layers.analyses.prompt_studies": "PromptStudies",
    "lit_layers.analyses.sample_sizes": "SampleSizeSweep",
    "lit_layers.analyses.token_coupling": "TokenCoupling",
    "lit_layers.analyses.trajectory": "Trajectory",
    "lit_layers.data.benchmarks": "BenchmarkPrompts",
    "lit_layers.data.tasks": "ProbeTask",
    "lit_layers.embeddings.analysis": "MtebTask",
    "lit_layers.intervene.benchmark_scores": "BenchmarkScores",
    "lit_layers.intervene.speed": "Speed",
    "lit_layers.training.glue": "GlueRecipe",
    "lit_layers.training.trained_variants": "Finetuning",
}
_JOINED = tuple(
    f"lit_layers.{room}."
    for room in ("analyses", "data", "functional", "models", "select", "series", "sweep", "tasks", "training")
)
_JOINED += ("lit_layers.downloads", "lit_layers.plots", "lit_layers.schema")
# By module of today and class; None for all classes of a module that moved as a whole.
_FORMER = {
    (now.split()[0], _CLASSES.get(former)): former
    for former, now in MOVED.items()
    if former in _CLASSES or not now.startswith(_JOINED)
}
_FORMER["lit_layers.training.sequence_tasks", "GlueScores"] = "lit_layers.training.trained_variants"


def public_path(kind: type) -> str:
    """How recipes, configs and their hashes call a class, wherever its file is: moving it re-measures nothing."""
    module = kind.__module__
    former = _FORMER.get((module, kind.__name__)) or _FORMER.get((module, None)) or module
    return f"{former}.{kind.__qualname__}"


class _Moved:
    """Lets a former name of a module be imported."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, _Moved) if name in MOVED else None  # pyright: ignore[reportArgumentType]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        def attribute(name: str) -> Any:
            for now in map(importlib.import_module, MOVED[module.__name__].split()):
                if hasattr(now, name):
                    return getattr(now, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__path__ = []  # some were folders
        module.__getattr__ = attribute  # pyright: ignore[reportAttributeAccessIssue]


def install() -> None:
    """First, as a folder that has moved may still be there with a cache in it."""
    sys.meta_path.insert(0, _Moved)  # pyright: ignore[reportArgumentType]
