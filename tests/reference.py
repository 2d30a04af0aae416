"""Naive loops that a reader can trust: one position, one step, one head at a time."""

from __future__ import annotations

import torch
from headsmith.heads.drafter import Needs
from headsmith.heads.layers import apply_rope, rope_tables


def naive_eagle3_logits(drafter, target, ids, steps):
    """[T, V_d] logits of every unrolled step over one sequence; entries past the right edge mean nothing.

    Index t of step j takes the token at t + 1 + j and its own state of step j - 1 (the fused feature at t for j = 0),
    stands at position t + j, and attends to the step-0 entries up to t and to its own entries of steps 1..j.
    """
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    hidden = target.features(ids[None], Needs(drafter.needs.layers)).hidden[0]
    fused = [drafter.fc((h.flatten() * drafter.feature_scale).to(drafter.dtype)) for h in hidden]
    length, groups = len(ids), attention.heads // attention.key_heads
    keys, values, results = [], [], []
    states = fused
    for step in range(steps):
        step_keys, step_values, queries, after = [], [], [], []
        for t in range(length):
            token = ids[(t + 1 + step) % length]
            x = torch.cat((layer.input_layernorm(target.embed(token)), layer.hidden_norm(states[t])))
            cos, sin = rope_tables(torch.tensor(t + step), attention.dim, drafter.config.rope_theta)
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
            queries.append(apply_rope(attention.q_proj(x).view(-1, attention.dim), cos, sin))
            step_keys.append(apply_rope(attention.k_proj(x).view(-1, attention.dim), cos, sin))
            step_values.append(attention.v_proj(x).view(-1, attention.dim))
        keys.append(step_keys)
        values.append(step_values)
        for t in range(length):
            seen = [(0, i) for i in range(t + 1)] + [(s, t) for s in range(1, step + 1)]
            heads = []
            for head in range(attention.heads):
                scores = torch.stack([queries[t][head] @ keys[s][i][head // groups] for s, i in seen])
                weights = (scores * attention.dim**-0.5).softmax(-1)
                heads.append(sum(w * values[s][i][head // groups] for w, (s, i) in zip(weights, seen)))
            state = states[t] + attention.o_proj(torch.cat(heads))
            after.append(state + layer.mlp(layer.post_attention_layernorm(state)))
        states = after
        results.append(torch.stack([drafter.lm_head(drafter.norm(s)) for s in states]))
    return results
