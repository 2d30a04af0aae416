"""Tree builders against a naive one, for a drafter whose scores depend on the whole path."""

from __future__ import annotations

import json
import math

import pytest
import torch
from headsmith.heads import build_drafter, load_drafter
from headsmith.heads.drafter import DraftState, Needs, Proposal
from headsmith.heads.prompt_lookup import PromptLookup
from headsmith.heads.tree import DraftTree, ancestor_mask
from headsmith.inference import DynamicTree, FixedTree, SpeculativeDecoder, chain, make_tree
from headsmith.inference.costs import CostModel
from headsmith.inference.tree_search import best_fixed_tree, best_paths, expected_rate

from tests.tiny import greedy_reference, random_prompts, tiny_target

VOCAB = 12


class PathDrafter:
    """Log-probabilities drawn from a generator seeded by row and path; sharp ones where `sharp`."""

    needs = Needs(positions="none")
    draft_ids = None
    max_depth = 8

    def __init__(self, batch, sharp=2.0):
        self.batch, self.sharp, self.calls = batch, sharp, 0

    def scores(self, row, path):
        generator = torch.Generator().manual_seed(hash((row, *path)) % (1 << 31))
        return (torch.randn(VOCAB, generator=generator) * self.sharp).log_softmax(-1)

    def first(self):
        self.nodes = [[()] for _ in range(self.batch)]
        return Proposal(torch.stack([self.scores(row, ()) for row in range(self.batch)])[:, None])

    def expand(self, state, parents, tokens, valid):
        self.calls += 1
        levels = []
        for row in range(self.batch):
            new = [(*self.nodes[row][p], t) for p, t in zip(parents[row].tolist(), tokens[row].tolist())]
            self.nodes[row] += new
            levels.append(torch.stack([self.scores(row, path) for path in new]))
        return Proposal(torch.stack(levels))


def build(builder, drafter, active=None):
    active = torch.ones(drafter.batch, dtype=torch.bool) if active is None else active
    root = torch.arange(drafter.batch)
    state = DraftState(None, drafter.batch)
    return builder.build(drafter, state, drafter.first(), root, active, torch.Generator().manual_seed(0))


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """Token paths of a row's nodes, checking that they hang together."""
    found: list[tuple[int, ...]] = []
    for node in range(int(tree.counts[row])):
        parent = int(tree.parents[row, node])
        assert parent < node
        path = () if node == 0 else (*found[parent], int(tree.tokens[row, node]))
        assert len(path) == int(tree.depth[row, node])
        found.append(path)
    return found


def naive_dynamic(drafter, row, total, depth, top_k):
    """EAGLE-2 as its paper says it: beam by beam, then the best of everything that was looked at."""
    pool, beam = [], [((), 0.0)]
    for _ in range(depth):
        level = []
        for path, score in beam:
            best = drafter.scores(row, path).topk(top_k)
            level += [((*path, t), score + s) for s, t in zip(best.values.tolist(), best.indices.tolist())]
        pool += level
        beam = sorted(level, key=lambda entry: -entry[1])[:top_k]
    return {path for path, _ in sorted(pool, key=lambda entry: -entry[1])[: total - 1]}


def best_chain(drafter, row, found):
    """From the root on, always the best child that is in the tree."""
    line = [()]
    while children := [path for path in found if len(path) == len(line) and path[:-1] == line[-1]]:
        line.append(max(children, key=lambda path: drafter.scores(row, path[:-1])[path[-1]]))
    return line


@pytest.mark.parametrize("total", [2, 4, 8, 20])
@pytest.mark.parametrize("sharp", [0.3, 2.0, 6.0])
def test_the_dynamic_tree_is_eagle2s(total, sharp):
    saved = 0
    for depth, top_k in ((1, 3), (3, 2), (5, 3), (4, 5)):
        drafter = PathDrafter(3, sharp)
        tree = build(DynamicTree(total, depth, top_k), drafter)
        for row in range(3):
            found = paths_of(tree, row)
            assert found[0] == () and len(set(found)) == len(found)
            assert set(found[1:]) == naive_dynamic(drafter, row, total, depth, top_k)
            assert found[: len(best_chain(drafter, row, found))] == best_chain(drafter, row, found)
        saved += depth - 1 - drafter.calls
    assert saved > 0 or total > 4  # passes that could not have changed a small tree are not made


def test_rows_that_take_no_part_have_no_nodes():
    active = torch.tensor([True, False, True])
    for builder in (chain(3), FixedTree(((0,), (1,), (0, 0))), DynamicTree(6, 3, 2)):
        tree = build(builder, PathDrafter(3), active)
        assert (tree.counts > 0).tolist() == active.tolist()


def test_a_fixed_tree_takes_children_by_rank():
    drafter = PathDrafter(2)
    tree = build(FixedTree(((0,), (1,), (2,), (1, 0), (1, 1), (1, 0, 0))), drafter)
    for row in range(2):

        def ranked(path, row=row):
            return drafter.scores(row, path).argsort(descending=True).tolist()

        second = (ranked(())[1],)
        chosen = [(t,) for t in ranked(())[:3]] + [(*second, t) for t in ranked(second)[:2]]
        third = (*second, ranked(second)[0])
        assert set(paths_of(tree, row)[1:]) == {*chosen, (*third, ranked(third)[0])}


def test_sampled_children_are_draws_without_replacement_in_their_order():
    counts = torch.zeros(VOCAB)
    drafter = PathDrafter(4000, sharp=1.0)
    drafter.scores = lambda row, path: (torch.arange(VOCAB).float() / 4).log_softmax(-1)
    tree = build(FixedTree(((0,), (1,), (2,)), sampled=True), drafter)
    assert (tree.tokens[:, 1:].sort(1).values.diff(dim=1) > 0).all()
    assert tree.draw_order[:, 1:].tolist() == [[0, 1, 2]] * 4000
    counts.scatter_add_(0, tree.tokens[:, 1], torch.ones(4000))
    q = drafter.scores(0, ()).exp()
    torch.testing.assert_close(tree.q[0, 0].float(), q)
    assert float(((counts - 4000 * q) ** 2 / (4000 * q)).sum()) < 45  # χ², 11 degrees of freedom, p ≈ 5e-6


def test_ancestor_masks():
    parents = torch.tensor([[-1, 0, 0, 1, 3], [-1, 0, 1, 2, 3]])
    mask = ancestor_mask(parents)
    assert mask[0].nonzero().tolist() == [
        [0, 0], [1, 0], [1, 1], [2, 0], [2, 2], [3, 0], [3, 1], [3, 3], [4, 0], [4, 1], [4, 3], [4, 4]
    ]  # fmt: skip
    assert torch.equal(mask[1], torch.ones(5, 5, dtype=torch.bool).tril())


def test_names_and_shapes_of_trees():
    assert make_tree("chain:depth=3").depth == 3
    assert make_tree("dynamic:total=6,depth=2") == DynamicTree(6, 2)
    assert make_tree("chain:depth=2,sampled=true").sampled
    for text, message in {
        "dynamic:depth": "name=number",
        "dynamic:size=3": "unexpected keyword",
        "chain:depth=0": "at least 1",
        "dynamic:total=1": "total >= 2",
    }.items():
        with pytest.raises(ValueError, match=message):
            make_tree(text)
    with pytest.raises(ValueError, match="needs"):
        FixedTree(((0, 0),))
    with pytest.raises(ValueError, match="needs"):
        FixedTree(((1,),))


TOP_K = [[0.6, 0.75, 0.8], [0.5, 0.62, 0.7], [0.4, 0.5, 0.55]]


def trees_of(count: int) -> list[set[tuple[int, ...]]]:
    """Every fixed tree of `count` paths with at most 3 ranks and 3 levels."""
    found = [frozenset()]
    for _ in range(count):
        larger = set()
        for tree in found:
            parents = [(), *tree]
            for parent in parents:
                rank = sum(path[:-1] == parent for path in tree)
                if rank < 3 and len(parent) < 3:
                    larger.add(tree | {(*parent, rank)})
        found = list(larger)
    return [set(tree) for tree in found]


def worth(paths) -> float:
    hit = [[a - b for a, b in zip(level, [0.0, *level])] for level in TOP_K]
    return sum(math.prod(hit[level][rank] for level, rank in enumerate(path)) for path in paths)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_the_searched_tree_is_the_best_of_all(count):
    tree = best_fixed_tree(TOP_K, nodes=count + 1)
    assert len(tree.paths) == count
    assert worth(tree.paths) == pytest.approx(max(worth(paths) for paths in trees_of(count)))


def test_costs_choose_the_size_of_the_searched_tree():
    free, dear = CostModel((1, 32), (1.0, 1.0), 0.1, 0.0), CostModel((1, 32), (1.0, 8.0), 0.1, 0.05)
    assert best_fixed_tree(TOP_K, 12, free).nodes == 12
    small = best_fixed_tree(TOP_K, 12, dear)
    best = max(range(13), key=lambda n: expected_rate(best_paths(TOP_K, n), dear))
    assert 1 < small.nodes == best + 1 < 12
    with pytest.raises(ValueError, match="decode plainly"):
        best_fixed_tree(TOP_K, 12, CostModel((1, 2), (1.0, 9.0), 5.0, 5.0))
    with pytest.raises(ValueError, match="must rise"):
        best_fixed_tree([[0.5, 0.4]])


@pytest.fixture
def run_folder(tmp_path):
    """A training run's output folder, with heads and the ranks that its evaluation recorded."""
    build_drafter("medusa", tiny_target()).save_pretrained(tmp_path / "heads")
    (tmp_path / "evaluation.json").write_text(json.dumps({"teacher_forced": {"top_k": TOP_K}, "decoded": {}}))
    return tmp_path


@pytest.mark.parametrize("given", [".", "heads"])
def test_the_best_tree_by_name_is_that_of_the_recorded_ranks(run_folder, given):
    drafter = load_drafter(run_folder / given, tiny_target())
    assert drafter.ranks == TOP_K
    assert make_tree("best:nodes=6", drafter) == best_fixed_tree(TOP_K, 6)
    assert make_tree("best", drafter) == best_fixed_tree(TOP_K, 32)
    decoder = SpeculativeDecoder(tiny_target(), drafter, tree="best:nodes=6")
    assert decoder.builder == best_fixed_tree(TOP_K, 6)
    ids, mask = random_prompts(2, 9)
    out = decoder.generate(ids, mask, max_new_tokens=12, do_sample=False)
    assert out.sequences[:, 9:].tolist() == greedy_reference(tiny_target(), ids, mask, 12)


@pytest.mark.parametrize(
    "record", [None, "", "[]", "{}", '{"teacher_forced": {}}', '{"teacher_forced": {"top_k": []}}']
)
def test_heads_without_recorded_ranks_load_and_have_no_best_tree(run_folder, record):
    (run_folder / "evaluation.json").unlink()
    if record is not None:
        (run_folder / "evaluation.json").write_text(record)
    drafter = load_drafter(run_folder, tiny_target())
    assert drafter.ranks is None
    with pytest.raises(ValueError, match=r"this drafter \(Medusa\) has none: expected teacher_forced.top_k in"):
        make_tree("best:nodes=8", drafter)


def test_the_best_tree_of_other_heads_is_not_taken(run_folder):
    """Heads that were moved out of their run: what lies beside them is not theirs."""
    (run_folder / "heads").rename(run_folder / "mine")
    assert load_drafter(run_folder / "mine", tiny_target()).ranks is None


@pytest.mark.parametrize("drafter, whose", [(None, "there is no drafter"), (PromptLookup(), "PromptLookup")])
def test_a_best_tree_without_heads_says_what_is_missing(drafter, whose):
    with pytest.raises(ValueError, match=rf"{whose}.*name the run's output folder"):
        SpeculativeDecoder(tiny_target(), drafter, tree="best:nodes=8")
    with pytest.raises(ValueError, match="at least 2 nodes"):
        best_fixed_tree(TOP_K, 1)
