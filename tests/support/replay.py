"""Run the blocks of a trajectory one after the other in any order, as a reference for faster ways."""

import torch
from torch import Tensor

from lit_layers.functional.block_schedules import checked, members


@torch.no_grad()
def replay(view, trajectory, schedule) -> Tensor:
    """Return the logits after the blocks of a schedule, run from layer 0; blocks in a tuple are averaged."""
    hidden = trajectory.hidden[0]
    for step in checked(schedule, trajectory.num_layers):
        outputs = [trajectory.block(number)(hidden) for number in members(step)]
        hidden = outputs[0] if len(outputs) == 1 else torch.stack(outputs).mean(0)
    return trajectory.pooled(hidden) if trajectory.pools_some else view.readout(hidden)
