"""The forward of one row on one device: uploaded, decoded, through the drafter, to its loss.

Embedding and head are the target's: plain tensors beside the module, never parameters, never saved. The features travel
as stored and are decoded on the device. The copies of a row run under the kernels of the row before.

Symbols: S tokens of a row, F features per token, A anchors, K block size, N counted slots, H hidden size, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dflash_train.stage2_drafter.compiled import CompiledDrafter
from dflash_train.stage2_drafter.drafter import Drafter
from dflash_train.stage2_drafter.fp8 import Fp8Head
from dflash_train.stage2_drafter.loss import block_weights, dpace_weights, frozen_head_cross_entropy, weighted_loss
from dflash_train.stage2_drafter.metrics import StepSums
from dflash_train.stage2_drafter.preparation import PreparedRun
from dflash_train.stage2_drafter.row_loader import Row


class RowForward:
    """The drafter, and all that a row's loss needs beside it; `world` ranks share its gradients.

    first_weights: False leaves the drafter's unset, for those that are loaded.
    """

    def __init__(self, run: PreparedRun, device: torch.device, world: int = 1, *, first_weights: bool = True) -> None:
        self.config, self.device, self.encoding = run.config, device, run.reader.encoding
        self.drafter = Drafter(
            run.drafter_config,
            seed=self.config.seed if first_weights else None,
            num_features=self.encoding.num_features,
            device=device,
        )
        self.compiled = CompiledDrafter(
            self.drafter,
            device=device,
            row_tokens=self.config.row_tokens,
            num_anchors=self.config.anchors,
            precision=self.config.precision,
            activation_checkpointing=self.config.activation_checkpointing,
        )
        dtype = self.compiled.compute_dtype
        self.embed_tokens = run.reader.frozen_embed_tokens().to(device, dtype)
        tied = run.reader.manifest.tied_embeddings
        lm_head = self.embed_tokens if tied else run.reader.frozen_lm_head().to(device, dtype)
        self.lm_head = Fp8Head.quantise(lm_head) if self.config.precision == "fp8" else lm_head
        self.calibration = run.reader.calibration.for_decoding().to(device)
        self.model: torch.nn.Module = self.compiled if world == 1 else _distribute(self.compiled, device)
        on_cuda = device.type == "cuda"
        self._copies = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]

    def warm_up(self, row: Row, evaluates: bool) -> None:
        """One whole step on a real row, and one evaluation, so that everything is compiled before anything is counted."""
        sums = StepSums(self.compiled.block_size, 1, self.device)
        self.compiled.warm_up(
            step=lambda: torch.autograd.backward(self.loss(row, 0, sums)),
            evaluate=(lambda: self.loss(row, 0, sums)) if evaluates else None,
        )

    def loss(self, row: Row, place: int, sums: StepSums) -> Tensor:
        """Forward of one row: Σ w·CE over its counted slots, a scalar with a graph even where there is no slot.

        `sums` gets the row's numbers at its place among the step's rows. Only a forward with gradients goes through DDP.
        """
        config, drafter_config = self.config, self.drafter.config
        model = self.model if torch.is_grad_enabled() else self.compiled
        with self._uploading() as upload:
            stored = upload(row.buffer.features)
            scales = None if row.buffer.scales is None else upload(row.buffer.scales)
            arrays = (row.positions, row.blocks.noise_ids, row.blocks.noise_positions, row.blocks.start)
            positions, noise_ids, noise_positions, start = (upload(torch.from_numpy(array)) for array in arrays)
            anchor, label_mask = (upload(torch.from_numpy(a)) for a in (row.blocks.anchor, row.blocks.label_mask))
            slots, labels = upload(torch.from_numpy(row.slots)), upload(torch.from_numpy(row.labels))
        features = self.encoding.decode(stored, scales, self.calibration, self.compiled.compute_dtype)
        noise = self.embed_tokens[noise_ids.reshape(-1)] * drafter_config.input_embedding_scale
        hidden = model(features, positions, noise, noise_positions, start, anchor)
        loss = frozen_head_cross_entropy(
            hidden.detach().index_select(0, slots),
            self.lm_head,
            labels,
            multiplier=drafter_config.output_multiplier,
            softcap=drafter_config.final_logit_softcapping,
            with_gradient=torch.is_grad_enabled(),
        )
        if config.loss == "dpace":
            ce = torch.zeros(label_mask.shape, dtype=torch.float32, device=self.device)
            ce.view(-1)[slots] = loss.ce
            weights = dpace_weights(ce, label_mask, config.dpace_alpha)
        else:
            weights = block_weights(label_mask, config.gamma_for(drafter_config.block_size))
        row_weights = weights.reshape(-1)[slots]
        sums.add_row(place, loss.ce, loss.correct, row_weights, slots, label_mask)
        return weighted_loss(hidden, loss.dhidden, loss.ce, row_weights, slots)

    def leave_group(self) -> None:
        """Drop data parallelism; call it before the process group is destroyed.

        Its reducer owns the group too. As the last owner it would join the group's threads with the GIL held, while one of
        gloo's waits for the GIL to drop the tensors of the last barrier: such ends hung for ever (torch 2.13).
        """
        self.model = self.compiled

    @contextlib.contextmanager
    def _uploading(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Copies to the device on a stream of their own, so that they run under the previous row's kernels.

        The host waits for the copies alone; then the row's buffer may be filled again.
        """
        if self._copies is None:
            yield lambda tensor: tensor
            return
        used, copied = torch.cuda.current_stream(self.device), []

        def upload(tensor: Tensor) -> Tensor:
            copied.append(tensor.to(self.device, non_blocking=True))
            return copied[-1]

        with torch.cuda.stream(self._copies):
            yield upload
        self._copies.synchronize()
        for tensor in copied:
            tensor.record_stream(used)


def _distribute(compiled: CompiledDrafter, device: torch.device) -> torch.nn.parallel.DistributedDataParallel:
    """Data parallelism with bf16 reduction on CUDA; gradients live in the buckets, which saves 4 bytes a parameter.

    The module has no buffers, so none are broadcast (asserted: the keyword that forbids it changed its name in 2.13).
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    assert not list(compiled.buffers())
    torch._dynamo.config.optimize_ddp = False  # per thread since torch 2.12, and this is the thread that compiles
    model = torch.nn.parallel.DistributedDataParallel(
        compiled,
        device_ids=[device.index or 0] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    if device.type == "cuda":
        model.register_comm_hook(None, bf16_compress_hook)
    return model
