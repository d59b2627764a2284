"""A drafter trained by SpecForge 0.2.0's step from a store of ours, to be measured beside one that `dflash train-drafter` made.

    python benchmarks/peer_training.py --store s.zarr --target T --run peer --steps 2500 --rows-per-step 1 \\
        --row-tokens 4096 --anchors 512 --lr 6e-4 --holdout 0.03 --seed 0
    dflash evaluate --target T --drafter peer --data held_out.jsonl

Options that both commands have mean the same and have the same defaults. Shared: samples, rows and their order, steps,
learning rates, clipping, AdamW and its fp32 masters (this is the trainer's own loop), the step's loss as Σ w·CE / Σ w,
and the numbers that the first weights have. SpecForge's: its drafter in bf16 as it keeps it (on the CPU fp32), its
anchors, mask and loss, by its OnlineDFlashModel.

Its step has no mask between documents, so it gets what its own collator makes: each conversation of our packed row is a
row of its batch, padded with zeros that do not count (to a multiple of 128 tokens on a GPU, for fewer shapes).
Conversations without two supervised tokens in a row are left out, as its reader does. It draws so many anchors a
conversation, not a row: the number that makes all of them together as many as ours has in that row; where it does not
divide, some conversations get one less.

--rule specforge counts every supervised label of a block, also behind one that is not; --rule ours stops at the first
that does not count, as our trainer does. --features raw hands it the target's states h, as SpecForge trains on;
--features scaled D⁻¹h, which our trainer trains on, so that anchors and loss alone differ. Rotary frequencies stay fp32,
where SpecForge rounds them to bf16 with the rest of the model and its engines do not.

Shapes: S tokens of a packed row, B conversations, T tokens of a padded one, A anchors, K block size, L·H features.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_train.benchmarks.peers import frozen_modules, import_specforge
from dflash_train.errors import InputError
from dflash_train.stage2_drafter.blocks import TILE, Blocks, anchor_candidates, equal_shares
from dflash_train.stage2_drafter.checkpoint import (
    CONFIG_FILE,
    GROUPS,
    WEIGHTS_FILE,
    Checkpoint,
    export_tensors,
    safetensors_bytes,
)
from dflash_train.stage2_drafter.collectives import Rank
from dflash_train.stage2_drafter.compiled import compiled_graphs
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.drafter_config import DrafterConfig
from dflash_train.stage2_drafter.events import StepDone
from dflash_train.stage2_drafter.metrics import StepSums
from dflash_train.stage2_drafter.preparation import PreparedRun, prepare_run
from dflash_train.stage2_drafter.row_forward import RowForward
from dflash_train.stage2_drafter.row_loader import Row, RowBuilder
from dflash_train.stage2_drafter.rows import RowKey
from dflash_train.stage2_drafter.trainer import Trainer
from dflash_train.stage2_drafter.versions import package_versions
from dflash_train.store.calibration import Calibration

Array = npt.NDArray[Any]

RULES = ("specforge", "ours")
FEATURES = ("raw", "scaled")
ATTENTIONS = ("flex_attention", "sdpa", "eager")
RECOMPILE_LIMIT = 64
"""As `import specforge` sets it; the step is imported without that, and torch's own 8 would end in dense attention."""
SETTLING_STEPS = 50
"""Steps that the median time leaves out: those that compile."""


@dataclass(frozen=True)
class TokenBlocks(Blocks):
    """Our blocks of a row, with the tokens that they were made of."""

    token_ids: Array
    """int32 [S]."""
    loss_mask: Array
    """uint8 [S]."""
    document_ids: Array
    """int32 [S]."""


class TokenRowBuilder(RowBuilder):
    """Rows that keep their tokens."""

    def _blocks(self, key: RowKey | None, token_ids: Array, loss_mask: Array, documents: Array) -> Blocks:
        blocks = super()._blocks(key, token_ids, loss_mask, documents)
        return TokenBlocks(**vars(blocks), token_ids=token_ids, loss_mask=loss_mask, document_ids=documents)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Where the conversations of a packed row lie in a batch with one of them a row."""

    index: Array
    """int64 [B,T], packed position; 0 where padded."""
    inside: Array
    """bool [B,T], False where padded."""
    num_anchors: Array
    """int64 [B], anchors that each conversation gets."""


def unpack(blocks: TokenBlocks, multiple: int) -> Batch | None:
    """The batch of a packed row, T a multiple of `multiple`; None where no conversation has a candidate for an anchor."""
    candidates = anchor_candidates(blocks.loss_mask, blocks.document_ids)
    documents, num_candidates = np.unique(blocks.document_ids[candidates], return_counts=True)
    if not len(documents):
        return None
    first = np.searchsorted(blocks.document_ids[blocks.document_ids >= 0], documents)
    lengths = np.searchsorted(blocks.document_ids[blocks.document_ids >= 0], documents, side="right") - first
    width = -(-int(lengths.max()) // multiple) * multiple
    place = np.arange(width)
    inside = place < lengths[:, None]
    return Batch(
        index=np.where(inside, first[:, None] + place, 0),
        inside=inside,
        num_anchors=equal_shares(num_candidates, int(blocks.valid.sum())),
    )


def until_first_masked(weight_mask: Tensor) -> Tensor:
    """Weights [B,A,K] of labels, where those behind the first 0 after slot 0 (the anchor's, always 0) are 0, too."""
    run = (weight_mask[..., 1:] > 0).to(weight_mask.dtype).cumprod(-1)
    return torch.cat((weight_mask[..., :1], weight_mask[..., 1:] * run), dim=-1)


def make_peer(
    config: DrafterConfig,
    head: nn.Module,
    embed: nn.Module,
    *,
    rule: str,
    attention: str,
    gamma: float,
    device: torch.device,
    dtype: torch.dtype,
    compiled: bool = False,
) -> tuple[nn.Module, Any]:
    """SpecForge's drafter, and its OnlineDFlashModel, which draws `anchors_of_each` (int64 [B]) anchors.

    Raises ImportError where SpecForge is not installed.
    """
    from transformers import Qwen3Config

    draft_class, family = import_specforge()
    peer_config = Qwen3Config(**config.to_json())
    peer_config._attn_implementation = attention
    draft = draft_class(peer_config)
    exact = {name: buffer.clone() for name, buffer in draft.named_buffers()}
    draft.to(device, dtype)
    for name, buffer in exact.items():  # rotary frequencies
        owner, _, attribute = name.rpartition(".")
        setattr(draft.get_submodule(owner), attribute, buffer.to(device))
    half = torch.arange(0, config.head_dim, 2) / config.head_dim
    torch.testing.assert_close(exact["rotary_emb.inv_freq"], config.rope_theta**-half, rtol=1e-5, atol=0)
    multiple = TILE // math.gcd(TILE, config.block_size) if attention == "flex_attention" else 1

    class Peer(family.OnlineDFlashModel):  # type: ignore[misc, name-defined]
        anchors_of_each: Tensor

        def _sample_anchor_positions(self, *arguments: Any) -> tuple[Tensor, Tensor]:
            self.num_anchors = int(self.anchors_of_each.max())
            anchors, keep = super()._sample_anchor_positions(*arguments)
            order = torch.rand(keep.shape, device=keep.device).masked_fill(~keep, 2.0).argsort(1).argsort(1)
            keep = keep & (order < self.anchors_of_each[:, None])
            more = (0, -keep.shape[1] % multiple)  # whole tiles of queries, blocks that do not count
            return F.pad(torch.where(keep, anchors, 0), more), F.pad(keep, more)

        def _dflash_objective_chunk_terms(self, hidden: Tensor, labels: Tensor, weight_mask: Tensor) -> Any:
            mask = until_first_masked(weight_mask) if rule == "ours" else weight_mask
            return super()._dflash_objective_chunk_terms(hidden, labels, mask)

    model = Peer(
        torch.compile(draft) if compiled else draft,
        head,
        embed,
        config.mask_token_id,
        config.block_size,
        attention,
        loss_decay_gamma=gamma,
    )
    return draft, model


class PeerForward(RowForward):
    """SpecForge's step on a row in place of ours: what it trains are our fp32 masters by the same names."""

    def __init__(self, run: PreparedRun, device: torch.device, options: argparse.Namespace) -> None:
        # SpecForge may run flex_attention dense where it likes to.
        with mock.patch("dflash_train.stage2_drafter.compiled.forbid_dense_flex"):
            super().__init__(run, device)
        self.anchors_trained = 0
        self.raw = options.features == "raw"
        self.attention = options.attention or ("flex_attention" if device.type == "cuda" else "eager")
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        torch.manual_seed(self.config.seed)  # SpecForge draws anchors from the device's own generator
        draft, self.peer = make_peer(
            run.drafter_config,
            *frozen_modules(self.embed_tokens, self.lm_head),  # type: ignore[arg-type]  # never fp8 here
            rule=options.rule,
            attention=self.attention,
            gamma=self.config.gamma_for(run.drafter_config.block_size),
            device=device,
            dtype=self.compiled.compute_dtype,
            compiled=options.compile,
        )
        theirs, masters = dict(draft.named_parameters()), dict(self.drafter.named_parameters())
        if theirs.keys() != masters.keys():
            raise RuntimeError(f"SpecForge's parameters are not ours: {sorted(theirs.keys() ^ masters.keys())}")
        self.masters = list(masters.values())
        self.theirs = [theirs[name] for name in masters]
        for parameter, master in zip(self.theirs, self.masters, strict=True):
            hook = functools.partial(_hand_over, master)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def loss(self, row: Row, place: int, sums: StepSums) -> Tensor:
        """Forward of one row by SpecForge: Σ w·CE, a scalar whose gradient goes to our masters."""
        assert isinstance(row.blocks, TokenBlocks)
        batch = unpack(row.blocks, TILE if self.attention == "flex_attention" else 1)
        if batch is None:
            return self.masters[0].sum() * 0.0
        with self._uploading() as upload:
            stored = upload(row.buffer.features)
            scales = None if row.buffer.scales is None else upload(row.buffer.scales)
            arrays = (row.blocks.token_ids, row.blocks.loss_mask, batch.index, batch.inside, batch.num_anchors)
            token_ids, loss_mask, index, inside, anchors = (upload(torch.from_numpy(array)) for array in arrays)
        features = self.encoding.decode(stored, scales, self.calibration, torch.float32)
        if self.raw:
            features = features * self.calibration.channel_scale
        features = features.to(self.compiled.compute_dtype)
        with torch.no_grad():
            for parameter, master in zip(self.theirs, self.masters, strict=True):
                parameter.copy_(master)
        self.peer.anchors_of_each = anchors
        self.anchors_trained += int(batch.num_anchors.sum())
        _, _, metrics = self.peer(
            input_ids=token_ids.long()[index] * inside,
            hidden_states=features[index] * inside[..., None],
            loss_mask=loss_mask.long()[index] * inside,
        )
        numerator, denominator = metrics["loss_terms"]
        sums.add("weight", denominator)
        sums.add("weighted_loss", numerator.detach())
        sums.add("slots", metrics["accuracy_denom"])
        sums.add("loss", math.nan)  # unweighted; SpecForge does not say
        loss: Tensor = numerator
        return loss


class PeerTrainer(Trainer):
    """Our loop around SpecForge's step; all that it saves are our masters."""

    forward: PeerForward

    def __init__(self, run: PreparedRun, device: torch.device, options: argparse.Namespace) -> None:
        """Raises InputError for a store whose states SpecForge cannot get or whose target it does not compute."""
        encoding, config = run.reader.encoding, run.drafter_config
        if encoding.is_projected:
            raise InputError(f"The store is {encoding.name}, and SpecForge wants all of h. Use one with bf16 or int8.")
        if (config.input_embedding_scale, config.output_multiplier, config.final_logit_softcapping) != (1, 1, None):
            raise InputError(
                "The target scales its embeddings or logits, which SpecForge's step does not. Use another."
            )
        self.step_seconds: list[float] = []
        super().__init__(
            run,
            Rank(device=device),
            functools.partial(print, flush=True),
            lambda: False,
            self._note_step,
            forward=PeerForward(run, device, options),
        )
        self.builder = TokenRowBuilder(**vars(self.builder))
        run.holdout.rows = []  # left out of the training, and measured by `dflash evaluate` alone

    def _note_step(self, event: StepDone) -> None:
        self.step_seconds.append(event.seconds)

    def _warm_up(self) -> None:
        """Nothing is compiled ahead: SpecForge's shapes change from step to step."""

    def save(self) -> Checkpoint | None:
        """Write the drafter in z-lab's format, with the groups it was trained on. It is no checkpoint of our trainer:
        a resume would take masters for raw h as masters for D⁻¹h."""
        self._saved_step = self.step
        reader, folder = self.run.reader, self.config.run
        ones = Calibration(torch.ones_like(reader.calibration.channel_scale))
        tensors = export_tensors(dict(self.named), reader.encoding, ones if self.forward.raw else reader.calibration)
        (folder / GROUPS).parent.mkdir(exist_ok=True)
        np.save(folder / GROUPS, self.run.training_groups(), allow_pickle=False)
        (folder / CONFIG_FILE).write_text(json.dumps(self.run.drafter_config.to_json(), indent=2) + "\n")
        write_whole(folder / WEIGHTS_FILE, safetensors_bytes(tensors, {"format": "pt"}))
        self.report(f"saved {folder}")
        return None


def write_whole(path: Path, parts: Iterable[Any]) -> None:
    """Write a file that is there only when it is complete: quality.py takes it for a finished training."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.writelines(parts)
    part.replace(path)


def _hand_over(master: nn.Parameter, parameter: Tensor) -> None:
    """Add a parameter's gradient to its master's, in fp32, and drop it."""
    assert parameter.grad is not None
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad + gradient
    parameter.grad = None


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train, write the drafter, and return what the run was; raises InputError for options that do not fit."""
    config = TrainConfig(
        store=options.store,
        run=options.run,
        devices=options.device,
        num_layers=options.num_layers,
        block_size=options.block_size,
        mask_token=options.mask_token,
        row_tokens=options.row_tokens,
        anchors=options.anchors,
        rows_per_step=options.rows_per_step,
        steps=options.steps,
        lr=options.lr,
        seed=options.seed,
        holdout=options.holdout,
        fraction=options.fraction,
        loss="decay",
        save_every=max(options.steps, 1),
        evaluate_every=max(options.steps, 1),
        log_every=max(options.steps // 20, 1),
    )
    if (config.run / WEIGHTS_FILE).exists() or (config.run / "checkpoints").exists():
        raise InputError(f"{config.run} holds a drafter or a run already. Give another --run.")
    device = torch.device("cuda:0" if options.device == "cuda" else options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    run = prepare_run(config)
    trainer = PeerTrainer(run, device, options)
    config.run.mkdir(parents=True, exist_ok=True)
    trainer.report(
        f"SpecForge's step with {trainer.forward.attention}{', compiled' if options.compile else ''}, labels by the rule of "
        f"{options.rule}, {options.features} features; {run.num_training:,} samples, {config.steps:,} steps of "
        f"{config.rows_per_step} rows"
    )
    began = time.perf_counter()
    trainer.train()
    settled = trainer.step_seconds[SETTLING_STEPS:] or trainer.step_seconds
    return {
        "peer": "SpecForge 0.2.0",
        **{name: getattr(options, name) for name in ("rule", "features", "compile", "seed", "steps", "lr")},
        "attention": trainer.forward.attention,
        "target": options.target,
        "train_config": config.to_json(),
        "drafter_config": run.drafter_config.to_json(),
        "samples": run.num_training,
        "anchors_trained": trainer.forward.anchors_trained,
        "seconds": time.perf_counter() - began,
        "ms_per_step": statistics.median(settled) * 1e3 if settled else None,
        "graphs": compiled_graphs(),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": package_versions(),
    }


def make_parser() -> argparse.ArgumentParser:
    """The options; defaults are those of `dflash train-drafter`."""
    defaults = {name: field.default for name, field in TrainConfig.__dataclass_fields__.items()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--target", help="the store's target, for the command that this ends with and --json's record")
    parser.add_argument("--run", type=Path, required=True, help="new folder of the drafter")
    parser.add_argument("--steps", type=int, required=True)
    for name in ("seed", "row_tokens", "anchors", "rows_per_step", "num_layers", "block_size"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=defaults[name], help="%(default)s")
    for name in ("lr", "holdout", "fraction"):
        parser.add_argument(f"--{name}", type=float, default=defaults[name], help="%(default)s")
    parser.add_argument("--mask-token", help="id or text")
    parser.add_argument("--rule", choices=RULES, default="specforge")
    parser.add_argument("--features", choices=FEATURES, default="raw")
    parser.add_argument("--attention", choices=ATTENTIONS, help="default: flex_attention, on the CPU eager")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile around its drafter, as it does not itself"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    return parser


def closing_line(result: dict[str, Any]) -> str:
    """What `train` returned, in one line that benchmarks/quality.py reads in the log."""
    return (
        f"{result['steps']:,} steps in {result['seconds']:.0f} s, median {result['ms_per_step'] or 0:.1f} ms, "
        f"{result['graphs']} graphs compiled. Measure it by:"
    )


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    try:
        result = train(options)
    except (InputError, ImportError) as error:
        parser.error(str(error))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    print(
        f"{closing_line(result)}\n"
        f"dflash evaluate --target {options.target or 'TARGET'} --drafter {options.run} --data HELD_OUT"
    )


if __name__ == "__main__":
    main()
