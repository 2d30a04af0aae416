"""What stays of a text between two calls, so that the next prompt is only read from where it goes on.

B rows, T prompt tokens.
"""

from __future__ import annotations

from typing import cast

import torch
from headsmith.heads.drafter import Drafter, DraftState, RewindableDrafter
from torch import Tensor

from .engine import Session


class Past:
    """The caches of target and drafter after a call, and the texts they belong to.

    Give one and the same `Past` to successive calls of one decoder, as a chat does: of each prompt only the tokens from
    where it departs from the text before it are run. The answer is the same as without.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.state: DraftState | None = None
        self._drafter: Drafter | None = None
        self._texts: list[list[int]] = []
        self._observed: Tensor | None = None  # [B] tokens whose features the drafter has taken in

    def resume(self, session: Session, drafter: Drafter | None, prompts: Tensor, lengths: Tensor) -> Session:
        """The session to go on with: the kept one, cut back to what the [B, T] prompts share with it, or the new one.

        Raises: ValueError if what is kept belongs to another target, drafter or number of rows.
        """
        if self.session is None or not self._texts:
            self._begin(session, drafter)
            return session
        if self.session.target is not session.target or self._drafter is not drafter:
            raise ValueError("this past belongs to another target or drafter; use a new Past for each decoder")
        if len(self._texts) != len(prompts):
            raise ValueError(f"this past holds {len(self._texts)} rows, the prompts are {len(prompts)}; use a new Past")
        kept = self.session.rewind(self._shared(prompts, lengths))
        rewinds = drafter is None or isinstance(drafter, RewindableDrafter)
        if not rewinds or not bool((kept > 0).all()):
            self._begin(session, drafter)
            return session
        if self.state is not None:
            cast(RewindableDrafter, drafter).rewind(self.state, kept)
        self._texts = []  # of a call that is interrupted nothing is known
        return self.session

    def keep(self, state: DraftState | None, texts: list[list[int]], observed: Tensor) -> None:
        """After a call: the rows' texts, of which the session has cached all but the last tokens."""
        self.state, self._texts, self._observed = state, texts, observed

    def _begin(self, session: Session, drafter: Drafter | None) -> None:
        self.session, self._drafter, self.state, self._texts = session, drafter, None, []

    def _shared(self, prompts: Tensor, lengths: Tensor) -> Tensor:
        """[B] tokens that need not be run again.

        The drafter pairs each feature with the token after it, so the last shared token is run once more.
        """
        assert self._observed is not None
        shared = []
        for text, prompt, length in zip(self._texts, prompts.tolist(), lengths.tolist()):
            pairs = zip(text, prompt[:length])
            shared.append(next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(text), length)))
        found = torch.tensor(shared, device=lengths.device) - 1
        if self._drafter is not None:
            found = torch.minimum(found, self._observed)
        return found.clamp(min=0)
