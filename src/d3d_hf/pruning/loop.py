"""Progressive pruning: score every layer, remove the cheapest, perhaps train a little, again and again.

Layers are chosen on the calibration rows; what is reported was measured on the evaluation rows, which had no part in
the choice. Every result is stored as it comes: see progress.py.
"""

import copy
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from ..training.examples import to_example
from ..training.provenance import provenance
from .baselines import BASELINES, block_influence, removed_by_influence, removed_evenly, removed_from_end
from .progress import ResumableRun
from .recovery import Recovery
from .removal import merged_copy, original_indices, prunable_layers, remove_layers, skip_layers
from .report import PLOT_NAME, REPORT_NAME, plot_report, write_report
from .scoring import (
    Accepted,
    CalibrationSet,
    accepted_in_batch,
    accepted_without_each,
    cheapest,
    in_order_of_texts,
    score_layers,
)
from .timing import pass_times


COMPARISONS = ("all", "last", "none")
_WORK_FOLDER = "pruning_work"


@dataclass
class PruningGoal:
    """
    When to stop removing layers: at the first of those given.

    Args:
        num_removed (`int`, *optional*): After so many removals.
        min_retention (`float`, *optional*):
            Before the removal that would leave less than this share of the full drafter's acceptance length, measured
            on the evaluation rows.
        max_draft_ms (`float`, *optional*):
            As soon as a packed pass takes no longer than this on this machine: see [`pass_times`].

    Raises:
        ValueError: None is given, or one is out of range.
    """

    num_removed: int | None = None
    min_retention: float | None = None
    max_draft_ms: float | None = None

    def __post_init__(self):
        if all(value is None for value in vars(self).values()):
            raise ValueError("Nothing says when to stop: give num_removed, min_retention or max_draft_ms.")
        if self.num_removed is not None and self.num_removed < 1:
            raise ValueError(f"num_removed is {self.num_removed}: give at least 1.")
        if self.min_retention is not None and not 0 < self.min_retention <= 1:
            raise ValueError(f"min_retention is {self.min_retention}: give a share above 0 and at most 1, as 0.99.")
        if self.max_draft_ms is not None and not self.max_draft_ms > 0:
            raise ValueError(f"max_draft_ms is {self.max_draft_ms}: give a positive number of milliseconds.")


@dataclass
class Progress:
    """
    Where a pruning stands.

    Attributes:
        step (`int`): Removals so far, and the one being worked on.
        num_steps (`int`, *optional*): `None` where it is not known beforehand.
        layer (`int`, *optional*): Original index of the layer that was just left out, if one was.
        done, total (`int`): Layers run; the total covers this step alone where the number of steps is not known.
        num_recalled (`int`): Of `done`, what an earlier run had done.
    """

    step: int
    num_steps: int | None
    layer: int | None = None
    done: int = 0
    total: int = 0
    num_recalled: int = 0


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
    settings = {
        "drafter": _fingerprint(drafter),
        "calibration": {name: _digest(rows, processing_class) for name, rows in calibration.items()},
        "evaluation": {name: _digest(rows, processing_class) for name, rows in evaluation.items()},
        "goal": asdict(goal),
        "recovery": _recovery_settings(recovery),
        "train_reference": train_reference,
        "compare": compare,
        "positions_per_text": positions_per_text,
        "texts_per_pass": texts_per_pass,
        "dtype": str(measured_dtype or drafter.dtype).removeprefix("torch."),
    }
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
    run = _Pruning(
        drafter,
        *sets,
        {name: len(rows) for name, rows in evaluation.items()},
        ResumableRun(work_folder, settings),
        goal,
        recovery,
        train_reference,
        compare,
        measured_dtype or drafter.dtype,
        on_progress,
    )
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
    if pruned.dtype != run.dtype:
        pruned = copy.deepcopy(pruned).to(run.dtype)
    pruned.save_pretrained(output_dir)
    if processing_class is not None:
        processing_class.save_pretrained(output_dir)
    write_report(report, output_dir)
    try:
        plot_report(report, os.path.join(output_dir, PLOT_NAME))
    except ImportError:
        pass
    run.results.close()
    return pruned, report


class _Pruning:
    """One run: the drafter so far, the one that is measured in its place, and the results."""

    def __init__(
        self,
        drafter,
        calibration: CalibrationSet,
        evaluation: CalibrationSet,
        set_sizes: dict[str, int],
        results: ResumableRun,
        goal: PruningGoal,
        recovery: Recovery | None,
        train_reference: bool,
        compare: str,
        dtype: torch.dtype,
        on_progress: Callable[[Progress], None],
    ):
        self.full_depth = self.drafter = drafter
        self.calibration, self.evaluation = calibration, evaluation
        self.results, self.goal, self.recovery, self.compare = results, goal, recovery, compare
        self.trains_reference, self.dtype, self.on_progress = train_reference, dtype, on_progress
        self.set_slices, start = {}, 0
        for name, size in set_sizes.items():
            self.set_slices[name] = slice(start, start + size)
            start += size
        self.num_layers = len(prunable_layers(drafter))
        self.measured = self._measurable(drafter)
        self.measured_full_depth = self.measured
        self.progress = Progress(step=1, num_steps=goal.num_removed)
        if goal.num_removed is not None:
            self.progress.total = sum(self._work_of_step(number) for number in range(goal.num_removed))

    def run(self) -> dict:
        """Everything that the report has about the drafters; `self.drafter` is the pruned one then."""
        full = self._measure("full", self.measured)
        for name, part in self.set_slices.items():
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
                self.progress.total = self.progress.done + self._work_of_step(len(steps))
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
        comparisons = self._compare(steps, full)
        for step in steps:
            del step["accepted"]
        return {
            "full": {
                **self._described(full),
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
        scores, without = self._score(number, before["calibration"])
        layer = cheapest(scores).layer
        indices = original_indices(self.drafter)
        if self.recovery is None:
            drafter = _without(self.drafter, layer)
            measured = drafter if self.measured is self.drafter else _without(self.measured, layer)
            after = self._measure(f"step_{number:03d}", measured, without[layer])
        else:
            drafter = copy.deepcopy(self.drafter)
            remove_layers(drafter, [layer])
            if self._trains_after(number):
                self._train(drafter, number, f"trained_{number:03d}")
            measured = self._measurable(drafter)
            after = self._measure(f"step_{number:03d}", measured)
        evaluated, whole = after["evaluation"], full["evaluation"]
        step = {
            "num_removed": number,
            "removed_layer": indices[layer],
            "kept_layers": original_indices(drafter),
            **self._described(after),
            "retention": evaluated.retention(whole),
            "retention_interval": evaluated.retention_interval(whole),
            "scores": [{**asdict(score), "layer": indices[score.layer]} for score in scores],
            "accepted": evaluated,
        }
        for name, part in self.set_slices.items():
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

    def _score(self, number: int, full: Accepted):
        """Scores of all layers of the drafter as it is, and what was accepted without each."""
        layers = original_indices(self.measured)
        parts = []
        for index in range(self.calibration.num_batches):
            name = f"step_{number:03d}_batch_{index:03d}"

            def compute(index=index):
                batch = self.calibration.batch(index, self.measured.device)
                without = accepted_without_each(
                    self.measured, batch, lambda layer: self._advance(len(layers) - layer, layers[layer])
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

    def _measure(self, name: str, model, calibration: Accepted | None = None) -> dict:
        """A drafter on both sets, its size and its speed."""

        def compute():
            on_calibration = calibration or self._accepted(model, self.calibration)
            return {
                "evaluation": self._accepted(model, self.evaluation).to_lists(),
                "calibration": on_calibration.to_lists(),
                "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
                **pass_times(model),
            }

        if self.results.has(name):
            self._advance(self.num_layers * self.evaluation.num_batches, is_recalled=True)
        result = self.results.recall(name, compute)
        return result | {part: Accepted.from_lists(result[part]) for part in ("evaluation", "calibration")}

    def _accepted(self, model, texts: CalibrationSet) -> Accepted:
        parts = {}
        for number in range(texts.num_batches):
            parts[number] = accepted_in_batch(model, texts.batch(number, model.device))
            if texts is self.evaluation:
                self._advance(self.num_layers)
        return in_order_of_texts(parts, texts)

    def _described(self, measured: dict) -> dict:
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

    def _train(self, drafter, number: int, name: str):
        folder = os.path.join(self.results.folder, "trainer")
        self.results.recall_weights(name, drafter, lambda: self.recovery.train(drafter, number, folder))

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
            lists = self.results.recall(
                f"reference_{number:03d}",
                lambda: self._accepted(self._measurable(reference), self.evaluation).to_lists(),
            )
            accepted.append(Accepted.from_lists(lists))
        return accepted

    def _compare(self, steps: list[dict], full: dict) -> list[dict]:
        """Simpler choices of as many layers, on the same evaluation rows."""
        if self.compare == "none" or not steps:
            return []
        model = self.measured_full_depth
        influence = self.results.recall("influence", lambda: block_influence(model, self.calibration))
        ways = (
            lambda count: removed_evenly(self.num_layers, count),
            lambda count: removed_from_end(self.num_layers, count),
            lambda count: removed_by_influence(influence, count),
        )
        indices = original_indices(self.full_depth)
        comparisons = []
        for step in steps if self.compare == "all" else steps[-1:]:
            count = step["num_removed"]
            by = {
                "progressive": {name: step[name] for name in ("acceptance_length", "retention", "retention_interval")}
            }
            for name, way in zip(BASELINES, ways):
                removed = way(count)

                def compute(removed=removed):
                    with skip_layers(model, removed):
                        return self._accepted(model, self.evaluation).to_lists()

                accepted = Accepted.from_lists(self.results.recall(f"{name}_{count:03d}", compute))
                by[name] = {
                    "removed_layers": [indices[layer] for layer in removed],
                    "acceptance_length": accepted.length,
                    "retention": accepted.retention(full["evaluation"]),
                    "retention_interval": accepted.retention_interval(full["evaluation"]),
                    # Above 1: progressive pruning keeps more, on the same texts.
                    "progressive_over_this": step["accepted"].retention(accepted) if accepted.tokens.sum() else None,
                    "progressive_over_this_interval": (
                        step["accepted"].retention_interval(accepted) if accepted.tokens.sum() else None
                    ),
                }
            comparisons.append(
                {
                    "num_removed": count,
                    "best": max(by, key=lambda name: by[name]["acceptance_length"]),
                    "is_progressive_trained": self.recovery is not None,
                    "by": by,
                }
            )
        return comparisons

    def _work_of_step(self, num_removed: int) -> int:
        work = self.calibration.num_batches * _work_of_scoring(self.num_layers - num_removed)
        return work + self.evaluation.num_batches * self.num_layers

    def _advance(self, work: int, layer: int | None = None, is_recalled: bool = False):
        self.progress.done += work
        self.progress.total = max(self.progress.total, self.progress.done)
        self.progress.num_recalled += work if is_recalled else 0
        self.progress.layer = layer
        self.on_progress(self.progress)


def _work_of_scoring(num_layers: int) -> int:
    """Of one batch, in layers run."""
    return sum(num_layers - layer for layer in range(num_layers))


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


def _digest(rows: Sequence[Mapping], processing_class) -> str:
    digest = hashlib.sha256()
    for row in rows:
        ids, prompt_length = to_example(row, processing_class)
        digest.update(json.dumps([prompt_length, *map(int, ids)]).encode())
    return digest.hexdigest()[:16]


def _fingerprint(drafter) -> str:
    """Tells drafters apart by their shapes and a few of their weights."""
    digest = hashlib.sha256()
    for name, parameter in drafter.named_parameters():
        if ".original_module." in name:  # what an adapter replaces as a whole, and is not stored with it
            continue
        few = parameter.detach().flatten()[:16].float().cpu().numpy().tobytes()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + few)
    return digest.hexdigest()[:16]


def _recovery_settings(recovery: Recovery | None) -> dict | None:
    if recovery is None:
        return None
    names = (
        "ar_loss_weight",
        "block_loss_decay",
        "blocks_per_sequence",
        "chain_dropout",
        "denoising_mask_ratio",
        "gradient_accumulation_steps",
        "learning_rate",
        "per_device_train_batch_size",
        "seed",
        "visible_token_share",
        "weight_decay",
    )
    arguments = {name: getattr(recovery.arguments, name) for name in names}
    scheduler = recovery.arguments.lr_scheduler_type
    return {
        "num_steps": recovery.num_steps,
        "every": recovery.every,
        "rows": _digest(recovery.rows, recovery.processing_class),
        "lr_scheduler_type": getattr(scheduler, "value", scheduler),
        **arguments,
    }


__all__ = ["COMPARISONS", "Progress", "PruningGoal", "prune_drafter"]
