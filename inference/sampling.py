"""generate()'s logits processors over a draft tree: each node is shown its own path, as generate() would show it.

B rows, N tree nodes, V vocabulary, n nodes of one call, L tokens of a text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from headsmith.heads.tree import DraftTree
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as known

# They look at the scores alone. Exact types: a subclass may look at more.
PREFIX_FREE = (
    known.TemperatureLogitsWarper, known.TopKLogitsWarper, known.TopPLogitsWarper, known.TopHLogitsWarper,
    known.MinPLogitsWarper, known.TypicalLogitsWarper, known.EpsilonLogitsWarper, known.EtaLogitsWarper,
    known.SuppressTokensLogitsProcessor, known.InfNanRemoveLogitsProcessor, known.LogitNormalization,
)  # fmt: skip
# They carry state from step to step, or run the model once more: a node of a tree cannot be replayed on them.
STATEFUL = (
    known.UnbatchedClassifierFreeGuidanceLogitsProcessor, known.ClassifierFreeGuidanceLogitsProcessor,
    known.DiaClassifierFreeGuidanceLogitsProcessor, known.DiaEOSDelayPatternLogitsProcessor,
    known.SynthIDTextWatermarkLogitsProcessor, known.WatermarkLogitsProcessor, known.WhisperNoSpeechDetection,
)  # fmt: skip


@dataclass
class Texts:
    """What every row has said, prompt and answer, without padding.

    Args:
        tokens: [B, L + 1] right-padded; the last column takes what does not fit.
        lengths: [B] tokens that are committed.
        most: [B] the length at which a row ends.
    """

    tokens: Tensor
    lengths: Tensor
    most: Tensor

    @classmethod
    def of(cls, prompts: Tensor, lengths: Tensor, limits: Sequence[int]) -> Texts:
        """Right-padded prompts [B, T] with room for `limits` new tokens each."""
        most = lengths + torch.tensor(limits, device=lengths.device)
        tokens = torch.nn.functional.pad(prompts, (0, max(limits) + 1))
        return cls(tokens, lengths, most)

    def write(self, new: Tensor) -> None:
        """Put [B, M] tokens behind each row's text; they count once `lengths` says so."""
        index = self.lengths[:, None] + torch.arange(new.shape[1], device=new.device)
        self.tokens.scatter_(1, index.clamp(max=self.tokens.shape[1] - 1), new)


class NodeProcessors:
    """The logits processors of a batch: one list a row, in generate()'s order, as its single-row call makes them.

    Args:
        by_row: B lists; nodes of rows that share a list are processed together.
        given: the caller's own processors. They are shown one node at a time, since they may expect one row.
        sample: tokens are drawn; else the best one is taken.
        eos: token ids that end a row: generate() shows no processor what would follow.
    Raises: ValueError naming a processor that cannot be replayed at the nodes of a tree.
    """

    def __init__(
        self, by_row: Sequence[LogitsProcessorList], given: Sequence[Any], sample: bool, eos: Sequence[int]
    ) -> None:
        self.by_row, self.sample = by_row, sample
        for processor in by_row[0]:
            if isinstance(processor, STATEFUL):
                raise ValueError(
                    f"{type(processor).__name__} keeps state from step to step and cannot be replayed at the nodes of "
                    "a draft tree; leave it out, or decode with model.generate"
                )
        self.reads_text = any(type(processor) not in PREFIX_FREE for processor in by_row[0])
        self._alone = {id(processor) for processor in given if type(processor) not in PREFIX_FREE}
        self._eos = torch.tensor(eos, dtype=torch.long)

    def __call__(self, logits: Tensor, tree: DraftTree, texts: Texts | None) -> Tensor:
        """[B, N, V] logits -> [B, N, V] processed scores; the very logits where there is nothing to do.

        Args: texts: what the rows have said up to node 0; needed only if `reads_text`.
        """
        if not self.by_row[0]:
            return logits
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if texts is None:
            # Prefix-free processors want no token ids: whatever stands in their place is ignored.
            return self.by_row[0](cast(Any, None), scores.flatten(0, 1)).view(scores.shape)
        return self._along_paths(scores, tree, texts)

    def _along_paths(self, raw: Tensor, tree: DraftTree, texts: Texts) -> Tensor:
        """Level by level: a node is shown only where generate() could have come, nothing beyond a ban or an EOS.

        Constraints may fail on texts that they have forbidden themselves. Nodes not shown score zero: what a
        verification finds there is never said.
        """
        scores = torch.zeros_like(raw)
        valid, parents = tree.valid(), tree.parents.clamp(min=0)
        ends = torch.isin(tree.tokens, self._eos.to(tree.tokens.device))
        ends |= texts.lengths[:, None] + tree.depth >= texts.most[:, None]
        shown = valid & (tree.parents < 0)
        depth = 0
        while bool(shown.any()):
            rows, nodes = shown.nonzero(as_tuple=True)
            done = self._level(raw[rows, nodes], tree, texts, depth, rows, nodes)
            scores[rows, nodes] = done
            if self.sample:
                whole = torch.arange(len(scores), device=scores.device)[:, None]
                possible = scores[whole, parents, tree.tokens] > -torch.inf
            else:
                best = torch.full_like(tree.tokens, -1)
                best[rows, nodes] = done.argmax(-1)
                possible = tree.tokens == best.gather(1, parents)
            shown = valid & (tree.parents >= 0) & shown.gather(1, parents) & possible & ~ends
            depth += 1
        return scores

    def _level(self, scores: Tensor, tree: DraftTree, texts: Texts, depth: int, rows: Tensor, nodes: Tensor) -> Tensor:
        """[n, V] scores of nodes of one depth, those with a common list and length in one call."""
        paths = _paths(tree, depth, rows, nodes)
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place, (row, length) in enumerate(zip(rows.tolist(), texts.lengths[rows].tolist())):
            groups[id(self.by_row[row]), length].append(place)
        done = torch.empty_like(scores)
        for (_, length), places in groups.items():
            members = rows[places]
            ids = torch.cat((texts.tokens[members, :length], paths[places]), 1)
            done[places] = self._processed(self.by_row[int(members[0])], ids, scores[places])
        return done

    def _processed(self, processors: LogitsProcessorList, ids: Tensor, scores: Tensor) -> Tensor:
        for processor in processors:
            one = LogitsProcessorList([processor])
            if id(processor) in self._alone:
                scores = torch.cat([one(ids[i : i + 1], scores[i : i + 1]) for i in range(len(ids))])  # type: ignore[arg-type]
            else:
                scores = one(ids, scores)  # type: ignore[arg-type]
        return scores


def _paths(tree: DraftTree, depth: int, rows: Tensor, nodes: Tensor) -> Tensor:
    """[n, depth] tokens on the way from below node 0 to each of the nodes, all of this depth."""
    tokens = rows.new_empty(len(rows), depth)
    for level in range(depth - 1, -1, -1):
        tokens[:, level] = tree.tokens[rows, nodes]
        nodes = tree.parents[rows, nodes]
    return tokens
