"""What the first rank decides, on every rank."""

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
