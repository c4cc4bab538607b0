"""Progressive layer pruning by acceptance length: scoring, removal, the loop, baselines and the report."""

from .loop import PruningGoal, prune_drafter
from .recovery import Recovery
from .removal import remove_layers, skip_layers


__all__ = ["PruningGoal", "Recovery", "prune_drafter", "remove_layers", "skip_layers"]
