"""How metrics, analyses and numbers are called in figures and tables."""

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass

DASH, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Label:
    """A metric's name in sentence case, its unit, and one sentence that helps to read it."""

    title: str
    unit: str = ""
    note: str = ""

    @property
    def with_unit(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title


METRICS = {
    "line_shape_score": Label("Line shape score", "", "1 is a straight path through the layers; lower is straighter."),
    "growth_rate": Label(
        "Growth rate of the norm", "log ratio", "How much a block lets the state's norm grow; 0: not at all."
    ),
    "expodistance": Label("Expodistance", "", "0 is exponential growth of the norm at one rate in all blocks."),
    "equidistance": Label("Equidistance", "", "0 is steps of equal length in all blocks."),
    "state_norm": Label("Norm of the states", "", "Mean length of a token's state."),
    "step_norm": Label("Norm of the steps", "", "Mean length of what a block adds to a token's state."),
    "coupling": Label("Coupling", "", "Agreement of the blocks' leading singular directions: 1 shared, 0 none."),
    "excess_coupling": Label("Excess coupling", "", "0 is the score of random bases, 1 is shared directions."),
    "coupling_pair": Label("Coupling of pairs", "", "Row: the block whose Jacobian is read in the other's bases."),
    "coupling_by_distance": Label("Coupling by distance", "", "Between blocks that lie that many blocks apart."),
    "coupling_with_diagonal": Label("Coupling with the diagonal", "", "Counts each block with itself, as published."),
    "random_coupling": Label("Coupling of random bases", "", "What blocks of these spectra score by chance."),
    "compression": Label(
        "One block in the other's directions",
        "",
        "The Jacobian of the first block in the leading singular directions of the second. A bright diagonal is "
        "coupling, noise is none. Blue is positive, brown negative.",
    ),
    "token_coupling": Label(
        "Coupling over tokens", "", "Whether a block acts on different tokens along the same directions: 1 yes, 0 no."
    ),
    "excess_token_coupling": Label(
        "Excess coupling over tokens", "", "0 is the score of random bases, 1 is shared directions."
    ),
    "token_coupling_pair": Label(
        "Coupling of pairs of tokens",
        "",
        "Row: the token whose Jacobian is read in the directions of the other. 0% is the first token of a prompt.",
    ),
    "same_token_coupling": Label(
        "Coupling of blocks, averaged over tokens", "", "Of two blocks at one token, then the mean over tokens."
    ),
    "excess_same_token_coupling": Label(
        "Excess coupling of blocks, averaged over tokens", "", "0 is the score of random bases."
    ),
    "input_context_coupling": Label(
        "Coupling over outputs of one input", "", "How alike an earlier token acts on the tokens after it."
    ),
    "excess_input_context_coupling": Label(
        "Excess coupling over outputs of one input", "", "0 is the score of random bases."
    ),
    "input_context_coupling_pair": Label(
        "Coupling of pairs of outputs of one input",
        "",
        "Averaged over the input tokens. Row: the output token whose Jacobian is read in the other's directions.",
    ),
    "output_context_coupling": Label(
        "Coupling over inputs of one output", "", "How alike the tokens before it act on one token."
    ),
    "excess_output_context_coupling": Label(
        "Excess coupling over inputs of one output", "", "0 is the score of random bases."
    ),
    "output_context_coupling_pair": Label(
        "Coupling of pairs of inputs of one output",
        "",
        "Averaged over the output tokens. Row: the input token whose Jacobian is read in the other's directions.",
    ),
    "influence_frobenius": Label(
        "Influence of earlier tokens",
        "Frobenius norm",
        "How strongly an earlier token moves what a block adds. Curves: the mean of all earlier tokens.",
    ),
    "influence_spectral": Label(
        "Strongest influence of earlier tokens", "spectral norm", "Along the direction that has most effect."
    ),
    "influence_participation_ratio": Label(
        "Directions of influence, participation ratio", "", "How many directions an earlier token acts along."
    ),
    "influence_entropy_rank": Label(
        "Directions of influence, entropy rank", "", "As the participation ratio, with more weight on small values."
    ),
    "singular_value": Label("Singular values", "", "Of the block Jacobians, largest first."),
    "linearized_rollout": Label("Linearized rollout", "cosine", "1: the blocks act on the token linearly."),
    "min_gap": Label("Smallest singular gap", "relative", "Near 0 the leading directions are not unique."),
    "error_estimate": Label("Likely error of a pair of blocks", "", "Largest over blocks and prompts."),
    "num_tied": Label("Ties among singular values", "count", "Blocks whose leading directions are not unique."),
    "jacobian_norm": Label("Norm of the Jacobians", "", "Frobenius norm of each block's Jacobian."),
    "spectrum_slope": Label("Slope of the inverse largest singular value", "per block", "Of a line over the blocks."),
    "spectrum_r_squared": Label("Fit of the inverse largest singular value", "R²", "Of a line over the blocks."),
    "prompt_entropy": Label("Prompt entropy", "nats", "Entropy of a prompt's token states."),
    "dataset_entropy": Label("Dataset entropy", "nats", "Entropy of the pooled states of all prompts."),
    "dataset_entropy_of_half": Label("Dataset entropy of halves", "nats", "Mean over random halves of the prompts."),
    "infonce": Label("InfoNCE of two views", "nats", "Lower: a prompt's other wording is found more easily."),
    "infonce_of_half": Label("InfoNCE of halves", "nats", "Mean over random halves of the prompts."),
    "infonce_chance": Label("InfoNCE at chance", "nats", "What equal states of all prompts give."),
    "infonce_chance_of_half": Label("InfoNCE of halves at chance", "nats", "What equal states of all prompts give."),
    "infonce_share": Label("InfoNCE below chance", "share", "1 - loss / log N: 0 is chance."),
    "infonce_share_of_half": Label(
        "InfoNCE of halves below chance", "share", "Mean over random halves of the prompts."
    ),
    "lidar": Label("LiDAR", "nats", "Entropy of the directions that tell prompts apart and do not mind their wording."),
    "lidar_of_half": Label("LiDAR of halves", "nats", "Mean over random halves of the prompts."),
    "lidar_rank": Label("LiDAR rank", "", "How many directions tell prompts apart and do not mind their wording."),
    "lidar_rank_of_half": Label("LiDAR rank of halves", "", "Mean over random halves of the prompts."),
    "lidar_within_over_delta": Label("Scatter within prompts over delta", "", "Below 10 LiDAR says little."),
    "dime": Label("DiME of two views", "nats", "What one wording tells of the other, beyond shuffled pairs."),
    "dime_of_half": Label("DiME of halves", "nats", "Mean over random halves of the prompts."),
    "changed_fraction": Label("Words that a view changes", "share", "Of the words of all texts."),
    "main_score": Label("Main score", "share", "Of a layer as an embedding on tasks of MTEB; higher is better."),
    "effective_rank": Label("Effective rank", "", "How many directions a prompt's token states use."),
    "participation_ratio": Label("Participation ratio", "", "As the effective rank, with less weight on small values."),
    "rankme": Label("RankMe", "", "As the effective rank, with a small constant added to each singular value."),
    "token_angle": Label("Token angle", "radians", "Mean angle between neighbouring tokens' states."),
    "token_curvature": Label("Token curvature", "radians", "Mean turn from one token's state to the next."),
    "accuracy": Label("Probe accuracy", "share", "Of a linear probe, on the test rows whose class it knows."),
    "accuracy_all": Label("Probe accuracy on all rows", "share", "Rows of unknown class count as errors."),
    "log_loss": Label("Probe log-loss", "nats", "Of a linear probe on the test rows."),
    "macro_f1": Label("Probe macro F1", "share", "Mean over classes, each with equal weight."),
    "coverage": Label("Coverage", "share", "Share of the test rows whose class the probe knows."),
    "mean_squared_error": Label("Probe mean squared error", "", "Of a ridge regression; lower is better."),
    "r_squared": Label("R²", "", "Share of the variance that the fit explains: 1 all, 0 none."),
    "monotonicity_spearman": Label(
        "Monotonicity, rank correlation", "Spearman", "1: each layer scores better than the one before it; -1: worse."
    ),
    "monotonicity_fraction_increasing": Label(
        "Monotonicity, increasing steps", "share", "Of the steps from layer to layer, those that improve the score."
    ),
    "monotonicity_largest_drop": Label(
        "Monotonicity, largest drop", "", "What the worst step from layer to layer loses."
    ),
    "monotonicity_max_drawdown": Label("Monotonicity, maximum drawdown", "", "The most that a later layer loses."),
    "plateau_layer": Label(
        "Plateau layer", "", "The first layer after which no single step gains more than 0.01 of the score."
    ),
    "best_layer": Label("Best layer", "", "The earliest layer with the best test score."),
    "inflection_layer": Label("Inflection layer", "", "Where the curve over layers first changes its curvature."),
    "concept_alignment": Label(
        "Concept alignment", "cosine", "Mean cosine between the differences of two word pairs of one relation."
    ),
    "excess": Label(
        "Excess concept alignment",
        "cosine",
        "Concept alignment less that of shuffled pairs: 0 is chance.",
    ),
    "leave_one_out": Label(
        "Leave-one-out alignment",
        "cosine",
        "Cosine of a pair's difference with the mean of the others.",
    ),
    "shuffled": Label(
        "Alignment of shuffled pairs", "cosine", "The same when the second words change partners within their relation."
    ),
    "prediction_residual": Label(
        "Prediction residual",
        "share of variance",
        "What a least-squares map of the states leaves unexplained of the next token's index: 1 all, 0 nothing.",
    ),
    "adjusted": Label(
        "Adjusted prediction residual", "share of variance", "Freed of the number of features: 1 is no relation."
    ),
    "held_out": Label(
        "Held-out prediction residual",
        "share of variance",
        "On texts that were not fitted; above 1: worse than their mean.",
    ),
    "residual_ratio": Label(
        "Residual ratio", "per block", "rho: the prediction residual is multiplied by it from block to block."
    ),
    "pearson": Label(
        "Correlation of the log residual with depth",
        "Pearson",
        "-1: the residual falls exactly exponentially.",
    ),
    "rank": Label("Rank of the states", "", "Of the features that the prediction residual is fitted on."),
    "prediction_residual_of_half": Label(
        "Prediction residual of halves", "share of variance", "Mean over random halves of the texts."
    ),
    "adjusted_of_half": Label(
        "Adjusted prediction residual of halves", "share of variance", "Mean over random halves of the texts."
    ),
    "residual_ratio_of_half": Label("Residual ratio of halves", "per block", "Mean over random halves of the texts."),
    "logit_lens_loss": Label("Logit-lens loss", "nats", "Loss of the model's own readout at each layer."),
    "logit_lens_accuracy": Label("Logit-lens accuracy", "share", "Top-1 accuracy of the model's readout per layer."),
    "logit_lens_perplexity": Label("Logit-lens perplexity", "", "At the last layer: the model's perplexity."),
    "kl_to_final": Label("Divergence from the final prediction", "nats", "KL(final, layer); 0 at the last layer."),
    "path": Label(
        "Paths of tokens through the layers",
        "",
        "Each line is a token, from the embedding (hollow) to the last layer (large), in the plane that spreads the "
        "last layer most, with the share of its variance along each axis. Each prompt and checkpoint has its own.",
    ),
    "path_variance": Label("Variance along an axis", "share", "Of the last layer's variance over a prompt's tokens."),
    "plane_variance": Label(
        "Variance in the plane of the paths", "share", "How much of the last layer's spread the picture shows."
    ),
    "variant_loss": Label("Loss", "nats", "Cross-entropy of the next token or of the class; lower is better."),
    "variant_accuracy": Label("Accuracy", "share", "Top-1, of the next token or of the class; higher is better."),
    "kl_to_full": Label(
        "Divergence from the full model", "nats", "KL(full model, variant): 0 where both predict the same."
    ),
    "kendall_distance": Label("Kendall distance", "pairs", "Pairs of blocks that a random order turns around."),
    "normalized_score": Label(
        "Normalized score", "", "1 is the full model, 0 guessing: (score - guessing) / (full model - guessing)."
    ),
    "task_score": Label("Task score", "share", "Accuracy on the task, or what it is scored by; higher is better."),
    "task_score_norm": Label(
        "Task score, normalized by length", "share", "Accuracy where each answer's likelihood is over its length."
    ),
    "task_perplexity": Label("Task perplexity", "", "Of the words to be told; lower is better."),
    "glue_score": Label("GLUE score", "share", "Mean over tasks, of two metrics of a task the mean first."),
    "random_score": Label("Score of guessing", "share", "What a model that knows nothing scores."),
    "latency": Label("Latency", "seconds", "Of one input; lower is better."),
    "relative_latency": Label(
        "Relative latency", "share of the full model's", "Below 1 is faster than the full model."
    ),
    "throughput": Label("Throughput", "inputs per second", "Higher is better."),
    "peak_memory": Label("Peak memory", "bytes", "Lower is better."),
    "layer_cosine": Label(
        "Cosine of layers",
        "cosine",
        "Mean cosine of a token's states at two layers, the middle of the model is a block.",
    ),
    "layer_cka": Label("Linear CKA of layers", "", "Likeness of the layers' geometry: 1 is the same up to rotation."),
    "num_beginning": Label("Beginning layers", "layers", "Before the block of similar layers in the middle."),
    "num_middle": Label("Middle layers", "layers", "That are like each other."),
    "num_ending": Label("Ending layers", "layers", "Behind the block of similar layers in the middle."),
    "block_contrast": Label(
        "Contrast of the middle layers",
        "",
        "How much more alike the middle layers are to each other than to the others.",
    ),
    "train/loss": Label("Training loss", "nats"),
    "validation/loss": Label("Validation loss", "nats"),
    "validation/perplexity": Label("Validation perplexity"),
    "train/learning_rate": Label("Learning rate"),
    "train/grad_norm": Label("Gradient norm"),
    "train/tokens_per_second": Label("Throughput", "tokens per second"),
    "train/images_per_second": Label("Throughput", "images per second"),
    "validation/accuracy": Label("Validation accuracy", "share"),
    "validation/accuracy_top5": Label("Validation accuracy, top 5", "share"),
    "validation/ema_accuracy": Label("Validation accuracy of averaged weights", "share"),
    "train/mfu": Label("Model FLOPs utilisation", "share"),
}

ANALYSES = {
    "trajectory": "The path of single tokens through the layers.",
    "coupling": "How alike the blocks' Jacobians are, by their leading singular directions.",
    "token_coupling": "How alike a block acts on the tokens of a prompt, by the Jacobians between them.",
    "coupling_matrices": "The matrices behind coupling, at the last token.",
    "cross_token_influence": "How much, and in how many directions, earlier tokens reach the last one in each block.",
    "representation": "How many directions the states of a prompt fill, and how its tokens turn.",
    "label_probe": "What a linear probe can tell about the label from each layer.",
    "paths_in_plane": "The paths of a prompt's tokens through the layers, as a picture.",
    "invariance": "How well each layer tells prompts apart, and how little it minds their wording.",
    "mteb": "How well each layer does as an embedding: the main scores of MTEB's tasks.",
    "prompt_studies": "How the entropy of prompts moves with repetition, with random tokens and with length.",
    "next_token_probe": "What a linear probe can tell about the next token from each layer.",
    "lens": "What the model's own readout makes of each layer.",
    "probe": "What a linear probe of each layer can tell on a downstream task.",
    "sample_sizes": "How the test score of each layer's probe grows with the number of training rows.",
    "concept_alignment": "How far the word pairs of a relation point in one direction at each layer.",
    "prediction_residual": "How much of the next token a linear map of each layer cannot tell, by least squares.",
    "interventions": (
        "What is left when the middle blocks are skipped, repeated, reversed, shuffled or run side by side, and "
        "nothing is trained again."
    ),
    "intervene": "Scores of the model with its blocks in another order.",
    "layer_similarity": (
        "How alike the states of two layers are, and where the stages of the model begin: layers in the middle share "
        "one space."
    ),
}

# Metrics that only their figures tell of, not the tables of results.
SECONDARY = {
    *("growth_rate", "step_norm", "coupling_with_diagonal", "min_gap", "participation_ratio", "accuracy_all"),
    *("coverage", "logit_lens_perplexity", "kl_to_final", "macro_f1", "dataset_entropy_of_half", "error_estimate"),
    *("random_coupling", "num_tied", "jacobian_norm", "spectrum_slope", "spectrum_r_squared"),
    *("random_token_coupling", "random_input_context_coupling", "random_output_context_coupling"),
    *("influence_spectral", "influence_participation_ratio", "plane_variance"),
    *("infonce_of_half", "infonce_chance", "infonce_chance_of_half", "infonce_share_of_half", "lidar_of_half"),
    *("lidar_rank_of_half", "lidar_within_over_delta", "dime_of_half", "changed_fraction"),
    *("best_layer", "leave_one_out", "shuffled", "adjusted", "held_out", "rank", "pearson"),
    *("task_score_norm", "task_perplexity", "random_score"),
    *("latency", "relative_latency", "throughput", "peak_memory", "block_contrast"),
}
# Metrics that no table of results has, not even that of models without steps.
UNLISTED = {
    *("monotonicity_fraction_increasing", "monotonicity_largest_drop", "monotonicity_max_drawdown", "inflection_layer"),
    *("prediction_residual_of_half", "adjusted_of_half", "residual_ratio_of_half"),
    *("kl_to_full", "kendall_distance"),
}
# Metrics whose values lie decades apart.
LOG_SCALE = {
    *("logit_lens_perplexity", "validation/perplexity", "task_perplexity", "influence_frobenius", "influence_spectral"),
    *("prediction_residual", "adjusted", "held_out"),
}
# Metrics whose values are numbers of layers.
WHOLE_NUMBERS = {
    *("plateau_layer", "best_layer", "inflection_layer", "num_beginning", "num_middle", "num_ending"),
}
# Metrics that are drawn beside another one, to compare with, rather than alone; and what they are called there.
BASELINES = {
    metric: {f"random_{metric}": "Random bases"}
    for metric in ("coupling", "token_coupling", "input_context_coupling", "output_context_coupling")
} | {
    "path": {"path_variance": "Variance along each axis"},
    "concept_alignment": {"shuffled": "Shuffled pairs"},
}
# Values to compare with that follow from the definition.
LEVELS = {
    metric: {0.0: "Random bases"}
    for metric in (
        *("excess_coupling", "excess_token_coupling", "excess_same_token_coupling"),
        *("excess_input_context_coupling", "excess_output_context_coupling"),
    )
}

_TAGS = {
    "drop_first": "first {} tokens dropped",
    "statistic": "{}",
    "control": "{}",
    "normalization": "{} normalization",
    "prompt": "prompt {}",
    "domain": "{}",
    "states": "{} states",
    "variant": "{}",
    "middle": "M = {}",
    "loops": "k = {}",
    "schedule": "{}",
    "when": "{} fine-tuning",
    "execution": "run as a {}",
    "mode": "{}",
}
_REFERENCES = {
    "majority": "majority class",
    "mean": "training mean",
    "lm_head": "model's head",
    "lm_head_closed": "model's head, probe's classes",
}
_SHOWN = {
    ("drop_first", "0"): "all tokens",
    ("drop_first", "1"): "without the first token",
    ("control", "random_labels"): "random labels",
    ("control", "untrained_model"): "untrained model",
    ("control", "relabelled_vocabulary"): "relabelled vocabulary",
    ("split", "train"): "training rows",
    ("split", "validation"): "validation rows",
    ("split", "test"): "test rows",
    ("of", "accuracy"): "of accuracy",
    ("of", "log_loss"): "of log-loss",
    ("of", "mean_squared_error"): "of mean squared error",
    ("pooling", "cls"): "class token",
    ("pooling", "mean"): "mean of the tokens",
    ("pooling", "last"): "last token",
    ("variant", "baseline"): "full model",
    ("variant", "middle_repeat"): "middle repeated",
    ("variant", "skip"): "skip",
    ("variant", "random"): "random order",
    ("variant", "looped_parallel"): "looped parallel",
    ("variant", "skip_one"): "skip one block",
    ("variant", "switch"): "switch with the next",
    ("variant", "custom"): "own schedule",
    ("execution", "loop"): "run one by one",
    ("execution", "stacked"): "run stacked",
    ("mode", "token"): "token by token",
    ("mode", "flattened"): "of flattened prompts",
    ("training", "full"): "all weights trained",
    ("training", "frozen"): "frozen encoder",
    ("of", "layer_cosine"): "by cosine",
    ("of", "layer_cka"): "by CKA",
    ("normalization", "raw"): "raw",
    ("normalization", "maxEntropy"): "share of the maximum",
}


def label(metric: str) -> Label:
    """Returns a metric's label; one that the table lacks is called by its name."""
    return METRICS.get(metric) or Label(sentence(metric))


def sentence(name: str) -> str:
    """Returns `some_name` as `Some name`, and `probe/some_task` as `Probe: some task`."""
    words = name.replace("_", " ").replace("/", ": ").strip()
    return f"MTEB{words[4:]}" if words.split(":")[0] == "mteb" else words[:1].upper() + words[1:]


def analysis_note(name: str) -> str:
    """Returns what an analysis does, in a sentence; one named `probe/some_task` does what `probe` does."""
    return ANALYSES.get(name) or ANALYSES.get(name.split("/")[0], "")


def escape(text: object) -> str:
    """Returns text that plotly and HTML show as it is, whatever it holds."""
    return html.escape(str(text), quote=False)


def tag_text(tags: dict[str, object]) -> str:
    """Returns what a variant of a metric is called: `k = 12, median`; an empty string for no tags."""
    parts = []
    for name, value in tags.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        if (name, text) in _SHOWN:
            parts.append(_SHOWN[name, text])
        elif name == "reference":
            parts.append(_REFERENCES.get(text, text.replace("_", " ")))
        else:
            parts.append(_TAGS[name].format(text) if name in _TAGS else f"{name.replace('_', ' ')} = {text}")
    return ", ".join(parts)


def listing(noun: str, names: Iterable[object], most: int = 12) -> str:
    """Returns `steps 1, 2, 3 and 40 more`: so many names, and how many there are beyond them."""
    known = [str(name) for name in names]
    rest = f" and {len(known) - most} more" if len(known) > most else ""
    return f"{noun}{'s' if len(known) > 1 else ''} {', '.join(known[:most])}{rest}"


def pair_text(layer: int | None, other_layer: int | None) -> str:
    """Returns what a layer is called, or a pair: `block 1 in the directions of block 3`."""
    return f"layer {layer}" if other_layer is None else f"block {layer} in the directions of block {other_layer}"


def count(number: float | None) -> str:
    """Returns a count, short: 512, 1,500, 143k, 2.1M, 300B."""
    if number is None:
        return ""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size and abs(number) >= 10_000:
            return f"{number / size:.3g}{suffix}"
    return f"{number:,.0f}" if abs(number) >= 10_000 or number == int(number) else f"{number:.3g}"


def value(number: float | None) -> str:
    """Returns a measured number with three to four digits; a dash where there is none."""
    if number is None or math.isnan(number):
        return DASH
    if math.isinf(number):
        return "\N{INFINITY}" if number > 0 else MINUS + "\N{INFINITY}"
    size = abs(number)
    if size != 0 and (size >= 1e5 or size < 1e-4):
        text = f"{number:.2e}".replace("e-0", "e-").replace("e+0", "e")
    elif 0 < size < 1e-2:
        text = f"{number:.4f}"
    else:
        text = f"{number:.1f}" if size >= 1000 else f"{number:.2f}" if size >= 10 else f"{number:.3f}"
    return text.replace("-", MINUS, 1) if number < 0 else text


def whole(number: float) -> str:
    """Returns a number that is a whole one, or the mean of some; a dash where there is none."""
    return DASH if math.isnan(number) else f"{number:g}".replace("-", MINUS, 1)
