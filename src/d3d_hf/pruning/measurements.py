"""What a drafter accepts on the calibration and the evaluation rows, with and without each layer, and how fast it is.

Every measurement is stored as it comes, and told to whoever waits.
"""

from collections.abc import Callable

from .progress import Progress
from .removal import original_indices
from .resumable_run import ResumableRun
from .scoring import (
    Accepted,
    CalibrationSet,
    LayerScore,
    accepted_in_batch,
    accepted_without_each,
    in_order_of_texts,
    score_layers,
)
from .timing import pass_times


class Measurements:
    """
    Measures the drafters of one pruning.

    Args:
        calibration, evaluation ([`CalibrationSet`]): What layers are chosen on, and what is reported.
        set_sizes (`dict[str, int]`): Texts of each evaluation data set, in their order.
        num_layers (`int`): Of the drafter with all its layers.
        results ([`ResumableRun`]): Where they are stored.
        progress ([`Progress`]): Is moved on.
        on_progress (`Callable(Progress)`): Called then.
    """

    def __init__(
        self,
        calibration: CalibrationSet,
        evaluation: CalibrationSet,
        set_sizes: dict[str, int],
        num_layers: int,
        results: ResumableRun,
        progress: Progress,
        on_progress: Callable[[Progress], None],
    ):
        self.calibration, self.evaluation, self.num_layers = calibration, evaluation, num_layers
        self.results, self.progress, self._on_progress = results, progress, on_progress
        self.set_slices, start = {}, 0
        for name, size in set_sizes.items():
            self.set_slices[name] = slice(start, start + size)
            start += size

    def score(self, number: int, model, full: Accepted) -> tuple[list[LayerScore], list[Accepted]]:
        """Scores of all layers of the drafter as it is, and what was accepted without each."""
        layers = original_indices(model)
        parts = []
        for index in range(self.calibration.num_batches):
            name = f"step_{number:03d}_batch_{index:03d}"

            def compute(index=index):
                batch = self.calibration.batch(index, model.device)
                without = accepted_without_each(
                    model, batch, lambda layer: self._advance(len(layers) - layer, layers[layer])
                )
                return [accepted.to_lists() for accepted in without]

            if self.results.has(name):
                self._advance(_work_of_scoring(len(layers)), is_recalled=True)
            parts.append([Accepted.from_lists(lists) for lists in self.results.recall(name, compute)])
        without = [
            in_order_of_texts({index: part[layer] for index, part in enumerate(parts)}, self.calibration)
            for layer in range(len(layers))
        ]
        return score_layers(without, full), without

    def measure(self, name: str, model, calibration: Accepted | None = None) -> dict:
        """A drafter on both sets, its size and its speed."""

        def compute():
            on_calibration = calibration or self.accepted(model, self.calibration)
            return {
                "evaluation": self.accepted(model, self.evaluation).to_lists(),
                "calibration": on_calibration.to_lists(),
                "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
                **pass_times(model),
            }

        if self.results.has(name):
            self._advance(self.num_layers * self.evaluation.num_batches, is_recalled=True)
        result = self.results.recall(name, compute)
        return result | {part: Accepted.from_lists(result[part]) for part in ("evaluation", "calibration")}

    def accepted(self, model, texts: CalibrationSet) -> Accepted:
        parts = {}
        for number in range(texts.num_batches):
            parts[number] = accepted_in_batch(model, texts.batch(number, model.device))
            if texts is self.evaluation:
                self._advance(self.num_layers)
        return in_order_of_texts(parts, texts)

    def describe(self, measured: dict) -> dict:
        """What `measure` gave, as the report has it."""
        evaluated, calibrated = measured["evaluation"], measured["calibration"]
        return {
            "acceptance_length": evaluated.length,
            "acceptance_interval": evaluated.interval(),
            "ar_accuracy": evaluated.ar_accuracy,
            "by_set": {
                name: {
                    "acceptance_length": evaluated.of(part).length,
                    "acceptance_interval": evaluated.of(part).interval(),
                }
                for name, part in self.set_slices.items()
            },
            "calibration": {"acceptance_length": calibrated.length, "acceptance_interval": calibrated.interval()},
            **{name: measured[name] for name in measured if name not in ("evaluation", "calibration")},
        }

    def work_of_step(self, num_removed: int) -> int:
        """Layers to run for the next removal."""
        work = self.calibration.num_batches * _work_of_scoring(self.num_layers - num_removed)
        return work + self.evaluation.num_batches * self.num_layers

    def _advance(self, work: int, layer: int | None = None, is_recalled: bool = False):
        self.progress.done += work
        self.progress.total = max(self.progress.total, self.progress.done)
        self.progress.num_recalled += work if is_recalled else 0
        self.progress.layer = layer
        self._on_progress(self.progress)


def _work_of_scoring(num_layers: int) -> int:
    """Of one batch, in layers run."""
    return sum(num_layers - layer for layer in range(num_layers))


__all__ = ["Measurements"]
