"""How a network that continues the target's features is put together: plain data, which EAGLE and MTP checkpoints fill in."""

from __future__ import annotations

from dataclasses import dataclass

from headway.models.layers import Linear, RMSNorm


@dataclass(frozen=True, slots=True)
class Wiring:
    """What a network does before and behind its layers. Norms left out do nothing.

    hidden_norms     of the target's hidden states, one each
    wide_norm        of all of them side by side
    fuse             them side by side -> feature; None: there is one, and it is the feature
    project          [token, feature] -> the layers' input; None: the input is the feature, and the first layer's attention reads the pair
    feature_first    in the pair
    mask_first       position 0 reads no token
    direct           the first layer's attention reads what was projected without its norm
    normed_residual  without `project`: the input is the normed feature
    norm_output      features handed on are those behind the final norm
    """

    hidden_norms: tuple[RMSNorm, ...] = ()
    wide_norm: RMSNorm | None = None
    fuse: Linear | None = None
    token_norm: RMSNorm | None = None
    feature_norm: RMSNorm | None = None
    project: Linear | None = None
    final_norm: RMSNorm | None = None
    feature_first: bool = False
    mask_first: bool = False
    direct: bool = False
    normed_residual: bool = False
    norm_output: bool = False
