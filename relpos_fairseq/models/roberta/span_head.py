"""The span head of question answering: a start and an end logit for every token.

Devlin et al. 2018, BERT (arXiv:1810.04805), section 4.2: two vectors S and E, and a token's logits
are their products with its last hidden state (here the rows of one projection, with biases, as in
BERT's released code).
"""

from __future__ import annotations

from torch import Tensor, nn


class SpanHead(nn.Module):
    """Start and end logits of every token."""

    def __init__(self, embed_dim: int, dropout: float = 0.0) -> None:
        """Build the projection.

        Args:
            embed_dim: width E of the features.
            dropout: of the features.
        """
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(embed_dim, 2)

    def forward(self, features: Tensor) -> Tensor:
        """(B, T, E) to (B, T, 2): start and end logits."""
        return self.out_proj(self.dropout(features))
