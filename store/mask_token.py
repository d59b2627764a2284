"""Which row of the embedding may fill a block's open slots: chosen by train-drafter, foreseen by extract.

Both stages ask, and neither imports the other; the tokenizer is given, so nothing is loaded here.
"""

from __future__ import annotations

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
