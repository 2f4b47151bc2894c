"""Build models from config values and tensors, without a task or a dictionary, and run them."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel
from torch import Tensor, nn

from relpos_fairseq.heads import CLASSIFIER, SPANS, TOKENS
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.tensor_files import building
from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel
from relpos_fairseq.saved.model import SavedModel, count_rows

State = dict[str, Tensor]
EMBEDDING = "encoder.sentence_encoder.embed_tokens.weight"  # of a RoBERTa


def build_roberta(values: dict[str, Any], state: State) -> nn.Module:
    """Build a relpos_roberta of config values and tensors, heads included.

    Raises:
        UserError: tensors are missing, unknown, or of another shape.
    """
    task = _roberta_task(state, values)
    model = RelPosRobertaModel.build_model(namespace(values), task)
    return load_tensors(model, state, state[EMBEDDING].dtype)


def build_fairseq_roberta(values: dict[str, Any], state: State) -> nn.Module:
    """Build fairseq's own RobertaModel of config values and tensors.

    Raises:
        UserError: tensors are missing, unknown, or of another shape.
    """
    options = namespace(values)
    options.layernorm_embedding = not values.get("no_layernorm_embedding", False)
    model = RobertaModel.build_model(options, _roberta_task(state, values))
    return load_tensors(model, state, state[EMBEDDING].dtype)


def namespace(values: dict[str, Any]) -> Namespace:
    """Return config values as a Namespace for fairseq's builders, which then register a checkpoint's heads."""
    known = {name: value for name, value in values.items() if value is not None}
    return Namespace(**known | {"load_checkpoint_heads": True})


class Rows:
    """Stand in for a dictionary: its number of rows, and the rows of padding and the end."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def pad(self) -> int:
        return 1

    def eos(self) -> int:
        return 2


def task_of(rows: int, length: int) -> SimpleNamespace:
    """Return a stand-in for a task: a dictionary of `rows` rows, and samples of at most `length` tokens."""
    return SimpleNamespace(source_dictionary=Rows(rows), max_positions=lambda: length)


def _roberta_task(state: State, values: dict[str, Any]) -> SimpleNamespace:
    return task_of(len(state[EMBEDDING]), int(values["max_positions"]))


def load_tensors(model: Any, state: State, dtype: torch.dtype) -> nn.Module:
    """Load copies of tensors into a model, cast to `dtype`, and put it into evaluation mode.

    Raises:
        UserError: tensors are missing, unknown, or of another shape.
    """
    try:
        model.to(dtype).load_state_dict({key: value.clone() for key, value in state.items()})
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(f"the tensors do not fit: {' '.join(lines[1:3] or lines)}") from None
    return model.eval()


def build_generating(name: str, values: dict[str, Any], rows: tuple[int, int]) -> nn.Module:
    """Build an untrained model that generates, by its registered name; values of its config or their defaults."""
    config = MODEL_DATACLASS_REGISTRY[name]()
    for option, value in values.items():
        setattr(config, option, value)
    target = Rows(rows[1])
    source = target if rows[0] == rows[1] else Rows(rows[0])
    task = SimpleNamespace(source_dictionary=source, target_dictionary=target, carries_memory=True)
    return MODEL_REGISTRY[name].build_model(config, task)


def shared_names(model: Any) -> dict[str, str]:
    """Map each tied parameter's name to the name of the parameter that it is tied to."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        before = first.setdefault(id(parameter), name)
        if before != name:
            found[name] = before
    return found


def fill_shared(state: State, shared: dict[str, str]) -> State:
    """Return tensors under all names of tied parameters, of which they may have any; `shared` as of `shared_names`."""
    known = dict(state)
    for name, first in shared.items():
        if name in known:
            known.setdefault(first, known[name])
    return known | {name: known[first] for name, first in shared.items() if first in known}


def roberta_shared_names(values: dict[str, Any], state: State) -> dict[str, str]:
    """Map names of tied parameters of a relpos_roberta, as `shared_names`."""
    return shared_names(RelPosRobertaModel.build_model(namespace(values), _roberta_task(state, values)))


def build_alone(saved: SavedModel, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a saved model of ours of its options and tensors, without its task; in `dtype`, or that of its embedding.

    Raises:
        UserError: tensors are missing, unknown, or of another shape.
    """
    values, state = saved.values, saved.state
    with building(saved.path):
        if saved.is_encoder:
            return build_roberta(values, state)
        rows = [*count_rows(state).values()]
        return load_tensors(build_generating(saved.name, values, (rows[0], rows[-1])), state, dtype or torch.float32)


@torch.no_grad()
def outputs_of(model: Any, tokens: Tensor, segments: Tensor | None) -> dict[str, Tensor]:
    """Return the features and the outputs of every head of a RoBERTa for (B, T) tokens, in fp64.

    Args:
        model: fairseq's RobertaModel or a relpos_roberta.
        tokens: (B, T).
        segments: (B, T), or None, as fairseq's own model takes none.
    """
    model = model.double().eval()
    more = {} if segments is None else {"segments": segments}
    features, _ = model(tokens, features_only=True, **more)
    found = {"features": features, "logits": model.encoder.lm_head(features)}
    places = [(head.kind, getattr(model, head.place, {})) for head in (CLASSIFIER, SPANS, TOKENS)]
    heads = [(kind, name, head) for kind, named in places for name, head in named.items()]
    for kind, name, head in heads:
        found[kind if len(heads) == 1 else f"{kind} {name}"] = head(features)
    return found


@torch.no_grad()
def run_ours(saved: SavedModel, first: Tensor, second: Tensor | None) -> dict[str, Tensor]:
    """Run a saved model of ours in fp64.

    Args:
        saved: the model.
        first: tokens (B, T), or sources (B, S) that end in </s>, which a language model leaves aside.
        second: segments (B, T) or None; beginnings of targets (B, T) after </s>.

    Returns:
        As `outputs_of`; of a model that generates `logits` (B, T, V), log-probabilities of an adaptive softmax.

    Raises:
        UserError: its tensors do not fit its options.
    """
    if saved.is_encoder:
        return outputs_of(build_alone(saved), first, second)
    model = build_alone(saved, torch.float64)
    output = model.decoder(second, model.encoder(first) if hasattr(model, "encoder") else None)[0]
    softmax = model.decoder.adaptive_softmax
    return {"logits": output if softmax is None else softmax.get_log_prob(output, None)}
