"""How a target can be driven: a small draft tree on random tokens, held against ordinary forwards of its root paths.

r rows, T prompt tokens, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..cache import RaggedTreeCache
from ..tree import ancestor_mask
from .alibi import find_builder
from .locate import UnsupportedTargetError
from .masks import MaskKind, mask_kinds
from .nodes import TreeNodes, run_nodes
from .paths import PathCaches, root_paths
from .target import Target

# Root-mean-square difference of the logits on random tokens, in their standard deviations. The model itself, in bf16,
# stands 0.08 from its fp32 logits there; a wrong layout gives 0.5 and more.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.25}
LENGTHS = (7, 5)
# Branches at several depths, another shape a row; deep enough to leave the windows below.
PARENTS = ((-1, 0, 0, 1, 2, 3), (-1, 0, 1, 0, 2, 4))
WINDOW = 4  # during the probe, in place of any longer window: these are then seen at work in a dozen tokens
TREE_ATTENTION = ("sdpa", "eager")  # implementations that take a 4D mask

_Seen = tuple[Tensor, Tensor]  # features of some nodes, and the logits expected there


@dataclass(frozen=True)
class Drive:
    """What the probe found.

    Args:
        path: `tree`: a draft tree in one forward; `paths`: its root paths as batch rows, accepted tokens run again;
            `plain`: one token a forward; `generate`: only `model.generate` drives this model.
        mask: the mask container of `tree`.
        attention: the attention implementation.
        alibi: whether ALiBi is built from logical positions.
        reason: why not a tree, or not even paths; empty for a tree.
    """

    path: Literal["tree", "paths", "plain", "generate"]
    mask: MaskKind | None
    attention: str
    alibi: bool = False
    reason: str = ""

    def __str__(self) -> str:
        how = f"{self.attention} attention"
        if self.mask is not None:
            how = f"{'one mask' if self.mask == 'one tensor' else 'a mask per layer type'}, {how}"
        if self.alibi:
            how += ", ALiBi at logical positions"
        return f"{self.path} ({how})" + (f": {self.reason}" if self.reason else "")


def probe(target: Target) -> Drive:
    """Find out how `target` is driven; done once a target, a few forwards of a few tokens."""
    found: Drive | None = target.__dict__.get("_drive")
    if found is None:
        found = target.__dict__["_drive"] = _probe(target)
    return found


@torch.inference_mode()
def _probe(target: Target) -> Drive:
    own = target.config._attn_implementation
    with _short_windows(target.config):
        sample, reason = _attempt(lambda: _Sample(target))
        if sample is None:
            return Drive("generate", None, own, reason=f"no forward without a cache: {reason}")
        reasons = []
        for drive in _tree_drives(target, own):
            if not (reason := _failure(target, partial(_by_tree, target, sample, drive))):
                return drive
            reasons.append(reason)
    # The first is the way that the target's configuration asks for: what went wrong there is the reason.
    return _without_tree(target, own, f"no tree in one cache: {reasons[0]}")


def _without_tree(target: Target, own: str, why: str) -> Drive:
    """Paths, or single tokens: the windows are the model's own affair there, and stay as long as they are."""
    sample = _Sample(target)
    if not (reason := _failure(target, partial(_by_paths, target, sample))):
        return Drive("paths", None, own, reason=why)
    why += f"; no continuation by several tokens: {reason}"
    if not (reason := _failure(target, partial(_by_steps, target, sample))):
        return Drive("plain", None, own, reason=why)
    return Drive("generate", None, own, reason=f"{why}; nor by one: {reason}")


def _tree_drives(target: Target, own: str) -> Iterator[Drive]:
    others = [name for name in TREE_ATTENTION if name != own]
    biases = (False, True) if find_builder(target.decoder) else (False,)
    for attention in ([own] if own in TREE_ATTENTION else []) + others:
        for kind in mask_kinds(target.config):
            for alibi in biases:
                yield Drive("tree", kind, attention, alibi)


class _Sample:
    """Random prompts and trees, and the logits [r, N, V] that ordinary forwards of the root paths give."""

    def __init__(self, target: Target) -> None:
        generator = torch.Generator().manual_seed(0)
        rows, device = len(LENGTHS), target.device
        shape = (rows, max(LENGTHS) + len(PARENTS[0]))
        tokens = torch.randint(target.num_tokens, shape, generator=generator).to(device)
        self.prompts, self.tokens = tokens[:, : max(LENGTHS)], tokens[:, max(LENGTHS) :]
        self.lengths = torch.tensor(LENGTHS, device=device)
        parents = torch.tensor(PARENTS, device=device)
        self.ancestors = ancestor_mask(parents)
        self.depth = self.ancestors.sum(2) - 1
        self.expected = self._expected(target)

    def texts(self) -> list[tuple[int, list[int], Tensor]]:
        """Every root path as (row, its nodes, prompt and path)."""
        found = []
        for row, length in enumerate(LENGTHS):
            for path in root_paths(self.ancestors[row]):
                found.append((row, path, torch.cat((self.prompts[row, :length], self.tokens[row, path]))))
        return found

    def _expected(self, target: Target) -> Tensor:
        texts = self.texts()
        # Padding on the right is never looked at.
        padded = torch.nn.utils.rnn.pad_sequence([text for _, _, text in texts], batch_first=True)
        logits = target.model(input_ids=padded, use_cache=False).logits.float()
        expected = logits.new_zeros(*self.tokens.shape, logits.shape[-1])
        for (row, path, text), values in zip(texts, logits):
            expected[row, path] = values[len(text) - len(path) : len(text)]
        return expected


def _by_tree(target: Target, sample: _Sample, drive: Drive) -> _Seen:
    assert drive.mask is not None
    nodes = TreeNodes(target, drive.mask, drive.attention, drive.alibi)
    rows, longest = sample.prompts.shape
    cache = RaggedTreeCache(list(nodes.shapes.values()), rows, longest, target.dtype, target.device)
    chain = torch.arange(longest, device=target.device).expand(rows, longest)
    run_nodes(nodes, cache, sample.prompts, chain, None)
    cache.commit(chain, sample.lengths)
    return run_nodes(nodes, cache, sample.tokens, sample.depth, sample.ancestors)[0], sample.expected


def _by_paths(target: Target, sample: _Sample) -> _Seen:
    """The end of the prompt is a round of its own, not accepted whole, so that running again is seen too."""
    cache = PathCaches(target, len(LENGTHS))
    cut = torch.tensor([length - 2 for length in LENGTHS], device=target.device)
    cache.extend(sample.prompts, cut, slice(None), ())
    rest = sample.prompts.gather(1, (cut[:, None] + torch.arange(3, device=target.device)).clamp(max=max(LENGTHS) - 1))
    cache.forward(rest, None, slice(None), ())
    steps = torch.arange(2, device=target.device).expand(len(LENGTHS), 2)
    cache.commit(steps, torch.full_like(cut, 2))
    return cache.forward(sample.tokens, sample.ancestors, slice(None), ())[0], sample.expected


def _by_steps(target: Target, sample: _Sample) -> _Seen:
    """A root path of each row, token by token."""
    paths = [root_paths(above)[0] for above in sample.ancestors]
    path = torch.tensor([nodes[: min(map(len, paths))] for nodes in paths], device=target.device)
    rows = torch.arange(len(path), device=target.device)[:, None]
    cache = PathCaches(target, len(LENGTHS))
    cache.extend(sample.prompts, sample.lengths, slice(None), ())
    finals = []
    for tokens in sample.tokens[rows, path].split(1, dim=1):
        finals.append(cache.forward(tokens, None, slice(None), ())[0])
        cache.commit(torch.zeros_like(tokens), torch.ones_like(sample.lengths))
    return torch.cat(finals, 1), sample.expected[rows, path]


def _failure(target: Target, run: Callable[[], _Seen]) -> str:
    """Why a way of running the sample will not do; empty if it gives the expected logits."""
    seen, reason = _attempt(run)
    if seen is None:
        return reason
    final, expected = seen
    logits, reason = _attempt(lambda: target.logits(final).float())
    if logits is None:
        return reason
    if logits.shape != expected.shape:
        return f"logits of shape {list(logits.shape)} in place of {list(expected.shape)}"
    error = float((logits - expected).square().mean().sqrt() / expected.std())
    return "" if error < TOLERANCE[target.dtype] else f"its logits are off by {error:.2g} standard deviations"


def _attempt(run: Callable[[], Any]) -> tuple[Any, str]:
    """What `run` returns, or None and the error: modelling code of any kind may refuse in any way."""
    try:
        return run(), ""
    except UnsupportedTargetError as error:
        return None, str(error)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return None, f"{type(error).__name__}: {lines[0][:160]}"


@contextmanager
def _short_windows(config: Any) -> Iterator[None]:
    before = {}
    for name in ("sliding_window", "attention_chunk_size"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > WINDOW:
            before[name] = value
            setattr(config, name, WINDOW)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
