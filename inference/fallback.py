"""What happens where a target takes no draft: plain decoding, or the model's own generate(), and one warning.

B rows, T prompt tokens.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from headsmith.heads.target import Target
from torch import Tensor

from .engine import Forward
from .options import decoding_options
from .paths import PathForward
from .rows import by_step, right_padded
from .stats import DecodeStats


def only_generates(forward: Forward) -> bool:
    """Whether nothing but the model's own generate() drives the target."""
    return isinstance(forward, PathForward) and forward.drive.path == "generate"


def fallback(target: Target, forward: Forward, drafts: bool) -> str:
    """Why nothing is drafted although it was asked for, said in one warning; empty where all is as asked for."""
    if not isinstance(forward, PathForward) or forward.drive.path == "paths":
        return ""
    if only_generates(forward):
        how = "is handed over to its own generate(), row by row"
    elif drafts:
        how = "decodes plainly, a token a forward, and without the drafter"
    else:
        return ""
    warnings.warn(f"{target.name} {how}: {forward.drive.reason}", stacklevel=3)
    return forward.drive.reason


def own_generate(
    target: Target,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    streamer: Any,
    generator: torch.Generator | None,
    arguments: dict[str, Any],
) -> tuple[Tensor, DecodeStats, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
    """Decode [B, T] by `model.generate`, each row without its padding; the fields of a `DecodeOutput`.

    Raises: ValueError for an argument that the decoder does not honour either, or a streamer for several rows.
    """
    prompts, lengths = right_padded(input_ids, attention_mask)
    options = decoding_options(target, prompts, lengths, **arguments)
    if streamer is not None and len(prompts) > 1:
        raise ValueError(f"a streamer shows one row, not {len(prompts)}; decode the prompts one by one")
    given = arguments | {"return_dict_in_generate": True, "tokenizer": arguments.get("tokenizer") or target.tokenizer}
    allowed = given.pop("prefix_allowed_tokens_fn", None)
    outputs = []
    with torch.random.fork_rng(enabled=generator is not None):
        if generator is not None:
            # generate() draws from the global source; the caller's decides which of its streams that is.
            torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator, device=generator.device)))
        for row, (prompt, length) in enumerate(zip(prompts, lengths.tolist())):
            ids = prompt[None, :length]
            if allowed is not None:
                # There is one row in this call; the caller counts those of the whole batch.
                given["prefix_allowed_tokens_fn"] = lambda _, text, row=row: allowed(row, text)
            mask = torch.ones_like(ids)
            outputs.append(target.model.generate(ids, attention_mask=mask, streamer=streamer, **given))
    answers = [out.sequences[0, length:] for out, length in zip(outputs, lengths.tolist())]
    new = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=options.pad)
    steps = sum(len(answer) - 1 for answer in answers)
    stats = DecodeStats("generate", len(answers), forwards=new.shape[1] - 1, row_forwards=steps, committed=steps)
    scores = by_step([[step[0] for step in out.scores] for out in outputs]) if options.scores else None
    logits = by_step([[step[0] for step in out.logits] for out in outputs]) if options.logits else None
    return torch.cat((input_ids, new), 1), stats, scores, logits
