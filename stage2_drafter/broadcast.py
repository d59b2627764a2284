"""What the first rank decides, and what each rank found, on every rank."""

import json
from typing import Any

import numpy as np
import torch


def broadcast_json(values: dict[str, Any], device: torch.device, world: int) -> dict[str, Any]:
    """Rank 0's values on every rank, as JSON bytes: torch's own broadcast of objects would be a pickle."""
    if world == 1:
        return values
    data = torch.from_numpy(np.frombuffer(json.dumps(values).encode(), np.uint8).copy()).to(device)
    size = torch.tensor([len(data)], device=device)
    torch.distributed.broadcast(size, 0)
    if torch.distributed.get_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    torch.distributed.broadcast(data, 0)
    result: dict[str, Any] = json.loads(data.cpu().numpy().tobytes())
    return result


def gather_flags(flag: bool, device: torch.device, world: int) -> list[bool]:
    """Every rank's flag, by rank, on every rank."""
    if world == 1:
        return [flag]
    flags = torch.zeros(world, dtype=torch.int32, device=device)
    flags[torch.distributed.get_rank()] = int(flag)
    torch.distributed.all_reduce(flags)
    return [bool(value) for value in flags.tolist()]
