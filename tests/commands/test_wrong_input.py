"""Everything that can be asked of the commands wrongly, what they answer, and that nothing is left behind.

`CASES` is the one table: each case is run here, and `python tests/commands/test_wrong_input.py` writes it into
docs/errors.md. In a message «…» stands for what varies. Every case runs in a folder of its own with a tiny target
(`target`), its store (`store.zarr`), a run of one step (`run`) and the conversations (`rows.jsonl`) in it.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from dflash_train.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "errors.md"
MARKER = "<!-- written by tests/commands/test_wrong_input.py -->\n"
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"question {n}"},
            {"role": "assistant", "content": f"answer {n} is long"},
        ]
    }
    for n in range(12)
]
CHECKPOINT = Path("run", "checkpoints", "step-00000001")

REGENERATE = "regenerate --target target --data rows.jsonl --output answers.jsonl --gpus cpu"
SERVER = "regenerate --target target --data rows.jsonl --output answers.jsonl --server"
EXTRACT = "extract --target target --data rows.jsonl --store new.zarr --gpus cpu --num-taps 2"
AGAIN = "extract --target target --data rows.jsonl --store store.zarr --gpus cpu --num-taps 2"
TRAIN = (
    "train-drafter --store store.zarr --run new --gpus cpu --num-layers 1 --block-size 4 --row-tokens 128 --anchors 16 "
    "--rows-per-step 1 --holdout 0 --mask-token <|mask|> --steps 1"
)
FROM = TRAIN.replace(" --num-layers 1 --block-size 4", "")  # the drafter to start from has these
RESUME = TRAIN.replace("--run new", "--run run")
EVALUATE = (
    "evaluate --target target --drafter run --data rows.jsonl --gpus cpu --max-prompts 1 --max-new-tokens 4 "
    "--allow-trained-prompts"
)
MEASURED = f"{TRAIN} --evaluate-target target --evaluate-prompts asked.jsonl"

IMPORT = "import-store states --store new.zarr --target target --gpus cpu"
CHECK = "check run --target target --gpus cpu --no-parity"
EXPORT = "export run out --format speculators --store store.zarr"

Prepare = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """One thing done wrongly."""

    situation: str
    words: str
    status: int
    message: str
    prepare: Prepare = lambda folder: None


def write(name: str | Path, content: str | bytes) -> Prepare:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def write_rows(name: str, *rows: Any) -> Prepare:
    return write(name, "".join(json.dumps(row) + "\n" for row in rows))


def edit(name: str | Path, change: Callable[[bytes], bytes]) -> Prepare:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def edit_json(name: str | Path, **values: Any) -> Prepare:
    return edit(name, lambda data: json.dumps({**json.loads(data), **values}).encode())


def edit_manifest(**values: Any) -> Prepare:
    """Change the store's attributes, as another program might."""

    def change(data: bytes) -> bytes:
        metadata = json.loads(data)
        metadata["attributes"] |= values
        return json.dumps(metadata).encode()

    return edit("store.zarr/zarr.json", change)


def in_segment(name: str, change: Callable[[bytes], bytes]) -> Prepare:
    def prepare(folder: Path) -> None:
        (path,) = (folder / "store.zarr" / "segments").glob(f"*/{name}")
        path.write_bytes(change(path.read_bytes()))

    return prepare


def own_target(change: Prepare) -> Prepare:
    """Work on a copy of the target, which is otherwise a link to one that all cases share."""

    def prepare(folder: Path) -> None:
        original = (folder / "target").resolve()
        (folder / "target").unlink()
        shutil.copytree(original, folder / "target")
        change(folder)

    return prepare


def remove(name: str | Path) -> Prepare:
    def prepare(folder: Path) -> None:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    return prepare


def make_folder(name: str) -> Prepare:
    return lambda folder: (folder / name).mkdir(parents=True)


def link(name: str, to: str) -> Prepare:
    return lambda folder: (folder / name).symlink_to(to)


def link_loop(name: str) -> Prepare:
    return link(name, Path(name).name)


def in_order(*steps: Prepare) -> Prepare:
    def prepare(folder: Path) -> None:
        for step in steps:
            step(folder)

    return prepare


def foreign_states(folder: Path) -> None:
    """A sample as speculators writes it, of the decoder layers 1 and 2 and the last."""
    import datasets
    import torch
    from safetensors.torch import save_file

    from dflash_train.stage1_target.target import load_target
    from dflash_train.stage1_target.target_config import TargetConfig

    token_ids = list(range(5, 14))
    rows = datasets.Dataset.from_dict({"input_ids": [token_ids], "loss_mask": [[0] * 4 + [1] * 5], "seq_len": [9]})
    rows.save_to_disk(str(folder / "states"))
    target = load_target(TargetConfig(name=str(folder / "target"), dtype="float32"), (1, 2), "cpu")
    states = target.hidden_states(torch.tensor([token_ids]))[0].view(9, 2, 32)
    (folder / "states" / "hidden_states").mkdir()
    content = {"token_ids": torch.tensor(token_ids), "hidden_states": torch.cat([states, states[:, :1]], dim=1)}
    save_file(content, folder / "states" / "hidden_states" / "hs_0.safetensors")


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


CASES: dict[str, list[Case]] = {
    "Any command": [
        Case("a command that does not exist", "extrct", 2, "No such command 'extrct'."),
        Case("an option that does not exist", f"{EXTRACT} --batch-size 4", 2, "No such option…--batch-size…"),
        Case(
            "a number that is text", f"{TRAIN} --lr fast", 2, "Invalid value for '--lr': 'fast' is not a valid float."
        ),
        Case(
            "a choice that does not exist",
            f"{EXTRACT} --encoding fp4",
            2,
            "Invalid value for '--encoding': 'fp4' is not one of 'bf16', 'int8', 'projected-int8', 'projected-int4'.",
        ),
        Case("an option without its value", "extract --target", 2, "Option '--target' requires an argument."),
        Case("a required option left out", "extract", 2, "Missing option '--target'."),
        Case("an argument too many", f"{TRAIN} now", 2, "Got unexpected extra argument (now)"),
        Case("a GPU that does not exist", EXTRACT.replace("cpu", "999"), 1, "--gpus names … but …"),
        Case("a GPU named twice", EXTRACT.replace("cpu", "0,0"), 1, "--gpus 0,0 names a GPU twice; name each once."),
        Case(
            "a device that is no GPU number",
            TRAIN.replace("cpu", "cuda:0"),
            1,
            "--gpus is 'cuda:0'; write GPU numbers like 0-4 or 5,7, or cpu, or cpu:3.",
        ),
        Case(
            "no worker at all",
            EXTRACT.replace("cpu", "cpu:0"),
            1,
            "--gpus cpu:0 asks for no worker at all; cpu:1 is the least.",
        ),
        Case(
            "two devices where one works",
            "check run --target target --gpus cpu:2",
            1,
            "--gpus cpu:2 names 2 devices, but this command runs on one: name one.",
        ),
        Case(
            "an empty device list",
            EXTRACT.replace("cpu", "''"),
            1,
            "--gpus is ''; write GPU numbers like 0-4 or 5,7, or cpu, or cpu:3.",
        ),
    ],
    "Recipes": [
        Case(
            "a file that is not there",
            "extract --recipe no.toml",
            1,
            "The recipe no.toml cannot be read: No such file or directory. Give the path of a TOML file.",
        ),
        Case(
            "a folder",
            "extract --recipe run",
            1,
            "The recipe run cannot be read: Is a directory. Give the path of a TOML file.",
        ),
        Case(
            "a file that is no TOML",
            "extract --recipe r.toml",
            1,
            "The recipe r.toml is not TOML: …. See the example in docs/recipes.md.",
            write("r.toml", "[extract\n"),
        ),
        Case(
            "a file that is not UTF-8",
            "extract --recipe r.toml",
            1,
            "The recipe r.toml is not TOML: …. See the example in docs/recipes.md.",
            write("r.toml", b"[extract]\ntarget = '\xff'\n"),
        ),
        Case(
            "an unknown option",
            "train-drafter --recipe r.toml",
            1,
            "The recipe r.toml has an unknown option 'row-token' in [train-drafter]; the nearest known name is 'row-tokens'.",
            write("r.toml", "[train-drafter]\nrow-token = 1\n"),
        ),
        Case(
            "an unknown command",
            "train-drafter --recipe r.toml",
            1,
            "The recipe r.toml has 'train' at its top; put options into a table named after their command; known are …",
            write("r.toml", "[train]\nlr = 1\n"),
        ),
        Case(
            "an option outside a table",
            "train-drafter --recipe r.toml",
            1,
            "The recipe r.toml has 'lr' at its top; put options into a table named after their command; known are …",
            write("r.toml", "lr = 1\n"),
        ),
        Case(
            "text where a number is wanted",
            f"{TRAIN} --recipe r.toml",
            2,
            "Invalid value for '--lr': 'fast' is not a valid float.",
            write("r.toml", "[train-drafter]\nlr = 'fast'\n"),
        ),
        Case(
            "a list where a number is wanted",
            f"{TRAIN} --recipe r.toml",
            1,
            "The recipe r.toml has lr = [1, 2]; write one number or text.",
            write("r.toml", "[train-drafter]\nlr = [1, 2]\n"),
        ),
        Case(
            "one value where two are wanted",
            f"{TRAIN} --recipe r.toml",
            2,
            "Invalid value for '--betas': Takes 2 values but 1 was given.",
            write("r.toml", "[train-drafter]\nbetas = [0.9]\n"),
        ),
        Case(
            "a number where two are wanted",
            f"{TRAIN} --recipe r.toml",
            1,
            "The recipe r.toml has betas = 0.9; write a list of 2 values.",
            write("r.toml", "[train-drafter]\nbetas = 0.9\n"),
        ),
        Case(
            "a number where a path is wanted",
            "train-drafter --recipe r.toml",
            1,
            "The recipe r.toml has store = 5; write text in quotes.",
            write("r.toml", "[train-drafter]\nstore = 5\nrun = 'r'\n"),
        ),
        Case(
            "a date",
            "train-drafter --recipe r.toml",
            1,
            "The recipe r.toml has store = datetime.date(2020, 1, 1); write text in quotes.",
            write("r.toml", "[train-drafter]\nstore = 2020-01-01\nrun = 'r'\n"),
        ),
        Case(
            "text where true or false is wanted",
            f"{TRAIN} --recipe r.toml",
            2,
            "Invalid value for '--crop': 'perhaps' is not a valid boolean. Recognized values: …",
            write("r.toml", "[train-drafter]\ncrop = 'perhaps'\n"),
        ),
        Case(
            "an unknown choice",
            f"{EXTRACT} --recipe r.toml",
            2,
            "Invalid value for '--encoding': 'fp4' is not one of 'bf16', 'int8', 'projected-int8', 'projected-int4'.",
            write("r.toml", "[extract]\nencoding = 'fp4'\n"),
        ),
    ],
    "regenerate": [
        Case(
            "a temperature below 0",
            f"{REGENERATE} --temperature -1",
            1,
            "--temperature is -1.0, but must be 0 or more.",
        ),
        Case(
            "a temperature of NaN", f"{REGENERATE} --temperature nan", 1, "--temperature is nan, but must be 0 or more."
        ),
        Case("top-p above 1", f"{REGENERATE} --top-p 2", 1, "--top-p is 2.0, but must be more than 0 and at most 1."),
        Case(
            "answers of no tokens",
            f"{REGENERATE} --max-new-tokens 0",
            1,
            "--max-new-tokens is 0, but must be more than 0.",
        ),
        Case(
            "an output that is no jsonl",
            REGENERATE.replace("answers.jsonl", "answers.parquet"),
            1,
            "--output is answers.parquet, but must end in .jsonl, the form that it has.",
        ),
        Case(
            "the data as output",
            REGENERATE.replace("answers.jsonl", "rows.jsonl"),
            1,
            "--output is rows.jsonl, the data itself; name another file.",
        ),
        Case(
            "an output that regenerate did not write",
            REGENERATE,
            1,
            "answers.jsonl is there, but no answers.jsonl.generation.json that says how it was made; name another --output.",
            write("answers.jsonl", "{}\n"),
        ),
        Case(
            "a damaged record of the settings",
            REGENERATE,
            1,
            "answers.jsonl.generation.json cannot be read (…); it says how the answers beside it were made. Restore it, or "
            "remove it.",
            write("answers.jsonl.generation.json", "{"),
        ),
        Case(
            "data without questions",
            REGENERATE.replace("rows.jsonl", "text.jsonl"),
            1,
            "The columns of text.jsonl are text; questions need turns: …. Give a data set that has one of them.",
            write_rows("text.jsonl", {"text": "a"}),
        ),
        Case(
            "a model name without a server",
            f"{REGENERATE} --server-model m",
            1,
            "--server-model needs --server; give both or neither.",
        ),
        Case(
            "a server and devices",
            f"{REGENERATE} --server localhost:9",
            1,
            "--gpus says where the target runs in process, but --server is given; leave one out.",
        ),
        Case(
            "a server that is no address",
            f"{SERVER} ftp://x",
            1,
            "--server is 'ftp://x'; write an address such as http://localhost:8000/v1.",
        ),
        Case(
            "a server whose name has an empty part",
            f"{SERVER} http://a..b:8000",
            1,
            "--server is 'http://a..b:8000'; write an address such as http://localhost:8000/v1.",
        ),
        Case(
            "a server that does not answer",
            f"{SERVER} http://127.0.0.1:9",
            1,
            "The server http://127.0.0.1:9 does not answer: …. Start it, or give its address as --server.",
        ),
        Case(
            "a key file that is not there",
            f"{SERVER} http://127.0.0.1:9 --api-key-file no.txt",
            1,
            "--api-key-file no.txt cannot be read: …. Name a text file.",
        ),
    ],
    "extract: options": [
        Case(
            "several GPUs a target on the CPU",
            f"{EXTRACT} --gpus-per-target 2",
            1,
            "--gpus-per-target 2 needs GPUs, but the target is to run on the CPU; leave it out.",
        ),
        Case(
            "no GPU a target",
            f"{EXTRACT} --gpus-per-target 0",
            1,
            "--gpus-per-target is 0, but must be more than 0.",
        ),
        Case(
            "a rank that is no number",
            f"{EXTRACT} --encoding projected-int8 --rank half",
            1,
            "--rank is 'half'. Give a number of features, a multiple of the hidden size such as 2H or 0.5H, or auto.",
        ),
        Case(
            "a rank beyond the channels",
            f"{EXTRACT} --encoding projected-int8 --rank 99H",
            1,
            "The rank of projected-int8 is 3168, but must be from 1 to …, the channels of … tapped layers. Give another --rank.",
        ),
        Case(
            "a rank without a projection",
            f"{EXTRACT} --rank 2H",
            1,
            "--rank 2H is for the projected encodings, but --encoding is int8.",
        ),
        Case(
            "the last layer of the target",
            f"{EXTRACT} --target-layers 1,4",
            1,
            "Target layer 4 is the last one, whose output engines cannot tap (transformers gives it after the final norm, SGLang not at all); choose from 0 to 3.",
        ),
        Case(
            "a layer that the target lacks",
            f"{EXTRACT} --target-layers 1,40",
            1,
            "The target layers 1,40 do not exist in a target of 5 layers; choose from 0 to 3.",
        ),
        Case(
            "a negative layer",
            f"{EXTRACT} --target-layers=-1,2",
            1,
            "The target layers -1,2 do not exist in a target of 5 layers; choose from 0 to 3.",
        ),
        Case(
            "a layer twice",
            f"{EXTRACT} --target-layers 1,1",
            1,
            "The target layers 1,1 are not ascending and distinct; sort them, each once.",
        ),
        Case(
            "layers that are no numbers",
            f"{EXTRACT} --target-layers a",
            2,
            "--target-layers is 'a'; write layer numbers like 1,9,17,25,33.",
        ),
        Case(
            "no layers",
            f"{EXTRACT} --target-layers ''",
            2,
            "--target-layers is ''; write layer numbers like 1,9,17,25,33.",
        ),
        Case(
            "more taps than layers",
            f"{EXTRACT} --num-taps 50",
            1,
            "A target of 5 layers has no 50 taps by z-lab's rule; tap fewer with --num-taps, or name them with --target-layers.",
        ),
        Case("no taps", f"{EXTRACT} --num-taps 0", 1, "--num-taps is 0, but must be more than 0."),
        Case(
            "an age of NaN seconds",
            f"{EXTRACT} --segment-seconds nan",
            1,
            "--segment-seconds is nan, but must be more than 0.",
        ),
        Case(
            "a largest size that is none",
            f"{EXTRACT} --max-store-size much",
            1,
            "--max-store-size is 'much'; write a size like 2TB, 500GiB, or a number of bytes.",
        ),
        Case(
            "a largest size that one batch fills",
            f"{EXTRACT} --dry-run --max-store-size 50kB",
            1,
            "--max-store-size is 48.8 KiB, but at least … are needed: … for what stays (embedding, head, calibration, reference samples), … for one batch, and 5% that are free when a pause ends. Give more, or lower --batch-tokens.",
        ),
        Case(
            "a largest size for a store in a bucket",
            f"{EXTRACT} --store s3://bucket/new.zarr --max-store-size 2TB",
            1,
            "--max-store-size is for local folders, and s3://bucket/new.zarr is a URL. Leave it out.",
        ),
        Case(
            "a damaged record of consumed samples",
            AGAIN,
            1,
            "segment.json is damaged (its own crc32c does not fit): it lists samples that were trained on and removed. Restore it from a copy, or remove it to have those samples stored again.",
            in_order(
                make_folder("store.zarr/consumed"),
                write("store.zarr/consumed/segment.json", '{"consumed": {"ids": []}}'),
            ),
        ),
        Case("batches of no tokens", f"{EXTRACT} --batch-tokens 0", 1, "--batch-tokens is 0, but must be more than 0."),
        Case(
            "samples of one token",
            f"{EXTRACT} --max-tokens 1",
            1,
            "--max-tokens is 1; wanted at least 2, an anchor and its successor.",
        ),
        Case(
            "no samples",
            f"{EXTRACT} --max-samples 0",
            1,
            "--max-samples is 0; wanted at least 1, or none for all samples.",
        ),
        Case("a negative seed", f"{EXTRACT} --seed=-1", 1, "--seed is -1, but must be at least 0 and below 2**63."),
        Case(
            "a seed of more than 63 bits",
            f"{EXTRACT} --seed 999999999999999999999999",
            1,
            "--seed is 999999999999999999999999, but must be at least 0 and below 2**63.",
        ),
        Case(
            "template arguments that are no JSON",
            f"{EXTRACT} --chat-template-arguments {{",
            2,
            "--chat-template-arguments is no JSON (…): '{'. Write an object, such as '{\"enable_thinking\": false}'.",
        ),
        Case(
            "template arguments that are a list",
            f"{EXTRACT} --chat-template-arguments [1]",
            2,
            "--chat-template-arguments is '[1]', no JSON object. Write an object, such as '{\"enable_thinking\": false}'.",
        ),
        Case(
            "template arguments nested 100,000 deep",
            f"{EXTRACT} --chat-template-arguments {'[' * 100000}",
            2,
            "--chat-template-arguments is no JSON (…): '…'. Write an object, such as '{\"enable_thinking\": false}'.",
        ),
        Case(
            "a template argument that the template is given anyway",
            f"{EXTRACT} --dry-run --chat-template-arguments '{{\"messages\": 5}}'",
            1,
            "No row of rows.jsonl (messages format, 12 rows) can be used; the commonest reason (12 times): the chat template refuses this row: …. Give other rows, or mend these.",
        ),
        Case(
            "a calibration from a store that is not there",
            f"{EXTRACT} --calibration-from no.zarr",
            1,
            "no.zarr is not there, but a store is a folder. Give the path that `dflash extract` wrote.",
        ),
        Case(
            "the same for a store that exists",
            f"{AGAIN} --calibration-from no.zarr",
            1,
            "no.zarr is not there, but a store is a folder. Give the path that `dflash extract` wrote.",
        ),
        Case(
            "a projection from a drafter for an encoding that has none",
            f"{EXTRACT} --projection-from run",
            1,
            "--projection-from run is for the projected encodings, but --encoding is int8.",
        ),
        Case(
            "two places to take the projection from",
            f"{EXTRACT} --encoding projected-int8 --projection-from run --calibration-from store.zarr",
            1,
            "--projection-from and --calibration-from both say where the projection comes from; give one of them.",
        ),
        Case(
            "a projection from a folder that is no drafter",
            f"{EXTRACT} --encoding projected-int8 --projection-from target",
            1,
            "The fc of the drafter target cannot be read (…). Give a drafter's folder in z-lab's format, such as a checkpoint of `dflash train-drafter`.",
        ),
        Case(
            "a projection from a drafter of other layers",
            f"{EXTRACT} --target-layers 0,2 --encoding projected-int8 --projection-from {CHECKPOINT}",
            1,
            "The drafter run/checkpoints/step-00000001 taps the layers [1, 2], but [0, 2] are to be stored. Give another drafter, or --target-layers.",
        ),
    ],
    "extract: target": [
        Case(
            "a folder that is not there",
            EXTRACT.replace("--target target", "--target ./no-target"),
            1,
            "The target './no-target' is not there; give a model's folder, or a name on the hub. The nearest folder is 'target'.",
        ),
        Case(
            "a name that the hub does not have",
            EXTRACT.replace("--target target", "--target nobody/no-such-target"),
            1,
            "Could not load the config of the target 'nobody/no-such-target': …. Give a whole model folder, or a name on the hub that this machine can reach.",
        ),
        Case(
            "a misspelt folder among models",
            EXTRACT.replace("--target target", "--target models/target-1B"),
            1,
            "target: 'models/target-1B' is no folder here and could not be read from the hub (…). The nearest folder is 'models/target-1.5b'. Check the name, the network, and your access (`hf auth whoami`).",
            in_order(make_folder("models"), link("models/target-1.5b", "../target"), make_folder("models/target-1")),
        ),
        Case(
            "no name",
            EXTRACT.replace("--target target", "--target ''"),
            1,
            "target: '' has no config.json. Give a model's folder or its name on the hub.",
        ),
        Case(
            "an empty folder",
            EXTRACT.replace("--target target", "--target empty"),
            1,
            "target: 'empty' has no config.json. Give a model's folder or its name on the hub.",
            make_folder("empty"),
        ),
        Case(
            "a file that is no target",
            EXTRACT.replace("--target target", "--target rows.jsonl"),
            1,
            "Could not load the config of the target 'rows.jsonl': …. Give a whole model folder, or a name on the hub that this machine can reach.",
        ),
        Case(
            "a .gguf file that is not there",
            EXTRACT.replace("--target target", "--target no.gguf"),
            1,
            "target: 'no.gguf' is no file. Give the path of a local .gguf file.",
        ),
        Case(
            "a .gguf file cut short",
            EXTRACT.replace("--target target", "--target t.gguf"),
            1,
            "Could not load the config of the target 't.gguf': …. Give a whole model folder, or a name on the hub that this machine can reach.",
            write("t.gguf", b"GGUF\x00\x01"),
        ),
        Case(
            "quantised weights without the package that loads them",
            EXTRACT,
            1,
            "The weights of target are quantised by gptq, which transformers loads with optimum and gptqmodel: pip install optimum gptqmodel, or take an unquantised checkpoint.",
            own_target(edit_json("target/config.json", quantization_config={"quant_method": "gptq", "bits": 4})),
        ),
        Case(
            "a config.json that is no JSON",
            EXTRACT,
            1,
            "target: target/config.json cannot be read (…). Download the target again.",
            own_target(write("target/config.json", "{")),
        ),
        Case(
            "an empty config.json",
            EXTRACT,
            1,
            "target: target/config.json cannot be read (…). Download the target again.",
            own_target(write("target/config.json", "")),
        ),
        Case(
            "a config.json that is not UTF-8",
            EXTRACT,
            1,
            "target: target/config.json cannot be read (…). Download the target again.",
            own_target(write("target/config.json", b"\xff\xfe{}")),
        ),
        Case(
            "a config.json that is a list",
            EXTRACT,
            1,
            "target: target/config.json is no JSON object. Download the target again.",
            own_target(write("target/config.json", "[]")),
        ),
        Case(
            "a model type that transformers lacks",
            EXTRACT,
            1,
            "Could not load the config of the target 'target': …. Give a whole model folder, or a name on the hub that this machine can reach.",
            own_target(edit_json("target/config.json", model_type="teapot")),
        ),
        Case(
            "text where config.json has a number",
            EXTRACT,
            1,
            "Could not load the config of the target 'target': …. Give a whole model folder, or a name on the hub that this machine can reach.",
            own_target(edit_json("target/config.json", num_hidden_layers="five")),
        ),
        Case(
            "an encoder-decoder model",
            EXTRACT,
            1,
            "The target 'target' is an encoder-decoder model; a causal language model is wanted.",
            own_target(write("target/config.json", json.dumps({"model_type": "t5"}))),
        ),
        Case(
            "a model with code of its own",
            EXTRACT,
            1,
            "Could not load the config of the target 'target': it brings code of its own. Read that code, then give --trust-remote-code to let it run.",
            own_target(edit_json("target/config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"})),
        ),
        Case(
            "a tokenizer.json cut short",
            EXTRACT,
            1,
            "Could not load the tokenizer of the target 'target': …. Give a whole model folder, or a name on the hub that this machine can reach.",
            own_target(edit("target/tokenizer.json", half)),
        ),
        Case(
            "no tokenizer.json",
            EXTRACT,
            1,
            "Could not load the tokenizer of the target 'target': …. Give a whole model folder, or a name on the hub that this machine can reach.",
            own_target(remove("target/tokenizer.json")),
        ),
        Case(
            "a tokenizer in Python where fast paths are required",
            f"{EXTRACT} --require-fast-kernels",
            1,
            "tokenizer: target has no tokenizer.json; …. Convert it once with AutoTokenizer and save_pretrained, or give data with input_ids and loss_mask. Nothing was stored, because of --require-fast-kernels.",
            own_target(
                in_order(
                    remove("target/tokenizer.json"),
                    write("target/tokenizer_config.json", '{"tokenizer_class": "ByT5Tokenizer"}'),
                )
            ),
        ),
        Case(
            "no chat template",
            EXTRACT,
            1,
            "The tokenizer of target has no chat template, which conversations need. Add a chat_template.jinja to its folder, or give `text` or `input_ids` + `loss_mask` columns.",
            own_target(remove("target/chat_template.jinja")),
        ),
        Case(
            "a chat template that is no template",
            EXTRACT,
            1,
            "No row of rows.jsonl (messages format, 12 rows) can be used; the commonest reason (12 times): the chat template refuses this row: …. Give other rows, or mend these.",
            own_target(write("target/chat_template.jinja", "{% for")),
        ),
        Case(
            "another target than the store's",
            AGAIN,
            1,
            "The store store.zarr was made from something else: target_config_hash: found '…', wanted '…'; hidden_size: found 32, wanted 64. Give the same target, data settings and encoding, or another --store.",
            own_target(edit_json("target/config.json", hidden_size=64)),
        ),
    ],
    "extract: data": [
        Case(
            "a file that is not there",
            EXTRACT.replace("rows.jsonl", "no.jsonl"),
            1,
            "no.jsonl does not exist. Give a .json, .jsonl, .parquet or .arrow file, a folder of them, a save_to_disk folder, or a hub name.",
        ),
        Case(
            "a name that the hub does not have",
            EXTRACT.replace("rows.jsonl", "nobody/no-such-data"),
            1,
            "nobody/no-such-data is no local path, and loading it from the hub failed: …. Give a .json, .jsonl, .parquet or .arrow file, a folder of them, a save_to_disk folder, or a hub name.",
        ),
        Case(
            "an empty file",
            EXTRACT,
            1,
            "rows.jsonl holds no rows. Give a data set with at least one conversation.",
            write("rows.jsonl", ""),
        ),
        Case(
            "a file of empty lines",
            EXTRACT,
            1,
            "rows.jsonl holds no rows. Give a data set with at least one conversation.",
            write("rows.jsonl", "\n\n"),
        ),
        Case(
            "no name",
            EXTRACT.replace("rows.jsonl", "''"),
            1,
            "The data has no name; give a file, a folder or a data set of the hub.",
        ),
        Case(
            "a last line cut short",
            EXTRACT,
            1,
            "rows.jsonl, line 12: not valid JSON (…). Repair or remove it.",
            edit("rows.jsonl", lambda data: data[:-20]),
        ),
        Case(
            "bytes that are not UTF-8",
            EXTRACT,
            1,
            "rows.jsonl, line 1: not valid UTF-8 (…). Repair or remove it.",
            write("rows.jsonl", b'{"messages": "\xff\xfe"}\n'),
        ),
        Case(
            "a list of numbers",
            EXTRACT,
            1,
            "rows.jsonl, item 1: found a JSON int, wanted a list of objects.",
            write("rows.jsonl", "[1, 2]"),
        ),
        Case(
            "lines of numbers",
            EXTRACT,
            1,
            "rows.jsonl, line 1: found a JSON int, wanted one object a line.",
            write("rows.jsonl", "1\n2\n"),
        ),
        Case(
            "NaN for the messages",
            EXTRACT,
            1,
            "No row of rows.jsonl (messages format, 1 row) can be used; the commonest reason (1 time): found a float where a list of turns was wanted. Give other rows, or mend these.",
            write("rows.jsonl", '{"messages": NaN}\n'),
        ),
        Case(
            "objects nested 100,000 deep",
            EXTRACT,
            1,
            "rows.jsonl, line 1: nested too deeply for a conversation. Repair or remove it.",
            write("rows.jsonl", '{"a":' * 100_000),
        ),
        Case(
            "a binary file",
            EXTRACT,
            1,
            "rows.jsonl, line 1: not valid UTF-8 (…). Repair or remove it.",
            write("rows.jsonl", bytes(range(256)) * 8),
        ),
        Case(
            "unknown columns",
            EXTRACT,
            1,
            "The columns of rows.jsonl are question, answer; wanted `messages` (OpenAI, with `tools` if there are any), `conversations` (ShareGPT), `prompt` + `response` (or `completion`), `text`, or `input_ids` + `loss_mask`. Rename them.",
            write_rows("rows.jsonl", {"question": "a", "answer": "b"}),
        ),
        Case(
            "a conversation without messages",
            EXTRACT,
            1,
            "No row of rows.jsonl (messages format, 1 row) can be used; the commonest reason (1 time): no messages in this row. Give other rows, or mend these.",
            write_rows("rows.jsonl", {"messages": []}),
        ),
        Case(
            "text for the messages",
            EXTRACT,
            1,
            "No row of rows.jsonl (messages format, 1 row) can be used; the commonest reason (1 time): found a str where a list of turns was wanted. Give other rows, or mend these.",
            write_rows("rows.jsonl", {"messages": "hello"}),
        ),
        Case(
            "numbers for the messages",
            EXTRACT,
            1,
            "No row of rows.jsonl (messages format, 1 row) can be used; the commonest reason (1 time): found a int as a message, not an object with role and content. Give other rows, or mend these.",
            write_rows("rows.jsonl", {"messages": [1, 2]}),
        ),
        Case(
            "a conversation without an answer",
            EXTRACT,
            1,
            "No row of rows.jsonl (messages format, 1 row) can be used; the commonest reason (1 time): no assistant turn in this row. Give other rows, or mend these.",
            write_rows("rows.jsonl", {"messages": [{"role": "user", "content": "a"}]}),
        ),
        Case(
            "a number for a content",
            EXTRACT,
            1,
            "No row of rows.jsonl (messages format, 1 row) can be used; the commonest reason (1 time): a message has content that is not text; only text can be used. Give other rows, or mend these.",
            write_rows(
                "rows.jsonl", {"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": 6.5}]}
            ),
        ),
        Case(
            "token ids that the tokenizer lacks",
            EXTRACT,
            1,
            "No row of rows.jsonl (input_ids+loss_mask format, 1 row) can be used; the commonest reason (1 time): input_ids holds something that is no token id of the tokenizer (0 to 399). Give other rows, or mend these.",
            write_rows("rows.jsonl", {"input_ids": [1, 2, 99999], "loss_mask": [0, 1, 1]}),
        ),
        Case(
            "token ids that are no whole numbers",
            EXTRACT,
            1,
            "No row of rows.jsonl (input_ids+loss_mask format, 1 row) can be used; the commonest reason (1 time): input_ids holds something that is no token id of the tokenizer (0 to 399). Give other rows, or mend these.",
            write_rows("rows.jsonl", {"input_ids": [1, 2.5, 3], "loss_mask": [0, 1, 1]}),
        ),
        Case(
            "token ids of more than 64 bits",
            EXTRACT,
            1,
            "No row of rows.jsonl (input_ids+loss_mask format, 1 row) can be used; the commonest reason (1 time): input_ids holds something that is no token id of the tokenizer (0 to 399). Give other rows, or mend these.",
            write_rows("rows.jsonl", {"input_ids": [1, 10**30, 3], "loss_mask": [0, 1, 1]}),
        ),
        Case(
            "a suffix that is not known",
            EXTRACT.replace("rows.jsonl", "rows.csv"),
            1,
            "rows.csv is a .csv file; wanted a .json, .jsonl, .parquet or .arrow file, a folder of them, a save_to_disk folder, or a hub name.",
            write("rows.csv", "a,b\n"),
        ),
        Case(
            "a parquet file cut short",
            EXTRACT.replace("rows.jsonl", "rows.parquet"),
            1,
            "rows.parquet cannot be read: …. Write it again.",
            write("rows.parquet", b"PAR1"),
        ),
        Case(
            "an empty parquet file",
            EXTRACT.replace("rows.jsonl", "rows.parquet"),
            1,
            "rows.parquet cannot be read: …. Write it again.",
            write("rows.parquet", b""),
        ),
        Case(
            "an arrow file cut short",
            EXTRACT.replace("rows.jsonl", "rows.arrow"),
            1,
            "rows.arrow cannot be read: …. Write it again.",
            write("rows.arrow", b"ARROW1"),
        ),
        Case(
            "a folder with other JSON files",
            EXTRACT.replace("rows.jsonl", "run/checkpoints"),
            1,
            "run/checkpoints/step-00000001/config.json holds JSON over several lines that is not a list. Wanted a list of objects or one object a line.",
        ),
        Case(
            "a split that is not there",
            f"{EXTRACT} --split test",
            1,
            "rows.jsonl is one file and has only the split train, not test. Name that split's file.",
        ),
        Case(
            "a link to itself",
            EXTRACT.replace("rows.jsonl", "loop.jsonl"),
            1,
            "loop.jsonl does not exist. Give a .json, .jsonl, .parquet or .arrow file, a folder of them, a save_to_disk folder, or a hub name.",
            link_loop("loop.jsonl"),
        ),
        Case(
            "a folder with a link to itself",
            EXTRACT.replace("rows.jsonl", "folder"),
            1,
            "No .json, .jsonl, .parquet or .arrow file in folder. Give a .json, .jsonl, .parquet or .arrow file, a folder of them, a save_to_disk folder, or a hub name.",
            in_order(make_folder("folder"), link("folder/a", "..")),
        ),
        Case(
            "a folder with a file that links to itself",
            EXTRACT.replace("rows.jsonl", "folder"),
            1,
            "No .json, .jsonl, .parquet or .arrow file in folder. Give a .json, .jsonl, .parquet or .arrow file, a folder of them, a save_to_disk folder, or a hub name.",
            in_order(make_folder("folder"), link_loop("folder/a.jsonl")),
        ),
        Case(
            "a damaged save_to_disk folder",
            EXTRACT.replace("rows.jsonl", "folder"),
            1,
            "folder is no whole save_to_disk folder: …",
            in_order(make_folder("folder"), write("folder/dataset_info.json", "{")),
        ),
        Case(
            "a name of more than 255 bytes",
            EXTRACT.replace("rows.jsonl", "x" * 300 + ".jsonl"),
            1,
            "….jsonl: File name too long; name a shorter path.",
        ),
        Case(
            "a name with a NUL",
            EXTRACT.replace("rows.jsonl", "'a\0b.jsonl'"),
            1,
            "…b.jsonl does not exist. Give a .json, .jsonl, .parquet or .arrow file, a folder of them, a save_to_disk folder, or a hub name.",
        ),
        Case(
            "a cache folder that is a file",
            f"{EXTRACT} --sample-cache rows.jsonl",
            1,
            "--sample-cache is rows.jsonl, a file, but must be a folder; name another path.",
        ),
    ],
    "extract: store": [
        Case(
            "a file",
            EXTRACT.replace("new.zarr", "rows.jsonl"),
            1,
            "rows.jsonl is a file, but a store is a folder. Give the path that `dflash extract` wrote.",
        ),
        Case(
            "a folder under a file",
            EXTRACT.replace("new.zarr", "rows.jsonl/new.zarr"),
            1,
            "rows.jsonl/new.zarr cannot be a store: a file stands in its way. Choose another path.",
        ),
        Case(
            "a folder of something else",
            EXTRACT.replace("new.zarr", "run"),
            1,
            "run is not a store: it has no zarr.json. Give the path that `dflash extract` wrote.",
        ),
        Case(
            "a link to itself",
            EXTRACT.replace("new.zarr", "loop"),
            1,
            "loop is a link that leads in a circle. Choose another path, or remove it first.",
            link_loop("loop"),
        ),
        Case(
            "a name of more than 255 bytes",
            EXTRACT.replace("new.zarr", "x" * 300),
            1,
            "… cannot be a store: its name is too long. Choose another path.",
        ),
        Case(
            "no name",
            EXTRACT.replace("new.zarr", "''"),
            2,
            "Invalid value for '--store': '.' has no name of its own; name the folder to make.",
        ),
        Case(
            "another encoding than the store's",
            f"{AGAIN} --encoding bf16",
            1,
            "The store store.zarr was made from something else: encoding: found 'int8', wanted 'bf16'. Give the same target, data settings and encoding, or another --store.",
        ),
        Case(
            "a projected encoding on a store without a projection",
            f"{AGAIN} --encoding projected-int4",
            1,
            "The store store.zarr was made from something else: encoding: found 'int8', wanted 'projected-int4'; rank: found None, wanted 32. Give the same target, data settings and encoding, or another --store.",
        ),
        Case(
            "a projection from a store that has none",
            f"{EXTRACT} --encoding projected-int8 --calibration-from store.zarr",
            1,
            "The calibration of store.zarr has no projection, but projected-int8 of rank 32 is to be stored. Choose another store, --encoding or --rank.",
        ),
        Case(
            "other layers than the store's",
            f"{AGAIN} --target-layers 0,2",
            1,
            "The store store.zarr was made from something else: target_layer_ids: found [1, 2], wanted [0, 2]. Give the same target, data settings and encoding, or another --store.",
        ),
        Case(
            "a log folder that is a file",
            f"{EXTRACT} --log-folder rows.jsonl",
            1,
            "--log-folder is rows.jsonl, a file, but must be a folder; name another path.",
        ),
    ],
    "import-store": [
        Case(
            "a folder that is not there",
            "import-store nowhere --store new.zarr --target target --layers 1,2 --gpus cpu",
            1,
            "nowhere is not there, but a folder of states is wanted.",
        ),
        Case(
            "a folder without states",
            "import-store target --store new.zarr --target target --layers 1,2 --gpus cpu",
            1,
            "target holds no hs_….safetensors and no data_….ckpt. Give the folder of one of them, or --layout.",
        ),
        Case(
            "layers that are no numbers",
            "import-store target --store new.zarr --target target --layers first --gpus cpu",
            2,
            "--layers is 'first'; write layer numbers like 1,9,17,25,33.",
        ),
        Case(
            "the last layer, as speculators numbers it",
            f"{IMPORT} --layers 2,5",
            1,
            "--layers 2,5 are decoder layers 1,4, as speculators numbers them. Target layer 4 is the last one, whose output engines cannot tap (…); choose from 0 to 3.",
            foreign_states,
        ),
        Case(
            "states of other layers",
            f"{IMPORT} --layers 1,2",
            1,
            "Plane 0 of …/hs_0.safetensors is the output of decoder layer 1 (difference …), not of 0 (…). What is in the file is --layers 2,3, as speculators numbers them.",
            foreign_states,
        ),
        Case(
            "states without the data set",
            f"{IMPORT} --layers 2,3",
            1,
            "states holds no prepared data set of speculators with input_ids and loss_mask (…), but its loss masks are nowhere else. Give the folder that its prepare-data wrote, and --hidden-states where the states lie elsewhere.",
            in_order(foreign_states, remove("states/state.json")),
        ),
        Case(
            "files of which none can be used",
            f"{IMPORT} --layers 2",
            1,
            "None of 1 file of states/hidden_states can be used; the commonest reason (1 time): its states have shape [9, 3, 32], but tokens x 1 layers, or one more, x 32 channels are wanted. Check --layers and --target.",
            foreign_states,
        ),
        Case(
            "a store of another encoding",
            f"{IMPORT} --layers 2,3 --encoding bf16".replace("new.zarr", "store.zarr"),
            1,
            "The store store.zarr was made from something else: encoding: found 'int8', wanted 'bf16'. Give the same target, data settings and encoding, or another --store.",
            foreign_states,
        ),
    ],
    "inspect-store": [
        Case(
            "a store that is not there",
            "inspect-store no.zarr",
            1,
            "no.zarr is not there, but a store is a folder. Give the path that `dflash extract` wrote.",
        ),
        Case(
            "a file",
            "inspect-store rows.jsonl",
            1,
            "rows.jsonl is a file, but a store is a folder. Give the path that `dflash extract` wrote.",
        ),
        Case(
            "a folder of something else",
            "inspect-store run",
            1,
            "run is not a store: it has no zarr.json. Give the path that `dflash extract` wrote.",
        ),
        Case(
            "a link to itself",
            "inspect-store loop",
            1,
            "loop is not there, but a store is a folder. Give the path that `dflash extract` wrote.",
            link_loop("loop"),
        ),
        Case(
            "a zarr.json cut short",
            "inspect-store store.zarr",
            1,
            "store.zarr/zarr.json is no zarr metadata: JSONDecodeError: …. Restore it from a copy, or extract again.",
            edit("store.zarr/zarr.json", half),
        ),
        Case(
            "an empty zarr.json",
            "inspect-store store.zarr",
            1,
            "store.zarr/zarr.json is no zarr metadata: JSONDecodeError: …. Restore it from a copy, or extract again.",
            edit("store.zarr/zarr.json", lambda d: b""),
        ),
        Case(
            "a zarr.json that is not UTF-8",
            "inspect-store store.zarr",
            1,
            "store.zarr/zarr.json is no zarr metadata: UnicodeDecodeError: …. Restore it from a copy, or extract again.",
            edit("store.zarr/zarr.json", lambda d: b"\xff"),
        ),
        Case(
            "a zarr.json that is a list",
            "inspect-store store.zarr",
            1,
            "store.zarr/zarr.json is no zarr metadata: TypeError: found a JSON list, wanted an object. Restore it from a copy, or extract again.",
            edit("store.zarr/zarr.json", lambda d: b"[]"),
        ),
        Case(
            "a zarr.json nested 100,000 deep",
            "inspect-store store.zarr",
            1,
            "store.zarr/zarr.json is no zarr metadata: RecursionError: …. Restore it from a copy, or extract again.",
            edit("store.zarr/zarr.json", lambda d: b"[" * 100000),
        ),
        Case(
            "a store of a newer version",
            "inspect-store store.zarr",
            1,
            "store.zarr: The store has format version 2 but this dflash-train reads up to 1. Install a newer dflash-train.",
            edit_manifest(format_version=2),
        ),
        Case(
            "text where the manifest has a number",
            "inspect-store store.zarr",
            1,
            "store.zarr: The manifest's field 'hidden_size' is 'wide', not int; it is damaged.",
            edit_manifest(hidden_size="wide"),
        ),
        Case(
            "a changed manifest",
            "inspect-store store.zarr",
            1,
            "store.zarr/zarr.json has … bytes but … were written; it is damaged.",
            edit_manifest(hidden_size=-3),
        ),
        Case(
            "a manifest with an unknown encoding",
            "inspect-store store.zarr",
            1,
            "store.zarr/zarr.json has … bytes but … were written; it is damaged.",
            edit_manifest(encoding="fp4"),
        ),
        Case(
            "a zarr group of something else",
            "inspect-store store.zarr",
            1,
            "store.zarr is a zarr group but not a dflash-train store. Give the path that `dflash extract` wrote.",
            edit_manifest(format="something"),
        ),
        Case(
            "a segment's zarr.json cut short",
            "inspect-store store.zarr",
            1,
            "store.zarr/segments/…/zarr.json has … bytes but … were written; it is damaged.",
            in_segment("zarr.json", half),
        ),
        Case(
            "empty checksums",
            "inspect-store store.zarr",
            1,
            "store.zarr/segments/…/checksums.json is damaged: ….",
            in_segment("checksums.json", lambda d: b""),
        ),
        Case(
            "checksums that are a list",
            "inspect-store store.zarr",
            1,
            "store.zarr/segments/…/checksums.json is damaged: list indices must be integers or slices, not str.",
            in_segment("checksums.json", lambda d: b"[]"),
        ),
        Case(
            "no folder of segments",
            "inspect-store store.zarr",
            1,
            "store.zarr/segments could not be listed: No such file or directory.",
            remove("store.zarr/segments"),
        ),
        Case(
            "features cut short",
            "inspect-store store.zarr",
            1,
            "store.zarr/segments/…/features/c/0/0 has … bytes, wanted …; it is damaged.",
            in_segment("features/c/0/0", half),
        ),
        Case(
            "a flipped bit in the features",
            "inspect-store store.zarr",
            1,
            "Sample … in segment … of store.zarr is damaged: crc32c …, wanted …. Remove that segment folder and extract again.",
            in_segment("features/c/0/0", flip),
        ),
        Case(
            "the same under --verify checksums",
            "inspect-store store.zarr --verify checksums",
            1,
            "segment …, file features/c/0/0: store.zarr/segments/…/features/c/0/0 has crc32c …, not …; it is damaged.",
            in_segment("features/c/0/0", flip),
        ),
        Case(
            "no channel scale",
            "inspect-store store.zarr",
            1,
            "store.zarr/calibration/channel_scale/zarr.json could not be read: No such file or directory.",
            remove("store.zarr/calibration"),
        ),
        Case(
            "recompute without a target",
            "inspect-store store.zarr --verify recompute",
            2,
            "--verify recompute runs the target again: give --target.",
        ),
        Case(
            "recompute of no samples",
            "inspect-store store.zarr --verify recompute --target target --gpus cpu --num-samples 0",
            1,
            "--num-samples is 0, but at least 1 is needed to compare.",
        ),
        Case(
            "recompute of -1 samples",
            "inspect-store store.zarr --verify recompute --target target --gpus cpu --num-samples=-1",
            1,
            "--num-samples is -1, but at least 1 is needed to compare.",
        ),
        Case(
            "recompute with a tolerance of NaN",
            "inspect-store store.zarr --verify recompute --target target --gpus cpu --tolerance nan",
            1,
            "--tolerance is nan, but a difference is at least 0 and finite.",
        ),
        Case(
            "recompute with another target",
            "inspect-store store.zarr --verify recompute --target target --gpus cpu",
            1,
            "The store store.zarr was made from something else: target_config_hash: found '…', wanted '…'; hidden_size: found 32, wanted 64. Give the same target, data settings and encoding, or another --store.",
            own_target(edit_json("target/config.json", hidden_size=64)),
        ),
        Case(
            "a sample id that is not hexadecimal",
            "inspect-store store.zarr --sample zz",
            1,
            "'zz' is no sample id. Give 1 to 16 hex digits, as in 00000000001f3a5b.",
        ),
        Case(
            "a sample id that the store lacks",
            "inspect-store store.zarr --sample 0123456789abcdef",
            1,
            "store.zarr has no sample whose id begins with 0123456789abcdef; its first are ….",
        ),
        Case(
            "an empty sample id",
            "inspect-store store.zarr --sample ''",
            1,
            "'' is no sample id. Give 1 to 16 hex digits, as in 00000000001f3a5b.",
        ),
        Case(
            "a damaged sample",
            "inspect-store store.zarr --sample 1573b8863b9b8e39",
            1,
            "Sample … in segment … of store.zarr is damaged: crc32c …, wanted …. Remove that segment folder and extract again.",
            in_segment("features/c/0/0", flip),
        ),
        Case(
            "an output that is a folder",
            "inspect-store store.zarr --output run",
            2,
            "Invalid value for '--output': File 'run' is a directory.",
        ),
        Case(
            "an output under a file",
            "inspect-store store.zarr --output rows.jsonl/report.json",
            2,
            "Invalid value for '--output': 'rows.jsonl/report.json' lies under the file '…rows.jsonl'; name another path.",
        ),
    ],
    "train-drafter": [
        Case(
            "a file as the folder of compiled kernels",
            f"{TRAIN} --compile-cache rows.jsonl",
            1,
            "--compile-cache is rows.jsonl, a file, but must be a folder; name another path.",
        ),
        Case(
            "a target for evaluation without prompts",
            f"{TRAIN} --evaluate-target target",
            1,
            "--evaluate-target needs --evaluate-prompts; give both or neither.",
        ),
        Case(
            "prompts for evaluation without a target",
            f"{TRAIN} --evaluate-prompts rows.jsonl",
            1,
            "--evaluate-prompts needs --evaluate-target; give both or neither.",
        ),
        Case(
            "prompts for evaluation that are trained on",
            MEASURED.replace("asked.jsonl", "rows.jsonl"),
            1,
            "All prompts of rows.jsonl are in the drafter's training data: «question 0», «question 1», «question 2» and 9 more; give prompts that were not trained on.",
        ),
        Case(
            "another target for evaluation than the store's",
            MEASURED,
            1,
            "--evaluate-target target is not the target of store.zarr: target_config_hash: found …, wanted …. Give the target that the store was extracted from.",
            in_order(
                write_rows("asked.jsonl", {"prompt": "new"}),
                own_target(edit_json("target/config.json", intermediate_size=96)),
            ),
        ),
        Case(
            "no new tokens for an evaluation",
            f"{MEASURED} --evaluate-new-tokens 0",
            1,
            "--evaluate-new-tokens is 0, but at least 1 is needed.",
        ),
        Case(
            "a store that is not there",
            TRAIN.replace("store.zarr", "no.zarr"),
            1,
            "no.zarr is not there, but a store is a folder. Give the path that `dflash extract` wrote.",
        ),
        Case(
            "both steps and epochs",
            f"{TRAIN} --epochs 2",
            1,
            "Both --steps 1 and --epochs 2 are given. Give one: the other follows from it.",
        ),
        Case(
            "data removed from a store that does not grow",
            f"{TRAIN} --consume 2",
            1,
            "--consume 2 removes data and is for a growing store only. Give --follow, too.",
        ),
        Case(
            "data removed after no pass",
            f"{TRAIN} --follow --consume 0",
            1,
            "--consume is 0, but at least 1 is needed.",
        ),
        Case(
            "passes given twice",
            f"{TRAIN.replace(' --steps 1', '')} --follow --consume 2 --epochs 3",
            1,
            "Both --consume 2 and --epochs 3 say how often a sample is trained on. Give one.",
        ),
        Case(
            "a run that is to follow a growing store after all",
            f"{RESUME} --follow",
            1,
            "The run run began without --follow, and trains on the segments that the store had then. Go on without --follow, or give another --run folder.",
        ),
        Case(
            "none of the data", f"{TRAIN} --fraction 0", 1, "--fraction is 0.0; it is a share above 0 and of at most 1."
        ),
        Case(
            "a fraction of NaN",
            f"{TRAIN} --fraction nan",
            1,
            "--fraction is nan; it is a share above 0 and of at most 1.",
        ),
        Case(
            "a fraction without a sample",
            f"{TRAIN} --fraction 1e-9",
            1,
            "--fraction 1e-09 leaves none of the 12 samples of store.zarr to train on. Give a larger one.",
        ),
        Case("a learning rate of NaN", f"{TRAIN} --lr nan", 1, "--lr is nan; it must be finite and above 0."),
        Case("an infinite learning rate", f"{TRAIN} --lr inf", 1, "--lr is inf; it must be finite and above 0."),
        Case("a negative learning rate", f"{TRAIN} --lr=-1", 1, "--lr is -1.0; it must be finite and above 0."),
        Case("a gradient norm of NaN", f"{TRAIN} --clip nan", 1, "--clip is nan; it must be finite and above 0."),
        Case("a gamma of NaN", f"{TRAIN} --gamma nan", 1, "--gamma is nan; it must be finite and above 0."),
        Case(
            "a weight decay of NaN",
            f"{TRAIN} --weight-decay nan",
            1,
            "--weight-decay is nan; it must be finite and at least 0.",
        ),
        Case(
            "an infinite weight decay",
            f"{TRAIN} --weight-decay inf",
            1,
            "--weight-decay is inf; it must be finite and at least 0.",
        ),
        Case(
            "everything held out",
            f"{TRAIN} --holdout 1",
            1,
            "--holdout is 1.0; it is a share of at least 0 and below 1.",
        ),
        Case(
            "a holdout of NaN",
            f"{TRAIN} --holdout nan",
            1,
            "--holdout is nan; it is a share of at least 0 and below 1.",
        ),
        Case(
            "a warmup of more than all steps",
            f"{TRAIN} --warmup-ratio 2",
            1,
            "--warmup-ratio is 2.0; it is a share between 0 and 1.",
        ),
        Case(
            "a beta of 1",
            f"{TRAIN} --betas 0.9 1",
            1,
            "--betas are (0.9, 1.0); two numbers of at least 0 and below 1 are needed.",
        ),
        Case(
            "a beta of NaN",
            f"{TRAIN} --betas nan 0.9",
            1,
            "--betas are (nan, 0.9); two numbers of at least 0 and below 1 are needed.",
        ),
        Case("blocks of one token", f"{TRAIN} --block-size 1", 1, "--block-size is 1, but at least 2 is needed."),
        Case("a negative number of steps", f"{TRAIN} --steps=-1", 1, "--steps is -1, but at least 0 is needed."),
        Case(
            "more anchors than tokens",
            f"{TRAIN} --anchors 500",
            1,
            "--anchors 500 is more than --row-tokens 128: a row has at most one anchor a token. Lower --anchors.",
        ),
        Case(
            "rows shorter than a sample",
            f"{TRAIN} --row-tokens 16",
            1,
            "The longest sample has 31 tokens, --row-tokens is 16. Give --row-tokens of at least 31, or --crop to cut such samples at the tail.",
        ),
        Case(
            "a mask token that the table lacks",
            f"{TRAIN} --mask-token 99999",
            1,
            "--mask-token 99999 is no row of the embedding, which has 400 rows. Give an id from 0 to 399 that the tokenizer does not use.",
        ),
        Case(
            "a mask token that the tokenizer lacks",
            f"{TRAIN} --mask-token no-token",
            1,
            "--mask-token 'no-token' is no token of the store's tokenizer. Give the text of one token, or an id below 400.",
        ),
        Case(
            "a negative mask token",
            f"{TRAIN} --mask-token=-3",
            1,
            "--mask-token '-3' is no token of the store's tokenizer. Give the text of one token, or an id below 400.",
        ),
        Case(
            "a mask token that stands in every text",
            f"{TRAIN} --mask-token <|im_end|>",
            1,
            "--mask-token '<|im_end|>' cannot be the mask token: 2 is the target's eos token, which stands in every text: drafts would read it as a mask. Give --mask-token 3.",
        ),
        Case(
            "a mask token of ordinary text",
            f"{TRAIN} --mask-token 100",
            1,
            "--mask-token 100 cannot be the mask token: 100 is '…', a token of ordinary text. Give --mask-token 3.",
        ),
        Case(
            "a seed of more than 63 bits",
            f"{TRAIN} --seed 99999999999999999999999999",
            1,
            "--seed is 99999999999999999999999999, but must be below 2**63.",
        ),
        Case(
            "a run folder that is a file",
            TRAIN.replace("--run new", "--run rows.jsonl"),
            1,
            "rows.jsonl: File exists; it is in the way: name another path, or remove it.",
        ),
        Case(
            "a run folder under a file",
            TRAIN.replace("--run new", "--run rows.jsonl/new"),
            1,
            "rows.jsonl/new/ledger.jsonl cannot be read: Not a directory. Make it a readable file, or remove it.",
        ),
        Case(
            "a run folder that links to itself",
            TRAIN.replace("--run new", "--run loop"),
            1,
            "loop/ledger.jsonl cannot be read: Too many levels of symbolic links. Make it a readable file, or remove it.",
            link_loop("loop"),
        ),
        Case(
            "an empty store",
            TRAIN,
            1,
            "store.zarr holds no sample yet. Run `dflash extract` first.",
            in_order(remove("store.zarr/segments"), make_folder("store.zarr/segments")),
        ),
        Case(
            "a drafter to start from that is not there",
            f"{FROM} --init-from no",
            1,
            "no is no folder; give a drafter's folder or the run folder of `dflash train-drafter`.",
        ),
        Case(
            "a target to start from",
            f"{FROM} --init-from target",
            1,
            "The drafter's config.json has no dflash_config; this is no DFlash checkpoint in z-lab's format. Give the config.json of one.",
        ),
        Case(
            "a drafter to start from with layers chosen beside",
            f"{FROM} --init-from run --num-layers 3",
            2,
            "--num-layers cannot be chosen beside --init-from, whose drafter has them already: leave it out.",
        ),
        Case(
            "a drafter to start from with its geometry given beside",
            f"{FROM} --init-from run --drafter-config {CHECKPOINT}/config.json",
            1,
            "Both --drafter-config run/checkpoints/step-00000001/config.json and --init-from run are given, but the drafter that the weights come from has a config.json of its own. Give one of the two.",
        ),
        Case(
            "a drafter to start from with layers that its config lacks",
            f"{FROM} --init-from run",
            1,
            "--init-from run/checkpoints/step-00000001 does not fit its config.json: layers.0.mlp.down_proj.weight is [32, 64], wanted [32, 128]; layers.0.mlp.gate_proj.weight is [64, 32], wanted [128, 32]; layers.0.mlp.up_proj.weight is [64, 32], wanted [128, 32]. Give a drafter that was exported whole.",
            edit_json(CHECKPOINT / "config.json", intermediate_size=128),
        ),
        Case(
            "going on with a drafter to start from",
            f"{FROM.replace('--run new', '--run run')} --init-from run --steps 2",
            1,
            "run/checkpoints/step-00000001 cannot be resumed with these options: --init-from is run, the checkpoint has None. Give the options the run began with, or another --run folder.",
        ),
        Case(
            "an optimizer that is not known",
            f"{TRAIN} --optimizer sgd",
            2,
            "Invalid value for '--optimizer': 'sgd' is not one of 'adamw', 'muon'.",
        ),
        Case(
            "a drafter config that is not there",
            f"{FROM} --drafter-config no.json",
            1,
            "--drafter-config no.json cannot be read: [Errno 2] No such file or directory: 'no.json'. Give a drafter's config.json in z-lab's format.",
        ),
        Case(
            "a drafter config that is a folder",
            f"{FROM} --drafter-config run",
            1,
            "--drafter-config run cannot be read: [Errno 21] Is a directory: 'run'. Give a drafter's config.json in z-lab's format.",
        ),
        Case(
            "an empty drafter config",
            f"{FROM} --drafter-config d.json",
            1,
            "--drafter-config d.json cannot be read: …. Give a drafter's config.json in z-lab's format.",
            write("d.json", ""),
        ),
        Case(
            "a drafter config that is a list",
            f"{FROM} --drafter-config d.json",
            1,
            "The drafter's config.json has no dflash_config; this is no DFlash checkpoint in z-lab's format. Give the config.json of one.",
            write("d.json", "[]"),
        ),
        Case(
            "a drafter config without dflash_config",
            f"{FROM} --drafter-config d.json",
            1,
            "The drafter's config.json has no dflash_config; this is no DFlash checkpoint in z-lab's format. Give the config.json of one.",
            write("d.json", "{}"),
        ),
        Case(
            "a drafter config nested 100,000 deep",
            f"{FROM} --drafter-config d.json",
            1,
            "--drafter-config d.json cannot be read: …. Give a drafter's config.json in z-lab's format.",
            write("d.json", "[" * 100000),
        ),
        Case(
            "the target's config as drafter config",
            f"{FROM} --drafter-config target/config.json",
            1,
            "The drafter's config.json has no dflash_config; this is no DFlash checkpoint in z-lab's format. Give the config.json of one.",
        ),
        Case(
            "text where the drafter config has a number",
            f"{FROM} --drafter-config {CHECKPOINT}/config.json",
            1,
            "hidden_size of the drafter's config.json is 'wide'; it must be a number (int).",
            edit_json(CHECKPOINT / "config.json", hidden_size="wide"),
        ),
        Case(
            "NaN in the drafter config",
            f"{FROM} --drafter-config {CHECKPOINT}/config.json",
            1,
            "rms_norm_eps of the drafter's config.json is nan; it must be a number (float).",
            edit_json(CHECKPOINT / "config.json", rms_norm_eps=float("nan")),
        ),
        Case(
            "a drafter config of another target",
            f"{FROM} --drafter-config {CHECKPOINT}/config.json",
            1,
            "run/checkpoints/step-00000001/config.json does not fit store.zarr: num_target_layers of the store is 5 but the drafter config has 7. Extract again with this target and these layers, or give another drafter.",
            edit_json(CHECKPOINT / "config.json", num_target_layers=7),
        ),
        Case(
            "a resume with another learning rate",
            f"{RESUME} --lr 1",
            1,
            "run/checkpoints/step-00000001 cannot be resumed with these options: --lr is 1.0, the checkpoint has 0.0006. Give the options the run began with, or another --run folder.",
        ),
        Case(
            "a resume with other layers",
            f"{RESUME} --num-layers 2",
            1,
            "run/checkpoints/step-00000001 cannot be resumed with these options: --num-layers is 2, the checkpoint has 1. Give the options the run began with, or another --run folder.",
        ),
        Case(
            "a checkpoint's state cut short",
            RESUME,
            1,
            "run/checkpoints/step-00000001 cannot be resumed from: run/checkpoints/step-00000001/trainer/state.json has … bytes but … were written; it is damaged. Delete this folder to go on from the one before it.",
            edit(CHECKPOINT / "trainer" / "state.json", half),
        ),
        Case(
            "a checkpoint's checksums cut short",
            RESUME,
            1,
            "run/checkpoints/step-00000001 cannot be resumed from: run/checkpoints/step-00000001/checksums.json is damaged: …. Delete this folder to go on from the one before it.",
            edit(CHECKPOINT / "checksums.json", half),
        ),
        Case(
            "a ledger with segments that the store lacks",
            RESUME,
            1,
            "store.zarr has no segment 20200101-000000-aaaa: it was removed, or the run began with another store.",
            edit("run/ledger.jsonl", lambda data: b'{"segments": ["20200101-000000-aaaa"]}\n'),
        ),
        Case(
            "a ledger that is a list",
            RESUME,
            1,
            "run/ledger.jsonl, line 1, is damaged: found '[]', wanted a line that the trainer wrote. Restore the file, or move it away to go on without it.",
            edit("run/ledger.jsonl", lambda data: b"[]\n"),
        ),
        Case(
            "a ledger that leads out of the store",
            RESUME,
            1,
            "store.zarr has no segment ../../rows.jsonl: it was removed, or the run began with another store.",
            edit("run/ledger.jsonl", lambda data: b'{"segments": ["../../rows.jsonl"]}\n'),
        ),
        Case(
            "a binary ledger",
            RESUME,
            1,
            "run/ledger.jsonl lists no segments, but the run trains on those it lists. Delete the file to take the list of the newest checkpoint.",
            edit("run/ledger.jsonl", lambda data: b"\xff\xfe"),
        ),
        Case(
            "a store without the target's config",
            TRAIN,
            1,
            "store.zarr/frozen/target/config.json could not be read: No such file or directory.",
            remove("store.zarr/frozen/target/config.json"),
        ),
        Case(
            "a store whose tokenizer is cut short",
            TRAIN,
            1,
            "store.zarr/frozen/target/tokenizer.json has … bytes but … were written; it is damaged. Give --mask-token with the id of an unused row of the embedding.",
            edit("store.zarr/frozen/target/tokenizer.json", half),
        ),
        Case(
            "a store without channel scale",
            TRAIN,
            1,
            "store.zarr/calibration/channel_scale/zarr.json could not be read: No such file or directory.",
            remove("store.zarr/calibration"),
        ),
    ],
    "evaluate": [
        Case(
            "a drafter that is not there",
            EVALUATE.replace("--drafter run", "--drafter no"),
            1,
            "no is no folder; give a drafter's folder or the run folder of `dflash train-drafter`.",
        ),
        Case(
            "a file for the drafter",
            EVALUATE.replace("--drafter run", "--drafter rows.jsonl"),
            1,
            "rows.jsonl is no folder; give a drafter's folder or the run folder of `dflash train-drafter`.",
        ),
        Case(
            "the target for the drafter",
            EVALUATE.replace("--drafter run", "--drafter target"),
            1,
            "The drafter's config.json has no dflash_config; this is no DFlash checkpoint in z-lab's format. Give the config.json of one.",
        ),
        Case(
            "the store for the drafter",
            EVALUATE.replace("--drafter run", "--drafter store.zarr"),
            1,
            "store.zarr lacks config.json and model.safetensors; give a drafter's folder in z-lab's format or a run folder.",
        ),
        Case(
            "a run without a checkpoint",
            EVALUATE,
            1,
            "The run run has no checkpoint yet; train it until its first checkpoint is saved.",
            in_order(remove("run/checkpoints"), make_folder("run/checkpoints")),
        ),
        Case(
            "weights cut short",
            EVALUATE,
            1,
            "run/checkpoints/step-00000001 cannot be read as a drafter (run/checkpoints/step-00000001/model.safetensors has … bytes but … were written; it is damaged.); copy or export it again.",
            edit(CHECKPOINT / "model.safetensors", half),
        ),
        Case(
            "no weights",
            EVALUATE,
            1,
            "run/checkpoints/step-00000001 lacks model.safetensors; give a drafter's folder in z-lab's format or a run folder.",
            remove(CHECKPOINT / "model.safetensors"),
        ),
        Case(
            "a flipped byte in the weights",
            EVALUATE,
            1,
            "run/checkpoints/step-00000001 cannot be read as a drafter (run/checkpoints/step-00000001/model.safetensors has crc32c …, not …; it is damaged.); copy or export it again.",
            edit(CHECKPOINT / "model.safetensors", lambda d: d[:-1] + b"\x7f"),
        ),
        Case(
            "weights that are no safetensors, without checksums",
            EVALUATE,
            1,
            "run/checkpoints/step-00000001 cannot be read as a drafter (Error while deserializing header: header too large); copy or export it again.",
            in_order(remove(CHECKPOINT / "checksums.json"), write(CHECKPOINT / "model.safetensors", b"\xff" * 50)),
        ),
        Case(
            "a config.json that is a list",
            EVALUATE,
            1,
            "run/checkpoints/step-00000001/config.json holds no JSON object; give a drafter's folder in z-lab's format.",
            write(CHECKPOINT / "config.json", "[]"),
        ),
        Case(
            "a config.json that is not UTF-8",
            EVALUATE,
            1,
            "run/checkpoints/step-00000001/config.json is no JSON (…); give a drafter's folder in z-lab's format.",
            write(CHECKPOINT / "config.json", b"\xff"),
        ),
        Case(
            "a config.json nested 100,000 deep",
            EVALUATE,
            1,
            "run/checkpoints/step-00000001/config.json is no JSON (…); give a drafter's folder in z-lab's format.",
            write(CHECKPOINT / "config.json", "[" * 100000),
        ),
        Case(
            "a drafter of another vocabulary",
            EVALUATE,
            1,
            "The drafter does not fit the target: it has vocab_size 7, the target has 400. Give the target that the drafter was trained for.",
            edit_json(CHECKPOINT / "config.json", vocab_size=7),
        ),
        Case("blocks of one token", f"{EVALUATE} --block-size 1", 1, "--block-size is 1, but at least 2 is needed."),
        Case(
            "blocks of 2,000 tokens",
            f"{EVALUATE} --block-size 2000",
            1,
            "--block-size is 2000, but at most 1024 makes sense.",
        ),
        Case(
            "a replay at a temperature",
            f"{EVALUATE} --replay --temperature 0.7",
            1,
            "--replay follows the target's greedy answers, which --temperature 0.7 does not give; leave one of them out.",
        ),
        Case(
            "a replay with z-lab's package",
            f"{EVALUATE} --replay --reference",
            1,
            "--replay decodes nothing that --reference could compare; leave one of them out.",
        ),
        Case(
            "batches of no answer",
            f"{EVALUATE} --replay --batch-size 0",
            1,
            "--batch-size is 0, but at least 1 is needed.",
        ),
        Case("-1 prompts", f"{EVALUATE} --max-prompts=-1", 1, "--max-prompts is -1, but at least 1 is needed."),
        Case("no new tokens", f"{EVALUATE} --max-new-tokens 0", 1, "--max-new-tokens is 0, but at least 1 is needed."),
        Case(
            "more new tokens than the target has positions",
            f"{EVALUATE} --max-new-tokens 100000",
            1,
            "None of the 1 prompts of rows.jsonl leaves room for the new tokens within the target's positions: the longest prompt has … tokens, … would do; give shorter prompts or lower --max-new-tokens.",
        ),
        Case(
            "data that is not there",
            EVALUATE.replace("rows.jsonl", "no.jsonl"),
            1,
            "no.jsonl does not exist. Give a .json, .jsonl, .parquet or .arrow file, a folder of them, a save_to_disk folder, or a hub name.",
        ),
        Case(
            "an empty data file",
            EVALUATE,
            1,
            "rows.jsonl holds no rows. Give a data set with at least one conversation.",
            write("rows.jsonl", ""),
        ),
        Case(
            "data without a user turn",
            EVALUATE,
            1,
            "No row of rows.jsonl has a user turn to answer. Give other data.",
            write_rows("rows.jsonl", {"messages": [1]}),
        ),
        Case(
            "data that was trained on",
            EVALUATE.removesuffix(" --allow-trained-prompts"),
            1,
            "All prompts of rows.jsonl are in the drafter's training data: «question 0», «question 1», «question 2» and 9 more; give prompts that were not trained on, or --allow-trained-prompts to measure on these.",
        ),
        Case(
            "a damaged list of what was trained on",
            EVALUATE,
            1,
            "run/checkpoints/step-00000001/trainer/groups.npy cannot be read: run/checkpoints/step-00000001/trainer/groups.npy has … bytes but … were written; it is damaged. Restore it, or remove it to go without the check that no prompt was trained on.",
            edit(CHECKPOINT / "trainer/groups.npy", half),
        ),
        Case(
            "a benchmark without network",
            EVALUATE.replace("rows.jsonl", "gsm8k"),
            1,
            "gsm8k is openai/gsm8k on the Hugging Face hub, which could not be loaded: …. Run once with network, or give a copy of it: --data gsm8k=FILE.",
        ),
        Case(
            "a copy of a benchmark that is none",
            EVALUATE.replace("rows.jsonl", "gsm8k=rows.jsonl"),
            1,
            "The columns of rows.jsonl are messages; gsm8k has a column 'question'. Give a copy of openai/gsm8k.",
        ),
        Case(
            "a temperature below 0", f"{EVALUATE} --temperature -1", 1, "--temperature is -1.0, but must be 0 or more."
        ),
        Case("top-p of 0", f"{EVALUATE} --top-p 0", 1, "--top-p is 0.0, but must be more than 0 and at most 1."),
        Case("top-k below 0", f"{EVALUATE} --top-k=-1", 1, "--top-k is -1, but must be 0 or more."),
        Case("no turns", f"{EVALUATE} --max-turns 0", 1, "--max-turns is 0, but at least 1 is needed."),
        Case(
            "a reference at a temperature",
            f"{EVALUATE} --reference --temperature 0.7",
            1,
            "--reference compares token by token, which --temperature 0.7 leaves to chance; give one of them.",
        ),
        Case(
            "a picture that is a folder",
            f"{EVALUATE} --plot run",
            2,
            "Invalid value for '--plot': File 'run' is a directory.",
        ),
        Case(
            "a picture that is no PNG",
            f"{EVALUATE} --plot e.jpg",
            2,
            "Invalid value for '--plot': 'e.jpg' must end in .png; name another file.",
        ),
        Case(
            "another target than the drafter's",
            EVALUATE,
            1,
            "The drafter does not fit the target: it has vocab_size 400, the target has 64. Give the target that the drafter was trained for.",
            own_target(edit_json("target/config.json", vocab_size=64)),
        ),
        Case(
            "a target whose weights are cut short",
            EVALUATE,
            1,
            "Could not load the weights of the target 'target': …. Give a whole model folder, or a name on the hub that this machine can reach.",
            own_target(edit("target/model.safetensors", half)),
        ),
        Case(
            "a target without weights",
            EVALUATE,
            1,
            "Could not load the weights of the target 'target': … (weights are read from safetensors alone: a pickle could run code). Give a whole model folder, or a name on the hub that this machine can reach.",
            own_target(remove("target/model.safetensors")),
        ),
        Case(
            "a target whose weights are a pickle",
            EVALUATE,
            1,
            "Could not load the weights of the target 'target': … (weights are read from safetensors alone: a pickle could run code). Give a whole model folder, or a name on the hub that this machine can reach.",
            own_target(in_order(remove("target/model.safetensors"), write("target/pytorch_model.bin", b"\x80\x04N."))),
        ),
        Case(
            "an output that is a folder",
            f"{EVALUATE} --output run",
            2,
            "Invalid value for '--output': File 'run' is a directory.",
        ),
        Case(
            "an output under a file",
            f"{EVALUATE} --output rows.jsonl/e.json",
            2,
            "Invalid value for '--output': 'rows.jsonl/e.json' lies under the file '…rows.jsonl'; name another path.",
        ),
    ],
    "check, export": [
        Case(
            "a drafter that is not there",
            CHECK.replace("check run", "check no"),
            1,
            "no is no folder; give a drafter's folder or the run folder of `dflash train-drafter`.",
        ),
        Case(
            "a target that is not there",
            CHECK.replace("--target target", "--target ./no"),
            1,
            "The target './no' is not there; give a model's folder, or a name on the hub. The nearest folder is 'target'.",
        ),
        Case(
            "a misspelt target among models",
            CHECK.replace("--target target", "--target models/targt"),
            1,
            "The target 'models/targt' is no folder here and could not be read from the hub (…). The nearest folder is 'models/target'. Check the name, the network, and your access (`hf auth whoami`).",
            in_order(make_folder("models"), link("models/target", "../target")),
        ),
        Case(
            "an engine that does not exist",
            f"{CHECK} --engine trt",
            2,
            "Invalid value for '--engine': 'trt' is not one of 'sglang', 'vllm', 'z-lab'.",
        ),
        Case(
            "weights that are no safetensors",
            CHECK,
            1,
            "run/checkpoints/step-00000001/model.safetensors cannot be read (…); copy or export it again.",
            write(CHECKPOINT / "model.safetensors", b"\xff" * 50),
        ),
        Case(
            "a config.json that is a list",
            CHECK,
            1,
            "run/checkpoints/step-00000001/config.json holds no JSON object; give a drafter's folder.",
            write(CHECKPOINT / "config.json", "[]"),
        ),
        Case(
            "a config.json that was edited",
            CHECK,
            1,
            "training record: config.json is not what the trainer wrote: block_size is 8, trained with 4.",
            edit_json(CHECKPOINT / "config.json", block_size=8),
        ),
        Case(
            "a config.json of junk",
            CHECK,
            1,
            "error geometry: …",
            write(CHECKPOINT / "config.json", '{"dflash_config": 3, "layer_types": {}, "rope_parameters": [1]}'),
        ),
        Case(
            "an export over a folder that is there",
            EXPORT.replace("out", "run"),
            1,
            "run exists already; name a folder that does not.",
        ),
        Case("an export under a file", EXPORT.replace("out", "rows.jsonl/out"), 1, "rows.jsonl…"),
        Case(
            "the speculators format without the target's head",
            EXPORT.replace("--store store.zarr", ""),
            1,
            "The speculators format carries the target's embedding and head; give --store or --target.",
        ),
        Case("both sources of the head", f"{EXPORT} --target target", 2, "both name embedding and head: give one."),
        Case(
            "a store that is not there",
            EXPORT.replace("store.zarr", "no.zarr"),
            1,
            "no.zarr is not there, but a store is a folder. Give the path that `dflash extract` wrote.",
        ),
        Case(
            "another store than the drafter's",
            EXPORT,
            1,
            "The drafter was not trained on store.zarr: it has target_layer_ids [0, 1], the store has [1, 2]. Give the store it was trained on.",
            in_order(
                remove(CHECKPOINT / "checksums.json"),
                edit_json(
                    CHECKPOINT / "config.json",
                    dflash_config={"mask_token_id": 3, "block_size": 4, "target_layer_ids": [0, 1]},
                ),
            ),
        ),
    ],
    "status, stop, logs": [
        Case(
            "a folder that is not there",
            "status no",
            1,
            "…no is not there. Give the --store of an extract or the --run of a train-drafter.",
        ),
        Case(
            "a folder without a run",
            "status target",
            1,
            "…target is there, but no run is recorded for it. Give the --store of an extract or the --run of a train-drafter.",
        ),
        Case(
            "a file",
            "stop rows.jsonl",
            1,
            "…rows.jsonl is there, but no run is recorded for it. Give the --store of an extract or the --run of a train-drafter.",
        ),
        Case(
            "a state cut short",
            "status run",
            1,
            "…run/state.json is no state of a run (…). Remove it; the next run writes it anew.",
            edit("run/state.json", half),
        ),
        Case(
            "a state that is a list",
            "logs run",
            1,
            "…run/state.json is no state of a run (found a JSON list). Remove it; the next run writes it anew.",
            write("run/state.json", "[]"),
        ),
        Case(
            "a state that is not UTF-8",
            "stop run",
            1,
            "…run/state.json is no state of a run (…). Remove it; the next run writes it anew.",
            write("run/state.json", b"\xff"),
        ),
        Case(
            "a state of a wrong type",
            "status run",
            1,
            "…run/state.json is no state of a run (started_at is 'yesterday'). Remove it; the next run writes it anew.",
            edit_json("run/state.json", started_at="yesterday"),
        ),
        Case("-1 lines", "logs run --lines=-1", 2, "Invalid value for '-n' / '--lines': -1 is not in the range x>=0."),
        Case(
            "a wait of -1 seconds",
            "stop run --timeout=-1",
            2,
            "Invalid value for '--timeout': -1.0 is not in the range x>=0.",
        ),
    ],
    "preflight, report": [
        Case("preflight for a GPU that does not exist", "preflight --gpus 999", 1, "--gpus names … but …"),
        Case(
            "preflight for a target that is not there",
            "preflight --gpus cpu --target ./no",
            1,
            "error target: './no' is no folder here and could not be read from the hub (Repo id must use alphanumeric chars, '-', '_' or '.'. The name cannot start or end with '-' or '.' and the maximum length is 96: './no').",
        ),
        Case(
            "a report of a folder that is not there",
            "report no",
            1,
            "no is no folder, so it is not a run. Give the --run folder of `dflash train-drafter`.",
        ),
        Case(
            "a report of a store",
            "report store.zarr",
            1,
            "store.zarr has neither metrics.jsonl nor checkpoints, so it is not a run. Give the --run folder of `dflash train-drafter`.",
        ),
        Case(
            "plots into a file",
            "inspect-store store.zarr --plot rows.jsonl",
            2,
            "Invalid value for '--plot': Directory 'rows.jsonl' is a file.",
        ),
    ],
    "Stores at a URL": [
        Case(
            "a user and a password in the URL, which are not repeated",
            EXTRACT.replace("new.zarr", "s3://AKIA1:hunter2@bucket/new.zarr"),
            2,
            "Invalid value for '--store': The URL of the store, s3://…, has a user or password before «@», which would end "
            "up in recipes and logs. Leave them out and give them as AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, in the environment.",
        ),
        Case(
            "the same in a recipe",
            "train-drafter --recipe r.toml --run new",
            2,
            "Invalid value for '--store': The URL of the store, s3://…, has a user or password before «@»",
            write("r.toml", "[train-drafter]\nstore = 's3://AKIA1:hunter2@bucket/new.zarr'\n"),
        ),
        Case(
            "a signed URL",
            "inspect-store https://host/new.zarr?X-Amz-Signature=hunter2",
            2,
            "Invalid value for 'STORE': The URL of the store, https://host/new.zarr, has a query or fragment, which may be a "
            "secret and would end up in recipes and logs. Leave it out; options and credentials go into fsspec's "
            "configuration (variables FSSPEC_HTTPS_…, or ~/.config/fsspec).",
        ),
        Case(
            "a bucket without a name in it",
            TRAIN.replace("store.zarr", "s3://bucket"),
            2,
            "Invalid value for '--store': 's3://bucket' is no URL of a store. Give protocol, bucket and a name within, such "
            "as s3://bucket/qwen3-8b.zarr.",
        ),
        Case(
            "a cache in front of the URL",
            "inspect-store simplecache::s3://bucket/new.zarr",
            2,
            "Invalid value for 'STORE': The URL of the store, simplecache::s3://bucket/new.zarr, is a chain. Give its last "
            "part alone: dflash keeps a cache of its own.",
        ),
        Case(
            "a protocol that nobody knows",
            "inspect-store magnet://bucket/new.zarr",
            1,
            "magnet://bucket/new.zarr cannot be opened: Protocol not known: magnet. Known are …s3.",
        ),
        Case(
            "nothing at the URL",
            TRAIN.replace("store.zarr", "memory://nowhere/new.zarr"),
            1,
            "memory://nowhere/new.zarr is not there, or has no zarr.json. Give the URL that `dflash extract` wrote to.",
        ),
        Case(
            "nothing at the URL to verify",
            "inspect-store memory://nowhere/new.zarr --verify checksums",
            1,
            "memory://nowhere/new.zarr is not there. Give the URL that `dflash extract` wrote to.",
        ),
        Case(
            "no run of the store at the URL",
            "status s3://bucket/new.zarr",
            1,
            "new.zarr is not there. Give the --store of an extract or the --run of a train-drafter.",
        ),
        Case(
            "a URL where only a folder will do",
            EXPORT.replace("store.zarr", "s3://bucket/new.zarr"),
            2,
            "Invalid value for '--store': s3://bucket/new.zarr is a URL, but this command takes a store in a folder. Give "
            "its path.",
        ),
        Case(
            "a URL to import to",
            "import-store states --target target --store s3://bucket/new.zarr",
            2,
            "Invalid value for '--store': s3://bucket/new.zarr is a URL, but this command takes a store in a folder. Give "
            "its path.",
        ),
        Case(
            "a cache of less than nothing",
            f"{TRAIN} --cache-bytes -1",
            1,
            "--cache-bytes is -1, but at least 0 is needed.",
        ),
        Case(
            "a cache of less than nothing to look",
            "inspect-store store.zarr --cache-bytes -1",
            1,
            "--cache-bytes is -1, but at least 0 is needed.",
        ),
        Case(
            "a file as the cache's folder",
            f"{TRAIN} --cache-folder rows.jsonl",
            1,
            "--cache-folder is rows.jsonl, a file, but must be a folder; name another path.",
        ),
        Case(
            "a file as the cache's folder of an extract",
            f"{EXTRACT} --cache-folder rows.jsonl",
            1,
            "--cache-folder is rows.jsonl, a file, but must be a folder; name another path.",
        ),
        Case(
            "a file as the cache's folder to look",
            "inspect-store store.zarr --cache-folder rows.jsonl",
            1,
            "--cache-folder is rows.jsonl, a file, but must be a folder; name another path.",
        ),
    ],
}


def call(words: str) -> Result:
    return CliRunner().invoke(main, shlex.split(words))


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path with its size and time; a lock file that was there keeps only its place."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status, is_lock = path.lstat(), path.name == "lock" or path.suffix == ".lock"
        found[str(path)] = (0, 0) if is_lock or not path.is_file() else (status.st_size, status.st_mtime_ns)
    return found


def as_pattern(message: str) -> str:
    return ".*".join(map(re.escape, message.split("…")))


@pytest.fixture(scope="session")
def trained(tiny_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, its store, a run of one step, and the conversations; its name must not matter."""
    folder = tmp_path_factory.mktemp("trained") / "mit Leerzeichen, ä und 日本"
    folder.mkdir()
    (folder / "target").symlink_to(tiny_target("llama"))
    write_rows("rows.jsonl", *ROWS)(folder)
    with contextlib.chdir(folder):
        for words in (f"{AGAIN} --sample-cache cache", RESUME):
            result = call(words)
            assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `trained` to do something wrong in; it is the working folder."""
    from huggingface_hub import constants

    folder = tmp_path / "ein Ort"
    shutil.copytree(trained, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # `use_device` sets it: monkeypatch puts it back
    return folder


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"{heading}: {case.situation}") for heading, cases in CASES.items() for case in cases],
)
def test_what_is_wrong_is_said_in_one_line_and_nothing_is_left(case: Case, folder: Path) -> None:
    case.prepare(folder)
    before = snapshot(folder)
    result = call(case.words)
    said = " ".join(result.output.split())
    assert result.exit_code == case.status, result.output
    assert re.search(as_pattern(case.message), said), f"{said}\n\nwanted {case.message}"
    assert "Traceback" not in said and "hunter2" not in said
    assert "internal error" not in said
    assert snapshot(folder) == before


def test_a_bug_is_one_line_and_its_traceback_shows_under_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("dflash_train.store.report.store_report", fail)
    result = call("inspect-store s.zarr")
    assert result.exit_code == 1
    assert result.output == (
        "Error: internal error: RuntimeError: first line second line; run again with `dflash --debug inspect-store …` "
        "for the traceback, and please report it.\n"
    )
    debugged = call("--debug inspect-store s.zarr")
    assert debugged.exit_code == 1
    assert "Traceback (most recent call last)" in debugged.output
    assert 'raise RuntimeError("first line' in debugged.output


def test_debug_shows_the_traceback_of_bad_input_too() -> None:
    result = call("--debug inspect-store no.zarr")
    assert (result.exit_code, "Traceback" in result.output) == (1, True)
    assert result.output.endswith("Give the path that `dflash extract` wrote.\n")


def calls_of(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_untrusted_input_is_only_ever_data() -> None:
    """No pickle (but multiprocessing's, between a run and its own processes), no evaluation, no shell, no remote code."""
    trusted = {"torch.compile", "re.compile", "model.eval", "drafter.eval"}
    forbidden = re.compile(
        r"(eval|exec|compile|__import__|os\.(system|popen|spawn\w*)|(\w+\.)?(loads?_pickle|unpickle)|(c?pickle|dill|marshal|"
        r"shelve|joblib|cloudpickle|yaml)\.\w+|torch\.(load|save|package\.\w+)|subprocess\.get\w*output)"
    )
    files = [path for path in ROOT.glob("**/*.py") if path.relative_to(ROOT).parts[0] in (
        "cli.py", "errors.py", "machine",
        "commands", "speculate", "stage1_target", "stage2_drafter", "store",
    )]  # fmt: skip
    assert len(files) > 50
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                bad = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "cloudpickle", "yaml"} & set(names)
                assert not bad, f"{path}:{node.lineno} imports {bad}"
        for name, call_node in calls_of(tree):
            place = f"{path}:{call_node.lineno}: {ast.unparse(call_node)[:100]}"
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call_node.keywords}
            if name == "torch.load" and path.name == "foreign.py":  # what others wrote: tensors and nothing else
                assert keywords.get("weights_only") == "True", place
                continue
            assert name in trusted or not forbidden.fullmatch(name), place
            assert keywords.get("shell", "False") == "False", place
            assert keywords.get("allow_pickle", "False") == "False", place
            assert keywords.get("trust_remote_code", "False") in ("False", "trust_remote_code"), place


def test_remote_code_is_off_unless_asked_for() -> None:
    from dflash_train.stage1_target.target_config import TargetConfig

    assert TargetConfig(name="t").source()[1]["trust_remote_code"] is False
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        assert not command.make_context(name, [], resilient_parsing=True).params.get("trust_remote_code")


def table() -> str:
    """The cases as Markdown; `extract …` stands for the options that are right."""
    lines = []
    for heading, cases in CASES.items():
        lines += [
            f"\n## {heading[:1].upper() + heading[1:]}\n",
            "| what is wrong | what is said | exit status |",
            "| --- | --- | --- |",
        ]
        lines += [
            f"| {case.situation} | {case.message.replace('|', chr(92) + '|')} | {case.status} |" for case in cases
        ]
    return "\n".join(lines) + "\n"


def test_the_document_lists_every_case() -> None:
    written = DOCUMENT.read_text(encoding="utf-8").split(MARKER)[1]
    assert written == table(), "run: python tests/commands/test_wrong_input.py"


if __name__ == "__main__":
    DOCUMENT.write_text(DOCUMENT.read_text(encoding="utf-8").split(MARKER)[0] + MARKER + table(), encoding="utf-8")
