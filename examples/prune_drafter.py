"""
Removes the layers of a drafter whose loss costs the least acceptance length: `python examples/prune_drafter.py`.

Two short answers decide here, to be quick. For a drafter to keep give some dozens, from every kind of prompt that it
will see, as `d3d-hf prune --help` says.
"""

import argparse
import tempfile

from example_models import load_drafter, load_target, own_answers

from d3d_hf.pruning import PruningGoal, prune_drafter


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny random models, to see that it runs")
    parser.add_argument("--remove", type=int, default=2, help="layers (default: %(default)s)")
    parser.add_argument("--output", default=None, help="where to save the drafter (default: a temporary folder)")
    args = parser.parse_args()

    target, tokenizer = load_target(args.tiny)
    drafter = load_drafter(target, args.tiny)
    rows = own_answers(target, tokenizer, num_answers=4, max_new_tokens=24 if args.tiny else 48)
    with tempfile.TemporaryDirectory() as folder:
        pruned, report = prune_drafter(
            drafter,
            calibration={"answers": rows[:2]},  # choose the layers
            evaluation={"answers": rows[2:]},  # say what that cost
            output_dir=args.output or folder,
            goal=PruningGoal(num_removed=args.remove),
            positions_per_text=12,
            compare="none",
        )
    full = report["full"]
    print(f"{drafter.config.num_hidden_layers} layers: acceptance length {full['acceptance_length']:.2f}")
    for step in report["steps"]:
        print(f"without layer {step['removed_layer']}: acceptance length {step['acceptance_length']:.2f}")
    print(f"kept layers: {pruned.config.kept_layers}")


if __name__ == "__main__":
    main()
