"""Every metric, a row each: what it is called, which values it can have, and where it is shown.

Figures, pages, tables, W&B, `correlate` and `select` read these rows, and the tables of docs/metrics.md are made of
them: what is said of a metric is said here. A metric that has no row is called by its name and is shown all the same.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

INF = math.inf


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        title: in sentence case.
        meaning: one sentence that helps to read the numbers; which direction is better comes from `better`.
        low, high: the range of its values, at whatever options.
        better: which values are better. None: it is no score.
        baseline: the metric that says what this one would be by chance, or is drawn beside it for another reason.
        as_baseline: what it is called where it is drawn beside another.
        excess: the metric from which chance has been taken off.
        level, level_name: a value to compare with that follows from the definition.
        log: values lie decades apart.
        whole: values are numbers of layers.
        first_layer: the first layer that can have a value; None: only the whole model has one.
        median: tokens have outliers, so that a median stands beside the mean.
        secondary: only figures tell of it, not the tables of results.
        unlisted: no table of results has it, nor does a figure of its own show it.
        headline: its place among the few that stand for all scores of a variant of the model; 0: none.
        of_full: what is left of the full model's value is a share of it.
        also: a second group.
    """

    name: str
    title: str
    unit: str = ""
    meaning: str = ""
    low: float = -INF
    high: float = INF
    better: Literal["higher", "lower"] | None = None
    baseline: str = ""
    as_baseline: str = ""
    excess: str = ""
    level: float | None = None
    level_name: str = ""
    log: bool = False
    whole: bool = False
    first_layer: int | None = 0
    median: bool = False
    secondary: bool = False
    unlisted: bool = False
    headline: int = 0
    of_full: bool = False
    also: str = ""
    group: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "baseline", self.baseline or f"random_{self.name}")
        object.__setattr__(self, "excess", self.excess or f"excess_{self.name}")

    @property
    def with_unit(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def title_beside(self) -> str:
        """What it is called where it is drawn beside another metric."""
        return self.as_baseline or self.title

    @property
    def note(self) -> str:
        """The meaning, and which direction is better."""
        if self.better is None:
            return self.meaning
        direction = f"{self.better} is better."
        return f"{self.meaning.removesuffix('.')}; {direction}" if self.meaning else sentence(direction)

    @property
    def higher_is_better(self) -> bool:
        return self.better != "lower"


@dataclass(frozen=True)
class Group:
    """Metrics that belong together.

    `over_tasks`: the group is called like its analysis, which can be measured on the texts of a task, too, as
    `GROUP/TASK`; there is a mean over tasks then.
    """

    name: str
    title: str
    metrics: tuple[Metric, ...]
    over_tasks: bool = False


_EXCESS = {"high": 1, "level": 0.0, "level_name": "Random bases"}

# A row is two lines here, and would be fifteen of one argument each.
# fmt: off
GROUPS = (
    Group("trajectory", "Paths of tokens", (
        Metric("line_shape_score", "Line shape score", "",
            "1 is a straight path through the layers; lower is straighter.", low=1, first_layer=2, median=True,
            also="path"),
        Metric("growth_rate", "Growth rate of the norm", "log ratio",
            "How much a block lets the state's norm grow; 0: not at all.", first_layer=1, secondary=True),
        Metric("expodistance", "Expodistance", "", "0 is exponential growth of the norm at one rate in all blocks.",
            low=0, first_layer=None, median=True, also="path"),
        Metric("equidistance", "Equidistance", "", "0 is steps of equal length in all blocks.", low=0,
            first_layer=None, also="path"),
        Metric("state_norm", "Norm of the states", "", "Mean length of a token's state.", low=0, median=True),
        Metric("step_norm", "Norm of the steps", "", "Mean length of what a block adds to a token's state.", low=0,
            first_layer=1, median=True, secondary=True),
    )),
    Group("coupling", "Coupling of blocks", (
        Metric("coupling", "Coupling", "", "Agreement of the blocks' leading singular directions: 1 shared, 0 none.",
            high=1),
        Metric("excess_coupling", "Excess coupling", "", "0 is the score of random bases, 1 is shared directions.",
            **_EXCESS),
        Metric("coupling_pair", "Coupling of pairs", "",
            "Row: the block whose Jacobian is read in the other's bases.", high=1),
        Metric("coupling_by_distance", "Coupling by distance", "", "Between blocks that lie that many blocks apart.",
            high=1),
        Metric("coupling_with_diagonal", "Coupling with the diagonal", "",
            "Counts each block with itself, as published.", high=1, secondary=True),
        Metric("random_coupling", "Coupling of random bases", "", "What blocks of these spectra score by chance.",
            high=1, as_baseline="Random bases", secondary=True),
        Metric("compression", "One block in the other's directions", "",
            "The Jacobian of the first block in the leading singular directions of the second. A bright diagonal "
            "is coupling, noise is none. Blue is positive, brown negative."),
    )),
    Group("token_coupling", "Coupling over tokens", (
        Metric("token_coupling", "Coupling over tokens", "",
            "Whether a block acts on different tokens along the same directions: 1 yes, 0 no.", high=1),
        Metric("excess_token_coupling", "Excess coupling over tokens", "",
            "0 is the score of random bases, 1 is shared directions.", **_EXCESS),
        Metric("token_coupling_pair", "Coupling of pairs of tokens", "",
            "Row: the token whose Jacobian is read in the directions of the other. 0% is the first token of a "
            "prompt.", high=1),
        Metric("same_token_coupling", "Coupling of blocks, averaged over tokens", "",
            "Of two blocks at one token, then the mean over tokens.", high=1),
        Metric("excess_same_token_coupling", "Excess coupling of blocks, averaged over tokens", "",
            "0 is the score of random bases.", **_EXCESS),
        Metric("input_context_coupling", "Coupling over outputs of one input", "",
            "How alike an earlier token acts on the tokens after it.", high=1),
        Metric("excess_input_context_coupling", "Excess coupling over outputs of one input", "",
            "0 is the score of random bases.", **_EXCESS),
        Metric("input_context_coupling_pair", "Coupling of pairs of outputs of one input", "",
            "Averaged over the input tokens. Row: the output token whose Jacobian is read in the other's directions.",
            high=1),
        Metric("output_context_coupling", "Coupling over inputs of one output", "",
            "How alike the tokens before it act on one token.", high=1),
        Metric("excess_output_context_coupling", "Excess coupling over inputs of one output", "",
            "0 is the score of random bases.", **_EXCESS),
        Metric("output_context_coupling_pair", "Coupling of pairs of inputs of one output", "",
            "Averaged over the output tokens. Row: the input token whose Jacobian is read in the other's directions.",
            high=1),
        Metric("random_token_coupling", "Coupling over tokens of random bases", "",
            "What blocks of these spectra score by chance.", high=1, as_baseline="Random bases", secondary=True),
        Metric("random_input_context_coupling", "Coupling over outputs of one input of random bases", "",
            "What blocks of these spectra score by chance.", high=1, as_baseline="Random bases", secondary=True),
        Metric("random_output_context_coupling", "Coupling over inputs of one output of random bases", "",
            "What blocks of these spectra score by chance.", high=1, as_baseline="Random bases", secondary=True),
    )),
    Group("influence", "Influence of earlier tokens", (
        Metric("influence_frobenius", "Influence of earlier tokens", "Frobenius norm",
            "How strongly an earlier token moves what a block adds. Curves: the mean of all earlier tokens.", low=0,
            log=True),
        Metric("influence_spectral", "Strongest influence of earlier tokens", "spectral norm",
            "Along the direction that has most effect.", low=0, log=True, secondary=True),
        Metric("influence_participation_ratio", "Directions of influence, participation ratio", "",
            "How many directions an earlier token acts along.", low=1, secondary=True),
        Metric("influence_entropy_rank", "Directions of influence, entropy rank", "",
            "As the participation ratio, with more weight on small values.", low=1),
    )),
    Group("jacobian", "Jacobians of blocks", (
        Metric("singular_value", "Singular values", "", "Of the block Jacobians, largest first.", low=0),
        Metric("linearized_rollout", "Linearized rollout", "cosine", "1: the blocks act on the token linearly.",
            low=-1, high=1),
        Metric("min_gap", "Smallest singular gap", "relative", "Near 0 the leading directions are not unique.", low=0,
            high=1, secondary=True),
        Metric("error_estimate", "Likely error of a pair of blocks", "", "Largest over blocks and prompts.", low=0,
            secondary=True),
        Metric("num_tied", "Ties among singular values", "count", "Blocks whose leading directions are not unique.",
            low=0, secondary=True),
        Metric("jacobian_norm", "Norm of the Jacobians", "", "Frobenius norm of each block's Jacobian.", low=0,
            secondary=True),
        Metric("spectrum_slope", "Slope of the inverse largest singular value", "per block",
            "Of a line over the blocks.", secondary=True),
        Metric("spectrum_r_squared", "Fit of the inverse largest singular value", "R²", "Of a line over the blocks.",
            low=0, high=1, secondary=True),
    )),
    Group("mteb", "Layers as embeddings", (
        Metric("main_score", "Main score", "share", "Of a layer as an embedding on tasks of MTEB.", low=-1, high=1,
            better="higher"),
    ), over_tasks=True),
    Group("representation", "States of a prompt and of all prompts", (
        Metric("prompt_entropy", "Prompt entropy", "nats", "Entropy of a prompt's token states.", low=0),
        Metric("dataset_entropy", "Dataset entropy", "nats", "Entropy of the pooled states of all prompts.", low=0),
        Metric("dataset_entropy_of_half", "Dataset entropy of halves", "nats",
            "Mean over random halves of the prompts.", low=0, secondary=True, also="half"),
        Metric("effective_rank", "Effective rank", "", "How many directions a prompt's token states use.", low=1),
        Metric("participation_ratio", "Participation ratio", "",
            "As the effective rank, with less weight on small values.", low=1, secondary=True),
        Metric("rankme", "RankMe", "", "As the effective rank, with a small constant added to each singular value.",
            low=1),
        Metric("token_angle", "Token angle", "radians", "Mean angle between neighbouring tokens' states.", low=0,
            high=math.pi),
        Metric("token_curvature", "Token curvature", "radians", "Mean turn from one token's state to the next.",
            low=0, high=math.pi),
    ), over_tasks=True),
    Group("invariance", "Prompts under another wording", (
        Metric("infonce", "InfoNCE of two views", "nats", "Lower: a prompt's other wording is found more easily.",
            low=0),
        Metric("infonce_of_half", "InfoNCE of halves", "nats", "Mean over random halves of the prompts.", low=0,
            secondary=True, also="half"),
        Metric("infonce_chance", "InfoNCE at chance", "nats", "What equal states of all prompts give.", low=0,
            secondary=True),
        Metric("infonce_chance_of_half", "InfoNCE of halves at chance", "nats",
            "What equal states of all prompts give.", low=0, secondary=True, also="half"),
        Metric("infonce_share", "InfoNCE below chance", "share", "1 - loss / log N: 0 is chance.", high=1),
        Metric("infonce_share_of_half", "InfoNCE of halves below chance", "share",
            "Mean over random halves of the prompts.", high=1, secondary=True, also="half"),
        Metric("lidar", "LiDAR", "nats",
            "Entropy of the directions that tell prompts apart and do not mind their wording.", low=0),
        Metric("lidar_of_half", "LiDAR of halves", "nats", "Mean over random halves of the prompts.", low=0,
            secondary=True, also="half"),
        Metric("lidar_rank", "LiDAR rank", "",
            "How many directions tell prompts apart and do not mind their wording.", low=1),
        Metric("lidar_rank_of_half", "LiDAR rank of halves", "", "Mean over random halves of the prompts.", low=1,
            secondary=True, also="half"),
        Metric("lidar_within_over_delta", "Scatter within prompts over delta", "", "Below 10 LiDAR says little.",
            low=0, secondary=True),
        Metric("dime", "DiME of two views", "nats", "What one wording tells of the other, beyond shuffled pairs."),
        Metric("dime_of_half", "DiME of halves", "nats", "Mean over random halves of the prompts.", secondary=True,
            also="half"),
        Metric("changed_fraction", "Words that a view changes", "share", "Of the words of all texts.", low=0, high=1,
            secondary=True),
    ), over_tasks=True),
    Group("score", "Probes", (
        Metric("accuracy", "Probe accuracy", "share", "Of a linear probe, on the test rows whose class it knows.",
            low=0, high=1, better="higher"),
        Metric("accuracy_all", "Probe accuracy on all rows", "share", "Rows of unknown class count as errors.", low=0,
            high=1, better="higher", secondary=True),
        Metric("macro_f1", "Probe macro F1", "share", "Mean over classes, each with equal weight.", low=0, high=1,
            better="higher", secondary=True),
        Metric("log_loss", "Probe log-loss", "nats", "Of a linear probe on the test rows.", low=0, better="lower"),
        Metric("coverage", "Coverage", "share", "Share of the test rows whose class the probe knows.", low=0, high=1,
            secondary=True),
        Metric("mean_squared_error", "Probe mean squared error", "", "Of a ridge regression.", low=0, better="lower"),
    )),
    Group("monotonicity", "How a probe's score rises over the layers", (
        Metric("monotonicity_spearman", "Monotonicity, rank correlation", "Spearman",
            "1: each layer scores better than the one before it; -1: worse.", low=-1, high=1, first_layer=None),
        Metric("monotonicity_fraction_increasing", "Monotonicity, increasing steps", "share",
            "Of the steps from layer to layer, those that improve the score.", low=0, high=1, first_layer=None,
            unlisted=True),
        Metric("monotonicity_largest_drop", "Monotonicity, largest drop", "",
            "What the worst step from layer to layer loses.", low=0, first_layer=None, unlisted=True),
        Metric("monotonicity_max_drawdown", "Monotonicity, maximum drawdown", "",
            "The most that a later layer loses.", low=0, first_layer=None, unlisted=True),
    )),
    Group("layer", "Layers that a probe's scores single out", (
        Metric("plateau_layer", "Plateau layer", "",
            "The first layer after which no single step gains more than 0.01 of the score.", low=1, whole=True,
            first_layer=None),
        Metric("best_layer", "Best layer", "", "The earliest layer with the best test score.", low=1, whole=True,
            first_layer=None, secondary=True),
        Metric("inflection_layer", "Inflection layer", "", "Where the curve over layers first changes its curvature.",
            low=1, whole=True, first_layer=None, unlisted=True),
    )),
    Group("concept", "Word pairs of one relation", (
        Metric("concept_alignment", "Concept alignment", "cosine",
            "Mean cosine between the differences of two word pairs of one relation.", low=-1, high=1,
            baseline="shuffled", excess="excess"),
        Metric("excess", "Excess concept alignment", "cosine",
            "Concept alignment less that of shuffled pairs: 0 is chance.", low=-2, high=2),
        Metric("leave_one_out", "Leave-one-out alignment", "cosine",
            "Cosine of a pair's difference with the mean of the others.", low=-1, high=1, secondary=True),
        Metric("shuffled", "Alignment of shuffled pairs", "cosine",
            "The same when the second words change partners within their relation.", low=-1, high=1,
            as_baseline="Shuffled pairs", secondary=True),
    )),
    Group("residual", "The next token by least squares", (
        Metric("prediction_residual", "Prediction residual", "share of variance",
            "What a least-squares map of the states leaves unexplained of the next token's index: 1 all, 0 nothing.",
            low=0, high=1, log=True),
        Metric("adjusted", "Adjusted prediction residual", "share of variance",
            "Freed of the number of features: 1 is no relation.", low=0, log=True, secondary=True),
        Metric("held_out", "Held-out prediction residual", "share of variance",
            "On texts that were not fitted; above 1: worse than their mean.", low=0, log=True, secondary=True),
    )),
    Group("law", "The law of the prediction residual over the layers", (
        Metric("residual_ratio", "Residual ratio", "per block",
            "rho: the prediction residual is multiplied by it from block to block.", low=0, first_layer=None),
        Metric("r_squared", "R²", "", "Share of the variance that the fit explains: 1 all, 0 none.", high=1,
            better="higher", also="score"),
        Metric("pearson", "Pearson correlation", "",
            "Of the log residual with depth: -1 is an exact law; of a task's predictions with the truth.", low=-1,
            high=1, first_layer=None, secondary=True),
    )),
    Group("residual_detail", "Beside the prediction residual", (
        Metric("rank", "Rank of the states", "", "Of the features that the prediction residual is fitted on.", low=0,
            secondary=True),
        Metric("prediction_residual_of_half", "Prediction residual of halves", "share of variance",
            "Mean over random halves of the texts.", low=0, high=1, unlisted=True, also="half"),
        Metric("adjusted_of_half", "Adjusted prediction residual of halves", "share of variance",
            "Mean over random halves of the texts.", low=0, unlisted=True, also="half"),
        Metric("residual_ratio_of_half", "Residual ratio of halves", "per block",
            "Mean over random halves of the texts.", low=0, first_layer=None, unlisted=True, also="half"),
    )),
    Group("lens", "The model's own readout at each layer", (
        Metric("logit_lens_loss", "Logit-lens loss", "nats", "Loss of the model's own readout at each layer.", low=0,
            better="lower"),
        Metric("logit_lens_accuracy", "Logit-lens accuracy", "share",
            "Top-1 accuracy of the model's readout per layer.", low=0, high=1, better="higher"),
        Metric("logit_lens_perplexity", "Logit-lens perplexity", "", "At the last layer: the model's perplexity.",
            low=1, better="lower", log=True, secondary=True),
        Metric("kl_to_final", "Divergence from the final prediction", "nats",
            "KL(final, layer); 0 at the last layer.", low=0, secondary=True),
    )),
    Group("plane", "Paths of tokens as a picture", (
        Metric("path", "Paths of tokens through the layers", "",
            "Each line is a token, from the embedding (hollow) to the last layer (large), in the plane that spreads "
            "the last layer most, with the share of its variance along each axis. Each prompt and checkpoint has "
            "its own.", baseline="path_variance"),
        Metric("path_variance", "Variance along an axis", "share",
            "Of the last layer's variance over a prompt's tokens.", low=0, high=1,
            as_baseline="Variance along each axis"),
        Metric("plane_variance", "Variance in the plane of the paths", "share",
            "How much of the last layer's spread the picture shows.", low=0, high=1, secondary=True),
    )),
    Group("variant", "Blocks in another order, on text and images", (
        Metric("variant_loss", "Loss", "nats", "Cross-entropy of the next token or of the class.", low=0,
            better="lower", headline=4),
        Metric("variant_accuracy", "Accuracy", "share", "Top-1, of the next token or of the class.", low=0, high=1,
            better="higher", headline=3, of_full=True),
        Metric("kl_to_full", "Divergence from the full model", "nats",
            "KL(full model, variant): 0 where both predict the same.", low=0, better="lower", unlisted=True),
    )),
    Group("task", "Blocks in another order, on tasks", (
        Metric("normalized_score", "Normalized score", "",
            "1 is the full model, 0 guessing: (score - guessing) / (full model - guessing).", better="higher",
            level=0, level_name="Guessing", headline=1),
        Metric("task_score", "Task score", "share", "Accuracy on the task, or what it is scored by.", low=-1, high=1,
            better="higher", headline=2, of_full=True, also="above guessing"),
        Metric("task_score_norm", "Task score, normalized by length", "share",
            "Accuracy where each answer's likelihood is over its length.", low=0, high=1, better="higher",
            secondary=True, also="above guessing"),
        Metric("task_perplexity", "Task perplexity", "", "Of the words to be told.", low=1, better="lower", log=True,
            secondary=True),
        Metric("random_score", "Score of guessing", "share", "What a model that knows nothing scores.", low=0, high=1,
            secondary=True),
    )),
    Group("cost", "What a variant costs", (
        Metric("relative_latency", "Relative latency", "share of the full model's",
            "Below 1 is faster than the full model.", low=0, better="lower", secondary=True, headline=5),
        Metric("latency", "Latency", "seconds", "Of one input.", low=0, better="lower", secondary=True),
        Metric("throughput", "Throughput", "inputs per second", low=0, better="higher", secondary=True),
        Metric("peak_memory", "Peak memory", "bytes", low=0, better="lower", secondary=True),
        Metric("latency_first_quartile", "Latency, first quartile", "seconds", "Of one input.", low=0, better="lower",
            secondary=True),
        Metric("latency_third_quartile", "Latency, third quartile", "seconds", "Of one input.", low=0, better="lower",
            secondary=True),
        Metric("weight_bytes", "Weights", "bytes", "Of the blocks that run.", low=0, better="lower", secondary=True),
    )),
    Group("glue", "What tasks of GLUE are scored by", (
        Metric("f1", "F1", "share", "Of the positive class.", low=0, high=1, better="higher"),
        Metric("matthews", "Matthews correlation", "", "1 is right throughout, 0 is guessing.", low=-1, high=1,
            better="higher"),
        Metric("spearman", "Spearman correlation", "", "Of the predictions with the truth.", low=-1, high=1,
            better="higher"),
    )),
    Group("order", "The running order itself", (
        Metric("kendall_distance", "Kendall distance", "pairs", "Pairs of blocks that a random order turns around.",
            low=0, unlisted=True),
        Metric("failed", "Failed", "", "A variant that could not be measured.", low=1, high=1, unlisted=True),
    )),
    Group("similarity", "Likeness of layers", (
        Metric("layer_cosine", "Cosine of layers", "cosine",
            "Mean cosine of a token's states at two layers, the middle of the model is a block.", low=-1, high=1),
        Metric("layer_cka", "Linear CKA of layers", "",
            "Likeness of the layers' geometry: 1 is the same up to rotation.", low=-1, high=1),
    )),
    Group("stage", "Stages of a model", (
        Metric("num_beginning", "Beginning layers", "layers", "Before the block of similar layers in the middle.",
            low=0, whole=True, first_layer=None),
        Metric("num_middle", "Middle layers", "layers", "That are like each other.", low=0, whole=True,
            first_layer=None),
        Metric("num_ending", "Ending layers", "layers", "Behind the block of similar layers in the middle.", low=0,
            whole=True, first_layer=None),
    )),
    Group("contrast", "How clear the stages are", (
        Metric("block_contrast", "Contrast of the middle layers", "",
            "How much more alike the middle layers are to each other than to the others.", low=-2, high=2,
            first_layer=None, secondary=True),
    )),
    Group("training", "Training", (
        Metric("train/loss", "Training loss", "nats", low=0, better="lower"),
        Metric("validation/loss", "Validation loss", "nats", low=0, better="lower"),
        Metric("validation/accuracy", "Validation accuracy", "share", low=0, high=1, better="higher"),
        Metric("validation/ema_accuracy", "Validation accuracy of averaged weights", "share", low=0, high=1,
            better="higher"),
        Metric("validation/accuracy_top5", "Validation accuracy, top 5", "share", low=0, high=1, better="higher"),
        Metric("validation/ema_loss", "Validation loss of averaged weights", "nats", low=0, better="lower"),
        Metric("validation/perplexity", "Validation perplexity", low=1, better="lower", log=True),
        Metric("train/learning_rate", "Learning rate", low=0),
        Metric("train/grad_norm", "Gradient norm", low=0),
        Metric("train/tokens_per_second", "Throughput", "tokens per second", low=0),
        Metric("train/images_per_second", "Throughput", "images per second", low=0),
        Metric("train/mfu", "Model FLOPs utilisation", "share", low=0),
    )),
)
# fmt: on
METRICS = {metric.name: replace(metric, group=group.name) for group in GROUPS for metric in group.metrics}


def look_up(metric: str) -> Metric:
    """Returns a metric's row; one that has none is called by its name, and nothing else is known of it."""
    half = metric.endswith("_of_half")
    return METRICS.get(metric) or Metric(metric, sentence(metric), secondary=half, also="half" if half else "")


def is_in(metric: str, *groups: str) -> bool:
    row = look_up(metric)
    return row.group in groups or row.also in groups


def names(group: str) -> list[str]:
    """Returns the metrics of a group, in order."""
    return [name for name in METRICS if is_in(name, group)]


def headlines() -> list[str]:
    """Returns the metrics that stand for all scores of a variant of the model, the first one first."""
    return sorted((name for name, row in METRICS.items() if row.headline), key=lambda name: METRICS[name].headline)


def rank(metric: str) -> int:
    """Returns a metric's place among the rows; those without a row come last."""
    return list(METRICS).index(metric) if metric in METRICS else len(METRICS)


def sentence(name: str) -> str:
    """Returns `some_name` as `Some name`, and `probe/some_task` as `Probe: some task`."""
    words = name.replace("_", " ").replace("/", ": ").strip()
    return f"MTEB{words[4:]}" if words.split(":")[0] == "mteb" else words[:1].upper() + words[1:]
