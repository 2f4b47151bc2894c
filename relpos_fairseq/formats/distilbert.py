"""Read the config of a DistilBERT, a BERT without token types and pooler under other names (Sanh et al. 2019).

Its tensors `names.DISTILBERT` names. A classifier has a dense layer of its own, with relu.
"""

from __future__ import annotations

from typing import Any

KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "classifier_dropout": "seq_classif_dropout",
}


def read_config(config: dict[str, Any]) -> None:
    """Set BERT's keys from a DistilBERT's config, in place, and what its library sets."""
    config |= {ours: value for ours, theirs in KEYS.items() if (value := config.get(theirs)) is not None}
    config |= {"layer_norm_eps": 1e-12, "type_vocab_size": 1, "pooler_hidden_act": "relu"}
    config["special_ids"] = {"<pad>": 0, "<unk>": 100, "<s>": 101, "</s>": 102, "<mask>": 103}
