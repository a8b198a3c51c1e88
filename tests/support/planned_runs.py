"""What running several orders together is planned to take."""

from lit_layers.functional.block_schedules import members
from lit_layers.models.running_order import SharedPrefixes


def num_block_runs(shared: SharedPrefixes) -> int:
    """Return how often a block runs for one batch, beside the trajectory itself."""
    beginnings = {order[:end] for order in shared.indices for end in range(1, len(order) + 1)}
    passed = {tuple(range(1, end + 1)) for end in range(1, shared.num_blocks + 1)}
    return sum(len(members(beginning[-1])) for beginning in beginnings - passed)
