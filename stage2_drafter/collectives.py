"""One process among those that train together: what the first decides, and what each found, on all of them."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Which of the run's processes this is, and its device."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        """Whether it decides, writes and reports."""
        return self.rank == 0

    def broadcast(self, values: dict[str, Any]) -> dict[str, Any]:
        """The first rank's values on every rank, as JSON bytes: torch's own broadcast of objects would be a pickle."""
        if self.world == 1:
            return values
        data = torch.from_numpy(np.frombuffer(json.dumps(values).encode(), np.uint8).copy()).to(self.device)
        size = torch.tensor([len(data)], device=self.device)
        torch.distributed.broadcast(size, 0)
        if not self.is_first:
            data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        torch.distributed.broadcast(data, 0)
        result: dict[str, Any] = json.loads(data.cpu().numpy().tobytes())
        return result

    def gather(self, flag: bool) -> list[bool]:
        """Every rank's flag, by rank, on every rank."""
        if self.world == 1:
            return [flag]
        flags = torch.zeros(self.world, dtype=torch.int32, device=self.device)
        flags[self.rank] = int(flag)
        torch.distributed.all_reduce(flags)
        return [bool(value) for value in flags.tolist()]
