"""Progressive layer pruning by acceptance length: scoring, removal, the loop, baselines and the report."""

from .after_training import prune_after_training
from .goal import PruningGoal
from .loop import prune_drafter
from .recovery import Recovery
from .removal import remove_layers, skip_layers


__all__ = ["PruningGoal", "Recovery", "prune_after_training", "prune_drafter", "remove_layers", "skip_layers"]
