"""
Measures ways of drafting side by side, as `d3d-hf bench` does, and reads the figures back from its JSON:
`python examples/benchmark.py`.

Three prompts say little: the intervals show how little. docs/results.md has more of them.
"""

import argparse
import json
import tempfile
from pathlib import Path

from example_models import DRAFTER, PROMPTS, load_drafter, load_target

from d3d_hf import cli


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny random models, to see that it runs")
    parser.add_argument("--methods", default="plain,prompt-lookup,d3d-sync", help="(default: %(default)s)")
    parser.add_argument("--max-samples", type=int, default=3, help="prompts (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        models = ["--drafter", str(DRAFTER)]  # the target: the embedded one
        if args.tiny:
            models = save_tiny_models(Path(folder))
        output = Path(folder) / "results.json"
        status = cli.main(
            [
                "bench",
                *models,
                f"--datasets={PROMPTS}",
                f"--methods={args.methods}",
                f"--max-samples={args.max_samples}",
                f"--max-new-tokens={args.max_new_tokens}",
                f"--output={output}",
            ]
        )
        if status:
            raise SystemExit(status)
        results = json.loads(output.read_text(encoding="utf-8"))["results"]
    best = max(results, key=lambda row: row["tokens_per_second"])
    print(f"Fastest: {best['method']}, {best['tokens_per_second']:.1f} tokens/s, {best['speedup']:.2f} times plain")


def save_tiny_models(folder: Path) -> list[str]:
    target, tokenizer = load_target(tiny=True)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    load_drafter(target, tiny=True).save_pretrained(folder / "drafter")
    return [f"--target={folder / 'target'}", f"--drafter={folder / 'drafter'}"]


if __name__ == "__main__":
    main()
