"""Whether another model reads token ids as the target does."""

from __future__ import annotations

from typing import Any

from .target import Target


def require_same_tokenizer(what: str, tokenizer: Any, target: Target, instead: str) -> None:
    """Check that a model which is to draft in the target's token ids has its tokenizer.

    Args:
        what: the model, as the error names it.
        instead: what else may be asked for, as the error ends.
    Raises: ValueError if one token has another id, or is missing on either side.
    """
    found, wanted = tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if found != wanted:
        raise ValueError(
            f"{what} has another tokenizer than {target.name}: {len(found)} tokens, expected the same {len(wanted)}; "
            f"name a smaller model of the target's own family, or {instead}"
        )
