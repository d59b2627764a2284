"""Fixtures shared by all tests: tiny targets, a tiny tokenizer and small conversations, made on the spot."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Without a GPU, Triton's kernels are tested under its interpreter, which must be chosen before triton is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts what it runs in the background with Ctrl-C ignored, and processes inherit that: tests of Ctrl-C would wait.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENIZER_TEXT = [
    "<system> You are a helpful assistant who answers in one short sentence.",
    "<user> What is the capital of France? Which river flows through it?",
    "<assistant> The capital of France is Paris, and the Seine flows through it.",
    "Count from one to ten: one two three four five six seven eight nine ten.",
    "def add(a, b):\n    return a + b\n",
]


def make_tiny_tokenizer(chat_template: str | None = CHATML, vocab_size: int = 400) -> Any:
    """A byte-level BPE tokenizer with the ChatML tokens; <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2 (eos), <|mask|> 3."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TOKENIZER_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(autouse=True, scope="session")
def not_started_apart() -> Iterator[None]:
    """Commands that tests run in this process are no detached runs, even where it is a container's first one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_train.machine.runs._leads_session", lambda: False)
        yield


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """The tokenizer of make_tiny_tokenizer: do not change it."""
    return make_tiny_tokenizer()


@pytest.fixture(scope="session")
def tiny_tokenizer_folder(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizer saved: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.save_pretrained(folder)
    return folder


TINY_TARGETS = (
    "llama",
    "qwen3",
    "gpt2",
    "mixture_of_experts",
    "linear_attention",
    "gemma2",
    "cohere",
    "granite",
)


def make_tiny_target_config(kind: str, vocab_size: int) -> Any:
    """A transformers config of 5 decoder layers and 32 channels; `kind` is one of TINY_TARGETS."""
    import transformers

    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if kind == "llama":
        return transformers.LlamaConfig(**shape, tie_word_embeddings=True)
    if kind == "qwen3":
        return transformers.Qwen3Config(**shape, head_dim=8, tie_word_embeddings=False)
    if kind == "gpt2":
        return transformers.GPT2Config(
            vocab_size=vocab_size, n_embd=32, n_layer=5, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
        )
    if kind == "mixture_of_experts":
        return transformers.Qwen3MoeConfig(**shape, head_dim=8, **experts)
    if kind == "linear_attention":
        return transformers.Qwen3NextConfig(
            **shape,
            **experts,
            head_dim=8,
            shared_expert_intermediate_size=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"] * 2 + ["linear_attention"],
        )
    if kind == "gemma2":
        return transformers.Gemma2Config(**shape, head_dim=8, final_logit_softcapping=5.0, query_pre_attn_scalar=8)
    if kind == "cohere":
        return transformers.CohereConfig(**shape, logit_scale=0.25)
    if kind == "granite":
        return transformers.GraniteConfig(**shape, logits_scaling=8.0, embedding_multiplier=12.0)
    raise AssertionError(kind)


def make_tiny_target(kind: str, vocab_size: int, seed: int = 0) -> Any:
    """A causal language model with seeded random weights, large enough that layers and attention matter."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(make_tiny_target_config(kind, vocab_size)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    return model


@pytest.fixture(scope="session")
def tiny_target(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_target(kind, seed=0)` is the folder of a saved tiny target with the tiny tokenizer."""
    folders: dict[tuple[str, int], Path] = {}

    def folder_of(kind: str, seed: int = 0) -> Path:
        if (kind, seed) not in folders:
            from transformers.utils import logging

            logging.disable_progress_bar()
            logging.set_verbosity_error()
            folder = tmp_path_factory.mktemp(f"{kind}-{seed}")
            make_tiny_target(kind, len(tiny_tokenizer), seed).save_pretrained(folder)
            tiny_tokenizer.save_pretrained(folder)
            folders[kind, seed] = folder
        return folders[kind, seed]

    return folder_of


S3_SECRET = "SECRETKEYTHATMUSTNOTBEWRITTEN"


class S3:
    """A bucket of its own on the loopback server, and the server's faults (s3_server.py)."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        import fsspec

        self.endpoint, self.bucket, self.secret = endpoint, bucket, S3_SECRET
        self.system = fsspec.filesystem("s3", use_listings_cache=False)
        self.system.mkdir(bucket)

    def url(self, name: str) -> str:
        return f"s3://{self.bucket}/{name}"

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """Every object below a prefix, by its name in the bucket."""
        found = self.system.find(f"{self.bucket}/{prefix}".rstrip("/"))
        return {name.partition("/")[2]: self.system.cat_file(name) for name in found}

    def upload(self, folder: Path, name: str) -> None:
        """Copy a folder's files as any tool would."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.system.pipe_file(f"{self.bucket}/{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())

    def put(self, name: str, data: bytes) -> None:
        self.system.pipe_file(f"{self.bucket}/{name}", data)

    def remove(self, name: str) -> None:
        self.system.rm_file(f"{self.bucket}/{name}")

    def fault(self, match: str = "\0", count: int = 1_000_000, **what: Any) -> None:
        """Fail the next requests that match; without arguments none any more."""
        self._ask("/-fault", json.dumps({"match": match, "count": count, **what}).encode())

    def requests(self) -> list[str]:
        """The requests since the last call: METHOD /bucket/name, and the range where there is one."""
        log: list[str] = json.loads(self._ask("/-log"))
        return log

    def _ask(self, path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.endpoint + path, data, method="PUT" if data else "GET")
        with urllib.request.urlopen(request) as answer:
            body: bytes = answer.read()
        return body


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The loopback server's URL; the environment has credentials for it. Skipped without the extra `test`."""
    for package in ("s3fs", "moto", "flask", "flask_cors"):
        pytest.importorskip(package)
    script = Path(__file__).with_name("s3_server.py")
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
    environment = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "AKIAXXXXXXXXXXXXXXXX",
        "AWS_SECRET_ACCESS_KEY": S3_SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            yield endpoint
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def s3(s3_endpoint: str, request: pytest.FixtureRequest) -> Iterator[S3]:
    """An empty bucket; no fault is left set."""
    bucket = S3(s3_endpoint, f"bucket-{abs(hash(request.node.nodeid)):x}")
    bucket.requests()
    yield bucket
    bucket.fault()
