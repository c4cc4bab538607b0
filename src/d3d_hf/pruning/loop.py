"""Progressive pruning: score every layer, remove the cheapest, perhaps train a little, again and again.

Layers are chosen on the calibration rows; what is reported was measured on the evaluation rows, which had no part in
the choice. Every result is stored as it comes: see resumable_run.py.
"""

import copy
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch

from ..training.examples import to_example
from ..training.provenance import provenance
from .baselines import compare_with_baselines
from .goal import PruningGoal
from .measurements import Measurements
from .progress import Progress
from .recovery import Recovery
from .removal import merged_copy, original_indices, prunable_layers, remove_layers
from .report import PLOT_NAME, REPORT_NAME, plot_report, write_report
from .resumable_run import ResumableRun
from .scoring import Accepted, CalibrationSet, cheapest
from .settings import pruning_settings


COMPARISONS = ("all", "last", "none")
_WORK_FOLDER = "pruning_work"


def prune_drafter(
    drafter,
    calibration: Mapping[str, Sequence[Mapping]],
    evaluation: Mapping[str, Sequence[Mapping]],
    output_dir: str,
    goal: PruningGoal,
    recovery: Recovery | None = None,
    train_reference: bool = False,
    compare: str = "last",
    positions_per_text: int = 32,
    texts_per_pass: int = 4,
    measured_dtype: torch.dtype | None = None,
    processing_class=None,
    argv: Sequence[str] | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple:
    r"""
    Prunes a drafter layer by layer, by the acceptance length without each, and saves it with its report. A run that
    was ended goes on where it was if it is started again with the same arguments.

    Args:
        drafter ([`D3DDrafterForCausalLM`]):
            Is not changed, but put into eval mode. One that carries an adapter stays one; a merged copy is measured.
        calibration (mapping of `str` to rows):
            The target's own greedy responses that layers are chosen on, by data set.
        evaluation (mapping of `str` to rows):
            Others that the report is measured on, by data set.
        output_dir (`str`): For the drafter, `pruning_report.json` and, where matplotlib is installed, `pruning.png`.
        goal ([`PruningGoal`]): When to stop.
        recovery ([`Recovery`], *optional*): Training after each removal.
        train_reference (`bool`, *optional*, defaults to `False`):
            With a recovery: also gives the full-depth drafter the same trainings, for a fair comparison.
        compare (`str`, *optional*, defaults to `"last"`):
            Whether to measure simpler ways to choose layers at `"all"` depths, at the `"last"` one, or `"none"`.
        positions_per_text (`int`, *optional*, defaults to 32): Drafts per response.
        texts_per_pass (`int`, *optional*, defaults to 4): Bounds the memory.
        measured_dtype (`torch.dtype`, *optional*): That drafts are measured and the drafter is saved in. Default: the
            drafter's, which training may want to be another.
        processing_class (*optional*): The target's tokenizer, for rows of `messages`; saved beside the drafter.
        argv (sequence of `str`, *optional*): The command, for the report.
        on_progress (`Callable(Progress)`, *optional*): Called often.

    Returns:
        The pruned drafter, which without a recovery shares the weights of the one given (`measured_dtype` aside), and
        the report, a `dict`. Each of its `steps` holds `num_removed`, `removed_layer` (original index),
        `acceptance_length`, `retention` and `retention_interval` (95%, over the texts, paired), all on the evaluation
        rows, and every layer's score on the calibration rows.

    Raises:
        ValueError: As many layers as there are, no rows, rows that are in two places or of another vocabulary, a
            backbone whose layers cannot be found, or a folder with another run.
    """
    num_layers = len(prunable_layers(drafter))
    if goal.num_removed is not None and goal.num_removed >= num_layers:
        raise ValueError(
            f"num_removed is {goal.num_removed} and the drafter has {num_layers} layers: remove at most "
            f"{num_layers - 1}."
        )
    if compare not in COMPARISONS:
        raise ValueError(f"compare is {compare!r}: choose one of {COMPARISONS}.")
    if train_reference and recovery is None:
        raise ValueError("train_reference is for prunings with a recovery: give one, or leave it out.")
    for name, sets in (("calibration", calibration), ("evaluation", evaluation)):
        if not sets or not all(len(rows) for rows in sets.values()):
            raise ValueError(f"The {name} data hold no rows: give responses that the target wrote.")
    _refuse_shared_rows(drafter, calibration, evaluation, recovery, processing_class)
    dtype = measured_dtype or drafter.dtype
    settings = pruning_settings(
        drafter,
        calibration,
        evaluation,
        goal,
        recovery,
        dtype,
        processing_class,
        train_reference=train_reference,
        compare=compare,
        positions_per_text=positions_per_text,
        texts_per_pass=texts_per_pass,
    )
    sets = [
        CalibrationSet(
            [row for rows in part.values() for row in rows],
            drafter.config,
            positions_per_text,
            texts_per_pass,
            processing_class,
        )
        for part in (calibration, evaluation)
    ]
    work_folder = os.path.join(output_dir, _WORK_FOLDER)
    shutil.rmtree(f"{work_folder}.done", ignore_errors=True)
    if os.path.exists(os.path.join(output_dir, REPORT_NAME)) and not os.path.exists(work_folder):
        raise ValueError(f"{output_dir!r} holds a finished pruning already: give another output folder.")
    os.makedirs(output_dir, exist_ok=True)
    measurements = Measurements(
        *sets,
        {name: len(rows) for name, rows in evaluation.items()},
        num_layers,
        ResumableRun(work_folder, settings),
        Progress(step=1, num_steps=goal.num_removed),
        on_progress,
    )
    run = _Pruning(drafter, measurements, goal, recovery, train_reference, compare, dtype)
    report = {
        **provenance(sys.argv if argv is None else argv),
        "drafter": {
            "name": drafter.config.name_or_path or None,
            "target": drafter.config.target_name_or_path,
            "num_layers": num_layers,
            "block_size": drafter.config.block_size,
            "chained_head_size": drafter.config.chained_head_size,
        },
        "data": {
            "calibration": {name: len(rows) for name, rows in calibration.items()},
            "evaluation": {name: len(rows) for name, rows in evaluation.items()},
            "num_positions": {"calibration": _num_anchors(sets[0]), "evaluation": _num_anchors(sets[1])},
        },
        "settings": settings,
        **run.run(),
    }
    pruned = run.drafter
    if report["steps"]:
        removed = [step["removed_layer"] for step in report["steps"]]
        pruning = {"removed_layers": removed, "recovery": settings["recovery"]}
        pruned.config.training_recipe = {**(pruned.config.training_recipe or {}), "pruning": pruning}
    if pruned.dtype != dtype:
        pruned = copy.deepcopy(pruned).to(dtype)
    pruned.save_pretrained(output_dir)
    if processing_class is not None:
        processing_class.save_pretrained(output_dir)
    write_report(report, output_dir)
    try:
        plot_report(report, os.path.join(output_dir, PLOT_NAME))
    except ImportError:
        pass
    measurements.results.close()
    return pruned, report


class _Pruning:
    """One run: the drafter so far, and the one that is measured in its place."""

    def __init__(
        self,
        drafter,
        measurements: Measurements,
        goal: PruningGoal,
        recovery: Recovery | None,
        train_reference: bool,
        compare: str,
        dtype: torch.dtype,
    ):
        self.full_depth = self.drafter = drafter
        self.measurements, self.progress = measurements, measurements.progress
        self.goal, self.recovery, self.compare = goal, recovery, compare
        self.trains_reference, self.dtype = train_reference, dtype
        self.num_layers = measurements.num_layers
        self.measured = self._measurable(drafter)
        self.measured_full_depth = self.measured
        if goal.num_removed is not None:
            self.progress.total = sum(measurements.work_of_step(number) for number in range(goal.num_removed))

    def run(self) -> dict:
        """Everything that the report has about the drafters; `self.drafter` is the pruned one then."""
        full = self.measurements.measure("full", self.measured)
        for name, part in self.measurements.set_slices.items():
            if not full["evaluation"].of(part).tokens.sum():
                raise ValueError(
                    f"Not one draft token is accepted on the evaluation data {name!r} with all layers, so nothing can "
                    f"be lost: give text that the drafter's target wrote, or a trained drafter."
                )
        if self.goal.max_draft_ms is not None and full["packed_pass_ms"] <= self.goal.max_draft_ms:
            raise ValueError(
                f"max_draft_ms is {self.goal.max_draft_ms} and a packed pass takes {full['packed_pass_ms']:.1f} ms "
                f"with all layers: there is nothing to prune, or give less."
            )
        steps, before = [], full
        while (reason := self._reason_to_stop(steps)) is None:
            self.progress.step = len(steps) + 1
            if self.progress.num_steps is None:
                self.progress.total = self.progress.done + self.measurements.work_of_step(len(steps))
            drafter, measured, step, before = self._remove_one(len(steps) + 1, before, full)
            if self.goal.min_retention is not None and step["retention"] < self.goal.min_retention:
                reason = "min_retention"
                break
            self.drafter, self.measured = drafter, measured
            steps.append(step)
        trained = self._train_reference(len(steps), full["evaluation"])
        for step, accepted in zip(steps, trained):
            step["retention_of_trained"] = step["accepted"].retention(accepted)
            step["retention_of_trained_interval"] = step["accepted"].retention_interval(accepted)
        comparisons = []
        if self.compare != "none":
            comparisons = compare_with_baselines(
                steps if self.compare == "all" else steps[-1:],
                full["evaluation"],
                self.measured_full_depth,
                original_indices(self.full_depth),
                self.measurements,
                self.recovery is not None,
            )
        for step in steps:
            del step["accepted"]
        return {
            "full": {
                **self.measurements.describe(full),
                "kept_layers": original_indices(self.full_depth),
                "trained": [
                    {"num_removed": n, "acceptance_length": accepted.length}
                    for n, accepted in enumerate(trained, start=1)
                    if self._trains_after(n)
                ],
            },
            "steps": steps,
            "stopped_by": reason,
            "baselines": comparisons,
        }

    def _reason_to_stop(self, steps: list[dict]) -> str | None:
        if len(steps) == self.goal.num_removed:
            return "num_removed"
        if steps and self.goal.max_draft_ms is not None and steps[-1]["packed_pass_ms"] <= self.goal.max_draft_ms:
            return "max_draft_ms"
        return "one layer is left" if len(steps) == self.num_layers - 1 else None

    def _remove_one(self, number: int, before: dict, full: dict) -> tuple:
        """One step: the drafter with a layer less, the one to measure, the report's entry, and what was measured."""
        scores, without = self.measurements.score(number, self.measured, before["calibration"])
        layer = cheapest(scores).layer
        indices = original_indices(self.drafter)
        if self.recovery is None:
            drafter = _without(self.drafter, layer)
            measured = drafter if self.measured is self.drafter else _without(self.measured, layer)
            after = self.measurements.measure(f"step_{number:03d}", measured, without[layer])
        else:
            drafter = copy.deepcopy(self.drafter)
            remove_layers(drafter, [layer])
            if self._trains_after(number):
                self._train(drafter, number, f"trained_{number:03d}")
            measured = self._measurable(drafter)
            after = self.measurements.measure(f"step_{number:03d}", measured)
        evaluated, whole = after["evaluation"], full["evaluation"]
        step = {
            "num_removed": number,
            "removed_layer": indices[layer],
            "kept_layers": original_indices(drafter),
            **self.measurements.describe(after),
            "retention": evaluated.retention(whole),
            "retention_interval": evaluated.retention_interval(whole),
            "scores": [{**asdict(score), "layer": indices[score.layer]} for score in scores],
            "accepted": evaluated,
        }
        for name, part in self.measurements.set_slices.items():
            step["by_set"][name]["retention"] = evaluated.of(part).retention(whole.of(part))
            step["by_set"][name]["retention_interval"] = evaluated.of(part).retention_interval(whole.of(part))
        return drafter, measured, step, after

    def _trains_after(self, number: int) -> bool:
        return number % self.recovery.every == 0 or number == self.goal.num_removed

    def _measurable(self, drafter):
        """The drafter as it will be used: merged, in the dtype asked for."""
        if hasattr(drafter, "peft_config") or drafter.dtype != self.dtype:
            return merged_copy(drafter, self.dtype)
        return drafter.eval()

    def _train(self, drafter, number: int, name: str):
        folder = os.path.join(self.measurements.results.folder, "trainer")
        self.measurements.results.recall_weights(name, drafter, lambda: self.recovery.train(drafter, number, folder))

    def _train_reference(self, num_removals: int, untrained: Accepted) -> list[Accepted]:
        """What the full-depth drafter accepts with the trainings of each number of removals."""
        if not self.trains_reference:
            return []
        accepted, reference = [], copy.deepcopy(self.full_depth)
        for number in range(1, num_removals + 1):
            if not self._trains_after(number):
                accepted.append(accepted[-1] if accepted else untrained)
                continue
            self._train(reference, number, f"reference_{number:03d}")
            lists = self.measurements.results.recall(
                f"reference_{number:03d}",
                lambda: self.measurements.accepted(
                    self._measurable(reference), self.measurements.evaluation
                ).to_lists(),
            )
            accepted.append(Accepted.from_lists(lists))
        return accepted


def _without(drafter, layer: int):
    """A drafter without one layer that shares all other weights with the one given."""
    tensors = [*drafter.parameters(), *drafter.buffers()]
    pruned = copy.deepcopy(drafter, {id(tensor): tensor for tensor in tensors})
    remove_layers(pruned, [layer])
    return pruned


def _num_anchors(calibration: CalibrationSet) -> int:
    return sum(int((anchors >= 0).sum()) for _, anchors in calibration.texts)


def _refuse_shared_rows(drafter, calibration, evaluation, recovery: Recovery | None, processing_class):
    """What is reported must not have been chosen or trained on."""

    def texts(rows):
        return {tuple(to_example(row, processing_class, drafter.config.vocab_size)[0]) for row in rows}

    evaluated = {text for rows in evaluation.values() for text in texts(rows)}
    others = {f"calibration data {name!r}": rows for name, rows in calibration.items()}
    if recovery is not None:
        others["recovery training data"] = recovery.rows
    for name, rows in others.items():
        if num_shared := len(texts(rows) & evaluated):
            raise ValueError(
                f"{num_shared} of the evaluation rows are in the {name} too: evaluate on others, or the report would "
                f"flatter the pruned drafter."
            )


__all__ = ["COMPARISONS", "prune_drafter"]
