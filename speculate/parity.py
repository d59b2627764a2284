"""Train/serve parity on a real target: what the drafter saw in training against what it sees when it drafts.

A few prompts are answered greedily. Then the same blocks are computed twice: as training does, all blocks of all
answers in one packed row under one mask, on states of one plain forward; and as serving does, one block after the other
with the drafter's cache. Both run in fp32 on the CPU, so that they must agree to rounding. States that come from
verification forwards with a cache are compared with those of the plain forward as well.

High training accuracy with an acceptance length near 1 is a difference between these paths (SpecForge #455, #533).

Shapes: T tokens of an answer with its prompt, S tokens of the row, A anchors, K block size, L tapped layers, H hidden
size, F = L · H features per token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_train.speculate.decode import HiddenStateTaps, draft_logits, plain_decode
from dflash_train.speculate.drafter_folder import DrafterFolder
from dflash_train.speculate.findings import Check, error, ok, warning
from dflash_train.speculate.loading import WEIGHTS_FILE
from dflash_train.speculate.target_cache import TargetCache
from dflash_train.stage1_target.target import Target
from dflash_train.stage2_drafter.blocks import document_positions, make_blocks
from dflash_train.stage2_drafter.compiled import CompiledDrafter
from dflash_train.stage2_drafter.drafter import Drafter, DrafterCache, DrafterConfig

PROMPTS = (
    "What is the capital of France, and which river flows through it?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A shirt costs 20 euros and is reduced by 15 percent. What does it cost now?",
)
NUM_NEW_TOKENS = 24
NUM_ANCHORS = 12
"""Of each answer, at most."""
PATH_TOLERANCE = 1e-3
"""Largest difference of logits of both paths, over the largest logit: fp32 sums in another order, some 1e-6 a layer."""
STATE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Largest relative difference of a layer's states with and without cache; bf16 is that of inspect-store's recompute."""
FEW_HITS = 0.05
"""Share of right first drafts under which a drafter does not know its target; trained ones reach more than a half."""


@dataclass(frozen=True)
class Answer:
    """A prompt with the target's own answer, read in one forward and again with a cache."""

    token_ids: list[int]
    num_prompt: int
    features: Tensor
    """[T, F], one plain forward, as training stores them."""
    served_features: Tensor
    """[T, F], prompt first, then the answer in blocks with the target's cache."""


def encode_texts(target: Target) -> list[list[int]]:
    """Token ids of PROMPTS, under the chat template where there is one."""
    tokenizer, encoded = target.tokenizer, []
    for prompt in PROMPTS:
        text = prompt
        if getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        encoded.append(list(map(int, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])))
    return [ids for ids in encoded if ids]


def answer_prompts(target: Target, prompts: Sequence[Sequence[int]], block_size: int) -> list[Answer]:
    """Let the target answer greedily, and read each answer both ways."""
    answers = []
    for prompt in prompts:
        token_ids = [*prompt, *plain_decode(target, prompt, NUM_NEW_TOKENS + block_size).token_ids]
        row = torch.tensor([token_ids], dtype=torch.long, device=target.device)
        served = []
        with torch.inference_mode(), HiddenStateTaps(target.layers, target.target_layer_ids) as taps:
            cache = TargetCache(target.model, rewindable=True)
            cache.run(row[:, : len(prompt)])
            served.append(taps.features(len(prompt)).clone())
            for start in range(len(prompt), len(token_ids), block_size):
                block = row[:, start : start + block_size]
                cache.run_block(block)
                served.append(taps.features(block.shape[1]).clone())
                cache.keep(block.shape[1])
        features = target.hidden_states(row)[0]
        answers.append(Answer(token_ids, len(prompt), features.float().cpu(), torch.cat(served, 1)[0].float().cpu()))
    return answers


def check_parity(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]]) -> list[Check]:
    """Both comparisons, and how many first drafts are right; drafter in fp32 on the CPU."""
    config = drafter.config
    answers = answer_prompts(target, prompts, config.block_size)
    checks = [_check_states(target, answers)]
    head = None if target.lm_head is None else target.lm_head.float().cpu()
    frozen = replace(target, embed_tokens=target.embed_tokens.float().cpu(), lm_head=head)
    trained, anchors, labels = training_logits(frozen, drafter, answers)
    served = serving_logits(frozen, drafter, answers, anchors)
    return [*checks, _compare_paths(trained, served), _first_drafts(served, labels)]


def _check_states(target: Target, answers: Sequence[Answer]) -> Check:
    name, worst = "target states", (0.0, 0)
    for answer in answers:
        shape = (len(answer.token_ids), len(target.target_layer_ids), target.hidden_size)
        plain, served = answer.features.view(shape), answer.served_features.view(shape)
        for index, layer in enumerate(target.target_layer_ids):
            difference = (plain[:, index] - served[:, index]).norm() / plain[:, index].norm().clamp_min(1e-30)
            worst = max(worst, (float(difference), layer))
    if not worst[0] <= STATE_TOLERANCE[target.dtype]:
        text = f"layer {worst[1]} differs by {worst[0]:.2%} between one forward and decoding with the cache."
        way_out = "The drafter was trained on the first and serves on the second: is the target's cache exact here?"
        return error(name, text, way_out)
    return ok(name, f"with and without cache they differ by at most {worst[0]:.1e} (layer {worst[1]}).")


def _pack(answers: Sequence[Answer]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids int32 [S], loss mask uint8 [S] (answers), document ids int32 [S]."""
    token_ids = np.concatenate([np.asarray(answer.token_ids, dtype=np.int32) for answer in answers])
    loss_mask = np.concatenate([np.arange(len(a.token_ids)) >= a.num_prompt for a in answers]).astype(np.uint8)
    documents = np.repeat(np.arange(len(answers), dtype=np.int32), [len(answer.token_ids) for answer in answers])
    return token_ids, loss_mask, documents


def _noise(frozen: Target, drafter: Drafter, noise_ids: Tensor) -> Tensor:
    return F.embedding(noise_ids, frozen.embed_tokens) * drafter.config.input_embedding_scale


@torch.no_grad()
def training_logits(
    frozen: Target, drafter: Drafter, answers: Sequence[Answer]
) -> tuple[Tensor, list[list[int]], Tensor]:
    """Logits [A, K - 1, V] as training computes them, the anchors of each answer, and the labels of slot 1 [A].

    frozen holds embedding and head in fp32 on the CPU.
    """
    config, packed = drafter.config, _pack(answers)
    anchors = []
    for answer in answers:
        last = len(answer.token_ids) - config.block_size
        spread = np.linspace(answer.num_prompt, last, min(NUM_ANCHORS, last - answer.num_prompt + 1))
        anchors.append(sorted({int(position) for position in spread}))
    first = np.cumsum([0, *(len(answer.token_ids) for answer in answers)])
    at = np.concatenate([start + np.asarray(own) for start, own in zip(first[:-1], anchors, strict=True)])
    blocks = make_blocks(
        *packed, at.astype(np.int32), np.ones(len(at), dtype=bool), config.block_size, config.mask_token_id
    )
    forward = CompiledDrafter(drafter, device="cpu", row_tokens=len(packed[0]), num_anchors=len(at))
    hidden = forward(
        torch.cat([answer.features for answer in answers]),
        torch.from_numpy(document_positions(packed[2])),
        _noise(frozen, drafter, torch.from_numpy(blocks.noise_ids).flatten()),
        torch.from_numpy(blocks.noise_positions),
        torch.from_numpy(blocks.start),
        torch.from_numpy(blocks.anchor),
    ).unflatten(0, (len(at), config.block_size))
    return draft_logits(frozen, drafter, hidden[:, 1:]), anchors, torch.from_numpy(blocks.labels[:, 1])


@torch.no_grad()
def serving_logits(
    frozen: Target, drafter: Drafter, answers: Sequence[Answer], anchors: Sequence[Sequence[int]]
) -> Tensor:
    """Logits [A, K - 1, V] as drafting computes them: block after block, new context through the drafter's cache."""
    config, logits = drafter.config, []
    for answer, own in zip(answers, anchors, strict=True):
        cache = DrafterCache(config)
        for anchor in own:
            new = answer.features[None, cache.length : anchor]
            ids = torch.full((1, config.block_size), config.mask_token_id)
            ids[0, 0] = answer.token_ids[anchor]
            positions = torch.arange(cache.length, anchor + config.block_size)[None]
            hidden = drafter.draft(new, _noise(frozen, drafter, ids), positions, cache)
            logits.append(draft_logits(frozen, drafter, hidden[:, 1:])[0])
    return torch.stack(logits)


def _compare_paths(trained: Tensor, served: Tensor) -> Check:
    name = "parity"
    difference = float((trained - served).abs().max() / served.abs().max().clamp_min(1e-30))
    if not difference <= PATH_TOLERANCE:
        text = f"the logits of training and of drafting differ by {difference:.1%} on {len(served)} blocks."
        return error(name, text, "This is a bug of dflash-train or a drafter with NaN: please report it.")
    return ok(name, f"training and drafting give the same logits on {len(served)} blocks, to {difference:.1e}.")


def _first_drafts(served: Tensor, labels: Tensor) -> Check:
    name, hits = "first drafts", int((served[:, 0].argmax(-1) == labels).sum())
    text = f"{hits} of {len(labels)} first drafts are the target's own token."
    if hits <= FEW_HITS * len(labels):
        way_out = "Is this the target (and its chat template) that it was trained for, and trained long enough?"
        return warning(name, text, way_out)
    return ok(name, text)


def check_scales(target: Target, config: DrafterConfig) -> Check:
    """Scales of embedding and logits as measured on the target, against config.json."""
    facts = (
        ("input_embedding_scale", config.input_embedding_scale, target.embedding_scale),
        ("output_multiplier", config.output_multiplier, target.logit_scale),
        ("final_logit_softcapping", config.final_logit_softcapping or 0.0, target.logit_softcap or 0.0),
    )
    wrong = [f"{key} is {has:g}, the target has {wanted:g}" for key, has, wanted in facts if not _close(has, wanted)]
    if wrong:
        return error("scales", f"{'; '.join(wrong)}.", "Write the target's, if the drafter was trained with them.")
    return ok("scales", "embedding and logits are scaled as the target does.")


def _close(first: float, second: float) -> bool:
    return abs(first - second) <= 1e-3 * max(abs(first), abs(second), 1e-30)


def check_head(target: Target, folder: DrafterFolder) -> Check:
    """Embedding and head that the file may carry must be the target's: vLLM takes the file's, SGLang the target's."""
    from safetensors import safe_open

    own = {
        "embed_tokens.weight": target.embed_tokens,
        "lm_head.weight": target.embed_tokens if target.lm_head is None else target.lm_head,
    }
    tied = "the target ties its head to the embedding" if target.lm_head is None else "the target has a head of its own"
    carried = [name for name in own if name in folder.shapes]
    with safe_open(folder.path / WEIGHTS_FILE, framework="pt") as file:
        for name in carried:
            tensor, wanted = file.get_tensor(name).float(), own[name].float().cpu()
            far = tensor.shape != wanted.shape or float((tensor - wanted).norm()) > 0.02 * float(wanted.norm())
            if far:
                text = f"{name} in the file is not the target's ({tied}): vLLM would use it, SGLang would not."
                return error("head", text, "Remove it from the file: engines take the target's.")
    return ok("head", f"{tied}; {'the file carries the same' if carried else 'the file carries none'}.")
