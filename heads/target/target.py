"""Target: one adapter over any transformers causal LM, frozen.

B rows, T tokens, C captured layers, H hidden, V vocabulary, V_d draft vocabulary.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..drafter import Needs, TargetFeatures
from .features import captured, stack
from .fingerprint import fingerprint
from .head_path import HeadPath
from .loading import load_model, load_tokenizer
from .locate import find_decoder, find_layers, text_config

CHUNK = 1024  # positions whose whole-vocabulary logits exist at one time


class Target:
    """A frozen causal LM as drafters, engine and trainer see it.

    Args:
        model: any transformers causal LM. It is put in eval mode and its parameters need no gradient from here on.
        tokenizer: its tokenizer, or None where only token ids are used.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = text_config(model)
        self.decoder: Any = find_decoder(model)
        self._heads: dict[int | None, tuple[Tensor | None, HeadPath]] = {}

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
    ) -> Target:
        """Load a hub name, a local folder, a peft adapter (merged into its base), or the embedded target by its alias.

        Raises: FileNotFoundError for a local path that is not there; whatever transformers raises for the rest.
        """
        model = load_model(name_or_path, dtype, device_map, attn_implementation, trust_remote_code)
        return cls(model, load_tokenizer(name_or_path, trust_remote_code))

    @property
    def name(self) -> str:
        return str(getattr(self.model, "name_or_path", "") or type(self.model).__name__)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        """Rows of the head: the size of the logits, which may exceed the tokenizer's length."""
        return cast(Any, self.model).get_output_embeddings().weight.shape[0]

    @property
    def num_tokens(self) -> int:
        """Token ids that may be drafted: rows beyond the tokenizer are padding."""
        return min(self.vocab_size, len(self.tokenizer)) if self.tokenizer is not None else self.vocab_size

    @property
    def max_positions(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return cast(Any, self.model).get_input_embeddings().weight.device

    @cached_property
    def layers(self) -> Any:
        """The list of decoder layers; a target without one decodes all the same, only capture needs it."""
        return find_layers(self.decoder, self.config.num_hidden_layers)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.model)

    def embed(self, ids: Tensor) -> Tensor:
        """[...] token ids -> [..., H], with the scaling that the model's own embedding module applies."""
        return cast(Any, self.model).get_input_embeddings()(ids)

    def head(self, rows: Tensor | None = None) -> HeadPath:
        """The model's own head path, over the whole vocabulary or over the token ids `rows` [V_d]."""
        key = None if rows is None else id(rows)
        if key not in self._heads:
            # The rows are kept beside their path, so that an id is never another tensor's.
            self._heads[key] = (rows, HeadPath(self.model, rows))
        return self._heads[key][1]

    def head_weight(self, rows: Tensor | None = None) -> Tensor:
        """[V, H] (or the chosen rows of) the weight of the language-model head."""
        weight = cast(Any, self.model).get_output_embeddings().weight.detach()
        return weight if rows is None else weight[rows.to(weight.device)]

    def teacher(self, draft_ids: Tensor | None = None) -> FrozenTeacher:
        """What trained drafters see of this target."""
        return FrozenTeacher(self, draft_ids)

    def logits(self, feature: Tensor) -> Tensor:
        """[..., H] features after the final norm -> [..., V]."""
        return self.head()(feature)

    @torch.no_grad()
    def features(
        self, input_ids: Tensor, needs: Needs, loss_mask: Tensor | None = None, with_top: bool = False
    ) -> TargetFeatures:
        """Run the target over right-padded sequences and keep what a drafter needs.

        Args:
            input_ids: [B, T], padded on the right with any token: causal attention never looks there.
            loss_mask: [B, T] passed on.
            with_top: also record the target's most likely next token, before the learned tokens of `loss_mask`
                (-1 elsewhere), or at every position without one.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        with captured(self.layers, needs.layers) as found:
            output = self.decoder(input_ids=input_ids, position_ids=positions, use_cache=False)
        final = output.last_hidden_state
        return TargetFeatures(
            input_ids=input_ids,
            hidden=stack(found, needs.layers, final) if needs.layers else None,
            final=final,
            loss_mask=loss_mask,
            position_ids=positions,
            top=self._top(final, loss_mask) if with_top else None,
        )

    def _top(self, final: Tensor, loss_mask: Tensor | None) -> Tensor:
        # The head reads a whole vocabulary at each position: nobody asks about those before unlearned tokens.
        wanted = torch.ones(final.shape[:2], dtype=torch.bool, device=final.device)
        if loss_mask is not None:
            wanted = F.pad(loss_mask[:, 1:], (0, 1))
        flat = final[wanted]
        # .max(-1) is several times quicker than argmax on bf16 rows of a whole vocabulary.
        parts = [self.logits(flat[i : i + CHUNK]).max(-1).indices for i in range(0, len(flat), CHUNK)]
        top = torch.full(final.shape[:2], -1, device=final.device)
        top[wanted] = torch.cat([top.new_empty(0), *parts])
        return top


class FrozenTeacher:
    """The target as trained drafters see it (`Teacher`): its head over the draft vocabulary, its embeddings."""

    def __init__(self, target: Target, draft_ids: Tensor | None = None) -> None:
        self._head = target.head(draft_ids)
        self._embed: nn.Module = cast(Any, target.model).get_input_embeddings()

    def logits(self, feature: Tensor) -> Tensor:
        return self._head(feature)

    def embed(self, ids: Tensor) -> Tensor:
        return self._embed(ids)
