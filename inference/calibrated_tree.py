"""The cost-aware draft tree: in every round as deep and as wide as pays on this machine, and no tree where none does.

B rows, P candidates, n tree nodes, D levels, k children.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from headsmith.heads.drafter import Drafter, DraftState, Proposal
from headsmith.heads.tree import DraftTree
from torch import Tensor

from .compiled import padded_size
from .costs import CostModel, RoundCosts, cost_model
from .dynamic_tree import Beam
from .engine import Session

log = logging.getLogger("headsmith")

PRIOR = 8.0  # accepted tokens' worth of trust in the drafter's own probabilities at each level
MEMORY = 0.995  # weight of the past, a round
# What a call may lose to drafting before it is given up, in tokens a row that plain decoding had made meanwhile; what
# it gained counts against that, up to the second figure.
STAKE, SAVINGS = 3.0, 16.0
# Plain rounds are put in to see what those take: one in OFTEN where the gain is below DOUBT, else one in SELDOM, until
# SAMPLES are known; afterwards one in EVER.
DOUBT, OFTEN, SELDOM, EVER = 1.3, 8, 16, 64
SAMPLES, RECENT = 5, 32
STALE = 1.2  # drafted rounds have become so much slower since: what is known of plain ones no longer holds

Candidates = tuple[np.ndarray, np.ndarray]  # [B, P] scores, and the probability that each is accepted


@dataclass
class Plan:
    """What a round is expected to be worth.

    Args:
        size: n, node 0 included.
        rate: tokens a second, over all rows.
        seconds: of the round.
        drafting: c, the part of them that drafts.
    """

    size: int
    rate: float
    seconds: float
    drafting: float


@dataclass
class CalibratedTree:
    """A dynamic tree (arXiv:2406.16858) whose size and depth maximise the expected tokens a second of every round.

    A node is worth the probability that it is accepted: the drafter's own, corrected at each level by how often the
    target agreed so far. What it costs was measured (`CostModel`), and rounds are timed while decoding: another
    context, or a machine that is busy with other work, shows there. Children are fixed, so sampling stays lossless.

    Args:
        nodes: most nodes verified, node 0 included.
        depth: most levels drafted.
        top_k: width of the beam, and children looked at a node.
        fallback: decode plainly for the rest of a call once speculation has turned out slower than that.
        costs: what rounds cost, taken at its word; None measures it, or takes what an earlier run measured on this
            machine, and corrects it by the rounds that follow.
    """

    nodes: int = 32
    depth: int = 8
    top_k: int = 4
    fallback: bool = True
    costs: CostModel | None = None
    name: str = "calibrated"
    pays: bool = field(default=True, init=False)
    _session: Session | None = field(default=None, init=False, repr=False)
    _measured: CostModel | None = field(default=None, init=False, repr=False)
    _costs: CostModel | None = field(default=None, init=False, repr=False)

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
        self._plan: Plan | None = None  # of the round that is being verified, None where it is a plain one
        self._sums = np.zeros(4)  # rounds, their seconds verifying and drafting, and T(1) at the time
        self._slower: deque[float] = deque(maxlen=RECENT)  # of the last drafted rounds: seconds over those planned,
        self._plainly: deque[float] = deque(maxlen=SAMPLES)  # and of plain ones, over that of drafted ones at the time
        self._sampled = 1.0  # how much slower drafted rounds were than planned when a plain one was last timed
        self._gains = np.full(2, 4.0)  # tokens a row of recent rounds, and those plain decoding had made
        self._credit = STAKE
        self._said = False
        self._round = 0

    # What the decoder calls

    def prepare(self, session: Session, drafter: Drafter) -> None:
        """Before a call: learn what rounds of its batch size cost here."""
        batch = len(session.lengths)
        self._session = session
        self._measured = self.costs or cost_model(session.target, drafter, batch, session.driver)
        self._price(0.0)
        self._credit = STAKE if self.pays else STAKE / 2
        self.pays = True
        self._round = 0

    def build(
        self,
        drafter: Drafter,
        state: DraftState,
        proposal: Proposal,
        root: Tensor,
        active: Tensor,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        assert self._session is not None, "prepare comes first"
        if self._round % RECENT == 0:
            self._price(float(self._session.lengths.float().mean()))
        self._round += 1
        if self._is_plain():
            self._plan = None
            return DraftTree.root(root, active.long())
        beam = Beam(drafter, state, proposal, active, self.top_k)
        rows = int(active.sum())
        known = self._worth(beam)
        plan = self._best_plan(known, rows, 0)
        for passes in range(1, min(self.depth, drafter.max_depth)):
            if self._best_plan(self._foreseen(known, beam, passes), rows, passes).rate <= plan.rate:
                break
            self._grow(beam)
            known = self._worth(beam)
            plan = self._best_plan(known, rows, passes)
        self._note(known[0], beam, plan)
        if plan.size == 1:
            return DraftTree.root(root, active.long())
        return beam.pool.tree(root, active, plan.size)

    def _price(self, context: float) -> None:
        """What rounds cost behind so many tokens."""
        assert self._session is not None and self._measured is not None
        self._costs = self._measured.at(context)
        self._times = self._costs.verify_times(self.nodes)
        if self._session.compiled is not None:
            sizes = np.array([min(padded_size(n), self.nodes) for n in range(1, self.nodes + 1)])
            self._times = self._times[sizes - 1]

    def learn(self, counts: Tensor, active: Tensor, seconds: dict[str, float]) -> None:
        """After a round: path lengths [B] (node 0 included), which rows took part, and its time by part."""
        assert self._costs is not None
        if not self.pays or self._plan is None:
            plain = sum(seconds.values()) - seconds["draft"]
            self._sampled = self._factor(self._slower)
            self._plainly.append(plain / self._costs.plain / self._sampled)
            self._sums += [1, self._plain(), 0, self._plain()]
            return
        found = counts[active].cpu().numpy()
        levels = np.arange(1, self.depth + 1)
        self._expected = MEMORY * self._expected + self._verified
        self._accepted = MEMORY * self._accepted + (found[:, None] > levels).sum(0)
        self._slower.append(sum(seconds.values()) / self._plan.seconds)
        self._account(float(found.mean()))
        self._plan = None

    def round_costs(self) -> RoundCosts:
        """Mean seconds of the rounds so far."""
        verify, draft, plain = self._sums[1:] / max(self._sums[0], 1)
        return RoundCosts(float(plain), float(verify), float(draft))

    # What speculation brings

    def _plain(self) -> float:
        """Seconds of a plain step, as things are now."""
        assert self._costs is not None
        # What slows the machine as a whole has been seen in drafted rounds, of which there are many more.
        return self._costs.plain * self._factor(self._slower) * self._factor(self._plainly)

    def _factor(self, slower: deque[float]) -> float:
        """By how much rounds take longer than was measured beforehand; the median, as single rounds are disturbed."""
        if self.costs is not None or len(slower) < 3:
            return 1.0
        return float(np.median(slower))

    def _account(self, tokens: float) -> None:
        """Book a drafted round of so many tokens a row, and stop drafting once too much was lost."""
        assert self._costs is not None and self._plan is not None
        factor, plain = self._factor(self._slower), self._plain()
        drafting = self._plan.drafting * factor
        self._sums += [1, self._plan.seconds * factor - drafting, drafting, plain]
        instead = self._plan.seconds * factor / plain
        self._gains = 0.95 * self._gains + [tokens, instead]
        self._credit = min(self._credit + tokens - instead, SAVINGS)
        if self.fallback and self._credit < 0:
            self._give_up()

    def _is_plain(self) -> bool:
        """Whether this round is a plain one, to see what those take now."""
        if self.costs is not None or not self.fallback:
            return False
        if self._plainly and self._factor(self._slower) > STALE * self._sampled:
            self._plainly.clear()  # either the machine is slower or drafting alone is, which plain rounds will tell
        if len(self._plainly) == SAMPLES:
            return self._round % EVER == 0
        return self._round % (OFTEN if self._gains[0] < DOUBT * self._gains[1] else SELDOM) == 0

    def _give_up(self) -> None:
        if not self._said:
            log.warning(
                "speculation does not pay here: drafting took the time of %.0f tokens more than it brought; the rest "
                "of this answer is decoded plainly (fallback=false goes on drafting)",
                STAKE,
            )
        self._said = True
        self.pays = False

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
        drafting = self._costs.drafting(passes)
        seconds = self._times[: len(tokens)] + drafting
        rates = tokens / seconds
        best = int(rates.argmax())
        return Plan(best + 1, float(rates[best]), float(seconds[best]), drafting)

    def _grow(self, beam: Beam) -> None:
        """One level deeper, and a look at what the best children of a node get."""
        parents = torch.where(beam.active[:, None], beam.pool.at(beam.nodes)[1], -torch.inf).exp()
        children = beam.grow().exp()
        if bool((total := parents.sum()) > 0):
            mean = (parents[..., None] * children).sum((0, 1)) / total
            self._children = 0.95 * self._children + 0.05 * mean.clamp(min=1e-6).cpu().numpy()

    def _note(self, scores: np.ndarray, beam: Beam, plan: Plan) -> None:
        """Keep what is needed to learn from the round."""
        order = np.argsort(-scores, axis=1, kind="stable")[:, : plan.size - 1]
        depth = beam.pool.depth[0].cpu().numpy()[order]
        chosen = np.exp(np.take_along_axis(scores, order, 1))
        self._verified = np.bincount(depth.ravel() - 1, weights=chosen.ravel(), minlength=self.depth)
        self._plan = plan
