"""The cost-aware draft tree: in every round as deep and as wide as pays on this machine, and no tree where none does.

B rows, P candidates, n tree nodes, D levels, k children.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import torch
from headsmith.heads.drafter import Drafter, DraftState, Proposal
from headsmith.heads.tree import DraftTree
from torch import Tensor

from .costs import CostModel, RoundCosts, cost_model
from .dynamic_tree import Beam
from .engine import Session

log = logging.getLogger("headsmith")

PRIOR = 8.0  # accepted tokens' worth of trust in the drafter's own probabilities at each level
MEMORY = 0.995  # weight of the past, a round
PATIENCE = 16  # rounds of a call before speculation may be given up; after it once was, a quarter

Candidates = tuple[np.ndarray, np.ndarray]  # [B, P] scores, and the probability that each is accepted


@dataclass
class Plan:
    """What a round is expected to be worth.

    Args:
        size: n, node 0 included.
        rate: tokens a second, over all rows.
        seconds: of the round.
    """

    size: int
    rate: float
    seconds: float


@dataclass
class CalibratedTree:
    """A dynamic tree (arXiv:2406.16858) whose size and depth maximise the expected tokens a second of every round.

    A node is worth the probability that it is accepted: the drafter's own, corrected at each level by how often the
    target agreed so far. What it costs was measured (`CostModel`). Children are fixed, so sampling stays lossless.

    Args:
        nodes: most nodes verified, node 0 included.
        depth: most levels drafted.
        top_k: width of the beam, and children looked at a node.
        fallback: decode plainly for the rest of a call once speculation has turned out slower than that.
        costs: what rounds cost; None measures it, or takes what an earlier run measured on this machine.
    """

    nodes: int = 32
    depth: int = 8
    top_k: int = 4
    fallback: bool = True
    costs: CostModel | None = None
    name: str = "calibrated"
    pays: bool = field(default=True, init=False)
    _costs: CostModel | None = field(default=None, init=False, repr=False)
    _patience: int = field(default=PATIENCE, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.nodes < 2 or self.depth < 1 or self.top_k < 1:
            raise ValueError(
                f"a calibrated tree needs nodes >= 2, depth >= 1 and top_k >= 1, "
                f"not {self.nodes}, {self.depth}, {self.top_k}"
            )
        self._expected = np.zeros(self.depth)  # acceptances the drafter foresaw at each level,
        self._accepted = np.zeros(self.depth)  # and those that came
        self._children = 0.5 ** np.arange(1, self.top_k + 1)  # what a node's best children usually get
        self._verified: np.ndarray = np.zeros(self.depth)  # foreseen for the tree that is being verified
        self._plan: Plan | None = None
        self._sums = np.zeros(3)  # rounds, seconds verifying, seconds drafting
        self._balance = np.zeros(2)  # tokens of this call, and those that plain decoding had made in the time

    # What the decoder calls

    def prepare(self, session: Session, drafter: Drafter) -> None:
        """Before a call: learn what rounds of its batch size cost here."""
        batch = len(session.lengths)
        self._costs = self.costs or cost_model(session.target, drafter, batch, session.runner)
        self._times = self._costs.verify_times(self.nodes)
        self._patience = PATIENCE if self.pays else PATIENCE // 4
        self.pays = True
        self._balance[:] = 0
        self._rounds = 0

    def build(
        self,
        drafter: Drafter,
        state: DraftState,
        proposal: Proposal,
        root: Tensor,
        active: Tensor,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        assert self._costs is not None, "prepare comes first"
        beam = Beam(drafter, state, proposal, active, self.top_k)
        rows = int(active.sum())
        known = self._worth(beam)
        plan = self._best_plan(known, rows, 0)
        passes = 0
        for level in range(1, min(self.depth, drafter.max_depth)):
            if self._best_plan(self._foreseen(known, beam, level), rows, passes + 1).rate <= plan.rate:
                break
            self._grow(beam)
            passes += 1
            known = self._worth(beam)
            plan = self._best_plan(known, rows, passes)
        self._note(known[0], beam, plan, passes)
        if plan.size == 1:
            return DraftTree.root(root, active.long())
        return beam.pool.tree(root, active, plan.size)

    def learn(self, counts: Tensor, active: Tensor) -> None:
        """After a round: path lengths [B] (node 0 included) of the rows that were active in it."""
        assert self._costs is not None
        if not self.pays:
            self._sums += [1, self._costs.plain, 0]
            return
        assert self._plan is not None
        found = counts[active].cpu().numpy()
        levels = np.arange(1, self.depth + 1)
        self._expected = MEMORY * self._expected + self._verified
        self._accepted = MEMORY * self._accepted + (found[:, None] > levels).sum(0)
        self._balance += [found.sum(), len(found) * self._plan.seconds / self._costs.plain]
        self._rounds += 1
        if self.fallback and self._rounds >= self._patience and self._balance[0] < self._balance[1]:
            self._give_up()

    def round_costs(self) -> RoundCosts:
        """Mean seconds of the rounds so far."""
        assert self._costs is not None
        rounds, verify, draft = self._sums
        return RoundCosts(self._costs.plain, verify / max(rounds, 1), draft / max(rounds, 1))

    # What a tree is worth

    def _trust(self) -> np.ndarray:
        """[D] how many times more often a level is accepted than the drafter foresees."""
        return (self._accepted + PRIOR) / (self._expected + PRIOR)

    def _worth(self, beam: Beam) -> Candidates:
        """[B, P] scores of all candidates, and the probability that each is accepted."""
        scores = torch.where(beam.active[:, None], beam.pool.scores, -torch.inf).double().cpu().numpy()
        depth = beam.pool.depth[0].cpu().numpy()  # a level's candidates stand in the same places in every row
        return scores, np.exp(scores) * self._trust()[depth - 1]

    def _foreseen(self, known: Candidates, beam: Beam, level: int) -> Candidates:
        """The known ones, and the children that the beam's nodes would usually have."""
        scores, worth = known
        parents = np.take_along_axis(scores, beam.nodes.cpu().numpy(), 1)
        children = (parents[..., None] + np.log(self._children)).reshape(len(scores), -1)
        added = np.exp(children) * self._trust()[level]
        return np.concatenate((scores, children), 1), np.concatenate((worth, added), 1)

    def _best_plan(self, candidates: Candidates, rows: int, passes: int) -> Plan:
        """The tree size at which the expected tokens a second are most."""
        assert self._costs is not None
        scores, worth = candidates
        order = np.argsort(-scores, axis=1, kind="stable")[:, : self.nodes - 1]
        gained = np.take_along_axis(worth, order, 1).sum(0).cumsum()
        tokens = rows + np.concatenate(([0.0], gained))
        seconds = self._times[: len(tokens)] + self._costs.drafting(passes)
        rates = tokens / seconds
        best = int(rates.argmax())
        return Plan(best + 1, float(rates[best]), float(seconds[best]))

    def _grow(self, beam: Beam) -> None:
        """One level deeper, and a look at what the best children of a node get."""
        parents = torch.where(beam.active[:, None], beam.pool.at(beam.nodes)[1], -torch.inf).exp()
        children = beam.grow().exp()
        if bool((total := parents.sum()) > 0):
            mean = (parents[..., None] * children).sum((0, 1)) / total
            self._children = 0.95 * self._children + 0.05 * mean.clamp(min=1e-6).cpu().numpy()

    def _note(self, scores: np.ndarray, beam: Beam, plan: Plan, passes: int) -> None:
        """Keep what is needed to learn from the round."""
        assert self._costs is not None
        order = np.argsort(-scores, axis=1, kind="stable")[:, : plan.size - 1]
        depth = beam.pool.depth[0].cpu().numpy()[order]
        chosen = np.exp(np.take_along_axis(scores, order, 1))
        self._verified = np.bincount(depth.ravel() - 1, weights=chosen.ravel(), minlength=self.depth)
        self._plan = plan
        drafting = self._costs.drafting(passes)
        self._sums += [1, plan.seconds - drafting, drafting]

    def _give_up(self) -> None:
        if self._patience == PATIENCE:
            made, plain = self._balance
            log.warning(
                "speculation does not pay here: %.2f times the speed of plain decoding after %d rounds; "
                "the rest is decoded plainly (fallback=false goes on drafting)",
                made / plain, self._rounds,
            )  # fmt: skip
        self.pays = False
