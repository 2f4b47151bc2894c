"""Prepare many steps of a decoder at once, which differ in the number of their keys alone, for the kernel in C."""

from __future__ import annotations

from fairseq.models.transformer import TransformerDecoderBase
from torch import Tensor, nn

from relpos_fairseq.attention.native.layer import LayerCall
from relpos_fairseq.attention.native.search import Steps
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.models.decoder import RelPosDecoder, encoder_parts
from relpos_fairseq.modules.cross_attention import SOURCES
from relpos_fairseq.modules.layer_step import Coming, drops, is_affine
from relpos_fairseq.modules.transformer_layer import RelPosDecoderLayer
from relpos_fairseq.nn.packed import for_kernel, is_hooked, is_plain

READ = ("forward", "extract_features", "extract_features_scriptable", "embed")  # of a decoder, that its steps are
ADAPTS = ("quant_noise", "project_in_dim", "project_out_dim", "adaptive_softmax")


def prepared_steps(
    decoder: RelPosDecoder, tokens: Tensor, encoder_out: dict | None, state: dict, temperature: float, most: int
) -> Steps | None:
    """Return the steps of a decoder from the coming one on, or None where its first is to be evaluated by itself.

    Args:
        decoder: in evaluation mode.
        tokens: (B, T) of hypotheses without padding, the last of which has not been read yet.
        encoder_out: the source, as fairseq passes it, or None.
        state: fairseq's incremental state after T - 1 tokens.
        temperature: by which logits are divided.
        most: how many tokens there may be.
    """
    projection, embedding = for_kernel(decoder.output_projection), decoder.embed_tokens.weight
    if projection is None or not _is_plain(decoder) or not is_plain(embedding) or not embedding.is_contiguous():
        return None
    (source, padding, state[SOURCES]), (rows, length) = encoder_parts(encoder_out), tokens.shape
    added, context = decoder.place(tokens, state)
    x = embedding.new_empty(1, rows, embedding.size(1))
    layers = [decoder.layers[index] for index in range(decoder.num_layers)]
    given = Coming(x, context, source, padding, state)
    tables = (scheme.shape.max_positions for scheme in decoder.positions.shared if scheme.table_limited)
    stop = min([most, *tables, *(layer.step.serves_until(given) for layer in layers)])
    if stop < length:
        return None
    prepared = [layer.step.prepared(given) for layer in layers]
    if added is not None:
        positions = Positions(stop - length + 1, stop, length - 1, device=tokens.device)
        added = decoder.positions.embed(positions)[0].contiguous()
    norms = decoder.layernorm_embedding, decoder.layer_norm
    calls = (LayerCall * len(layers))(*(call for call, _ in prepared))
    places = decoder.layers[0].self_attn.cache(state).key_rows()[:, : length - 1]
    attention = decoder.layers[0].encoder_attn
    sources, masks = (None, None) if source is None or attention is None else attention.sources(state)
    scale = decoder.embed_scale
    return Steps(calls, stop, places, sources, masks, embedding, scale, added, norms, projection, temperature, prepared)


def take_back(decoder: RelPosDecoder, state: dict, places: Tensor, order: Tensor) -> None:
    """Let a state hold what the kernel wrote.

    Args:
        decoder: whose it is.
        state: as `prepared_steps` had it.
        places: (B', T) where the keys of the tokens lie.
        order: (B',) row that each row continues, of those which there were.
    """
    regrouped = None
    for index in range(decoder.num_layers):
        layer = decoder.layers[index]
        cache = layer.self_attn.cache(state)
        cache.places, cache.length = places, places.size(1)
        if layer.encoder_attn is not None:
            regrouped = layer.encoder_attn.reorder(state, order, regrouped)


def _is_plain(decoder: RelPosDecoder) -> bool:
    """Return whether nothing waits for what a decoder's parts find, or adds to it, but the parts that `Steps` has."""
    layers = [decoder.layers[index] for index in range(decoder.num_layers)]
    norms = [norm for norm in (decoder.layernorm_embedding, decoder.layer_norm) if norm is not None]
    as_known = all(getattr(type(decoder), name) is getattr(RelPosDecoder, name) for name in READ)
    as_known = as_known and vars(decoder).keys().isdisjoint(READ)
    as_known = as_known and type(decoder).output_layer is TransformerDecoderBase.output_layer
    return (
        as_known
        and bool(layers)
        and type(decoder.embed_tokens) is nn.Embedding
        and decoder.embed_tokens.max_norm is None
        and not (decoder.training or drops(decoder.dropout_module))
        and all(getattr(decoder, name) is None for name in ADAPTS)
        and all(map(is_affine, norms))
        and all(type(layer) is RelPosDecoderLayer and layer.step is not None for layer in layers)
        and not any(scheme.by_length or scheme.counts_sentences for scheme in decoder.positions.shared)
        and not any(map(is_hooked, (decoder, decoder.embed_tokens, decoder.dropout_module, *norms, *layers)))
    )
