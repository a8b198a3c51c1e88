"""What running several orders together is planned to take."""

from lit_layers.models.running_order import SharedPrefixes


def num_block_runs(shared: SharedPrefixes) -> int:
    """Return how often a block runs for one batch, on one state or several at once, beside the trajectory itself."""
    total, nodes = 0, [shared._root]
    while nodes:
        node = nodes.pop()
        total += sum(number != node.next_of_full for number in node.uses())
        nodes += node.children.values()
    return total
