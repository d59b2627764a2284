"""The tensors of model.safetensors against the geometry of config.json: names, shapes, types, finite values.

SGLang ignores tensors that it does not know and leaves out of its layers what is missing, both without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from dflash_train.speculate.drafter_folder import DrafterFolder
from dflash_train.speculate.findings import Check, error, ok, warning
from dflash_train.speculate.loading import WEIGHTS_FILE

TARGET_TENSORS = ("embed_tokens.weight", "lm_head.weight")
"""What a drafter may carry of its target; vLLM then takes it in place of the target's own, SGLang ignores it."""
DTYPES = ("BF16", "F16", "F32")
NUM_SHOWN = 4


def wanted_shapes(folder: DrafterFolder) -> dict[str, tuple[int, ...]] | None:
    """Name and shape of every tensor that config.json asks for; None where it does not say enough."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = [folder.integer(name) for name in (*names, "head_dim")]
    ids = folder.target_layer_ids()
    known = [size for size in sizes if size is not None and size > 0]
    if len(known) < len(sizes) or ids is None:
        return None
    hidden, mlp, num_layers, heads, kv_heads, head_dim = known
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    return shapes | {
        f"layers.{index}.{name}.weight": shape for index in range(num_layers) for name, shape in layer.items()
    }


def check_tensors(folder: DrafterFolder) -> list[Check]:
    """Names, shapes, types and values."""
    wanted = wanted_shapes(folder)
    if wanted is None:
        return [
            error(
                "tensors",
                "config.json does not say which tensors there must be.",
                "Mend config.json, then check again.",
            )
        ]
    checks = [*_names(folder.shapes.keys(), wanted), *_shapes(folder.shapes, wanted)]
    if not checks:
        size = sum(map(_count, folder.shapes.values()))
        checks.append(ok("tensors", f"all {len(wanted)} are there with their shapes, {size:,} parameters."))
    return [*checks, _dtypes(folder), _values(folder)]


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _names(found: Collection[str], wanted: Mapping[str, tuple[int, ...]]) -> list[Check]:
    prefixed = [name for name in found if name.removeprefix("model.") in wanted and name not in wanted]
    if prefixed:
        text = (
            f"{len(prefixed)} tensors have the prefix «model.» ({prefixed[0]} …), which z-lab's package does not know."
        )
        return [error("tensor names", text, "Write them without the prefix.")]
    checks = []
    missing = [name for name in wanted if name not in found]
    if missing:
        text = f"model.safetensors lacks {_list(missing)}; SGLang would go on with what stands in memory."
        checks.append(error("missing tensors", text, "Export the drafter again."))
    unknown = [name for name in found if name not in wanted and name not in TARGET_TENSORS]
    if unknown:
        text = f"model.safetensors has {_list(unknown)}, which config.json does not ask for; SGLang ignores them."
        checks.append(error("unknown tensors", text, "Are num_hidden_layers and the kind of drafter right?"))
    return checks


def _shapes(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> list[Check]:
    wrong = []
    for name, shape in wanted.items():
        has = found.get(name, shape)
        if has != shape:
            transposed = ", its transpose" if has == shape[::-1] else ""
            wrong.append(f"{name} is {list(has)}{transposed}, wanted {list(shape)}")
    if not wrong:
        return []
    more = f" and {len(wrong) - NUM_SHOWN} more" if len(wrong) > NUM_SHOWN else ""
    text = f"{'; '.join(wrong[:NUM_SHOWN])}{more}."
    return [error("tensor shapes", text, "Export the drafter again, or mend the geometry in config.json.")]


def _dtypes(folder: DrafterFolder) -> Check:
    name, found = "tensor types", sorted(set(folder.dtypes.values()))
    unknown = [dtype for dtype in found if dtype not in DTYPES]
    if unknown:
        return error(name, f"{', '.join(unknown)} tensors are there; wanted {', '.join(DTYPES)}.", "Export it again.")
    if found != ["BF16"]:
        text = f"the tensors are {', '.join(found)}; engines round them to the target's type when they load them."
        return warning(name, text, "`dflash export --format z-lab` writes bfloat16.")
    return ok(name, "bfloat16.")


def _values(folder: DrafterFolder) -> Check:
    """NaN and infinity; one tensor in memory at a time."""
    import torch
    from safetensors import safe_open

    def bad(path: Path) -> list[str]:
        with safe_open(path, framework="pt") as file:
            tensors = ((name, file.get_tensor(name)) for name in folder.shapes)
            return [name for name, tensor in tensors if not bool(torch.isfinite(tensor.float()).all())]

    wrong = bad(folder.path / WEIGHTS_FILE)
    if wrong:
        return error("values", f"{_list(wrong)} hold NaN or infinity.", "Take an earlier checkpoint.")
    return ok("values", "all are finite.")


def _list(names: list[str]) -> str:
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(names[:NUM_SHOWN]) + more
