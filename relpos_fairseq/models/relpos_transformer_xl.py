"""`relpos_transformer_xl`: a language model with memory, under any relative position scheme.

Dai et al. 2019, Transformer-XL (arXiv:1901.02860), section 3.2; sizes from the paper's released scripts.

    h~_tau+1^(n-1) = [SG(h_tau^(n-1)) ; h_tau+1^(n-1)]
    q, k, v = h_tau+1 W_q, h~_tau+1 W_k, h~_tau+1 W_v
    h_tau+1^n = transformer layer (q, k, v)

SG(h_tau) is `Memory.states[n-1]`.  The decoder takes a memory and returns the next one; it keeps none
itself.  Positions are the scheme's, over slots M memory + T segment.

As in the released code there is dropout also after the last layer; `same_length` shows each token mem_len
tokens, itself included; and weights start from N(0, 0.02), projections of adaptive embeddings from
N(0, 0.01), layer norms from N(1, 0.02), biases from 0 (`weights_init` in its train.py), while position
schemes keep their own initial values.  Unlike in the released code projections of attention have biases,
as everywhere in fairseq, and outputs have none: --no-attention-bias and --output-bias.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from fairseq.modules import AdaptiveInput
from torch import Tensor, nn

from relpos_fairseq.core.placement import DecodingTerms, Placement, SchemeStack
from relpos_fairseq.core.plan import encode_text
from relpos_fairseq.core.positions import Positions, index_in_document, is_captured
from relpos_fairseq.core.scheme import PositionScheme
from relpos_fairseq.models.configs import (
    RelPosTransformerXLConfig,
    check_mem_len,
    check_memory_flags,
    register_sizes,
    widths,
)
from relpos_fairseq.models.memory_positions import memory_positions, window_of
from relpos_fairseq.models.relpos_transformer_lm import RelPosLanguageModel, RelPosLMDecoder
from relpos_fairseq.modules.memory import Memory, MemoryCarrier, carried, number_documents
from relpos_fairseq.modules.transformer_layer import RelPosMemoryLayer

logger = logging.getLogger(__name__)


def initialise(decoder: Any, std: float, proj_std: float) -> None:
    """Redraw a decoder's parameters, except those of position schemes; `proj_std` is for projections between widths."""
    projections = _projections(decoder)
    for module in _own_modules(decoder):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, 0.0, proj_std if id(module) in projections else std)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx])
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, std)
        if isinstance(module, (nn.Linear, nn.LayerNorm)) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module and its descendants, except position schemes."""
    if isinstance(module, (SchemeStack, Placement)):
        return
    yield module
    for child in module.children():
        yield from _own_modules(child)


def _projections(decoder: Any) -> set[int]:
    """Return the ids of the projections between the widths of an embedding's bands and the model's."""
    found = [decoder.project_in_dim, decoder.project_out_dim]
    if isinstance(decoder.embed_tokens, AdaptiveInput):
        found += [band[1] for band in decoder.embed_tokens.embeddings]
    if decoder.adaptive_softmax is not None:
        found += [tail[0] for tail in decoder.adaptive_softmax.tail]
    return {id(module) for module in found if module is not None}


def drop_biases(layers: nn.ModuleList) -> None:
    """Remove the biases of the projections of attention.

    Raises:
        ValueError: a position scheme starts from biases of its own.
    """
    for layer in layers:
        attention = layer.self_attn
        for scheme in attention.position:
            if type(scheme).initialize_projections is not PositionScheme.initialize_projections:
                raise ValueError(
                    f"--no-attention-bias: position scheme {scheme.name} starts from the biases of "
                    f"queries and keys: leave the flag out, or choose another scheme"
                )
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            getattr(attention, name).register_parameter("bias", None)


class Bias(nn.Module):
    """Add a bias (N,), initialised with zeros, to (..., N)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def add_output_bias(decoder: Any) -> None:
    """Add a bias to a decoder's output projection, or to each band of its adaptive softmax, in place."""
    softmax = decoder.adaptive_softmax
    if softmax is None:
        projection = decoder.output_projection
        projection.bias = nn.Parameter(torch.zeros(projection.out_features))
        return
    sizes = [end - start for start, end in zip(softmax.cutoff, softmax.cutoff[1:])]  # noqa: B905
    softmax.head = nn.Sequential(softmax.head, Bias(softmax.cutoff[0] + len(sizes)))
    for tail, size in zip(softmax.tail, sizes, strict=True):
        tail.append(Bias(size))


class RelPosXLDecoder(RelPosLMDecoder):
    """Transformer decoder whose layers attend over [memory, segment]."""

    layer_class = RelPosMemoryLayer

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Module, no_encoder_attn: bool = True) -> None:
        """Build the decoder with its memory.

        Raises:
            ValueError: lengths of memory that contradict each other, or an absolute position scheme.
        """
        check_memory_flags(cfg)
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn)
        if cfg.no_attention_bias:
            drop_biases(self.layers)
        if cfg.output_bias:
            add_output_bias(self)
        self.same_length = cfg.same_length
        evaluated = cfg.mem_len if cfg.eval_mem_len is None else cfg.eval_mem_len
        self._mem_lens = {"training": cfg.mem_len, "evaluation": evaluated}
        # Tells a checkpoint of this model from one of relpos_transformer_lm, whose tensors have the
        # same names; "version" keeps it out of moving averages.
        self.register_buffer("segment_recurrence_version", encode_text("1"))
        self.window = window_of(cfg, self.num_layers)

    make_positions = staticmethod(memory_positions)

    def initialize(self, cfg: Any) -> None:
        """Draw the released code's initial values, for everything but the schemes."""
        initialise(self, cfg.init_std, cfg.proj_init_std)

    def max_positions(self) -> int:
        longest = super().max_positions()
        return longest if self.window is None else min(longest, self.window.segment)

    @property
    def mem_len(self) -> int:
        """The number of memory slots that a forward pass reads and returns in the current mode, training or evaluation.

        Setting it sets both.  0 evaluates without memory, where same_length does not apply.
        """
        return self._mem_lens["training" if self.training else "evaluation"]

    @mem_len.setter
    def mem_len(self, length: int) -> None:
        check_mem_len(length)
        self._mem_lens = dict.fromkeys(self._mem_lens, length)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: dict | None = None,
        features_only: bool = False,
        memory: Memory | MemoryCarrier | None = None,
        document_starts: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return logits (B, T, V) and, under `memory`, the memory after the segment.

        Args:
            prev_output_tokens: (B, T) tokens; padding may stand anywhere.
            encoder_out: unused beyond fairseq's signature.
            incremental_state: fairseq's decoding cache: only new tokens are evaluated, memory is
                read by the first step and then is in the cache, and none is returned.
            features_only: (B, T, E) features in place of logits.
            memory: what came before; a carrier is given the new one.
            document_starts: (B, T) True at tokens that begin a document: they and those after them
                see nothing before.
            unused: further inputs of fairseq's tasks.

        Raises:
            ValueError: a memory or document_starts that do not fit the tokens.
        """
        features, extra = self.extract_features(prev_output_tokens, None, incremental_state, memory, document_starts)
        return features if features_only else self.output_layer(features), extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: dict | None = None,
        memory: Memory | MemoryCarrier | None = None,
        document_starts: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return features (B, T, E); see `forward`."""
        tokens = prev_output_tokens
        if document_starts is not None and document_starts.shape != tokens.shape:
            raise ValueError(
                f"document_starts must be (B, T) = {tuple(tokens.shape)} as the tokens are, got "
                f"{tuple(document_starts.shape)}"
            )
        if incremental_state is not None:
            return self._decode(tokens, incremental_state, carried(memory), document_starts)
        features, after = self._segment(tokens, carried(memory), document_starts)
        if isinstance(memory, MemoryCarrier):
            memory.fill(after, self)
        return features, {"attn": [None], "memory": after}

    def _segment(self, tokens: Tensor, memory: Memory | None, starts: Tensor | None) -> tuple[Tensor, Memory]:
        """Evaluate a whole segment; return its features, and the memory after it."""
        padding = tokens.eq(self.padding_idx)
        if torch.compiler.is_compiling() or not padding.any():  # a graph's segments have no padding
            padding = order = None
        else:
            # Tokens begin where memory ends, so that slots tell distances.
            order = padding.long().argsort(dim=1, stable=True)
            tokens, padding = tokens.gather(1, order), padding.gather(1, order)
            starts = None if starts is None else starts.gather(1, order)
        before = self._before(memory, tokens)
        documents = number_documents(starts, padding)
        x, before, inputs = self._layers(tokens, before, padding, documents, None)
        after = before.extend(inputs, self.mem_len, padding=padding, documents=documents)
        if order is not None:
            back = order.argsort(dim=1)
            x = x.gather(1, back[:, :, None].expand_as(x))
        return x, after

    def _decode(
        self, tokens: Tensor, state: dict, memory: Memory | None, starts: Tensor | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Evaluate the tokens that the cache lacks; the first step also puts the memory into the cache."""
        cache = self.get_incremental_state(state, "segment") or {}
        done = cache.get("tokens", 0)
        new = tokens[:, done:]
        if not new.size(1):
            raise ValueError(
                f"incremental_state holds {done} tokens and prev_output_tokens has "
                f"{tokens.size(1)}: pass one more token a step, or a fresh state for another batch"
            )
        if done == 0:
            before = self._before(memory, tokens)
            cache.update(memory_len=len(before), terms=DecodingTerms())
        else:
            before = Memory.empty(self.num_layers, tokens.size(0), self.embed_dim, tokens)
        cache["tokens"] = tokens.size(1)
        self.set_incremental_state(state, "segment", cache)
        padding = new.eq(self.padding_idx)
        padding = padding if padding.any() else None
        if padding is not None and done == 0:
            _check_prompt(padding, before.valid)
        documents = number_documents(starts, None)
        x, _, _ = self._layers(new, before, padding, documents, state)
        return x, {"attn": [None], "memory": None}

    def _before(self, memory: Memory | None, tokens: Tensor) -> Memory:
        """Return the memory that a forward pass reads: `memory` checked and cut to `mem_len`, or an empty one."""
        width = self.embed_dim
        if memory is None:
            return Memory.empty(self.num_layers, tokens.size(0), width, tokens)
        memory.check(self.num_layers, tokens.size(0), width)
        return memory.last(self.mem_len).on(tokens.device)

    def _layers(
        self, tokens: Tensor, before: Memory, padding: Tensor | None, documents: Tensor | None, state: dict | None
    ) -> tuple[Tensor, Memory, list[Tensor]]:
        """Return features (B, T, E) of new tokens, the memory that layers read, and each layer's input (T, B, E)."""
        done = self._done(tokens, state)
        x = self.embed(tokens, self._on_input(tokens, done)).transpose(0, 1)
        before = before.to(x)
        if padding is not None or is_captured() or not before.valid.all():
            new = torch.zeros_like(tokens, dtype=torch.bool) if padding is None else padding
            padding = torch.cat([~before.valid, new], dim=1)
        context = self._memory_context(tokens, len(before), padding, documents, state)
        kept = {id(layer) for layer in self.layers}  # LayerDrop draws while it is iterated over
        inputs, read = [], []
        for index, memory in enumerate(before.states):
            if self.window is not None:
                x, memory = self.window.entering(index, x, memory, done)
            inputs.append(x)
            read.append(memory.detach())
            layer = self.layers[index]
            if id(layer) in kept:
                x, _, _ = layer(
                    x, self_attn_mask=context, memory=memory, self_attn_padding_mask=padding, incremental_state=state
                )
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        x = self.dropout_module(x).transpose(0, 1)
        x = x if self.project_out_dim is None else self.project_out_dim(x)
        return x, replace(before, states=tuple(read)), inputs

    def _done(self, tokens: Tensor, state: dict | None) -> int:
        """Return how many of the segment's tokens came before the new ones; 0 outside of decoding."""
        if state is None:
            return 0
        return self.get_incremental_state(state, "segment")["tokens"] - tokens.size(1)

    def _on_input(self, tokens: Tensor, done: int) -> Tensor | None:
        """Return what positions add to the input, counted from the segment's start (--absolute-memory), or None."""
        length = tokens.size(1)
        where = Positions(length, done + length, query_start=done, device=tokens.device)
        added = self.positions.embed(where)
        if self.window is None:
            return added
        waves = self.window.on_input(done, done + length, tokens.device)
        return waves if added is None or waves is None else added + waves

    def _memory_context(
        self, tokens: Tensor, mem_len: int, padding: Tensor | None, documents: Tensor | None, state: dict | None
    ) -> Any:
        """Return the context of all layers over memory and segment."""
        start, kept = mem_len, None
        if state is not None:
            cache = self.get_incremental_state(state, "segment")
            start = cache["memory_len"] + cache["tokens"] - tokens.size(1)
            mem_len, kept = cache["memory_len"], cache["terms"]
            earlier = self.layers[0].self_attn.padding_of(state)
            if earlier is not None:
                padding = tokens.eq(self.padding_idx) if padding is None else padding
                padding = torch.cat([earlier, padding], dim=1)
        if documents is not None:
            documents = torch.nn.functional.pad(documents, (mem_len, 0))
        counted = None
        if self.positions.counts_tokens:
            counted = index_in_document(padding, documents, start + tokens.size(1))
        positions = Positions(
            tgt_len=tokens.size(1),
            src_len=start + tokens.size(1),
            query_start=start,
            token_index=counted,
            device=tokens.device,
        )
        window = self.mem_len or None if self.same_length else None
        context = self.positions.context(positions, kept)
        return replace(context, window=window, documents=documents)


def _check_prompt(padding: Tensor, remembered: Tensor) -> None:
    """Raise an error for padding (B, T) after a row's tokens, or between a row's memory and its tokens.

    Raises:
        ValueError: says which, and the way out.
    """
    where = "after" if padding[:, -1].any() else "before"
    if where == "before" and not (padding.any(1) & remembered.any(1)).any():
        return
    raise ValueError(
        f"incremental decoding cannot begin with padding {where} the tokens of a row, which would "
        f"make their distances wrong: read the prompts as a segment, and decode from its memory"
    )


class RelPosTransformerXLModel(RelPosLanguageModel):
    """A causal language model whose layers attend over [memory, segment]."""

    flags = RelPosTransformerXLConfig
    decoder_class = RelPosXLDecoder

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> RelPosLanguageModel:
        """Build the model, and warn of a task that carries no memory."""
        if cfg.mem_len and not getattr(task, "carries_memory", False):
            logger.warning(
                "task %s carries no memory: every sample begins without any, whatever --mem-len "
                "%d says; train and evaluate by --task segment_language_modeling",
                type(task).__name__,
                cfg.mem_len,
            )
        return super().build_model(cfg, task)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        memory: Memory | MemoryCarrier | None = None,
        document_starts: Tensor | None = None,
        incremental_state: dict | None = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return logits (B, T, V) and {"memory": the new memory}; see `RelPosXLDecoder.forward`."""
        return self.decoder(
            src_tokens, incremental_state=incremental_state, memory=memory, document_starts=document_starts, **unused
        )

    @property
    def mem_len(self) -> int:
        """Slots of memory: --mem-len in training, --eval-mem-len in evaluation, or what was set."""
        return self.decoder.mem_len

    @mem_len.setter
    def mem_len(self, length: int) -> None:
        self.decoder.mem_len = length


def _paper(width: int, ffn: int, heads: int, layers: int, dropout: float) -> dict[str, Any]:
    sizes = widths("decoder", width, ffn, heads, layers)
    return sizes | {"dropout": dropout, "activation_dropout": dropout}


def _adaptive(factor: float) -> dict[str, Any]:
    """WikiText-103's adaptive embedding and softmax, with tied projections."""
    return {
        "adaptive_input": True,
        "adaptive_input_cutoff": "20000,40000,200000",
        "adaptive_softmax_cutoff": "20000,40000,200000",
        "adaptive_input_factor": factor,
        "adaptive_softmax_factor": factor,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
    }


SIZES: dict[str, dict[str, Any]] = {
    "relpos_transformer_xl": {},
    "relpos_transformer_xl_tiny": _paper(128, 512, 4, 2, 0.1) | {"mem_len": 64},
    "relpos_transformer_xl_wt103_base": _paper(410, 2100, 10, 16, 0.1) | _adaptive(1.0) | {"mem_len": 150},
    "relpos_transformer_xl_wt103_large": _paper(1024, 4096, 16, 18, 0.2)
    | _adaptive(4.0)
    | {"mem_len": 384, "attention_dropout": 0.2},
    "relpos_transformer_xl_enwik8_base": _paper(512, 2048, 8, 12, 0.1) | {"mem_len": 512},
}

globals().update(register_sizes(RelPosTransformerXLModel, RelPosTransformerXLConfig, SIZES, __name__))
