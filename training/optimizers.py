"""The optimizers of a run: AdamW for everything, or Muon for the matrices inside the drafter and AdamW for the rest."""

from __future__ import annotations

import torch
from headsmith.training.recipe import TrainSection
from torch import nn


def make_optimizers(drafter: nn.Module, train: TrainSection) -> list[torch.optim.Optimizer]:
    """Optimizers over the drafter's trainable parameters; every group's `peak` is its highest learning rate.

    Muon (arXiv:2502.16982) is for matrices between hidden states. Output layers over a vocabulary, and vectors, stay
    with AdamW. Only matrices decay.
    """
    trainable = {name: value for name, value in drafter.named_parameters() if value.requires_grad}
    inner = [name for name, value in trainable.items() if train.optimizer == "muon" and _is_inner(name, value)]
    others = [value for name, value in trainable.items() if name not in inner]
    groups = [
        {"params": [value for value in others if value.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [value for value in others if value.dim() <= 1], "weight_decay": 0.0},
    ]
    fused = next(iter(trainable.values())).device.type in ("cpu", "cuda")
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, fused=fused)]
    if inner:
        # The rule of the paper that lets Muon's rate be of AdamW's size.
        matrices = [trainable[name] for name in inner]
        decay = train.weight_decay
        made.append(torch.optim.Muon(matrices, train.muon_lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made


def _is_inner(name: str, value: torch.Tensor) -> bool:
    return value.dim() == 2 and not any(part.startswith("lm_head") for part in name.split("."))
