"""The DFlash drafter: z-lab's architecture, parameter names and config keys, in plain torch.

A small transformer whose queries are noise blocks only. The target's context features are projected once (`fc`, then
`hidden_norm`) and enter every layer as extra keys and values, next to those of the block itself. One set of layers
serves two callers: training hands in `attend` (flex_attention or SDPA with a mask over all blocks of a row), drafting
goes through `Drafter.draft` with a cache of context keys and values.

Normalisation of queries and keys and the rotation run in fp32 and are rounded once, where z-lab's bf16 path rounds the
rotation table too; in fp32 both are the same numbers. Rotary frequencies are computed, never stored: a buffer would be
rounded by `.to(torch.bfloat16)`.

Shapes: B batch, S context tokens, Q noise tokens, N = S + Q keys, H hidden size, F features per context token,
Hq / Hkv query and key heads, d head size, K block size.
Source: DFlash, arXiv 2602.06036, section 3; key names and rules from z-lab's released checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.checkpoint import check_file
from dflash_train.stage2_drafter.drafter_config import DrafterConfig
from dflash_train.store.files import StoreError

__all__ = ["Attend", "Drafter", "DrafterCache", "DrafterConfig", "DrafterLayer", "load_drafter"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""attend(q [B,Hq,Q,d], k [B,Hkv,N,d], v [B,Hkv,N,d]) -> [B,Hq,Q,d]; it knows which keys each query sees."""
Product = Callable[[Tensor, Tensor], Tensor]
"""product(x [...,I], weight [O,I]) -> [...,O]: F.linear, or the same in another precision."""


class RMSNorm(nn.Module):
    """x / rms(x) · weight, in fp32, rounded once to the type of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.in_fp32(x).to(x.dtype)

    def in_fp32(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight.float() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head: x [B,heads,N,d] fp32, cos and sin [B,N,d/2] fp32."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Queries from the block; keys and values from [context; block] through the same weights."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def queries(self, z: Tensor, cos: Tensor, sin: Tensor, product: Product = F.linear) -> Tensor:
        """z [B,Q,H] -> rotated queries [B,Hq,Q,d]."""
        q = product(z, self.q_proj.weight)
        q = q.view(*q.shape[:-1], -1, self.head_dim).transpose(1, 2)
        return rotate(self.q_norm.in_fp32(q), cos, sin).to(q.dtype)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor, product: Product = F.linear) -> tuple[Tensor, Tensor]:
        """x [B,N,H] -> rotated keys and values, [B,Hkv,N,d] each, in one product."""
        both = product(x, torch.cat((self.k_proj.weight, self.v_proj.weight)))
        k, v = both.view(*both.shape[:-1], -1, self.head_dim).transpose(1, 2).chunk(2, dim=1)
        # Contiguous: inductor's flex_attention on the CPU reads a view into a wider tensor at offset 0 (torch 2.13).
        return rotate(self.k_norm.in_fp32(k), cos, sin).to(v.dtype), v.contiguous()


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, product: Product = F.linear) -> Tensor:
        gated = F.silu(product(x, self.gate_proj.weight)) * product(x, self.up_proj.weight)
        return product(gated, self.down_proj.weight)


class DrafterLayer(nn.Module):
    """One layer over the noise; the context enters as keys and values, is never updated, and skips input_layernorm."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        noise: Tensor,
        context: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        product: Product = F.linear,
    ) -> Tensor:
        """noise [B,Q,H], context [B,S,H], cos and sin [B,S+Q,d/2] -> noise [B,Q,H]."""
        return self.finish(noise, self.attended(noise, context, cos, sin, attend, product), product)

    def attended(
        self,
        noise: Tensor,
        context: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        product: Product = F.linear,
    ) -> Tensor:
        """The part of `forward` before the output projection -> [B,Hq,Q,d]."""
        z = self.input_layernorm(noise)
        num_queries = noise.shape[1]
        q = self.self_attn.queries(z, cos[:, -num_queries:], sin[:, -num_queries:], product)
        k, v = self.self_attn.keys_values(torch.cat((context.to(z.dtype), z), dim=1), cos, sin, product)
        return attend(q, k, v)

    def finish(self, noise: Tensor, attended: Tensor, product: Product = F.linear) -> Tensor:
        """Output projection, residuals and MLP: noise [B,Q,H], attended [B,Hq,Q,d] -> [B,Q,H]."""
        noise = noise + product(attended.transpose(1, 2).flatten(2), self.self_attn.o_proj.weight)
        out: Tensor = noise + self.mlp(self.post_attention_layernorm(noise), product)
        return out


class DrafterCache:
    """Rotated keys and values of the context, per layer; block entries are never kept, so nothing is ever cropped."""

    def __init__(self, config: DrafterConfig) -> None:
        self.keys: list[Tensor | None] = [None] * config.num_hidden_layers
        self.values: list[Tensor | None] = [None] * config.num_hidden_layers
        self.positions: Tensor | None = None

    @property
    def length(self) -> int:
        """Context tokens held."""
        return 0 if self.positions is None else self.positions.shape[-1]

    def append(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add [1,Hkv,N,d] of new context tokens to a layer and return all of that layer's."""
        old_keys, old_values = self.keys[index], self.values[index]
        if old_keys is not None and old_values is not None:
            keys, values = torch.cat((old_keys, keys), dim=2), torch.cat((old_values, values), dim=2)
        self.keys[index], self.values[index] = keys, values
        return keys, values


class Drafter(nn.Module):
    """The trained half of speculative decoding; embedding and head stay with the target and are not parameters.

    Weights are drawn on `device` from their own generator (normal, std `initializer_range`; norms 1), so they depend on
    `seed` and the kind of device alone (a CPU, a model of GPU); a CPU core takes 10 s for Qwen3-8B's. seed=None leaves them
    unset, for a caller that loads them next. num_features is the width that `fc` takes while it is trained on projected
    features; None, and every exported drafter: all channels of the tapped layers.
    """

    def __init__(
        self,
        config: DrafterConfig,
        seed: int | None = 0,
        num_features: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.fc = nn.Linear(num_features or config.num_taps * config.hidden_size, config.hidden_size, bias=False)
            self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.to_empty(device=device)
        if seed is not None:
            self.initialize(torch.Generator(device).manual_seed(seed))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        for parameter in self.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, self.config.initializer_range, generator=generator)

    def project_context(self, features: Tensor) -> Tensor:
        """features [B,S,F] -> context states [B,S,H] that every layer takes its extra keys and values from."""
        out: Tensor = self.hidden_norm(self.fc(features))
        return out

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int [...,N] -> cos and sin, fp32 [...,N,d/2]."""
        half = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device=positions.device)
        frequencies = 1.0 / (self.config.rope_theta ** (half / self.config.head_dim))
        angles = positions[..., None].float() * frequencies
        return angles.cos(), angles.sin()

    def forward(
        self,
        context: Tensor,
        noise: Tensor,
        context_positions: Tensor,
        noise_positions: Tensor,
        attend: Attend | Sequence[Attend],
    ) -> Tensor:
        """Final states of the noise tokens: context [B,S,H], noise [B,Q,H], positions [B,S] and [B,Q] -> [B,Q,H].

        `attend` is one function for all layers, or one a layer where their masks differ.
        """
        per_layer = [attend] * len(self.layers) if callable(attend) else list(attend)
        cos, sin = self.rotary(torch.cat((context_positions, noise_positions), dim=-1))
        for layer, layer_attend in zip(self.layers, per_layer, strict=True):
            noise = layer(noise, context, cos, sin, layer_attend)
        out: Tensor = self.norm(noise)
        return out

    def draft(self, features: Tensor, noise: Tensor, positions: Tensor, cache: DrafterCache) -> Tensor:
        """Final states of one block, given the context features that are new since the last block.

        features [1,N,F] of the N committed tokens not yet in the cache (N may be 0), noise [1,K,H] (embedding of the
        anchor, then of mask tokens), positions int [1,N+K] of both in that order -> [1,K,H]; slot 0 is the anchor's
        and predicts nothing. The cache keeps the context, never the block.
        """
        context = self.project_context(features)
        cos, sin = self.rotary(positions)
        num_new = features.shape[1]
        new, block = positions[:, :num_new], positions[:, num_new:]
        known = new if cache.positions is None else torch.cat((cache.positions, new), dim=1)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DrafterLayer)
            z = layer.input_layernorm(noise)
            q = layer.self_attn.queries(z, cos[:, num_new:], sin[:, num_new:])
            k, v = layer.self_attn.keys_values(torch.cat((context.to(z.dtype), z), dim=1), cos, sin)
            old_k, old_v = cache.append(index, k[:, :, :num_new], v[:, :, :num_new])
            mask = self._draft_mask(index, known, block)
            attended = F.scaled_dot_product_attention(
                q,
                torch.cat((old_k, k[:, :, num_new:]), dim=2),
                torch.cat((old_v, v[:, :, num_new:]), dim=2),
                attn_mask=mask,
                enable_gqa=True,
            )
            noise = layer.finish(noise, attended)
        cache.positions = known
        out: Tensor = self.norm(noise)
        return out

    def _draft_mask(self, index: int, context_positions: Tensor, block_positions: Tensor) -> Tensor | None:
        """bool [1,1,K,T+K], None where every slot sees everything: the rule of a layer for one block."""
        window, causal = self.config.layer_window(index), self.config.layer_is_causal(index)
        if window is None and not causal:
            return None
        keys = torch.cat((context_positions, block_positions), dim=1)
        distance = block_positions[:, :, None] - keys[:, None, :]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if causal:
            visible &= distance >= 0
        if window is not None:
            visible &= distance.abs() < window
        return visible[:, None]


def load_drafter(folder: Path, dtype: torch.dtype | None = None) -> Drafter:
    """Load a checkpoint in z-lab's format (config.json, model.safetensors), in `dtype` or as stored.

    Raises InputError for a missing or unreadable file and for tensors that are missing, too many, or of another shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise InputError(f"{folder} has no {name}; give a folder with a drafter in z-lab's format.")
    try:
        check_file(folder, "model.safetensors")
        config = DrafterConfig.from_json(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        tensors = load_file(folder / "model.safetensors")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, SafetensorError, StoreError) as error:
        raise InputError(f"{folder} cannot be read as a drafter ({error}); copy or export it again.") from error
    drafter = Drafter(config, seed=None)
    wanted = {name: tuple(parameter.shape) for name, parameter in drafter.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [
        f"{name} is {found.get(name, 'missing')}, wanted {wanted.get(name, 'none')}"
        for name in sorted(wanted.keys() | found.keys())
        if found.get(name) != wanted.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise InputError(f"{folder} does not fit its config.json: {'; '.join(wrong[:3])}{more}. Export it again.")
    drafter.to(dtype or next(iter(tensors.values())).dtype)
    drafter.load_state_dict(tensors)
    return drafter
