"""Verification is lossless: as an exact law in fractions, as statistics of known power, and case by case."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from headsmith.heads.tree import DraftTree
from headsmith.inference import verify
from headsmith.inference.verify import (
    NonFiniteLogitsError,
    Verified,
    accept_probability,
    inverse_cdf,
    residual,
    uniforms_needed,
    verify_greedy,
    verify_lossless,
    verify_typical,
)
from torch import Tensor

from tests.laws import chi_square_p_value, chi_square_power, count_sequences, joint_law, processed

Context = tuple[int, ...]
Distribution = tuple[Fraction, ...]
Conditional = Callable[[Context], Distribution]
Law = dict[Context, Fraction]
JUST = 1e-9  # how far inside its cell a uniform number is tried: thresholds are exact to this


# ---- Exact laws in fractions ---------------------------------------------------------------------
#
# What is emitted is piecewise constant in the uniform numbers. The cells are worked out in fractions; the
# real function runs at the lowest and at the highest corner of every cell, and both must agree; the volume of
# the cell is the exact probability of that outcome.


@dataclass(frozen=True)
class Tree:
    """One row: a tree with its tokens filled in; `order` is None where children are fixed."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    count: int
    order: tuple[int, ...] | None = None

    def context(self, node: int) -> Context:
        return () if node == 0 else (*self.context(self.parents[node]), self.tokens[node])

    def depth(self, node: int) -> int:
        return 0 if node == 0 else self.depth(self.parents[node]) + 1

    def children(self, node: int) -> list[int]:
        """Real children, in draw order."""
        found = [child for child in range(1, self.count) if self.parents[child] == node]
        return found if self.order is None else sorted(found, key=self.order.__getitem__)


def normalise(weights: Sequence[Fraction | int]) -> Distribution:
    total = sum(weights)
    return tuple(Fraction(weight) / total for weight in weights)


def conditional(seed: int, vocabulary: int, least: int = 0) -> Conditional:
    """A distribution of small rationals for every context, zeros among them if `least` is 0."""

    @cache
    def distribution(context: Context) -> Distribution:
        dice = random.Random(f"{seed} {context}")
        weights = [dice.randint(least, 3) for _ in range(vocabulary)]
        return normalise(weights) if sum(weights) else distribution((*context, -1))

    return distribution


def over_vocabulary(q: Distribution, draft_ids: Sequence[int], size: int) -> Distribution:
    spread = [Fraction(0)] * size
    for token, mass in zip(draft_ids, q):
        spread[token] = mass
    return tuple(spread)


def cumulative(p: Distribution) -> set[Fraction]:
    return set(itertools.accumulate(p))


def thresholds(tree: Tree, p: Conditional, q: Conditional | None) -> list[set[Fraction]]:
    """For every column of uniforms, where the outcome can change; q is over token ids."""
    cuts: list[set[Fraction]] = [set() for _ in tree.tokens]
    for node in range(tree.count):
        left = p(tree.context(node))
        if q is None:
            cuts[node] = cumulative(left)
            continue
        undrawn = list(q(tree.context(node)))
        for child in tree.children(node):
            token = tree.tokens[child]
            if undrawn[token] == 0:
                continue
            drawn = normalise(undrawn)
            cuts[child].add(min(Fraction(1), left[token] / drawn[token]))
            rest = [max(a - b, Fraction(0)) for a, b in zip(left, drawn)]
            left = normalise(rest) if sum(rest) else left
            undrawn[token] = Fraction(0)
        cuts[0] |= cumulative(left)
    return cuts


def batch(
    trees: Sequence[Tree], p: Conditional, q: Conditional | None, draft_ids: Sequence[int] | None = None
) -> tuple[DraftTree, Tensor]:
    """The rows as one DraftTree, and the target's [B, N, V]; padding is filled as real nodes are."""
    drafted = None if q is None else [[q(tree.context(i)) for i in range(len(tree.tokens))] for tree in trees]
    probs = [[p(tree.context(i)) for i in range(len(tree.tokens))] for tree in trees]
    draft_tree = DraftTree(
        tokens=torch.tensor([tree.tokens for tree in trees]),
        parents=torch.tensor([tree.parents for tree in trees]),
        depth=torch.tensor([[tree.depth(i) for i in range(len(tree.tokens))] for tree in trees]),
        counts=torch.tensor([tree.count for tree in trees]),
        q=None if drafted is None else real(drafted),
        draft_ids=None if draft_ids is None else torch.tensor(draft_ids),
        draw_order=None if trees[0].order is None else torch.tensor([tree.order for tree in trees]),
    )
    return draft_tree, real(probs)


def real(nested: list[list[Distribution]]) -> Tensor:
    return torch.tensor([[[float(x) for x in row] for row in rows] for rows in nested], dtype=torch.float64)


def take(tree: DraftTree, rows: Tensor) -> DraftTree:
    """The rows of a tree, repeated as `rows` says."""
    names = ("tokens", "parents", "depth", "counts", "q", "draw_order")
    values = {name: getattr(tree, name) for name in names}
    return replace(tree, **{name: value[rows] for name, value in values.items() if value is not None})


def emitted_laws(
    trees: Sequence[Tree],
    p: Conditional,
    q: Conditional | None = None,
    draft_ids: Sequence[int] | None = None,
) -> list[Law]:
    """The exact law of what one round emits in each row, by the real function, one call for all rows."""
    if q is None or draft_ids is None:
        over_tokens = q
    else:
        size, reduced = len(p(())), q
        over_tokens = lambda context: over_vocabulary(reduced(context), draft_ids, size)  # noqa: E731
    rows: list[int] = []
    volumes: list[Fraction] = []
    lows: list[Tensor] = []
    highs: list[Tensor] = []
    for row, tree in enumerate(trees):
        edges = [
            sorted({Fraction(0), Fraction(1)} | {cut for cut in cuts if 0 < cut < 1})
            for cuts in thresholds(tree, p, over_tokens)
        ]
        lows.append(grid([[float(a) + JUST for a in edge[:-1]] for edge in edges]))
        highs.append(grid([[float(b) - JUST for b in edge[1:]] for edge in edges]))
        cells = [Fraction(1)]
        for edge in edges:
            cells = [volume * (b - a) for volume in cells for a, b in itertools.pairwise(edge)]
        volumes += cells
        rows += [row] * len(cells)

    tree_batch, probs = batch(trees, p, q, draft_ids)
    index = torch.tensor(rows)
    repeated, spread = take(tree_batch, index), probs[index]
    low = verify_lossless(repeated, spread, torch.cat(lows))
    high = verify_lossless(repeated, spread, torch.cat(highs))
    for name in ("path", "counts", "bonus"):
        assert torch.equal(getattr(low, name), getattr(high, name)), f"{name} changes inside a cell"

    laws: list[Law] = [{} for _ in trees]
    tokens = repeated.tokens.gather(1, low.path).tolist()
    for row, volume, drafted, count, bonus in zip(rows, volumes, tokens, low.counts.tolist(), low.bonus.tolist()):
        emitted = (*drafted[1:count], bonus)
        laws[row][emitted] = laws[row].get(emitted, Fraction(0)) + volume
    return laws


def grid(columns: list[list[float]]) -> Tensor:
    """Every combination, the last column fastest; the order in which the cells' volumes are multiplied."""
    columns_64 = [torch.tensor(column, dtype=torch.float64) for column in columns]
    return torch.cartesian_prod(*columns_64).reshape(-1, len(columns))


def extended(law: Law, p: Conditional, length: int) -> Law:
    """The law of the first `length` tokens, plain sampling having gone on where a round emitted fewer."""
    done: Law = {}
    todo = list(law.items())
    while todo:
        emitted, mass = todo.pop()
        if len(emitted) >= length:
            done[emitted[:length]] = done.get(emitted[:length], Fraction(0)) + mass
        else:
            todo += [((*emitted, x), mass * share) for x, share in enumerate(p(emitted)) if share]
    return done


def mixture(weighted: Sequence[tuple[Fraction, Law]]) -> Law:
    total: Law = {}
    for weight, law in weighted:
        for emitted, mass in law.items():
            total[emitted] = total.get(emitted, Fraction(0)) + weight * mass
    return total


def draws(shape: Tree, q: Conditional, vocabulary: int) -> Iterator[tuple[Fraction, Tree]]:
    """Every way to fill the shape with draws from q without replacement, with its exact probability.

    A child for which q has nothing left is filled with token 0, as a builder of rectangular trees would.
    """

    def fill(tree: Tree, nodes: list[int], weight: Fraction) -> Iterator[tuple[Fraction, Tree]]:
        if not nodes:
            yield weight, tree
            return
        node, rest = nodes[0], nodes[1:]
        parent = tree.parents[node]
        undrawn = list(q(tree.context(parent)))
        siblings = tree.children(parent)
        for earlier in siblings[: siblings.index(node)]:
            undrawn[tree.tokens[earlier]] = Fraction(0)
        shares = normalise(undrawn) if sum(undrawn) else (Fraction(1),) + (Fraction(0),) * (vocabulary - 1)
        for token, share in enumerate(shares):
            if share:
                tokens = (*tree.tokens[:node], token, *tree.tokens[node + 1 :])
                yield from fill(replace(tree, tokens=tokens), rest, weight * share)

    order = [child for node in range(shape.count) for child in shape.children(node)]
    yield from fill(shape, order, Fraction(1))


def law_over_draws(
    shape: Tree, p: Conditional, q: Conditional, length: int, draft_ids: Sequence[int] | None = None
) -> Law:
    vocabulary = len(p(()))

    def over_tokens(context: Sequence[int]) -> Any:
        return q(context) if draft_ids is None else over_vocabulary(q(context), draft_ids, vocabulary)

    weights, trees = zip(*draws(shape, over_tokens, vocabulary))
    assert sum(weights) == 1
    laws = emitted_laws(trees, p, q, draft_ids)
    return extended(mixture(list(zip(weights, laws))), p, length)


def plain_law(p: Conditional, length: int) -> Law:
    return extended({(): Fraction(1)}, p, length)


CHAIN = (-1, 0, 1, 2)
BRANCHING = (-1, 0, 0, 1, 1, 3)
TWO_LEVELS = (-1, 0, 0, 1, 1, 2, 2)
FIXED = {
    "root alone": ((0,), (-1,)),
    "chain": ((0, 1, 2, 1), CHAIN),
    "branching": ((0, 2, 0, 1, 3, 0), BRANCHING),
    "all children": ((0, 0, 1, 2, 3), (-1, 0, 0, 0, 0)),
    "duplicate siblings": ((0, 1, 1, 2, 0), (-1, 0, 0, 1, 2)),
    "children apart": ((0, 3, 1, 0, 2, 1), (-1, 0, 1, 0, 3, 2)),
}


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("seed", range(3))
def test_fixed_children_emit_the_targets_law_at_every_ragged_count(name: str, seed: int) -> None:
    tokens, parents = FIXED[name]
    p = conditional(seed, 4)
    trees = [Tree(tokens, parents, count) for count in range(1, len(tokens) + 1)]
    expected = plain_law(p, 4)
    for law in emitted_laws(trees, p):
        assert extended(law, p, 4) == expected


def test_fixed_children_that_the_target_never_emits_are_never_accepted() -> None:
    def p(context: Context) -> Distribution:
        return normalise((0, 2, 1))

    (law,) = emitted_laws([Tree((0, 0, 0), (-1, 0, 1), 3)], p)
    assert law == {(1,): Fraction(2, 3), (2,): Fraction(1, 3)}


SAMPLED = {
    "chain": Tree((0,) * 4, CHAIN, 4, (0, 0, 0, 0)),
    "siblings": Tree((0,) * 3, (-1, 0, 0), 3, (0, 0, 1)),
    "three siblings": Tree((0,) * 4, (-1, 0, 0, 0), 4, (0, 0, 1, 2)),
    "two levels": Tree((0,) * 7, TWO_LEVELS, 7, (0, 0, 1, 0, 1, 0, 1)),
    "drawn in another order than laid out": Tree((0,) * 6, (-1, 0, 0, 1, 2, 2), 6, (0, 1, 0, 0, 1, 0)),
    "ragged": Tree((0,) * 7, TWO_LEVELS, 5, (0, 0, 1, 0, 1, 0, 1)),
    "ragged chain": Tree((0,) * 4, CHAIN, 3, (0, 0, 0, 0)),
}


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("seed", range(2))
def test_sampled_children_emit_the_targets_law(name: str, seed: int) -> None:
    p, q = conditional(seed, 3), conditional(seed + 100, 3, least=1)
    assert law_over_draws(SAMPLED[name], p, q, 4) == plain_law(p, 4)


def test_the_laws_above_are_of_walks_that_reach_every_depth_and_every_sibling() -> None:
    p, q = conditional(0, 3, least=1), conditional(100, 3, least=1)
    shape = SAMPLED["two levels"]
    weights, trees = zip(*draws(shape, q, 3))
    assert len(trees) == 6**3
    laws = emitted_laws(trees, p, q)
    assert extended(mixture(list(zip(weights, laws))), p, 3) == plain_law(p, 3)
    whole = {emitted for tree, law in zip(trees, laws) for emitted in law if len(emitted) == 3}
    assert len(whole) == 3**3
    second = [law for tree, law in zip(trees, laws) if any(e[:1] == (tree.tokens[2],) for e in law if len(e) > 1)]
    assert len(second) > len(trees) / 4


@pytest.mark.parametrize("name", ["chain", "siblings", "two levels"])
def test_q_equal_to_p_leaves_a_residual_of_no_mass_and_the_law_as_it_is(name: str) -> None:
    p = conditional(1, 3)
    assert law_over_draws(SAMPLED[name], p, p, 3) == plain_law(p, 3)


@pytest.mark.parametrize("name", ["chain", "three siblings"])
def test_drafts_of_no_mass_under_the_target_are_harmless(name: str) -> None:
    """q drafts only what p forbids; with three siblings q also runs out of tokens."""

    def p(context: Context) -> Distribution:
        return normalise((0, 0, 1, 2))

    def q(context: Context) -> Distribution:
        return normalise((2, 1, 0, 0))

    law = law_over_draws(SAMPLED[name], p, q, 2)
    assert law == plain_law(p, 2)


def test_a_child_that_q_could_not_have_drawn_counts_as_absent() -> None:
    """Filler beside a drawn sibling, while q has mass left: neither accepted nor subtracted."""

    def p(context: Context) -> Distribution:
        return normalise((2, 1, 3))

    def q(context: Context) -> Distribution:
        return normalise((1, 3, 0))

    filled = [replace(SAMPLED["siblings"], tokens=(0, drawn, 2)) for drawn in (0, 1)]
    laws = emitted_laws(filled, p, q)
    assert extended(mixture(list(zip(q(())[:2], laws))), p, 2) == plain_law(p, 2)


@pytest.mark.parametrize("name", ["chain", "siblings", "ragged", "drawn in another order than laid out"])
@pytest.mark.parametrize("draft_ids", [(3, 1), (4, 0, 2)])
def test_a_draft_vocabulary_smaller_than_the_targets_keeps_the_law(name: str, draft_ids: tuple[int, ...]) -> None:
    p, q = conditional(3, 5), conditional(103, len(draft_ids))
    assert law_over_draws(SAMPLED[name], p, q, 3, draft_ids) == plain_law(p, 3)


def test_a_sampled_child_dropped_by_its_own_score_is_caught() -> None:
    """The precondition: p = q = (3/5, 2/5), the child kept only if it is the likelier token, emits 21/25."""

    def p(context: Context) -> Distribution:
        return normalise((3, 2))

    shape = Tree((0, 0), (-1, 0), 2, (0, 0))
    weights, trees = zip(*draws(shape, p, 2))
    dropped = [replace(tree, count=2 if tree.tokens[1] == 0 else 1) for tree in trees]
    law = extended(mixture(list(zip(weights, emitted_laws(dropped, p, p)))), p, 1)
    assert law[(0,)] == Fraction(21, 25)
    assert law != plain_law(p, 1)


def test_siblings_verified_in_score_order_are_caught() -> None:
    """The precondition: p = (1/2, 0, 1/2), q = (1/2, 1/3, 1/6), likelier sibling first, emits 17/20."""

    def p(context: Context) -> Distribution:
        return normalise((1, 0, 1))

    def q(context: Context) -> Distribution:
        return normalise((3, 2, 1))

    shape = SAMPLED["siblings"]
    weights, trees = zip(*draws(shape, q, 3))
    by_score = [tree if tree.tokens[1] < tree.tokens[2] else replace(tree, order=(0, 1, 0)) for tree in trees]
    law = extended(mixture(list(zip(weights, emitted_laws(by_score, p, q)))), p, 1)
    assert law[(0,)] == Fraction(17, 20)
    assert law != plain_law(p, 1)
    assert law_over_draws(shape, p, q, 1) == plain_law(p, 1)


# ---- The algebra ---------------------------------------------------------------------------------


def test_what_is_kept_of_q_and_the_residual_make_p() -> None:
    torch.manual_seed(0)
    p, q = processed(torch.randn(50, 7) * 2, top_p=0.9), processed(torch.randn(50, 7) * 2, top_p=0.8)
    p[0], p[1, :], q[1, :] = q[0], torch.eye(7)[2], torch.eye(7)[5]  # equal, and disjoint
    kept = q * accept_probability(p, q)
    torch.testing.assert_close(kept + (1 - kept.sum(-1, keepdim=True)) * residual(p, q), p)
    torch.testing.assert_close(residual(p, q).sum(-1), torch.ones(50, dtype=torch.float64))


def test_acceptance_without_draft_mass_is_nothing_and_without_residual_is_p() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.25, 0.75, 0.0])
    assert accept_probability(p, q).tolist() == [0, 1, 0, 0]
    assert residual(p, p).tolist() == p.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_cdf_never_lands_on_a_token_of_no_mass(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    p = torch.softmax(torch.randn(64, 5000, dtype=dtype), -1)
    p[:, :100] = p[:, -100:] = p[:, 2000:2100] = 0
    p /= p.sum(-1, keepdim=True) * torch.linspace(0.999, 1.001, 64, dtype=dtype)[:, None]
    below_one = torch.nextafter(torch.ones(1, dtype=dtype), torch.zeros(1, dtype=dtype)).item()
    for u in (0.0, 1e-30, 0.3, 0.9999999, below_one, 1 - 2**-53):
        drawn = inverse_cdf(p, torch.full((64,), u, dtype=torch.float64))
        assert bool((p.gather(1, drawn[:, None]) > 0).all()), u
    assert inverse_cdf(p, torch.zeros(64, dtype=dtype)).tolist() == [100] * 64
    assert inverse_cdf(p, torch.full((64,), 1 - 2**-53).double()).tolist() == [4899] * 64


def test_inverse_cdf_survives_a_running_sum_that_wobbles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parallel sum need not be monotone: a token of no mass may seem to reach beyond its neighbours."""
    p = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    steady = torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, dim: steady(self, dim) + 1e-3 * (self == 0))
    drawn = [int(inverse_cdf(p, torch.tensor([u]).double())) for u in (0.0, 0.4995, 0.5, 0.5005, 1 - 2**-53)]
    assert drawn == [1, 1, 3, 3, 3]


def test_inverse_cdf_splits_the_unit_interval_where_p_says() -> None:
    p = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).expand(5, 4)
    assert inverse_cdf(p, torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75])).tolist() == [0, 0, 2, 2, 3]


@pytest.mark.parametrize("sampled", [False, True])
def test_half_precision_probabilities_are_summed_in_single(sampled: bool) -> None:
    tree = DraftTree.root(torch.tensor([0]))
    if sampled:
        tree.q, tree.draw_order = torch.zeros(1, 1, 1024, dtype=torch.bfloat16), torch.zeros(1, 1).long()
    probs = torch.full((1, 1, 1024), 1 / 1024, dtype=torch.bfloat16)
    assert verify_lossless(tree, probs, torch.tensor([[0.9999]])).bonus.tolist() == [1023]


@pytest.mark.parametrize("sampled", [False, True])
def test_stopped_rows_repeat_their_end_so_leaving_early_changes_nothing(
    sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU the walk ends with the last row, on a GPU it goes on; and a row ends alone as in a batch."""
    p, q = conditional(5, 3, least=1), conditional(105, 3, least=1)
    shape = SAMPLED["two levels"]
    trees = [tree if sampled else replace(tree, order=None) for _, tree in draws(shape, q, 3)][::3]
    tree, probs = batch(trees, p, q if sampled else None)
    uniforms = torch.rand(len(trees), tree.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    together = verify_lossless(tree, probs, uniforms)
    alone = [
        verify_lossless(take(tree, torch.tensor([i])), probs[i : i + 1], uniforms[i : i + 1]) for i in range(len(trees))
    ]
    monkeypatch.setattr(verify, "_none", lambda mask: False)
    for later in (
        verify_lossless(tree, probs, uniforms),
        Verified(*(torch.cat([getattr(one, name) for one in alone]) for name in ("path", "counts", "bonus"))),
    ):
        assert torch.equal(later.path, together.path)
        assert torch.equal(later.counts, together.counts)
        assert torch.equal(later.bonus, together.bonus)
    assert sorted(set(together.counts.tolist())) == [1, 2, 3]


# ---- Statistics ----------------------------------------------------------------------------------

V, LENGTH, RUNS, ROWS = 8, 3, 200_000, 25_000
STATES = 1 + V + V * V  # contexts of 0, 1 and 2 tokens; one state more for all that is longer
SHAPE = (-1, 0, 0, 1, 1, 2, 2, 3)
RANKS = (0, 0, 1, 0, 1, 0, 1, 0)
DRAFT_IDS = torch.tensor([6, 1, 4, 0, 3, 7])

Build = Callable[[Tensor, torch.Generator], DraftTree]


class TableTarget:
    """A random target of V tokens in float64: a table of its conditional distributions, a state a context."""

    def __init__(self, temperature: float = 0.7, top_p: float = 0.9) -> None:
        generator = torch.Generator().manual_seed(11)
        logits = torch.randn(STATES + 1, V, dtype=torch.float64, generator=generator)
        noise = torch.randn(STATES + 1, V, dtype=torch.float64, generator=generator)
        logits[STATES] = 0
        self.p, self.raw = processed(logits, temperature, top_p), processed(logits)
        self.draft = processed(logits + 0.7 * noise)
        self.next = torch.full((STATES + 1, V), STATES)
        self.next[0] = torch.arange(1, 1 + V)
        self.next[1 : 1 + V] = torch.arange(1 + V, STATES).reshape(V, V)

    def state(self, context: Context) -> int:
        state = 0
        for token in context:
            state = int(self.next[state, token])
        return state

    def law(self) -> Tensor:
        return joint_law([self.p[0], self.p[1 : 1 + V], self.p[1 + V : STATES].reshape(V, V, V)])

    def node_states(self, tree: DraftTree, state: Tensor) -> Tensor:
        """[B, N] the state after each node."""
        states = torch.zeros_like(tree.tokens)
        states[:, 0] = state
        for node in range(1, tree.size):
            before = states.gather(1, tree.parents[:, node : node + 1].clamp(min=0))[:, 0]
            states[:, node] = self.next[before, tree.tokens[:, node]]
        return states


Check = Callable[[TableTarget, DraftTree, Tensor, torch.Generator], Verified]


def fixed_builder(target: TableTarget, shape: Sequence[int], ranks: Sequence[int], ragged: bool) -> Build:
    """The draft's likeliest tokens; every row cut to a length of its own where `ragged`."""
    favourites = target.draft.argsort(-1, descending=True)

    def build(state: Tensor, generator: torch.Generator) -> DraftTree:
        tree, states = blank(state, shape, ranks), [state]
        for node in range(1, len(shape)):
            before = states[shape[node]]
            tree.tokens[:, node] = favourites[before, ranks[node]]
            states.append(target.next[before, tree.tokens[:, node]])
        if ragged:
            tree.counts = torch.randint(1, len(shape) + 1, state.shape, generator=generator)
        return replace(tree, draw_order=None)

    return build


def sampled_builder(target: TableTarget, shape: Sequence[int], ranks: Sequence[int], ragged: bool) -> Build:
    """Draws without replacement from the draft, over a draft vocabulary of 6 of the 8 tokens."""
    table = target.draft[:, DRAFT_IDS]
    table = table / table.sum(-1, keepdim=True)

    def build(state: Tensor, generator: torch.Generator) -> DraftTree:
        tree, states = blank(state, shape, ranks), [state]
        undrawn: dict[int, Tensor] = {}
        for node in range(1, len(shape)):
            before = states[shape[node]]
            left = undrawn.setdefault(shape[node], table[before])
            drawn = torch.multinomial(left, 1, generator=generator)
            left.scatter_(1, drawn, 0)
            tree.tokens[:, node] = DRAFT_IDS[drawn[:, 0]]
            states.append(target.next[before, tree.tokens[:, node]])
        if ragged:
            tree.counts = torch.randint(1, len(shape) + 1, state.shape, generator=generator)
        return replace(tree, q=table[torch.stack(states, 1)], draft_ids=DRAFT_IDS)

    return build


def blank(state: Tensor, shape: Sequence[int], ranks: Sequence[int]) -> DraftTree:
    rows, plain = len(state), Tree((0,) * len(shape), tuple(shape), len(shape))
    depth = [plain.depth(node) for node in range(len(shape))]
    return DraftTree(
        tokens=torch.zeros(rows, len(shape), dtype=torch.long),
        parents=torch.tensor(shape).expand(rows, -1),
        depth=torch.tensor(depth).expand(rows, -1),
        counts=torch.full((rows,), len(shape)),
        draw_order=torch.tensor(ranks).expand(rows, -1),
    )


def lossless(target: TableTarget, tree: DraftTree, states: Tensor, generator: torch.Generator) -> Verified:
    uniforms = torch.rand(len(states), uniforms_needed(tree), dtype=torch.float64, generator=generator)
    return verify_lossless(tree, target.p[states], uniforms)


def simulate(target: TableTarget, build: Build, check: Check, runs: int = RUNS, seed: int = 5) -> Tensor:
    """[runs, LENGTH] tokens, decoded in rounds, ROWS rows at a time; a row that is done takes no part."""
    generator = torch.Generator().manual_seed(seed)
    done = []
    for start in range(0, runs, ROWS):
        rows = min(ROWS, runs - start)
        state, length = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
        tokens = torch.full((rows, LENGTH), -1)
        while bool((length < LENGTH).any()):
            tree = build(state, generator)
            tree.counts = torch.where(length < LENGTH, tree.counts, 0)
            out = check(target, tree, target.node_states(tree, state), generator)
            assert torch.equal(out.counts == 0, length == LENGTH)
            drafted = tree.tokens.gather(1, out.path)
            for step in range(1, drafted.shape[1] + 1):
                token = drafted[:, step] if step < drafted.shape[1] else out.bonus
                token = torch.where(step == out.counts, out.bonus, token)
                row = ((step <= out.counts) & (length < LENGTH)).nonzero()[:, 0]
                tokens[row, length[row]] = token[row]
                state[row] = target.next[state[row], token[row]]
                length[row] += 1
        done.append(tokens)
    return torch.cat(done)


BUILDERS = {
    "fixed tree": (fixed_builder, SHAPE, RANKS),
    "sampled tree without replacement": (sampled_builder, SHAPE, RANKS),
    "sampled chain": (sampled_builder, CHAIN, (0, 0, 0, 0)),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_three_tokens_follow_the_targets_joint_law(name: str) -> None:
    builder, shape, ranks = BUILDERS[name]
    target = TableTarget()
    tokens = simulate(target, builder(target, shape, ranks, ragged=True), lossless)
    assert chi_square_p_value(count_sequences(tokens, V), target.law()) > 1e-4


def raw_bonus(target: TableTarget, tree: DraftTree, states: Tensor, generator: torch.Generator) -> Verified:
    """A released bug: after a path accepted down to its leaf, the bonus comes from the raw softmax."""
    out = lossless(target, tree, states, generator)
    end = out.path.gather(1, (out.counts - 1).clamp(min=0)[:, None])
    leaf = ~(tree.parents == end).any(1)
    raw = target.raw[states.gather(1, end)[:, 0]]
    drawn = inverse_cdf(raw, torch.rand(len(states), dtype=torch.float64, generator=generator))
    return replace(out, bonus=torch.where(leaf, drawn, out.bonus))


def resampled(target: TableTarget, tree: DraftTree, states: Tensor, generator: torch.Generator) -> Verified:
    """A released bug: each child is tested against a draw of its own, as if siblings shared no parent."""

    def draw(node: Tensor) -> Tensor:
        probs = target.p[states.gather(1, node[:, None])[:, 0]]
        return inverse_cdf(probs, torch.rand(len(states), dtype=torch.float64, generator=generator))

    node, valid = torch.zeros_like(tree.counts), tree.valid()
    path = [node]
    for level in range(1, int(tree.depth.max()) + 1):
        taken = torch.zeros_like(node)
        for child in range(1, tree.size):
            offered = valid[:, child] & (tree.depth[:, child] == level) & (tree.parents[:, child] == node)
            taken = torch.where(offered & (taken == 0) & (draw(node) == tree.tokens[:, child]), child, taken)
        path.append(taken)
        node = torch.where(taken > 0, taken, node)
    nodes = torch.stack(path, 1)
    return Verified(nodes, (nodes > 0).sum(1) + (tree.counts > 0), draw(node))


Rounds = Callable[[TableTarget, Tree, int, int], Iterator[tuple[Context, float]]]


def raw_bonus_round(target: TableTarget, tree: Tree, node: int, state: int) -> Iterator[tuple[Context, float]]:
    """What the walk from `node` on emits with `raw_bonus`, and with what probability."""
    children = {tree.tokens[child]: child for child in reversed(tree.children(node))}
    for token, mass in enumerate((target.p if children else target.raw)[state].tolist()):
        if token not in children:
            yield (token,), mass
            continue
        for later, share in raw_bonus_round(target, tree, children[token], int(target.next[state, token])):
            yield (token, *later), mass * share


def resampled_round(target: TableTarget, tree: Tree, node: int, state: int) -> Iterator[tuple[Context, float]]:
    """What the walk from `node` on emits with `resampled`, and with what probability."""
    masses, left = target.p[state].tolist(), 1.0
    for child in tree.children(node):
        token = tree.tokens[child]
        for later, share in resampled_round(target, tree, child, int(target.next[state, token])):
            yield (token, *later), left * masses[token] * share
        left *= 1 - masses[token]
    for token, mass in enumerate(masses):
        yield (token,), left * mass


def law_of_rounds(target: TableTarget, build: Build, one_round: Rounds) -> Tensor:
    """[V**LENGTH] the exact law of the first LENGTH tokens when fixed trees are decoded in such rounds."""
    law = torch.zeros([V] * LENGTH, dtype=torch.float64)

    def extend(emitted: Context, mass: float) -> None:
        if len(emitted) >= LENGTH:
            law[emitted[:LENGTH]] += mass
            return
        state = target.state(emitted)
        drafted = build(torch.tensor([state]), torch.Generator())
        tree = Tree(tuple(drafted.tokens[0].tolist()), tuple(drafted.parents[0].tolist()), drafted.size)
        outcomes: Counter[Context] = Counter()
        for later, share in one_round(target, tree, 0, state):
            outcomes[later[: LENGTH - len(emitted)]] += share  # type: ignore[assignment]
        for later, share in outcomes.items():
            if share:
                extend((*emitted, *later), mass * share)

    extend((), 1.0)
    return law.flatten()


@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("bug", ["raw bonus", "resampled siblings"])
def test_released_bugs_do_not_pass(bug: str, top_p: float) -> None:
    """The statistics have power: a quarter of the runs rejects each bug, as its exact law says it must."""
    one_round, check = {
        "raw bonus": (raw_bonus_round, raw_bonus),
        "resampled siblings": (resampled_round, resampled),
    }[bug]
    target = TableTarget(top_p=top_p)
    build = fixed_builder(target, SHAPE, RANKS, ragged=False)
    law, biased = target.law(), law_of_rounds(target, build, one_round)
    assert biased.sum().item() == pytest.approx(1)
    assert chi_square_power(law, biased, RUNS // 4, 1e-6) > 0.99

    counts = count_sequences(simulate(target, build, check, RUNS // 4), V)
    assert chi_square_p_value(counts, law) < 1e-6
    assert chi_square_p_value(counts, biased) > 1e-4


# ---- Greedy --------------------------------------------------------------------------------------


def greedy_by_hand(tree: DraftTree, choices: Tensor, row: int) -> tuple[list[int], int]:
    path = [0]
    while True:
        wanted = int(choices[row, path[-1]])
        for child in range(1, int(tree.counts[row])):
            if int(tree.parents[row, child]) == path[-1] and int(tree.tokens[row, child]) == wanted:
                path.append(child)
                break
        else:
            return path, wanted


def chain_tree(tokens: list[list[int]], counts: list[int]) -> DraftTree:
    size = len(tokens[0])
    parents, depth = torch.arange(-1, size - 1), torch.arange(size)
    return DraftTree(
        torch.tensor(tokens),
        parents.repeat(len(tokens), 1),
        depth.repeat(len(tokens), 1),
        torch.tensor(counts),
    )


def test_greedy_keeps_a_perfect_chain_and_nothing_of_a_wrong_one() -> None:
    tree = chain_tree([[9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3]], [4, 4, 3, 0])
    choices = torch.tensor([[1, 2, 3, 4], [5, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    out = verify_greedy(tree, choices)
    assert out.path.tolist() == [[0, 1, 2, 3], [0, 0, 0, 0], [0, 1, 2, 0], [0, 0, 0, 0]]
    assert out.counts.tolist() == [4, 1, 3, 0]
    assert out.bonus.tolist()[:3] == [4, 5, 3]


def test_greedy_on_node_0_alone_is_plain_decoding() -> None:
    out = verify_greedy(DraftTree.root(torch.tensor([7, 8]), torch.tensor([1, 0])), torch.tensor([[3], [4]]))
    assert (out.path.tolist(), out.counts.tolist(), out.bonus.tolist()[0]) == ([[0], [0]], [1, 0], 3)


def test_greedy_walks_random_ragged_trees_as_a_loop_does() -> None:
    dice = random.Random(0)
    size, rows = 9, 400
    trees = []
    for _ in range(rows):
        parents = (-1, *(dice.randrange(node) for node in range(1, size)))
        trees.append(Tree(tuple(dice.randrange(2) for _ in range(size)), parents, dice.randint(1, size)))
    tree, _ = batch(trees, conditional(0, 2), None)
    choices = torch.randint(0, 2, (rows, size), generator=torch.Generator().manual_seed(0))
    out = verify_greedy(tree, choices)
    for row in range(rows):
        path, bonus = greedy_by_hand(tree, choices, row)
        padded = path + [0] * (out.path.shape[1] - len(path))
        found = (out.path[row].tolist(), int(out.counts[row]), int(out.bonus[row]))
        assert found == (padded, len(path), bonus)
    assert int(out.counts.max()) >= 4


# ---- Typical acceptance --------------------------------------------------------------------------


def typical_case(tokens: list[int], parents: list[int]) -> DraftTree:
    (row, _) = batch([Tree(tuple(tokens), tuple(parents), len(tokens))], conditional(0, 4), None)
    return row


def test_typical_acceptance_by_hand() -> None:
    """The entropy after node 0 keeps 0.3 · exp(-entropy) above epsilon = 0.09: that is the threshold there.

    Deeper, all four tokens are equal: 0.25 each, above 0.3 / 4.
    """
    tree = typical_case([0, 1, 2, 3, 0], [-1, 0, 0, 2, 3])
    even = [0.25, 0.25, 0.25, 0.25]
    probs = torch.tensor([[[0.5, 0.5, 0.0, 0.0], even, even, even, even]])
    choices = torch.tensor([[0, 1, 2, 3, 1]])

    def outcome(**thresholds: float) -> tuple[list[int], int, int]:
        out = verify_typical(tree, probs, choices, **thresholds)
        return out.path[0].tolist(), int(out.counts), int(out.bonus)

    assert outcome() == ([0, 1, 0, 0], 2, 1)  # node 2 has no mass; the longer path below it is lost
    probs[0, 0] = torch.tensor([0.2, 0.6, 0.1, 0.1])
    assert outcome() == ([0, 2, 3, 4], 4, 1)  # node 2 has 0.1: the longest path wins, not the likeliest
    assert outcome(epsilon=0.1) == ([0, 1, 0, 0], 2, 1)  # the threshold itself is not enough
    tree.counts -= 1
    assert outcome() == ([0, 2, 3], 3, 3)  # node 4 is padding now
    tree.counts *= 0
    assert outcome()[1] == 0


def test_typical_threshold_falls_with_entropy() -> None:
    """16 equal tokens have 1/16 each, above 0.3 / 16; under epsilon alone they would all be refused."""
    tree = typical_case([0, 1], [-1, 0])
    probs, choices = torch.full((1, 2, 16), 1 / 16), torch.tensor([[5, 6]])
    assert verify_typical(tree, probs, choices).counts.tolist() == [2]
    assert verify_typical(tree, probs, choices, delta=2.0).counts.tolist() == [1]


def test_typical_breaks_ties_of_length_by_likelihood() -> None:
    tree = typical_case([0, 1, 2, 0, 0], [-1, 0, 0, 1, 2])
    row = [0.4, 0.25, 0.35, 0.0]
    probs = torch.tensor([[row, [0.9, 0.1, 0.0, 0.0], [0.3, 0.3, 0.4, 0.0], row, row]])
    choices = torch.tensor([[0, 0, 0, 1, 2]])
    out = verify_typical(tree, probs, choices)  # 0.25 · 0.9 beats 0.35 · 0.3
    assert (out.path.tolist(), out.bonus.tolist()) == ([[0, 1, 3]], [1])


# ---- Errors --------------------------------------------------------------------------------------


def sampled_pair() -> tuple[DraftTree, Tensor, Tensor]:
    p = conditional(2, 3)
    shape = replace(SAMPLED["siblings"], tokens=(0, 1, 2))
    tree, probs = batch([shape, shape], p, p)
    return tree, probs, torch.full((2, 3), 0.5, dtype=torch.float64)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("rule", [verify_lossless, verify_typical])
def test_a_distribution_that_is_not_finite_is_named(rule: Callable[..., Verified], poison: float) -> None:
    tree, probs, uniforms = sampled_pair()
    probs[1, 2, 0] = poison
    last = uniforms if rule is verify_lossless else torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(NonFiniteLogitsError, match="row 1, node 2"):
        rule(tree, probs, last)
    tree.counts[1] = 2  # now it is padding
    rule(tree, probs, last)


def test_logits_in_place_of_probabilities_are_refused() -> None:
    tree, probs, uniforms = sampled_pair()
    with pytest.raises(ValueError, match=r"row 0, node 0 sums to 2, expected 1; pass probabilities"):
        verify_lossless(tree, probs * 2, uniforms)


def test_a_draft_distribution_is_checked_where_children_were_drawn_and_only_there() -> None:
    tree, probs, uniforms = sampled_pair()
    assert tree.q is not None
    tree.q[:, 1:] = torch.nan
    verify_lossless(tree, probs, uniforms)
    tree.q[1, 0, 1] = torch.nan
    with pytest.raises(NonFiniteLogitsError, match="draft's distribution at row 1, node 0"):
        verify_lossless(tree, probs, uniforms)


def test_too_few_uniforms_are_refused() -> None:
    tree, probs, uniforms = sampled_pair()
    with pytest.raises(ValueError, match="got 2 uniforms a row, needs 3"):
        verify_lossless(tree, probs, uniforms[:, :2])


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 0, 0], [0, 1, 1]])
def test_a_sampled_sibling_dropped_or_ranked_twice_is_refused(order: list[int]) -> None:
    tree, probs, uniforms = sampled_pair()
    tree.draw_order = torch.tensor([[0, 0, 1], order])
    with pytest.raises(ValueError, match="draw_order at row 1, node"):
        verify_lossless(tree, probs, uniforms)


def test_sampled_children_without_their_draw_order_are_refused() -> None:
    tree, probs, uniforms = sampled_pair()
    tree.draw_order = None
    with pytest.raises(ValueError, match="no draw_order"):
        verify_lossless(tree, probs, uniforms)
