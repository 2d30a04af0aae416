"""Naive loops that a reader can trust: one position, one step, one head at a time."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from headsmith.heads.drafter import Needs
from headsmith.heads.layers import apply_rope, rope_tables


def naive_eagle3_logits(drafter, target, ids, steps):
    """[T, V_d] logits of every unrolled step over one sequence; entries past the right edge mean nothing."""
    layer = drafter.midlayer
    hidden = target.features(ids[None], Needs(drafter.needs.layers)).hidden[0]
    if drafter.config.norm_features:
        scaled = [torch.cat([norm(part) for norm, part in zip(drafter.feature_norms, h)]) for h in hidden]
    else:
        scaled = [h.flatten() * drafter.feature_scale for h in hidden]

    def pair(embedding, state):
        return state, torch.cat((layer.input_layernorm(embedding), layer.hidden_norm(state)))

    feed = drafter.norm if drafter.config.feedback == "normed" else lambda state: state
    fused = [drafter.fc(h.to(drafter.dtype)) for h in scaled]
    outputs = naive_unrolled(drafter, target, ids, steps, fused, pair, feed)
    return [torch.stack([drafter.lm_head(drafter.norm(state)) for state in step]) for step in outputs]


def naive_eagle_features(drafter, target, ids, steps):
    """[T, H] features that every unrolled step predicts, in the target's units: that of index t is for t + 1 + j."""
    final = target.features(ids[None], Needs(final=True)).final[0]

    def pair(embedding, state):
        joined = drafter.fc(torch.cat((embedding * drafter.embedding_scale, state)))
        return joined, joined

    scaled = [f * drafter.feature_scale for f in final]
    outputs = naive_unrolled(drafter, target, ids, steps, scaled, pair, lambda state: state)
    return [torch.stack(step) / drafter.feature_scale for step in outputs]


def naive_eagle_loss(drafter, target, predicted, feature):
    """What EAGLE and HASS minimise at one position, given the predicted [H] and the true [H] feature there."""
    config = drafter.config
    rows = slice(None) if drafter.draft_ids is None else drafter.draft_ids
    wanted = target.logits(feature)[rows].softmax(-1)
    found = target.logits(predicted)[rows].log_softmax(-1)
    loss = -config.logit_weight * (wanted * found).sum()
    if config.top_k_loss:
        for token in wanted.argsort(descending=True)[: config.top_k_loss]:
            loss = loss - config.top_k_weight * wanted[token] * found[token]
    for error in (predicted - feature) * drafter.feature_scale:
        small = error.abs() < 1
        loss = loss + config.feature_weight * (error**2 / 2 if small else error.abs() - 0.5) / len(feature)
    return loss


def naive_hydra_logits(drafter, target, ids, levels):
    """[T, V_d] logits of every head over one sequence; entries past the right edge mean nothing.

    Head i at index t takes what is known at t and the tokens at t + 1 to t + 1 + i.
    """
    final = target.features(ids[None], Needs(final=True)).final[0]
    known = [f / drafter.feature_scale for f in final]
    if (layer := drafter.prefix_layer) is not None:
        # One step of which nothing is fed back, and whose attention reads the feature alone.
        alone = SimpleNamespace(midlayer=layer, config=drafter.config)
        (known,) = naive_unrolled(alone, target, ids, 1, known, lambda _, f: (f, layer.input_layernorm(f)), lambda f: f)
    rows = slice(None) if drafter.draft_ids is None else drafter.draft_ids
    results = []
    for level in range(levels):
        logits = []
        for t, hidden in enumerate(known):
            for i in range(level + 1):
                embedding = target.embed(ids[(t + 1 + i) % len(ids)]) / drafter.embedding_scale
                hidden = torch.cat((hidden, embedding))
            hidden = drafter.inputs[level](hidden) * drafter.feature_scale
            for block in drafter.blocks[level]:
                hidden = hidden + F.silu(block.linear(hidden))
            shared = drafter.config.lm_head == "shared"
            logits.append(target.logits(hidden)[rows] if shared else drafter.lm_heads[level](hidden))
        results.append(torch.stack(logits))
    return results


def naive_unrolled(drafter, target, ids, steps, states, pair, feed):
    """The layer's outputs of every unrolled step, one state [H] at a time.

    Index t of step j takes the token at t + 1 + j and the state that was fed back at t from step j - 1 (`states` for
    j = 0), stands at position t + j, and attends to the step-0 entries up to t and to its own entries of steps 1..j.
    `pair` makes of an embedding and a state the residual and what attention reads.
    """
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    length, groups = len(ids), attention.heads // attention.key_heads
    keys, values, outputs = [], [], []
    for step in range(steps):
        step_keys, step_values, queries, residuals, after = [], [], [], [], []
        for t in range(length):
            residual, x = pair(target.embed(ids[(t + 1 + step) % length]), states[t])
            cos, sin = rope_tables(torch.tensor(t + step), attention.dim, drafter.config.rope_theta)
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
            queries.append(apply_rope(attention.q_proj(x).view(-1, attention.dim), cos, sin))
            step_keys.append(apply_rope(attention.k_proj(x).view(-1, attention.dim), cos, sin))
            step_values.append(attention.v_proj(x).view(-1, attention.dim))
            residuals.append(residual)
        keys.append(step_keys)
        values.append(step_values)
        for t in range(length):
            seen = [(0, i) for i in range(t + 1)] + [(s, t) for s in range(1, step + 1)]
            heads = []
            for head in range(attention.heads):
                scores = torch.stack([queries[t][head] @ keys[s][i][head // groups] for s, i in seen])
                weights = (scores * attention.dim**-0.5).softmax(-1)
                heads.append(sum(w * values[s][i][head // groups] for w, (s, i) in zip(weights, seen)))
            state = residuals[t] + attention.o_proj(torch.cat(heads))
            after.append(state + layer.mlp(layer.post_attention_layernorm(state)))
        outputs.append(after)
        states = [feed(state) for state in after]
    return outputs
