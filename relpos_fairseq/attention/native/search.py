"""Search for the translations of one sentence by the kernel in C, with the arguments that search.h declares."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relpos_fairseq.attention.native import build
from relpos_fairseq.attention.native.candidates import CandidatesCall, form_candidates
from relpos_fairseq.attention.native.layer import LayerCall, NormArg, Packed, norm_arg
from relpos_fairseq.attention.native.step import StepCall

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
        *((name, _integer) for name in ("places_stride", "beam", "begin", "pad", "unk", "eos", "min_len", "max_len")),
        ("unk_penalty", ctypes.c_double),
        *((name, _integer) for name in ("step", "stop")),
        *((name, _pointer) for name in ("parents", "units", "scores", "best", "best_places")),
        ("ended", _integer),
        *((name, _pointer) for name in ("ended_lengths", "ended_tokens", "ended_scores")),
    ]


class Steps(NamedTuple):
    """A decoder's steps from the coming one to the one before `stop`, ready for the kernel.

    Args:
        layers: of the coming step, with self-attention and cross-attention.
        stop: the step before which to return.
        places: (beam, slots) the rows in which the keys of earlier steps lie.
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
    embedding: Tensor
    scale: float
    added: Tensor | None
    norms: tuple[nn.LayerNorm | None, nn.LayerNorm | None]
    projection: Packed
    temperature: float
    kept: Any


class Search:
    """Beam search of one sentence by options with fairseq's names; it chooses what fairseq's does.

    Args:
        beam: hypotheses.
        named: first units of the vocabulary that are candidates of every hypothesis; padding, `</s>` and `<unk>` are
            among them.
        begin: unit by which hypotheses begin.
        pad, unk, eos: these.
        min_len, max_len: the least and the most units, `</s>` not counted.
        unk_penalty: what `<unk>` costs.

    Attributes:
        step: how many steps there were.
        places: (beam, step) after steps that the kernel evaluated, the row in which each key of a hypothesis lies.
    """

    def __init__(
        self,
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
        steps = max_len + 1
        self._integers = {
            name: torch.empty(*shape, dtype=torch.long)
            for name, shape in {
                "parents": (steps, beam),
                "units": (steps, beam),
                "best_places": (2 * beam,),
                "ended_lengths": (beam,),
                "ended_tokens": (beam, steps),
            }.items()
        }
        self._numbers = {
            name: torch.empty(*shape, dtype=torch.float32)
            for name, shape in {"scores": (steps, beam), "best": (2 * beam,), "ended_scores": (beam, steps)}.items()
        }
        self._call = SearchCall(
            beam=beam, begin=begin, pad=pad, unk=unk, eos=eos, min_len=min_len, max_len=max_len, unk_penalty=unk_penalty
        )
        for name, part in (self._integers | self._numbers).items():
            setattr(self._call, name, part.data_ptr())
        self._call.candidates.first, self._call.candidates.best = named, 2 * beam
        self.places: Tensor | None = None

    @property
    def step(self) -> int:
        return int(self._call.step)

    @property
    def order(self) -> Tensor:
        """(beam,) which hypothesis each continues since the last step."""
        return self._integers["parents"][self.step - 1]

    def tokens(self) -> Tensor:
        """Return what the decoder reads: (beam, step + 1), whose first column is what hypotheses begin by."""
        row, columns = torch.arange(self._call.beam), []
        for step in reversed(range(self.step)):
            columns.append(self._integers["units"][step][row])
            row = self._integers["parents"][step][row]
        return torch.stack([torch.full_like(row, self._call.begin), *reversed(columns)], dim=1)

    def choose(self, log_probs: Tensor, units: Tensor) -> bool:
        """Choose among a step's candidates (beam, width) in fp32, their units beside them; return whether all is done.

        Raises:
            AssertionError: no hypothesis can end, as where a model finds no numbers.
        """
        self._call.candidates.log_probs, self._call.candidates.units = log_probs.data_ptr(), units.data_ptr()
        self._call.num_layers = 0
        return self._run()

    def advance(self, steps: Steps) -> bool:
        """Evaluate steps; return whether all is done.

        Raises:
            MemoryError: there is none for a layer's rows.
            AssertionError: as `choose`.
        """
        call, beam = self._call, self._call.beam
        channels = steps.embedding.size(1)
        call.layers, call.num_layers = ctypes.addressof(steps.layers), len(steps.layers)
        call.channels, call.stop = channels, steps.stop
        call.embedding, call.embed_scale = steps.embedding.data_ptr(), steps.scale
        call.added = None if steps.added is None else steps.added.data_ptr()
        call.embedding_norm, call.final_norm = (NormArg() if norm is None else norm_arg(norm) for norm in steps.norms)
        x, y = torch.empty(2, beam, channels, dtype=torch.float32)
        call.x, call.y = x.data_ptr(), y.data_ptr()
        call.candidates, *found = form_candidates(
            x, call.candidates.first, call.candidates.best, steps.temperature, steps.projection
        )
        given = steps.places.contiguous()
        places = torch.empty(beam, steps.stop + 1, dtype=torch.long)
        call.given_places, call.places, call.places_stride = given.data_ptr(), places.data_ptr(), places.stride(0)
        places[:, : self.step], places[:, self.step] = given, torch.arange(beam)
        for layer in steps.layers:
            attention = StepCall.from_address(layer.attention)
            attention.key_rows = places.data_ptr()
            attention.key_rows_stride, attention.key_rows_step = places.stride()
        done = self._run()
        del found, given  # the kernel had their addresses
        self.places = places[:, : self.step]
        return done

    def _run(self) -> bool:
        state = build.entry(torch.float32, "relpos_search", SearchCall)(self._call)
        if state == LACKS_MEMORY:
            raise MemoryError("a search has no memory for the rows of a decoder's layer")
        if state == IS_STUCK:
            raise AssertionError(f"no hypothesis ends within {self._call.max_len} units: the model finds no numbers")
        return state == IS_DONE

    def ended(self) -> list[tuple[Tensor, Tensor]]:
        """Return the units of each hypothesis that has ended, and its sums of log-probabilities, in their order."""
        lengths = self._integers["ended_lengths"][: self._call.ended].tolist()
        tokens, scores = self._integers["ended_tokens"], self._numbers["ended_scores"]
        return [(tokens[row, :length].clone(), scores[row, :length].clone()) for row, length in enumerate(lengths)]
