"""From tapped layers to what is stored, one layer at a time: no tensor of all layers' padded states is made.

Shapes: B batch, T tokens, M = B * T, N tokens without padding, H hidden size, L tapped target layers, G scale groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_train.store.encoding import Encoding, are_sound, has_kernels

if TYPE_CHECKING:
    import torch

    from dflash_train.store.calibration import Calibration


PROBE_TOKENS = 64
"""Tokens of a batch, evenly spaced, whose error is measured; 64 x 20,480 values settle a mean to a percent."""


class TapEncoder:
    """Encodes a batch layer by layer, as the target taps them: real tokens of [B, T, H], N of them, without padding.

    On CUDA the kernels of kernels.py read each layer where it lies and write what is stored; elsewhere, and for what a
    projection needs of all layers at once, the real tokens are gathered first and `Encoding.encode` is called at the end.
    """

    def __init__(self, encoding: Encoding, calibration: Calibration, rows: torch.Tensor) -> None:
        """rows, int64 [N], are the places of the real tokens among the B * T; outputs lie on their device."""
        import torch

        self.encoding = encoding
        self.sound = rows.new_zeros((len(rows), encoding.num_layers), dtype=torch.bool)
        self._calibration = calibration
        self._rows = rows
        num_probed = min(PROBE_TOKENS, len(rows)) if encoding.name != "bf16" else 0
        self._probe = torch.linspace(0, len(rows) - 1, num_probed, device=rows.device).long()
        self._probed: list[torch.Tensor] = []
        self._states: torch.Tensor | None = None
        """[N, L * H]: gathered states, or int8 features already."""
        self._scales: torch.Tensor | None = None

    def add(self, layer: int, states: torch.Tensor) -> None:
        """Take the output [B, T, H] (or [M, H]) of tapped layer number `layer`; it may change once this returns."""
        import torch

        encoding, rows = self.encoding, self._rows
        states = states.to(rows.device).reshape(-1, encoding.hidden_size)  # a target may lie on several devices
        columns = slice(layer * encoding.hidden_size, (layer + 1) * encoding.hidden_size)
        with_kernels = has_kernels(states)
        if self._states is None:
            dtype = {"bf16": torch.bfloat16, "int8": torch.int8 if with_kernels else states.dtype}.get(
                encoding.name, states.dtype
            )
            self._states = states.new_empty((len(rows), encoding.num_states), dtype=dtype)
            if encoding.name == "int8":
                self._scales = states.new_empty((len(rows), encoding.num_layers), dtype=torch.float32)
        out, sound = self._states[:, columns], self.sound[:, layer]
        if len(self._probe):
            self._probed.append(states[rows[self._probe]].float())
        if not with_kernels:
            gathered = states[rows]
            out.copy_(gathered)
            sound.copy_(are_sound(gathered))
            return
        from dflash_train.store import kernels

        if encoding.name == "int8":
            assert self._scales is not None
            divisors = self._calibration.channel_scale[columns]
            kernels.encode_int8(states, rows, divisors, out, self._scales[:, layer], sound)
        else:
            kernels.gather(states, rows, out, sound)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Features [N, columns] as stored, scales [N, G] or None, and whether a token's state was sound, bool [N, L]."""
        import torch

        assert self._states is not None, "no layer was added"
        if self.encoding.name == "int8" and self._states.dtype == torch.int8:
            return self._states, self._scales, self.sound
        return *self.encoding.encode(self._states, self._calibration), self.sound

    def errors(self, features: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor | None:
        """Of what `finish` returned: mean square error of D^-1 h relative to its mean square, [L], over some tokens.

        Rounding, and what a projection leaves out. Nothing is ever clipped, since every scale is that of the largest
        value; what data unlike the calibration's do is to make the steps coarse, and this shows it. None for bf16.
        """
        import torch

        if not self._probed:
            return None
        encoding, probe = self.encoding, self._probe
        scales = None if scales is None else scales[probe]
        decoded = encoding.decode(features[probe], scales, self._calibration, torch.float32)
        wanted = torch.cat(self._probed, dim=-1) / self._calibration.channel_scale
        groups = (len(probe), encoding.num_layers, encoding.hidden_size)
        lost = (encoding.scaled_states(decoded, self._calibration) - wanted).view(groups).square().sum(-1)
        relative = lost / wanted.view(groups).square().sum(-1)
        measured = relative.isfinite()  # neither zeros nor what is not finite
        return relative.where(measured, 0).sum(0) / measured.sum(0).clamp_min(1)
