"""What a drafter thinks may follow each node of a tree, one level at a time.

A block drafter has one marginal per slot of its block, whatever was chosen before; an
autoregressive one runs its layer on the nodes that are opened, each of which sees its own
ancestors. Builders of trees (models/decoding/trees.py) need no more than this.

Rows of an autoregressive drafter, W = 2, anchor's row committed at 4 (length 5):

    level opened      1         2
    row               5   6     7   8
    position          5   5     6   6
    sees rows         0..4, itself, and the rows of its ancestors

Shapes: B slots, W opened nodes, X draft rows so far, K slots of a block, V draft vocabulary, D
width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from paceline.models.backbones.autoregressive import AutoregressiveBackbone
from paceline.models.backbones.cache import DraftCache


class Expansion(Protocol):
    """Logits over the draft vocabulary; levels are opened in order, each once."""

    def first(self) -> Tensor:
        """Logits [B, V] of the token after the anchor."""

    def next(self, target_ids_BW: Tensor, parent_BW: Tensor) -> Tensor:
        """Logits [B, W, V] of the tokens after W nodes of the next level.

        target_ids are their tokens, parent the index of each one's parent among the nodes opened
        before (0 at the first level, whose parent is the anchor).
        """


class MarginalExpansion:
    """A block drafter's slots: what follows depends on the level alone."""

    def __init__(self, logits_BKV: Tensor) -> None:
        self.logits_BKV = logits_BKV
        self._level = 0

    def first(self) -> Tensor:
        """See Expansion."""
        return self.logits_BKV[:, 0]

    def next(self, target_ids_BW: Tensor, parent_BW: Tensor) -> Tensor:
        """See Expansion."""
        self._level += 1
        return self.logits_BKV[:, self._level, None].expand(-1, target_ids_BW.shape[1], -1)


class LayerExpansion:
    """An autoregressive drafter's layer, run on the opened nodes of each level."""

    def __init__(
        self,
        backbone: AutoregressiveBackbone,
        head: Callable[[Tensor], Tensor],
        embedding_VD: Tensor,
        cache: DraftCache,
        slots: slice,
    ) -> None:
        assert cache.last_hidden is not None, "extend before drafting"
        self._backbone, self._head, self._embedding_VD = backbone, head, embedding_VD
        self._cache, self._slots = cache, slots
        self._hidden_BWD = cache.last_hidden[slots][:, None]
        batch = len(self._hidden_BWD)
        self._visible_BWX = torch.zeros(
            batch, 1, 0, dtype=torch.bool, device=self._hidden_BWD.device
        )
        self._level = 0

    def first(self) -> Tensor:
        """See Expansion."""
        return self._logits(self._hidden_BWD)[:, 0]

    def next(self, target_ids_BW: Tensor, parent_BW: Tensor) -> Tensor:
        """See Expansion."""
        width = target_ids_BW.shape[1]
        batch_B1 = torch.arange(len(parent_BW), device=parent_BW.device)[:, None]
        itself_BWW = torch.eye(width, dtype=torch.bool, device=parent_BW.device).expand(
            len(parent_BW), -1, -1
        )
        seen_BWX = self._visible_BWX[batch_B1, parent_BW]
        self._visible_BWX = torch.cat((seen_BWX, itself_BWW), dim=2)
        self._hidden_BWD = self._backbone.draft_hidden_tree(
            self._cache,
            self._slots,
            self._hidden_BWD[batch_B1, parent_BW],
            self._embedding_VD[target_ids_BW],
            self._level,
            self._visible_BWX,
        )
        self._level += 1
        return self._logits(self._hidden_BWD)

    def _logits(self, hidden_BWD: Tensor) -> Tensor:
        return self._head(self._backbone.norm(hidden_BWD))
