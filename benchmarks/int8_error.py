"""What int8 loses of the states of a real target: by channel over ordinary tokens, by token over attention sinks.

    python benchmarks/int8_error.py --target HuggingFaceTB/SmolLM2-135M-Instruct --data conversations.jsonl

Runs up to --tokens tokens of the data through the target, measures D as `dflash extract` does, encodes and decodes the
states of all tapped layers (by the Triton kernels on a GPU, by their torch twins on a CPU) and prints a Markdown table
beside the bars. Ordinary tokens have an rms over all tapped layers below 20 times the median, sinks the others. The error
of a channel is the rms of the error over the rms of its states, which D does not change; the error of a sink is relative
L2 of D⁻¹h, a token and a layer at a time. A value is clipped if it lies more than half a step beyond ±127.

Shapes: N tokens, L tapped target layers, H hidden size.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dflash_train.errors import InputError
from dflash_train.stage1_target.calibration import SINK_FACTOR, calibrate_states, draw_samples, states_of
from dflash_train.stage1_target.forward import pad_right
from dflash_train.stage1_target.samples import DataConfig, prepare_samples
from dflash_train.stage1_target.schedule import plan_batches
from dflash_train.stage1_target.target import load_target
from dflash_train.stage1_target.target_config import (
    TargetConfig,
    default_target_layer_ids,
    load_model_config,
    text_config,
)
from dflash_train.store.calibration import Calibration
from dflash_train.store.encoding import INT8_LIMIT, has_kernels, make_encoding

BARS = {"median": 0.009, "largest": 0.016, "sinks": 0.045, "bytes": 0.51}
PIECE_TOKENS = 1024


def target_states(arguments: argparse.Namespace, device: str) -> tuple[list[torch.Tensor], tuple[int, ...], int]:
    """Raw states of a seeded draw of samples, [N, L * H] a batch; the tapped layers, and H."""
    config = TargetConfig(name=arguments.target, dtype=arguments.dtype)
    given = arguments.target_layers
    num_layers = text_config(load_model_config(config)).num_hidden_layers
    layers = tuple(map(int, given.split(","))) if given else default_target_layer_ids(num_layers, 5)
    target = load_target(config, layers, device)
    with tempfile.TemporaryDirectory() as cache:
        table = prepare_samples(DataConfig(source=arguments.data), target.tokenizer, Path(cache))
        drawn = draw_samples(table.lengths, arguments.tokens, seed=0)

        def batches() -> Iterator[tuple[torch.Tensor, list[int]]]:
            for batch in plan_batches(table.lengths, drawn, arguments.batch_tokens, 0):
                samples = [table.sample(index)[2] for index in batch.indices]
                yield pad_right(samples), list(map(len, samples))

        return list(states_of(target, batches())), layers, target.hidden_size


def measure(states: list[torch.Tensor], num_layers: int, hidden_size: int) -> dict[str, Any]:
    """All figures of the table, as shares, from raw states [N, L * H]."""
    device = states[0].device
    encoding = make_encoding("int8", num_layers, hidden_size)
    scale = calibrate_states(states, num_layers, encoding.num_states, device)
    if scale is None:
        raise InputError("No token has finite states; try --dtype float32.")
    calibration = Calibration.from_arrays(scale).to(device)
    pieces = [piece for batch in states for piece in torch.split(batch, PIECE_TOKENS)]
    rms = torch.cat([piece.float().square().mean(1).sqrt() for piece in pieces])
    limit = SINK_FACTOR * rms.median()
    power, lost = torch.zeros(2, encoding.num_states, dtype=torch.float64, device=device)
    sinks: list[torch.Tensor] = []
    num_clipped = num_values = 0
    shape = (-1, num_layers, hidden_size)
    for piece in pieces:
        features, scales = encoding.encode(piece, calibration)
        assert scales is not None
        scaled = encoding.fc_input(piece, calibration)
        error = (encoding.decode(features, scales, calibration, torch.float32) - scaled).double()
        is_sink = piece.float().square().mean(1).sqrt() >= limit
        power += scaled[~is_sink].double().square().sum(0)
        lost += error[~is_sink].square().sum(0)
        sinks.append(error[is_sink].view(shape).norm(dim=-1) / scaled[is_sink].double().view(shape).norm(dim=-1))
        beyond = scaled.view(shape).abs() > (INT8_LIMIT + 0.5) * scales[..., None]
        num_clipped, num_values = num_clipped + int(beyond.sum()), num_values + beyond.numel()
    channels = (lost / power.clamp_min(1e-300)).sqrt().view(num_layers, hidden_size).cpu()
    of_sinks = torch.cat(sinks).cpu()
    return {
        "kernels": has_kernels(states[0]),
        "tokens": len(rms),
        "sink_tokens": len(of_sinks),
        "layers": [
            {
                "median": float(channels[layer].median()),
                "largest": float(channels[layer].max()),
                "sinks": float(of_sinks[:, layer].max()) if len(of_sinks) else None,
            }
            for layer in range(num_layers)
        ],
        "median": float(channels.median()),
        "largest": float(channels.max()),
        "sinks": float(of_sinks.max()) if len(of_sinks) else None,
        "bytes": (encoding.num_columns + 4 * encoding.num_scales) / (2 * encoding.num_states),
        "clipped": num_clipped / num_values,
    }


def table(result: dict[str, Any], layers: tuple[int, ...]) -> str:
    """The figures in Markdown."""

    def percent(value: float | None) -> str:
        return "none" if value is None else f"{value:.2%}"

    def verdict(name: str, form: Callable[[float], str]) -> str:
        value, bar = result[name], BARS[name]
        return "no sink" if value is None else f"≤ {form(bar)}: {'met' if value <= bar else 'missed'}"

    lines = ["| layer | median of channels | largest of channels | largest of sinks |", "|---|---|---|---|"]
    for layer, row in zip(layers, result["layers"], strict=True):
        lines.append(f"| {layer} | {percent(row['median'])} | {percent(row['largest'])} | {percent(row['sinks'])} |")
    lines.append(f"| all | {percent(result['median'])} | {percent(result['largest'])} | {percent(result['sinks'])} |")
    bars = [verdict(name, lambda value: f"{value:.1%}") for name in ("median", "largest", "sinks")]
    lines += [f"| bar | {' | '.join(bars)} |", ""]
    lines.append(
        f"{result['tokens']:,} tokens, {result['sink_tokens']:,} of them sinks; {result['bytes']:.4f} of bf16's bytes "
        f"({verdict('bytes', lambda value: f'{value:.2f}')}); {result['clipped']:.4%} of the values clipped; "
        f"{'Triton kernels' if result['kernels'] else 'torch twins of the kernels'} on {result['device']}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="hub name, folder or .gguf file")
    parser.add_argument("--data", required=True, help="conversations, as dflash extract takes them")
    parser.add_argument("--target-layers", metavar="IDS", help="default: z-lab's rule, 5 taps")
    parser.add_argument("--dtype", default="auto", help="as dflash extract's")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        states, layers, hidden_size = target_states(arguments, arguments.device)
        result = measure(states, len(layers), hidden_size)
    except InputError as error:
        parser.error(str(error))
    on_gpu = torch.device(arguments.device).type == "cuda"
    result |= {"device": torch.cuda.get_device_name() if on_gpu else "the CPU", "target": arguments.target}
    print(table(result, layers))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
