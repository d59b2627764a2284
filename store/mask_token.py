"""Which row of the embedding may fill a block's open slots: chosen by train-drafter, foreseen by extract, judged by check.

Both stages ask, and neither imports the other; the tokenizer is given, so nothing is loaded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUM_PROPOSED = 8


def default_mask_token(tokenizer: Any, vocab_size: int) -> int | None:
    """The tokenizer's own mask token, else the first row of the embedding that it does not use; None if there is neither.

    Never pad or eos, which stand in the training text (algorithm: Qwen3's 151669 is such an unused row).
    """
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    first_unused = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)
    return first_unused if first_unused < vocab_size else None


def mask_token_wanted(tokenizer: Any) -> str:
    """What to give where there is no default: in words, with added tokens that the chat template does not hold."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    common = set(tokenizer.all_special_tokens)
    rare = [text for text in tokenizer.get_added_vocab() if text not in common and text not in template]
    example = f"perhaps {', '.join(map(repr, rare[:NUM_PROPOSED]))}" if rare else "such as a reserved one"
    return f"the id or text of a token that never occurs in the data, {example}"


def mask_token_fault(token: int, tokenizer: Any, text_config: Mapping[str, Any]) -> str | None:
    """Why a row of the embedding must not be the mask token, as a sentence without its stop; None where it may be.

    text_config is the config of the target's language model, defaults included.
    """
    special = _special_roles(tokenizer, text_config).get(token)
    if special is not None:
        return f"{token} is the target's {special} token, which stands in every text: drafts would read it as a mask"
    word = token_text(token, tokenizer)
    if word is None or token == tokenizer.mask_token_id:
        return None
    if word not in tokenizer.get_added_vocab() and word not in tokenizer.all_special_tokens:
        return f"{token} is {word!r}, a token of ordinary text"
    if word in str(getattr(tokenizer, "chat_template", None) or ""):
        return f"{token} is {word!r}, which the chat template writes"
    return None


def token_text(token: int, tokenizer: Any) -> str | None:
    """The token as the vocabulary has it; None for a row that the tokenizer does not use."""
    return {index: text for text, index in tokenizer.get_vocab().items()}.get(token)


def _special_roles(tokenizer: Any, text_config: Mapping[str, Any]) -> dict[int, str]:
    roles: dict[int, str] = {}
    for role in ("unk", "pad", "bos", "eos"):  # the last one wins: pad often is eos
        name = f"{role}_token_id"
        for ids in (text_config.get(name), getattr(tokenizer, name, None)):
            for token in ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]:
                roles[int(token)] = role
    return roles
