"""What drafting gives on what hardware: a cost model, a simulation to check it, a search."""

from .acceptance import AcceptanceProfile, constant_profile, tokens_per_round
from .forward_times import Demand, MeasuredForward, RooflineForward, with_layers_between
from .hardware import HARDWARE, Hardware
from .schedules import Plan, Prediction, Schedule, needed_tokens_per_round, predict, predict_lookup
from .search import Choice, best_choice
from .simulation import Simulated, simulate


__all__ = [
    "HARDWARE",
    "AcceptanceProfile",
    "Choice",
    "Demand",
    "Hardware",
    "MeasuredForward",
    "Plan",
    "Prediction",
    "RooflineForward",
    "Schedule",
    "Simulated",
    "best_choice",
    "constant_profile",
    "needed_tokens_per_round",
    "predict",
    "predict_lookup",
    "simulate",
    "tokens_per_round",
    "with_layers_between",
]
