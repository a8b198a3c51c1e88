"""The Jacobian lens: maps the states of earlier layers to the last one by the mean Jacobian between them."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_layers.analyses.base import Analysis, Jobs
from lit_layers.analyses.base import Rows as RowsRead
from lit_layers.analyses.readout_scores import FullModel, Rows, check_head, rows_of
from lit_layers.analyses.statistics import exponential, require_values, summarize_ratio
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.jacobian.block_call import pull_back
from lit_layers.functional.jacobian.block_jacobians import exact_arithmetic
from lit_layers.models.view import Batch, LayeredModel, Trajectory, real_tokens
from lit_layers.records import Record

_Block = Callable[[Tensor], Tensor]  # (1, tokens, dim) -> (1, tokens, dim)


@dataclass(kw_only=True)
class JacobianLens(Analysis):
    """The Jacobian lens and its controls: how near each layer's readout is to the model's own output.

    A lens maps the states of layer l to the last layer, whose norm and head then read them. The tag `lens` names it.
    `jacobian` uses the mean Jacobian J_l = E[d h_L / d h_l], fitted at each checkpoint. `logit` uses the states
    unchanged. `shuffled` is the baseline of `jacobian`: it is fitted to the same model after the entries of each weight
    matrix in its blocks are shuffled.

    Per layer 0 to L - 1, over tokens of held-out prompts from position `skip_first` on: `lens_kl` is KL(model || lens)
    in nats, 0 if the lens gives the model's own output. `lens_rank` is the geometric mean of the rank of the true next
    token, where rank 1 is the most probable token. `stderr` and the interval are over prompts. `num_undefined` and
    `num_undefined_fit_prompts` count prompts that are too short or not finite.

    The first `num_prompts` prompts fit the Jacobians; the others are held out. The model runs in float32 or wider.

    Cost: `dim` backward passes through all blocks for each of the `num_prompts`. For 8 prompts x 128 tokens and a model
    of width 1,024 with 302 M parameters in its blocks (Pythia 410M), that is 2 x 302e6 x 128 x 8 x 1,024 = 6.3e14 FLOP.

    Source: Gurnee et al., Verbalizable Representations Form a Global Workspace in Language Models, Transformer Circuits
    Thread 2026.

    Args:
        batches: prompts of equal length, or padded.
        num_prompts: prompts on which the Jacobians are fitted.
        skip_first: positions to leave out at the start of each prompt, as the states of the first tokens are unlike all
            others.
        lenses: which lenses to measure.
        seed: seed of the shuffled weights.
    """

    SEES = "text"
    NEXT_TOKEN = True
    batches: Batches
    name: str = "jacobian_lens"
    num_prompts: int = 8
    skip_first: int = 16
    lenses: tuple[Literal["jacobian", "logit", "shuffled"], ...] = ("jacobian", "logit", "shuffled")
    seed: int = 0

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        check_head(self.name, model)

    def check_data(self) -> None:
        """Check that there are enough long prompts, both to fit on and to compare on."""
        super().check_data()
        are_long = [is_long(prompt, self.skip_first) for prompt in single_prompts(self.batches)]
        uses = {"fit on": are_long[: self.num_prompts], "compare on": are_long[self.num_prompts :]}
        if missing := [use for use, long in uses.items() if not any(long)]:
            raise InputError(
                f"{self.name}: no prompt to {missing[0]}: give more than {self.num_prompts} (num_prompts) of more than "
                f"{self.skip_first + 1} tokens (skip_first), got {len(are_long)}"
            )

    def reads(self, model: LayeredModel) -> dict[str, RowsRead]:
        """Return an empty dict, because `jobs` runs the model itself: it fits each lens before it compares readouts."""
        return {}

    def jobs(self, model: LayeredModel) -> Jobs:
        """Return one job per lens."""
        self.check_data()
        jobs = [partial(self._lens_records, model, name) for name in self.lenses]
        return Jobs(jobs, lambda results: require_values(self.name, chain.from_iterable(results)))

    def _lens_records(self, model: LayeredModel, name: str) -> list[Record]:
        """Fit one lens and compare its readouts with the model's own on the held-out prompts."""
        prompts, lens, num_left_out = [*single_prompts(self.batches)], None, None
        if name != "logit":
            lens, num_left_out = self.fit(model, name, prompts[: self.num_prompts])
            lens = lens.to(model.device, torch.promote_types(model.dtype, torch.float32))

        def prompt_values(prompt: Batch) -> Tensor:
            """Return the sums of divergence and log rank over a prompt's tokens, and the number of tokens, (layers, 3).

            All are zero if the prompt is too short.
            """
            if not is_long(prompt, self.skip_first):
                return torch.zeros(model.num_layers, 3, dtype=torch.float64)
            trajectory = model.trajectory(prompt)
            every = rows_of(self.name, trajectory, prompt)
            chosen = torch.isin(every.position, positions_of(trajectory, self.skip_first))
            rows = Rows(every.prompt[chosen], every.position[chosen], every.target[chosen], True)
            full, results = FullModel(trajectory.logits_of(rows.index), rows), []
            for layer in range(model.num_layers):
                hidden = trajectory.hidden[layer][rows.index]
                with torch.no_grad():
                    logits = model.readout((hidden if lens is None else hidden @ lens[layer].T)[None])[0]
                results.append(torch.stack([full.scores(logits)[2].sum(), _log_rank(logits, rows)]))
            return torch.nn.functional.pad(torch.stack(results).cpu().double(), (0, 1), value=len(rows.position))

        sums = torch.stack([prompt_values(prompt) for prompt in prompts[self.num_prompts :]], -1)
        records = list[Record]()
        for layer, (divergence, log_rank, tokens) in enumerate(sums):  # (prompts,) each
            tags: dict[str, Any] = {"lens": name}
            if name == "jacobian" and num_left_out is not None:
                missing = int(num_left_out[layer])
                tags |= {"num_fit_prompts": self.num_prompts - missing}
                tags |= {"num_undefined_fit_prompts": missing} if missing else {}
            fields: dict[str, Any] = {"layer": layer, "tags": tags, "counted": "num_tokens"}
            records += summarize_ratio("lens_kl", divergence, tokens, **fields)
            records += map(exponential, summarize_ratio("lens_rank", log_rank, tokens, **fields))
        return records

    def fit(self, model: LayeredModel, name: str, prompts: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Return the mean Jacobians (layers, dim, dim) over prompts in float64, and how many prompts each mean lacks.

        Prompts are left out if they are too short or their Jacobian is not finite. The mean is NaN if none is left.
        """
        view = LayeredModel(shuffle_weights(model, self.seed)) if name == "shuffled" else model
        whole = torch.zeros(view.num_layers, view.dim, view.dim, dtype=torch.float64)
        counts = torch.zeros(view.num_layers, dtype=torch.long)
        for prompt in prompts:
            if not is_long(prompt, self.skip_first):
                continue
            trajectory = view.trajectory(prompt)
            blocks = [trajectory.block(layer) for layer in range(1, view.num_layers + 1)]
            found = jacobians_to_last_layer(blocks, trajectory.hidden[0], positions_of(trajectory, self.skip_first))
            for layer, jacobian in enumerate(found.cpu()):  # one layer at a time: all of them in float64 take 0.2 GB
                if jacobian.isfinite().all():
                    whole[layer] += jacobian
                    counts[layer] += 1
        return whole.div_(counts[:, None, None]), len(prompts) - counts


def _log_rank(logits: Tensor, rows: Rows) -> Tensor:
    """Return the sum over tokens of the log of the true token's rank, where rank 1 has the largest logit.

    Each other token with an equal logit adds a half to the rank. The rank is NaN if the logits are not finite.
    """
    # For each token, the number of logits above that of the true token, minus the number of those below it.
    signs = (logits - logits.gather(1, rows.target[:, None])).sign_().sum(-1)
    rank = (logits.shape[1] + 1 + signs) / 2
    defined = logits.amax(-1).isfinite() & logits.amin(-1).isfinite()
    return rank.where(defined, torch.nan).log().sum()


def single_prompts(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield each prompt as a batch of its own."""
    for batch in batches:
        for row in range(len(next(iter(batch.values())))):
            yield {name: column[row : row + 1] for name, column in batch.items()}


def is_long(prompt: Batch, skip_first: int) -> bool:
    """Return whether any real token of a prompt after the first `skip_first` is followed by another token."""
    return len(real_tokens(prompt)[0]) > skip_first + 1


def positions_of(trajectory: Trajectory, skip_first: int) -> Tensor:
    """Return the positions of a prompt's real tokens, without the first `skip_first` and the last one."""
    return trajectory.mask[0].nonzero()[:, 0][skip_first:-1]


def shuffle_weights(view: LayeredModel, seed: int) -> torch.nn.Module:
    """Return a copy of a model in which the entries of each weight matrix of its blocks are shuffled."""
    model = copy.deepcopy(view.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in dict.fromkeys(LayeredModel(model).blocks):
            for weight in block.parameters():
                if weight.ndim > 1:
                    order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
                    weight.copy_(weight.flatten()[order].view_as(weight))
    return model


# -------------------------------------------------------------------------------------------------- the Jacobians


def jacobians_to_last_layer(blocks: Sequence[_Block], hidden: Tensor, positions: Tensor) -> Tensor:
    """Return the Jacobians of the last layer with respect to layers 0..L-1 of one prompt, (layers, dim, dim).

    `J[l] @ h` maps h to the last layer: J[l] = 1/|V| sum over t in V and t' in V of d h_L[t'] / d h_l[t], where V are
    the `positions`. The effects on all positions t' are summed, and averaged over the changed positions t. In a causal
    model the terms with t' < t are 0. The Jacobians are exact, computed by reverse-mode differentiation in the dtype of
    the states. A linear model h_L = A h_l at each token gives A. Blocks that add 0 to their input give the identity.

    Source: Gurnee et al., Verbalizable Representations Form a Global Workspace in Language Models, Transformer Circuits
    Thread 2026, and its reference implementation, which leaves out layer 0, the embedding.

    Args:
        blocks: blocks 1..L, each a differentiable function from states (1, tokens, dim) to states.
        hidden: input of the first block, (1, tokens, dim).
        positions: distinct positions, at least one.
    """
    tokens, dim = hidden.shape[1:]
    with torch.inference_mode(False), torch.no_grad(), exact_arithmetic(hidden.device):
        states = [hidden.detach().clone()]
        for block in blocks[:-1]:
            states.append(block(states[-1]))
        jacobians = hidden.new_empty(len(blocks), dim, dim)
        # The number of rows of J that one backward pass computes. On a CPU, 8,192 cotangents nearly fit into the cache.
        # A GPU needs large products.
        rows_at_once = max(1, (2**13 if hidden.device.type == "cpu" else 2**14) // tokens)
        for rows in torch.arange(dim, device=hidden.device).split(rows_at_once):
            # For each row, start with one unit vector at all positions of the last layer, (rows, 1, tokens, dim), and
            # pull it back block by block.
            cotangents = hidden.new_zeros(len(rows), 1, tokens, dim)
            cotangents[torch.arange(len(rows))[:, None], 0, positions, rows[:, None]] = 1
            for layer in reversed(range(len(blocks))):
                cotangents = _block_vjp(blocks[layer], states[layer], cotangents)
                jacobians[layer, rows] = cotangents[:, 0, positions].mean(1)
    return jacobians


def _block_vjp(block: _Block, hidden: Tensor, cotangents: Tensor) -> Tensor:
    """Return the cotangents (rows, 1, tokens, dim) of a block's input from the cotangents of its output."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # no fused kernels: they do not support vmap
        leaf = hidden.detach().clone().requires_grad_()
        output = block(leaf)
        if not output.requires_grad:  # the block detaches its input, so the derivative is 0
            return torch.zeros_like(cotangents)
        return pull_back([output], [leaf], [cotangents])[0]
