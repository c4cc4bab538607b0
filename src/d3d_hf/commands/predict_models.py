"""Forwards that `d3d-hf predict` reckons with: from shapes and hardware, from a file, or measured here."""

import dataclasses
import json

from .arguments import UsageError, one_line, option


@dataclasses.dataclass
class Models:
    """Forwards of the target and, by depth, of the drafter, and what was assumed for them."""

    target: object
    drafter: object
    num_layers: int
    is_bounded: bool  # no deeper drafter exists
    plain_overhead_ms: float
    round_overhead_ms: float
    assumptions: list[str]


def models_of(args, block_size: int) -> Models:
    from ..cost_model import HARDWARE, Hardware, RooflineForward, with_layers_between
    from ..cost_model.inputs import GivenTimes, read_times

    overheads = {"plain_overhead_ms": args.plain_overhead, "round_overhead_ms": args.round_overhead}
    if args.times or args.measure:
        for name in ("context", "batch_size"):
            if args.times and getattr(args, name) is not None:
                raise UsageError(f"{option(name)} does not go with --times: the times hold for what was measured")
        if args.batch_size is not None:
            raise UsageError("--batch-size does not go with --measure: one sequence is measured")
        if args.bandwidth or args.flops:
            raise UsageError("--bandwidth and --flops go with shapes: leave out --times and --measure")
        times: GivenTimes = read_times(args.times) if args.times else _measure(args, block_size)
        overheads = {name: getattr(times, name) if value is None else value for name, value in overheads.items()}
        return Models(
            times.target,
            lambda layers: with_layers_between(times.drafters, layers),
            max(times.drafters),
            is_bounded=False,
            **overheads,
            assumptions=[
                "times between two measured numbers of tokens or depths lie on a straight line",
                "on one device, memory is busy for the time of the fewest tokens, arithmetic by the best throughput",
            ],
        )
    hardware = HARDWARE[args.hardware] if args.hardware else Hardware("given", 1.0, 1.0, layer_latency_ms=0.0)
    given = {}
    if args.bandwidth:
        given |= {"peak_bandwidth": 1e12 * args.bandwidth, "bandwidth_efficiency": 1.0}
    if args.flops:
        given |= {"peak_flops": 1e12 * args.flops, "flops_efficiency": 1.0}
    hardware = dataclasses.replace(hardware, **given)
    context = 1024 if args.context is None else args.context
    target_config, drafter_config = _config(args.target, "--target"), _config(args.drafter, "--drafter")

    def forward(config, num_layers=None):
        return RooflineForward(config, hardware, context, args.batch_size or 1, num_layers)

    return Models(
        forward(target_config),
        lambda layers: forward(drafter_config, layers),
        drafter_config.num_hidden_layers,
        is_bounded=True,
        **{name: value or 0.0 for name, value in overheads.items()},
        assumptions=[
            f"{hardware.bandwidth / 1e12:.3g} TB/s and {hardware.flops / 1e12:.4g} TFLOP/s within reach "
            f"({hardware.bandwidth_efficiency:.2g} and {hardware.flops_efficiency:.2g} of the peaks), and "
            f"{1e3 * hardware.layer_latency_ms:g} us a layer",
            f"16-bit weights and cache, {context} tokens of context, batch size {args.batch_size or 1}",
            "forwards that run at once on one device slow each other alike",
        ],
    )


def _config(name: str, argument: str):
    """The text config of a shape's name, a folder or a Hub name."""
    from transformers import AutoConfig

    from ..cost_model.shapes import SHAPE_NAMES, shape_config

    if name in SHAPE_NAMES:
        return shape_config(name)
    try:
        return AutoConfig.from_pretrained(name).get_text_config()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{argument} {name!r} is no shape ({', '.join(SHAPE_NAMES)}) and no model with a config: give one of "
            f"them. {one_line(error)}"
        ) from error


def _measure(args, block_size: int):
    """Times with random weights: of the target, and of the drafter at the depth asked for and at half of it."""
    import copy

    import torch

    from ..cost_model import MeasuredForward
    from ..cost_model.inputs import GivenTimes
    from ..cost_model.measure import drafter_forward_ms, target_forward_ms
    from ..cost_model.shapes import random_model
    from ..model.modeling_d3d import D3DDrafterForCausalLM
    from ..training.provenance import provenance
    from .loading import usable_device

    device = usable_device(None)
    context = 256 if args.context is None else args.context
    config, drafter_config = _config(args.target, "--target"), _config(args.drafter, "--drafter")
    verified = sorted({1, block_size // 2 + 1, block_size + 1, args.max_block_size + 1})
    target_ms = target_forward_ms(random_model(config, torch.bfloat16, device), verified, context)
    packed = (block_size + 1) * (block_size * (1 + args.num_guesses) + 1)
    drafted = sorted({block_size, 2 * block_size, (block_size + 1) ** 2, packed})
    depths = {args.num_layers or drafter_config.num_hidden_layers, drafter_config.num_hidden_layers}
    depths.add(max(1, drafter_config.num_hidden_layers // 2))
    drafters_ms = {}
    for depth in sorted(depths):
        shallow = copy.deepcopy(drafter_config)
        shallow.num_hidden_layers = depth
        model = random_model(shallow, torch.bfloat16, device)
        drafter = D3DDrafterForCausalLM.from_backbone(model, block_size=block_size).eval()
        drafters_ms[depth] = drafter_forward_ms(drafter, drafted, context)
    if args.times_output:
        report = {
            "target": {"name": args.target, "forward_ms": target_ms},
            "drafters": [{"num_layers": depth, "forward_ms": ms} for depth, ms in drafters_ms.items()],
            "drafter": args.drafter,
            "context": context,
            **provenance(args.argv),
        }
        with open(args.times_output, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    return GivenTimes(MeasuredForward(target_ms), {depth: MeasuredForward(ms) for depth, ms in drafters_ms.items()})


__all__ = ["Models", "models_of"]
