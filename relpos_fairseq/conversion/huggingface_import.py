"""Read BERT, RoBERTa, XLM-R and DeBERTa folders of Hugging Face's library as relpos models.

    absolute              learned (RoBERTa's table begins after its padding row)
    relative_key          shaw_keys, a_r = E_{-r}: transformers reads its table over i - j
    relative_key_query    m4, the same table in both terms
    token types           --segment-encoding input; a single type, the same for every token, joins
                          the position table (or stays a segment where positions are relative)
    layer_norm_eps        --layer-norm-eps
    DeBERTa               `hf_deberta`

transformers 4 (tested: 4.46.3) has the relative kinds, 5 no longer has them. Rows of the embedding are put
in fairseq's order (`vocabulary`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.conversion import hf_deberta
from relpos_fairseq.conversion.layouts import ENCODER, VERSION, State, encode_text
from relpos_fairseq.conversion.ledger import KEPT, NEUTRAL, USED, Ledger, Recorded
from relpos_fairseq.conversion.report import PADDING, ConversionError, NotComparedError, Outputs
from relpos_fairseq.conversion.source import DEFAULTS, SourceModel
from relpos_fairseq.conversion.vocabulary import Vocabulary, of_folder
from relpos_fairseq.conversion.weight_files import read_json, read_weights, weight_files
from relpos_fairseq.heads import HEAD, MASKED_LM, MODEL, REGRESSION, SEVERAL, SINGLE, SPAN_HEAD, Head, head_of
from relpos_fairseq.schemes import named_elsewhere, scheme_class
from relpos_fairseq.text import load_tokenizer
from relpos_fairseq.text.transformers_files import TRIED

# Hugging Face's names of a layer's modules, and fairseq's.
_LAYER = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "self_attn_layer_norm",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "output.LayerNorm": "final_layer_norm",
}


@dataclass(frozen=True)
class Family:
    """Describe how BERT, RoBERTa and DeBERTa differ in Hugging Face's library.

    Args:
        name: `model_type` of its config.
        prefix: what the encoder's names begin with in a model with a head.
        padded: positions count from the row after padding's, as fairseq's do.
        lm_head: Hugging Face's names of fairseq's `encoder.lm_head.*`.
        stem: what the names of its classes begin with.
    """

    name: str
    prefix: str
    padded: bool
    lm_head: dict[str, str]
    stem: str


_ROBERTA_HEAD = {
    "lm_head.dense": "dense",
    "lm_head.layer_norm": "layer_norm",
    "lm_head.decoder.weight": "weight",
    "lm_head.bias": "bias",
}
FAMILIES = {
    "bert": Family(
        "bert",
        "bert.",
        False,
        {
            "cls.predictions.transform.dense": "dense",
            "cls.predictions.transform.LayerNorm": "layer_norm",
            "cls.predictions.decoder.weight": "weight",
            "cls.predictions.bias": "bias",
        },
        "Bert",
    ),
    "roberta": Family("roberta", "roberta.", True, _ROBERTA_HEAD, "Roberta"),
    "xlm-roberta": Family("xlm-roberta", "roberta.", True, _ROBERTA_HEAD, "XLMRoberta"),
}
# DeBERTa, whose heads are BERT's (`disentangled`); v2 and v3 have names of their own.
(DISENTANGLED,) = named_elsewhere("transformers' model_type")
for _name in (DISENTANGLED, f"{DISENTANGLED}-v2"):
    FAMILIES[_name] = replace(FAMILIES["bert"], name=_name, prefix=f"{DISENTANGLED}.")
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
POSITIONS = "embeddings.position_embeddings.weight"
_HEAD_BIASES = ("decoder.bias", "lm_head.bias", "predictions.bias")
# Tensors that say nothing, and why.
NEUTRAL_TENSORS = {
    "embeddings.position_ids": "a buffer of 0, 1, 2, ...",
    "embeddings.token_type_ids": "a buffer of zeros",
    "cls.predictions.decoder.bias": "repeats cls.predictions.bias",
    "lm_head.decoder.bias": "repeats lm_head.bias",
}
# Keys of config.json that say nothing of the model, by the reason why.
NEUTRAL_KEYS = {
    "the library's own record": "_name_or_path transformers_version torch_dtype dtype auto_map _attn_implementation "
    "_attn_implementation_autoset attn_implementation architectures finetuning_task xla_device output_past model_type",
    "of training from nothing": "initializer_range initializer_factor",
    "of memory and speed": "gradient_checkpointing chunk_size_feed_forward use_cache torchscript use_bfloat16",
    "of what the library returns": "output_hidden_states output_attentions return_dict",
    "the tokenizer says it": "pad_token_id bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id "
    "unk_token_id",
    "the tensors say it": "tie_word_embeddings",
    "id2label says it": "num_labels _num_labels",
    "of generation, which an encoder has not": "top_k top_p temperature repetition_penalty length_penalty "
    "num_return_sequences num_beam_groups diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "eos_token_ids max_length min_length do_sample num_beams typical_p exponential_decay_length_penalty",
    "of another architecture under the same config": "directionality pooler_fc_size pooler_num_attention_heads "
    "pooler_num_fc_layers pooler_size_per_head pooler_type pooler_hidden_size pooler_dropout tie_encoder_decoder "
    "cross_attention_hidden_size",
}
# Files by patterns of their places: what becomes of them, and why.
FILES = (
    (NEUTRAL, "a description", r"(?i)(.*/)?(readme|license|notice|model_card)[^/]*|.*\.(md|png|jpg|svg)"),
    (NEUTRAL, "of a version control or a download", r"(.*/)?\..*"),
    (
        NEUTRAL,
        "the same weights in another format",
        r"(pytorch_model|model|tf_model|flax_model|rust_model)([-.].*)?\.(bin|safetensors|h5|msgpack|ot)(\.index\.json)?"
        r"|(onnx|openvino|coreml)/.*",
    ),
    (NEUTRAL, "of generation, which an encoder has not", r"generation_config\.json"),
    (
        NEUTRAL,
        "of training",
        r"(data_config\.json|training_args\.bin|trainer_state\.json|(optimizer|scheduler|rng_state)[^/]*\.(pt|pth|bin))",
    ),
    (
        KEPT,
        "of sentence-transformers",
        r"modules\.json|sentence_bert_config\.json|config_sentence_transformers\.json|\d+_[A-Za-z]+/[^/]+",
    ),
)
# Tensors that no model here reads, which a conversion keeps for the way back: without the prefix, and with it.
POOLER = ("pooler.dense.weight", "pooler.dense.bias")
NEXT_SENTENCE = ("cls.seq_relationship.weight", "cls.seq_relationship.bias")


def distances(layer: int) -> str:
    """Return Hugging Face's table over distances of a layer, without the family's prefix."""
    return f"encoder.layer.{layer}.attention.self.distance_embedding.weight"


def encoder_names(layers: int) -> dict[str, str]:
    """Map Hugging Face's names of the encoder, without the prefix, to fairseq's."""
    modules = {"embeddings.LayerNorm": f"{ENCODER}.layernorm_embedding"}
    for layer in range(layers):
        for theirs, ours in _LAYER.items():
            modules[f"encoder.layer.{layer}.{theirs}"] = f"{ENCODER}.layers.{layer}.{ours}"
    words = {"embeddings.word_embeddings.weight": f"{ENCODER}.embed_tokens.weight"}
    return words | _parameters(modules)


def head_names(family: Family) -> dict[str, str]:
    """Map Hugging Face's names of the masked LM's head to fairseq's."""
    return _parameters({name: f"encoder.lm_head.{ours}" for name, ours in family.lm_head.items()})


def classifier_names(family: Family, head: str) -> dict[str, str]:
    """Map Hugging Face's names of a classifier (a dense layer, tanh, a projection) to fairseq's.

    BERT's dense layer is its pooler.
    """
    dense, out = ("classifier.dense", "classifier.out_proj")
    if not family.padded:
        dense, out = (f"{family.prefix}pooler.dense", "classifier")
    ours = f"classification_heads.{head}"
    return _parameters({dense: f"{ours}.dense", out: f"{ours}.out_proj"})


def span_names(head: str) -> dict[str, str]:
    """Map Hugging Face's names of a span head to those of relpos_roberta."""
    return _parameters({"qa_outputs": f"span_heads.{head}.out_proj"})


def _parameters(modules: dict[str, str]) -> dict[str, str]:
    """Expand names of modules to those of their weights and biases; names of parameters stay."""
    found = {}
    for theirs, ours in modules.items():
        alone = theirs.endswith((".weight", ".bias"))
        ends = ("",) if alone else (".weight", ".bias")
        found |= {theirs + end: ours + end for end in ends}
    return found


SCHEMES = named_elsewhere("transformers")  # its position_embedding_type to our schemes
KINDS = SCHEMES | dict.fromkeys([hf_deberta.KIND], named_elsewhere("transformers' model_type")[DISENTANGLED])
# fairseq's gelu is the exact one, and its gelu_accurate the approximation by tanh.
ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "tanh": "tanh",
    "gelu_new": "gelu_accurate",
    "gelu_pytorch_tanh": "gelu_accurate",
}


@dataclass
class HuggingFaceModel:
    """Hold a folder that was read and checked.

    Args:
        family: BERT or RoBERTa.
        config: its config.json.
        weights: its tensors under its own names, with the family's prefix.
        vocabulary: the order of its rows in fairseq's dictionary.
        head: the head that its config names; None: none.
        notes: assumptions and omissions that the user should know.
    """

    family: Family
    config: dict[str, Any]
    weights: dict[str, Tensor]
    vocabulary: Vocabulary
    head: Head | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """`absolute`, `relative_key` or `relative_key_query`."""
        return self.config.get("position_embedding_type") or "absolute"

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]

    @property
    def max_positions(self) -> int:
        """Positions of an input that its tables cover."""
        reserved = self.offset if self.kind == "absolute" else 0
        return self.config["max_position_embeddings"] - reserved

    @property
    def offset(self) -> int:
        """Rows of the position table before position 0."""
        return self.config.get("pad_token_id", 1) + 1 if self.family.padded else 0

    def encoder(self, name: str) -> Tensor:
        """Return a tensor of the encoder, by its name without the prefix."""
        return self.weights[self.family.prefix + name]


def read_folder(folder: Path) -> HuggingFaceModel:
    """Read and check a folder.

    Raises:
        ConversionError: a file is missing or truncated, the model is no BERT or RoBERTa encoder,
            or config, weights and vocabulary contradict each other.
    """
    config = Recorded(read_json(folder / "config.json"))
    family, notes, weights = _family(config, folder), [], None
    head = head_of(config, str(folder))
    if family.name.startswith(DISENTANGLED):
        weights = _named(read_weights(folder), family)
        notes = hf_deberta.as_bert(config, weights, family.prefix)
    _check_config(config, folder)
    weights = weights or _named(read_weights(folder), family)
    model = HuggingFaceModel(family, config, weights, Vocabulary([], []), head, notes)
    _check_shapes(model, folder)
    if broken := next((name for name, value in dict(weights).items() if not torch.isfinite(value).all()), None):
        raise ConversionError(f"{folder}: {broken} holds NaN or infinite values: copy the folder again")
    model.vocabulary = of_folder(folder, config, model.notes)
    padding = model.vocabulary.rows[1]
    if family.padded and padding != config.get("pad_token_id", 1):
        raise ConversionError(
            f"{folder}: <pad> is {padding} to the tokenizer and {config['pad_token_id']} to config.json, from which "
            f"positions count: they do not belong together"
        )
    if model.vocabulary.files and (said := compare_ids(folder)):
        model.notes.append(said)
    return model


def compare_ids(folder: Path) -> str:
    """Compare a folder's ids with those of AutoTokenizer; return what was found, or nothing without transformers."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return ""
    release = transformers_release()
    try:
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        found = [theirs(text, add_special_tokens=False)["input_ids"] for text in TRIED]
    except Exception as error:  # whatever a release makes of a folder that it does not know
        return f"ids were not compared: {release} does not load the tokenizer ({' '.join(str(error).split())[:99]})"
    ours = load_tokenizer(folder)
    own = [[ours.numbers[symbol] for symbol in ours.encode(text).pieces] for text in TRIED]
    differing = [text for text, first, second in zip(TRIED, own, found, strict=True) if first != second]
    if not differing:
        return f"ids of {len(TRIED)} texts equal AutoTokenizer's ({release})"
    return (
        f"ids of {len(differing)} of {len(TRIED)} texts differ from AutoTokenizer's of {release} ({differing[0]!r}): "
        f"ours are those of transformers 4.46, and the result's own tokenizer.json keeps them"
    )


def _family(config: dict[str, Any], folder: Path) -> Family:
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ConversionError(
            f"{folder}/config.json says model_type {kind!r}: only {', '.join(FAMILIES)} are converted"
        )
    return FAMILIES[kind]


_NEEDED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)


def _check_config(config: dict[str, Any], folder: Path) -> None:
    config.setdefault("type_vocab_size", 1 if FAMILIES[config["model_type"]].padded else 2)
    for key in _NEEDED:
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise ConversionError(f"{folder}/config.json has {key} {config.get(key)!r}: a whole number is needed")
    if config["hidden_size"] % config["num_attention_heads"]:
        raise ConversionError(
            f"{folder}/config.json: hidden_size {config['hidden_size']} is no multiple of "
            f"num_attention_heads {config['num_attention_heads']}"
        )
    if FAMILIES[config["model_type"]].padded and not isinstance(config.get("pad_token_id", 1), int):
        raise ConversionError(
            f"{folder}/config.json has pad_token_id {config['pad_token_id']!r}: RoBERTa counts from it"
        )
    if config["max_position_embeddings"] < 5:
        raise ConversionError(f"{folder} has {config['max_position_embeddings']} positions: a text needs more")
    problem = config.get("problem_type")
    if problem not in (None, SINGLE, SEVERAL, REGRESSION):
        raise ConversionError(
            f"{folder}/config.json: problem_type {problem!r} is none of {SINGLE}, {SEVERAL}, {REGRESSION}"
        )
    if not isinstance(config.get("classifier_dropout"), float | int | None):
        raise ConversionError(
            f"{folder}/config.json has classifier_dropout {config['classifier_dropout']!r}: give a number"
        )
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ConversionError(f"{folder} is a decoder: only encoders are converted")
    if config.get("pruned_heads"):
        raise ConversionError(f"{folder} has pruned heads, which fairseq's layers cannot express")
    kind = config.get("position_embedding_type") or "absolute"
    for value, known, key in (
        (kind, KINDS if "special_ids" in config else SCHEMES, "position_embedding_type"),
        (config.get("hidden_act", "gelu"), ACTIVATIONS, "hidden_act"),
    ):
        if value not in known:
            raise ConversionError(f"{folder}/config.json: {key} {value!r} is none of {', '.join(known)}")
    if FAMILIES[config["model_type"]].padded and config.get("hidden_act", "gelu") != "gelu":
        raise ConversionError(
            f"{folder}/config.json: hidden_act {config['hidden_act']!r}: RoBERTa's LM head keeps "
            f"gelu, and fairseq has one activation for layers and head"
        )


def _named(weights: dict[str, Tensor], family: Family) -> Recorded:
    """Rename tensors as today's library does, those of the encoder with the family's prefix."""
    result = Recorded()
    for name, value in weights.items():
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        if name.startswith(("embeddings.", "encoder.", "pooler.")):
            name = family.prefix + name
        result[name] = value.float() if value.is_floating_point() else value  # sums in half precision would round
    return result


def _check_shapes(model: HuggingFaceModel, folder: Path) -> None:
    """Check that every tensor is there, of the config's shape, and none unknown."""
    config, prefix = model.config, model.family.prefix
    width, length = config["hidden_size"], config["max_position_embeddings"]
    shapes = {
        prefix + "embeddings.word_embeddings.weight": (config["vocab_size"], width),
        prefix + TOKEN_TYPES: (config["type_vocab_size"], width),
    }
    if model.kind == "absolute":
        shapes[prefix + POSITIONS] = (length, width)
    elif model.kind == hf_deberta.KIND:
        shapes |= {prefix + name: shape for name, shape in hf_deberta.names(config).items()}
    else:
        head = width // config["num_attention_heads"]
        for layer in range(model.layers):
            shapes[prefix + distances(layer)] = (2 * length - 1, head)
    needed = {prefix + name for name in encoder_names(model.layers)} | set(shapes)
    missing = sorted(needed - set(model.weights))
    if missing:
        raise ConversionError(
            f"{folder} lacks {len(missing)} tensors of a {model.family.name} of {model.layers} "
            f"layers ({missing[0]}): its config and weights do not belong together"
        )
    for name, shape in shapes.items():
        found = tuple(dict.__getitem__(model.weights, name).shape)
        if found != shape:
            raise ConversionError(f"{folder}: {name} is {found}, and its config says {shape}")
    known = needed | set(head_names(model.family))
    for heads in (classifier_names(model.family, HEAD), span_names(SPAN_HEAD)):
        known |= set(heads)
    known |= {prefix + name for name in (POSITIONS, *POOLER, *hf_deberta.unread(config))}
    known |= {*NEXT_SENTENCE, *NEUTRAL_TENSORS, *(prefix + name for name in NEUTRAL_TENSORS)}
    unknown = sorted(set(model.weights) - known)
    if unknown:
        raise ConversionError(
            f"{folder} holds {len(unknown)} tensors that no {model.family.name} has here "
            f"({unknown[0]}): another head or architecture than is converted"
        )


def read_huggingface(folder: Path) -> SourceModel:
    """Read a BERT, RoBERTa, XLM-R or DeBERTa folder as a source.

    Raises:
        ConversionError: as `read_folder`.
    """
    model = read_folder(folder)
    state, values = from_hf(model)
    kept = kept_of(model, state)
    source = SourceModel(
        kind=f"Hugging Face's {model.family.name}",
        path=folder,
        state=state,
        values=DEFAULTS | values,
        vocabulary=model.vocabulary,
        files=model.vocabulary.files,
        notes=model.notes,
        task=hf_task(model),
        labels=labels_of(model.config, classes_of(model)),
        problem=model.config.get("problem_type"),
        head=(model.head or (None if has_head(model) else MODEL) or MASKED_LM).suffix,
        family=model.family.name,
        named={key: model.config[key] for key in ("id2label", "label2id") if model.config.get(key)},
        kept=kept,
        library=transformers_release(),
        outputs=lambda tokens, segments: _run(model, folder, tokens, segments),
    )
    state[VERSION] = encode_text(source.plan.describe())
    source.ledger = ledger_of(model, folder, kept)
    source.kept_files = {name: folder / name for name in source.ledger.named("files", KEPT)}
    return source


def _run(model: HuggingFaceModel, folder: Path, tokens: Tensor, segments: Tensor | None) -> Outputs:
    """Return what transformers computes of tokens (B, T) in fairseq's rows, in fairseq's order of rows."""
    rows = torch.tensor(model.vocabulary.rows)
    types = segments
    if segments is None or len(model.encoder(TOKEN_TYPES)) == 1:
        types = torch.zeros_like(tokens)
    found = run_in_transformers(folder, model.family, model.weights, rows[tokens], tokens == PADDING, types)
    if "logits" in found:
        logits = found["logits"][..., rows.clamp(min=0)]
        logits[..., rows < 0] = 0
        found["logits"] = logits
    return found


@torch.no_grad()
def run_in_transformers(
    folder: Path, family: Family, weights: dict[str, Tensor], tokens: Tensor, padding: Tensor, types: Tensor
) -> Outputs:
    """Run a folder's encoder and every head in transformers, in fp64.

    Args:
        folder: the folder.
        family: its family.
        weights: its tensors by the library's names, which say what heads there are.
        tokens: (B, T) ids of the folder's own vocabulary.
        padding: (B, T) True at padding.
        types: (B, T) token types.

    Returns:
        `features` (B, T, E), and `logits`, `classification` and `spans` where the folder has them.

    Raises:
        NotComparedError: transformers is absent, or does not load the folder as it is.
    """
    given = {"input_ids": tokens, "attention_mask": (~padding).long(), "token_type_ids": types}
    bias = next(theirs for theirs, ours in head_names(family).items() if ours == "encoder.lm_head.bias")
    classifier = "classifier.weight" in weights or "classifier.out_proj.weight" in weights
    heads = ("MaskedLM",) * (bias in weights) + ("SequenceClassification",) * classifier
    heads += ("QuestionAnswering",) * ("qa_outputs.weight" in weights)
    found: Outputs = {}
    for head in heads or ("",):
        model = load_in_transformers(f"AutoModelFor{head}" if head else "AutoModel", folder)
        if head == "MaskedLM" and (own := model.get_output_embeddings().bias).shape == weights[bias].shape:
            own.copy_(weights[bias])  # which transformers 4 may lose when it loads
        output = model(**given, output_hidden_states=True)
        found["features"] = output.hidden_states[-1]
        if head == "QuestionAnswering":
            found["spans"] = torch.stack([output.start_logits, output.end_logits], -1)
        elif head:
            found["logits" if head == "MaskedLM" else "classification"] = output.logits
    return found


def transformers_release() -> str:
    """Return the name and version of the installed transformers, without importing it."""
    try:
        return f"transformers {metadata.version('transformers')}"
    except metadata.PackageNotFoundError:
        return "transformers"


def load_in_transformers(name: str, folder: Path) -> Any:
    """Load a folder by a class of transformers, in fp64 and evaluation mode.

    Raises:
        NotComparedError: transformers is absent, or does not load the folder as it is.
    """
    try:
        import transformers
    except ImportError as error:
        raise NotComparedError(
            f"transformers does not import here ({' '.join(str(error).split())[:99]}): "
            f"pip install 'relpos_fairseq[transformers]'"
        ) from error
    version, verbosity = transformers_release(), transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        model, loading = getattr(transformers, name).from_pretrained(
            folder, output_loading_info=True, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # whatever a release makes of a folder that it does not know
        raise NotComparedError(f"{version} does not load the folder ({' '.join(str(error).split())[:99]})") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    new = [key for key in loading["missing_keys"] if "pooler" not in key and not key.endswith(_HEAD_BIASES)]
    unread = [key for key in loading["unexpected_keys"] if "distance_embedding" in key]  # as of 5
    if new or unread:
        raise NotComparedError(f"{version} does not read the folder as it is ({[*new, *unread][0]})")
    return model.double().eval()


def from_hf(model: HuggingFaceModel) -> tuple[State, dict[str, Any]]:
    """Return the model's tensors under the names of relpos_roberta, and values of RelPosRobertaConfig."""
    config, state = model.config, {}
    for theirs, ours in encoder_names(model.layers).items():
        state[ours] = model.encoder(theirs)
    key = f"{ENCODER}.embed_tokens.weight"
    state[key] = model.vocabulary.take(state[key])
    untied = _lm_head(model, state)
    _heads(model, state)
    types, more = model.encoder(TOKEN_TYPES), {}
    if model.kind == hf_deberta.KIND:
        more = hf_deberta.positions(model, state, KINDS[model.kind], KINDS["absolute"])
    segments = _positions(model, state)
    values = {
        "position_scheme": KINDS[model.kind],
        "segment_encoding": segments,
        "encoder_layers": model.layers,
        "encoder_embed_dim": config["hidden_size"],
        "encoder_ffn_embed_dim": config["intermediate_size"],
        "encoder_attention_heads": config["num_attention_heads"],
        "activation_fn": ACTIVATIONS[config.get("hidden_act", "gelu")],
        "layer_norm_eps": config.get("layer_norm_eps", 1e-12),
        "dropout": config.get("hidden_dropout_prob", 0.1),
        "attention_dropout": config.get("attention_probs_dropout_prob", 0.1),
        "pooler_dropout": _classifier_dropout(config),
        "num_segments": None if segments == "none" else str(max(len(types), 2)),
        "max_positions": model.max_positions,
        "untie_weights_roberta": untied,
    } | more
    return state, values


def _classifier_dropout(config: dict[str, Any]) -> float:
    given = config.get("classifier_dropout")
    return config.get("hidden_dropout_prob", 0.1) if given is None else given


def ledger_of(model: HuggingFaceModel, folder: Path, kept: dict[str, Tensor]) -> Ledger:
    """Return what became of everything in a folder that was read: tensors by today's names."""
    prefix = model.family.prefix
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    # Keys that hf_deberta and the checks set are not the file's.
    keys = read_json(folder / "config.json")
    ledger = Ledger(model.weights, keys, files)
    ledger.mark("tensors", USED, model.weights.read)
    ledger.mark("tensors", KEPT, list(kept), "no model here reads it")
    ledger.mark("tensors", NEUTRAL, NEUTRAL_TENSORS | {prefix + n: why for n, why in NEUTRAL_TENSORS.items()})
    cancelled = "adds the same to all logits of a query"
    ledger.mark("tensors", NEUTRAL, [prefix + name for name in hf_deberta.unread(model.config)], cancelled)
    if model.kind not in ("absolute", hf_deberta.KIND):
        ledger.mark("tensors", NEUTRAL, [prefix + POSITIONS], "not read with relative positions")
    ledger.mark("keys", NEUTRAL, [key for key, value in keys.items() if value in (None, False, [], {})], "not set")
    ledger.mark("keys", USED, model.config.read)
    for reason, names in NEUTRAL_KEYS.items():
        ledger.mark("keys", NEUTRAL, set(names.split()) - model.config.read, reason)
    for verdict, reason, pattern in FILES:
        ledger.mark("files", verdict, filter(re.compile(pattern).fullmatch, files), reason)
    ledger.mark("files", USED, (path.name for path in (folder / "config.json", *weight_files(folder))))
    ledger.mark("files", USED, (path.name for path in model.vocabulary.files))
    return ledger


def has_head(model: HuggingFaceModel) -> bool:
    """Return True if a folder holds tensors of a head, whatever config.json calls it."""
    names = [*head_names(model.family), *classifier_names(model.family, HEAD), *span_names(SPAN_HEAD)]
    return any(dict.__contains__(model.weights, name) for name in names if "pooler" not in name)


def kept_of(model: HuggingFaceModel, state: State) -> dict[str, Tensor]:
    """Return the tensors that no model here reads, by their names: BERT's next-sentence head, an unused pooler."""
    names = list(NEXT_SENTENCE)
    if f"classification_heads.{HEAD}.dense.weight" not in state or model.family.padded:
        names += [model.family.prefix + name for name in POOLER]
    return {name: model.weights[name] for name in names if name in model.weights}


def hf_task(model: HuggingFaceModel) -> dict[str, Any]:
    """Return options of the task that gives the model's head the input that it was trained on.

    RoBERTa's pairs are `<s> A </s> </s> B </s>`, BERT's `<s> A </s> B </s>`: fairseq's
    sentence_prediction writes the first with a separator token and the second without one.
    """
    if classes_of(model) == 0:
        return {}
    bert = not model.family.padded
    if bert:
        model.notes.append(
            "pairs have BERT's one </s> between them: sentence_prediction without "
            "--separator-token; with --separator-token 2, RoBERTa's two, inputs would differ"
        )
    return {
        "_name": "sentence_prediction",
        "init_token": 0,
        "separator_token": None if bert else 2,
        "classification_head_name": HEAD,
        "regression_target": classes_of(model) == 1 or model.config.get("problem_type") == REGRESSION,
    }


def labels_of(config: dict[str, Any], classes: int) -> list[str]:
    """Return the names of `classes` classes where config.json names every one, else nothing."""
    named = config.get("id2label")
    named = named if isinstance(named, dict) else {}
    labels = [str(named.get(str(number), "")).strip() for number in range(classes)]
    own = all(labels) and len(set(labels)) == len(labels)
    return labels if own and not any(name.startswith("LABEL_") for name in labels) else []


def classes_of(model: HuggingFaceModel) -> int:
    """Return the number of the classifier's outputs; 0: there is no classifier."""
    names = classifier_names(model.family, HEAD)
    key = next(theirs for theirs, ours in names.items() if ours.endswith("out_proj.weight"))
    return len(model.weights.get(key, ()))


def _lm_head(model: HuggingFaceModel, state: State) -> bool:
    """Copy the masked LM's head into `state`; return whether its projection differs from the embedding."""
    names = head_names(model.family)
    have = {theirs: ours for theirs, ours in names.items() if theirs in model.weights}
    bias = next(theirs for theirs, ours in names.items() if ours.endswith("lm_head.bias"))
    if bias not in have and bias.replace(".bias", ".decoder.bias") in model.weights:
        model.weights[bias] = model.weights[bias.replace(".bias", ".decoder.bias")]
        have[bias] = names[bias]
    embedding = state[f"{ENCODER}.embed_tokens.weight"]
    output = "encoder.lm_head.weight"
    if bias not in have:
        model.notes.append("no masked LM head: one is added, untrained (identity, no bias)")
        _fresh_head(state, embedding)
        return False
    for theirs, ours in have.items():
        value = model.weights[theirs]
        by_row = ours in (output, "encoder.lm_head.bias")
        state[ours] = model.vocabulary.take(value) if by_row else value
    state.setdefault(output, embedding)
    return not torch.equal(state[output], embedding)


def _fresh_head(state: State, embedding: Tensor) -> None:
    """Add an untrained masked LM head to `state`: identity, no bias, tied to the embedding."""
    width = embedding.size(1)
    state["encoder.lm_head.dense.weight"] = torch.eye(width, dtype=embedding.dtype)
    state["encoder.lm_head.layer_norm.weight"] = embedding.new_ones(width)
    for name in ("dense", "layer_norm"):
        state[f"encoder.lm_head.{name}.bias"] = embedding.new_zeros(width)
    state["encoder.lm_head.weight"] = embedding
    state["encoder.lm_head.bias"] = embedding.new_zeros(len(embedding))


def _heads(model: HuggingFaceModel, state: State) -> None:
    """Copy a classifier and a span head into `state`, where the folder has them."""
    for names in (classifier_names(model.family, HEAD), span_names(SPAN_HEAD)):
        own = [theirs for theirs in names if "pooler" not in theirs]
        if not all(theirs in model.weights for theirs in own):
            continue
        lost = [theirs for theirs in names if theirs not in model.weights]
        if lost:
            raise ConversionError(f"the classifier lacks {lost[0]}: its file is incomplete")
        for theirs, ours in names.items():
            state[ours] = model.weights[theirs]


def _positions(model: HuggingFaceModel, state: State) -> str:
    """Write the position tables into `state`; return the segment encoding that expresses the token types."""
    types, shared = model.encoder(TOKEN_TYPES), f"{ENCODER}.positions.shared"
    single, index = len(types) == 1, 0
    if model.kind == "absolute":
        table = model.encoder(POSITIONS)[model.offset :]
        if single:
            if types.any():
                model.notes.append("the only token type is added to the position table")
            table = table + types
        state[f"{shared}.0.table"], index = table, 1
    elif model.kind == hf_deberta.KIND:
        index = int(f"{shared}.0.table" in state)
    else:
        (name,) = scheme_class(KINDS[model.kind]).tables
        for layer in range(model.layers):
            table = model.encoder(distances(layer)).flip(0)[None]  # i - j to j - i
            state[f"{ENCODER}.layers.{layer}.self_attn.position.0.{name}"] = table
    if single and (model.kind == "absolute" or not types.any()):
        return "none"
    state[f"{shared}.{index}.table"] = types.expand(max(len(types), 2), -1)
    return "input"
