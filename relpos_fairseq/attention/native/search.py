"""Beam search by the kernel in C, with the arguments that search.h declares."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relpos_fairseq.attention.native import build
from relpos_fairseq.attention.native.candidates import CandidatesCall, form_candidates
from relpos_fairseq.attention.native.layer import LayerCall, NormArg, Packed, norm_arg
from relpos_fairseq.attention.native.step import StepCall

WORK_OF_A_CALL = 1 << 34  # multiplications, half a second of a core, after which Ctrl-C is seen
_integer, _pointer = ctypes.c_int64, ctypes.c_void_p
GOES_ON, IS_DONE, IS_STUCK, LACKS_MEMORY = range(4)  # what relpos_search returns


class SearchCall(ctypes.Structure):
    """search.h's struct SearchCall, field by field."""

    _fields_ = [
        ("candidates", CandidatesCall),
        ("layers", _pointer),
        *((name, _integer) for name in ("num_layers", "channels")),
        ("embedding", _pointer),
        ("embed_scale", ctypes.c_double),
        ("added", _pointer),
        *((name, NormArg) for name in ("embedding_norm", "final_norm")),
        *((name, _pointer) for name in ("x", "y", "places", "given_places")),
        ("places_stride", _integer),
        *((name, _pointer) for name in ("sources", "source_of_row", "given_masks", "masks")),
        *((name, _integer) for name in ("source_length", "beam", "begin", "pad", "unk", "eos", "min_len", "max_len")),
        ("unk_penalty", ctypes.c_double),
        *((name, _integer) for name in ("step", "stop", "sentences")),
        ("active", _pointer),
        *((name, _integer) for name in ("of_each", "rows")),
        *((name, _pointer) for name in ("parents", "units", "scores", "best", "best_places")),
        *((name, _pointer) for name in ("ended", "ended_lengths", "ended_tokens", "ended_rows", "ended_scores")),
    ]


class Steps(NamedTuple):
    """A decoder's steps from the coming one to the one before `stop`, ready for the kernel.

    Args:
        layers: of the coming step, with self-attention and cross-attention.
        stop: the step before which to return.
        places: (rows, slots) the rows in which the keys of earlier steps lie.
        sources: (U,) where the keys of each sentence's source lie that goes on, or None: there are none.
        masks: (sources, S) True at hidden keys of a source, or None.
        embedding: (V, E) in fp32.
        scale: of embeddings.
        added: (stop - step, E) what positions add to them, or None.
        norms: of the embeddings, and of the last layer's output, or None.
        projection: of this output to logits.
        temperature: by which these are divided.
        kept: what else must outlive the call.
    """

    layers: ctypes.Array[LayerCall]
    stop: int
    places: Tensor
    sources: Tensor | None
    masks: Tensor | None
    embedding: Tensor
    scale: float
    added: Tensor | None
    norms: tuple[nn.LayerNorm | None, nn.LayerNorm | None]
    projection: Packed
    temperature: float
    kept: Any


class Ended(NamedTuple):
    """A hypothesis that has ended: T units, the rows of the steps that found them, and sums of log-probabilities."""

    units: Tensor
    rows: Tensor
    sums: Tensor


class Search:
    """Beam search by options with fairseq's names; it chooses what fairseq's does.

    Rows are those of the sentences that go on, `beam` of each.

    Args:
        sentences: how many.
        beam: hypotheses of each.
        named: first units of the vocabulary that are candidates of every hypothesis; padding, `</s>` and `<unk>` are
            among them.
        begin: unit by which hypotheses begin.
        pad, unk, eos: these.
        min_len, max_len: the least and the most units, `</s>` not counted.
        unk_penalty: what `<unk>` costs.

    Attributes:
        step: how many steps there were.
        tokens: (rows, step + 1) what the decoder reads, whose first column is what hypotheses begin by.
        order: (rows,) which row each continues since the last call, of those before it.
        places: (rows, step) after steps that the kernel evaluated, the row in which each key of a hypothesis lies.
    """

    def __init__(
        self,
        sentences: int,
        beam: int,
        named: int,
        *,
        begin: int,
        pad: int,
        unk: int,
        eos: int,
        min_len: int,
        max_len: int,
        unk_penalty: float,
    ) -> None:
        steps, rows = max_len + 1, sentences * beam
        self._integers = {
            name: torch.empty(*shape, dtype=torch.long)
            for name, shape in {
                "parents": (steps, rows),
                "units": (steps, rows),
                "best_places": (2 * beam,),
                "ended_lengths": (sentences, beam),
                "ended_tokens": (sentences, beam, steps),
                "ended_rows": (sentences, beam, steps),
            }.items()
        }
        self._integers |= {"active": torch.arange(sentences), "ended": torch.zeros(sentences, dtype=torch.long)}
        self._numbers = {
            name: torch.empty(*shape, dtype=torch.float32)
            for name, shape in {
                "scores": (steps, rows),
                "best": (2 * beam,),
                "ended_scores": (sentences, beam, steps),
            }.items()
        }
        options = {"begin": begin, "pad": pad, "unk": unk, "eos": eos, "min_len": min_len, "max_len": max_len}
        self._call = SearchCall(sentences=sentences, rows=rows, beam=beam, unk_penalty=unk_penalty, **options)
        for name, part in (self._integers | self._numbers).items():
            setattr(self._call, name, part.data_ptr())
        self._call.candidates.first, self._call.candidates.best = named, 2 * beam
        self.tokens = torch.full((rows, 1), begin)
        self.order = torch.arange(rows)
        self.places: Tensor | None = None

    @property
    def step(self) -> int:
        return int(self._call.step)

    def choose(self, log_probs: Tensor, units: Tensor) -> bool:
        """Choose among a step's candidates (rows, width) in fp32, their units beside them; return whether all is done.

        Raises:
            AssertionError: no hypothesis of a sentence can end, as where a model finds no numbers.
        """
        call = self._call
        call.candidates.log_probs, call.candidates.units = log_probs.data_ptr(), units.data_ptr()
        call.num_layers, call.of_each = 0, call.beam
        return self._run()

    def advance(self, steps: Steps) -> bool:
        """Evaluate steps, as many as `WORK_OF_A_CALL` or one; return whether all is done.

        Raises:
            MemoryError: there is none for a layer's rows.
            AssertionError: as `choose`.
        """
        call, rows, channels = self._call, len(self.tokens), steps.embedding.size(1)
        call.layers, call.num_layers = ctypes.addressof(steps.layers), len(steps.layers)
        call.channels, call.of_each = channels, call.beam if self.step else 1
        linear = [part for layer in steps.layers for part in (layer.inner, layer.outer, layer.queries_keys_values)]
        work = sum(part.inputs * part.outputs for part in (*linear, steps.projection)) * rows
        call.stop = min(steps.stop, self.step + max(1, WORK_OF_A_CALL // work))
        call.embedding, call.embed_scale = steps.embedding.data_ptr(), steps.scale
        call.added = None if steps.added is None else steps.added.data_ptr()
        call.embedding_norm, call.final_norm = (NormArg() if norm is None else norm_arg(norm) for norm in steps.norms)
        x, y = torch.empty(2, rows, channels, dtype=torch.float32)
        call.x, call.y = x.data_ptr(), y.data_ptr()
        call.candidates, *found = form_candidates(
            x, call.candidates.first, call.candidates.best, steps.temperature, steps.projection
        )
        given, places = steps.places.contiguous(), torch.empty(rows, steps.stop + 1, dtype=torch.long)
        call.given_places, call.places, call.places_stride = given.data_ptr(), places.data_ptr(), places.stride(0)
        for layer in steps.layers:
            attention = StepCall.from_address(layer.attention)
            attention.key_rows = places.data_ptr()
            attention.key_rows_stride, attention.key_rows_step = places.stride()
        kept = self._place_sources(steps, rows)
        done = self._run()
        del found, given, kept  # the kernel had their addresses
        self.places = places[: len(self.tokens), : self.step]
        return done

    def _place_sources(self, steps: Steps, rows: int) -> list[Any]:
        """Let attention to sources read what a search says of each row; return what must outlive the call."""
        call = self._call
        call.sources = call.given_masks = None
        if steps.sources is None:
            return []
        sources, of_row = torch.empty(call.rows // call.beam, dtype=torch.long), torch.empty(rows, dtype=torch.long)
        sources[self._active()] = steps.sources
        call.sources, call.source_of_row = sources.data_ptr(), of_row.data_ptr()
        kept: list[Any] = [sources, of_row]
        if steps.masks is not None:
            given = steps.masks.contiguous()
            masks = given.new_empty(rows, given.size(1))
            call.given_masks, call.masks, call.source_length = given.data_ptr(), masks.data_ptr(), given.size(1)
            kept += [given, masks]
        for layer in steps.layers:
            attention = StepCall.from_buffer_copy(StepCall.from_address(layer.cross))  # which steps after these read
            attention.key_rows, attention.key_rows_stride, attention.key_rows_step = of_row.data_ptr(), 1, 0
            if steps.masks is not None:
                attention.masked, attention.masked_stride = masks.data_ptr(), masks.size(1)
            layer.cross = ctypes.addressof(attention)
            kept.append(attention)
        return kept

    def _active(self) -> Tensor:
        """Return the numbers of the sentences that go on."""
        return self._integers["active"][: self._call.sentences]

    def _run(self) -> bool:
        call, first = self._call, self.step
        hypotheses = call.beam // call.of_each  # of a row: in a first step, the row stands for all of its sentence
        state = build.entry(torch.float32, "relpos_search", SearchCall)(call)
        if state == LACKS_MEMORY:
            raise MemoryError("a search has no memory for the rows of a decoder's layer")
        if state == IS_STUCK:
            raise AssertionError(f"no hypothesis ends within {call.max_len} units: the model finds no numbers")
        row, columns = torch.arange(call.sentences * call.beam), []
        for step in reversed(range(first, self.step)):
            columns.append(self._integers["units"][step][row])
            row = self._integers["parents"][step][row]
        self.order = row * hypotheses
        self.tokens = torch.cat([self.tokens[self.order], torch.stack(columns[::-1], dim=1)], dim=1)
        return state == IS_DONE

    def ended(self) -> list[list[Ended]]:
        """Return the hypotheses of each sentence, in the order in which they ended."""
        lengths = self._integers["ended_lengths"]
        parts = self._integers["ended_tokens"], self._integers["ended_rows"], self._numbers["ended_scores"]
        return [
            [Ended(*(part[s, n, : lengths[s, n]].clone() for part in parts)) for n in range(count)]
            for s, count in enumerate(self._integers["ended"].tolist())
        ]
