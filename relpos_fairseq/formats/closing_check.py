"""Open a written folder in a process of its own, by transformers' Auto class and pipeline, and compare it with ours.

Run as a program, this file opens the folders that its input names, a line of JSON each, and answers on the file
descriptor that its argument names; it imports nothing of this package. `check_folder` asks it of an encoder, and
compares ids, classes, outputs, the loss, the pipeline; `check_generating` of a model that generates. The program stays
as long as the process that asked first.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

TEXTS = ("A man rides a red bike.", "Où est-il né ?  Zürich, 北京!")
PAIR = ("Who rides?", "The old man rides a red bike.")
LABEL = 2  # of every third token in the masked LM's loss; ids that any model has
TOLERANCE = 1e-3  # of outputs, beside their size, in fp32; what rounds differently stays far below
IMPOSSIBLE = -5e3  # scores up to here are those of symbols that a model never writes
TAIL = 16  # last positions of a model that generates, which are compared
MORE = 4  # tokens by which a pipeline continues a text
EOS, PAD = 2, 1  # in the models that generate, fairseq's
OUTPUTS = "outputs.pt"  # the program's tensors, in its own folder
BOOT = "import runpy, sys; del sys.path[0]; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"


def open_folder(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return what the installed transformers makes of a folder.

    Args:
        folder: the folder.
        asked: `auto`, `pipeline` and `kind` of its head; `trust`, whether its code may be imported; `text`, whether it
            has a tokenizer; `lines`, whose ids are asked for; a classifier's `problem` and number of `classes`; for a
            model that generates what `_generated` says.  The choices of multiple choice are the texts.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    how = {"trust_remote_code": asked["trust"], "local_files_only": True}
    model, loading = getattr(transformers, asked["auto"]).from_pretrained(folder, output_loading_info=True, **how)
    model = model.float().eval()
    known = ("pooler", "decoder.bias", "lm_head.bias", "predictions.bias", "position_ids", "version")
    found = {"release": transformers.__version__, "outputs": {}, "classes": model.config.to_dict().get("id2label")}
    found["missing"] = [key for key in loading["missing_keys"] if not any(part in key for part in known)]
    # Of a head's class, the parts that it leaves aside are named so; positions that it does not read matter.
    found["unread"] = [key for key in loading["unexpected_keys"] if "distance_embedding" in key or "positions" in key]
    if found["missing"] or found["unread"]:
        return found
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **how) if asked["text"] else None
    found["lines"] = [tokenizer(line)["input_ids"] for line in asked["lines"]] if tokenizer else []
    if asked["kind"] == "next":
        return found | _generated(model, tokenizer, asked)
    if not tokenizer:
        return found
    tokenizer.padding_side = "right"  # absolute positions of transformers count padding on the left
    batch = tokenizer(list(TEXTS), padding=True, truncation=True, return_tensors="pt")
    found["ids"], found["mask"] = batch["input_ids"].tolist(), batch["attention_mask"].tolist()
    found["segments"] = batch["token_type_ids"].tolist() if "token_type_ids" in batch else None
    found["plain"] = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    pair = tokenizer(*PAIR)
    found["pair"] = [pair["input_ids"], pair.get("token_type_ids", [0] * len(pair["input_ids"]))]
    choices = asked["kind"] == "choices"
    alone = tokenizer(TEXTS[0], truncation=True, return_tensors="pt")  # without padding, which a loss may count
    alone = batch if choices else alone
    found["alone"] = alone["input_ids"].tolist()

    def shaped(rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: part[None] if choices else part for name, part in rows.items()}

    with torch.no_grad():
        output = model(**shaped(batch))
    names = ("logits", "prediction_logits", "start_logits", "end_logits", "last_hidden_state")
    found["outputs"] = {name: output[name] for name in names if name in output}
    longest = tokenizer.model_max_length
    if longest < 1 << 20:
        cut = tokenizer("a man " * longest, truncation=True, return_tensors="pt")
        found["cut"] = cut["input_ids"].size(1)
        with torch.no_grad():
            model(**shaped(cut))
    # Not where no question fits, nor by a tokenizer in Python, whose words the pipeline does not find.
    short = asked["pipeline"] == "question-answering" and (longest < 32 or not tokenizer.is_fast)
    if asked["pipeline"] in transformers.pipelines.SUPPORTED_TASKS and not short:
        made = transformers.pipeline(asked["pipeline"], model=model, tokenizer=tokenizer)
        ends = f" {tokenizer.mask_token}" if asked["pipeline"] == "fill-mask" else ""
        lengths = ((part + ends, len(tokenizer(part + ends)["input_ids"])) for part in (TEXTS[0][:-1], "a", ""))
        text = next(text for text, length in lengths if length <= longest)  # pipelines do not truncate
        more = {"fill-mask": {"top_k": 5}, "text-classification": {"top_k": None}}
        more["token-classification"] = {"ignore_labels": []}
        if asked["pipeline"] == "question-answering":
            stride = max(1, min(128, longest // 8))  # its own is too long for a short model
            found["piped"] = made(question=PAIR[0], context=PAIR[1], doc_stride=stride)["answer"]
        else:
            found["piped"] = made(text, **more.get(asked["pipeline"], {}))
            if asked["pipeline"] == "token-classification":
                found["piped"] = [[one["index"], one["entity"], float(one["score"])] for one in found["piped"]]
            found["piped_ids"] = tokenizer(text)["input_ids"]
    with torch.no_grad():  # last, since it may set the config's problem_type
        loss = model(**shaped(alone), **labels_for(asked, alone["input_ids"])).get("loss")
    return found | {"loss": None if loss is None else float(loss)}


def _generated(model: Any, tokenizer: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the last logits, the loss and greedy continuations of a model that generates, and what its text becomes.

    Args:
        model: transformers' model.
        tokenizer: its tokenizer, or None.
        asked: `batch`, its inputs by name; the number `prompt` of tokens that are continued, up to as many as the
            batch has; `trains`, whether it has a loss; `targets`, texts of a translation's output; `lines` to continue.
    """
    import transformers

    given = {name: torch.tensor(rows) for name, rows in asked["batch"].items()}
    tokens = given.get("decoder_input_ids", given["input_ids"])
    begun = {name: rows for name, rows in given.items() if name != "decoder_input_ids"}
    begun |= {} if "decoder_input_ids" in given else {"input_ids": tokens[:, : asked["prompt"]]}
    greedy = {"num_beams": 1, "do_sample": False, "early_stopping": False, "length_penalty": 1.0}
    greedy["max_new_tokens"] = tokens.size(1) - asked["prompt"]
    found: dict[str, Any] = {"loss": None}
    with torch.no_grad():
        outputs = {"logits": model(**given).logits[:, -TAIL:]}
        outputs["logits with its cache"] = model(**given, use_cache=True).logits[:, -1:]
        if asked["trains"]:
            found["loss"] = float(model(**given, labels=tokens).loss)
        if greedy["max_new_tokens"]:
            found["chosen"] = model.generate(**begun, **greedy).tolist()
    found["outputs"] = outputs
    if tokenizer is None:
        return found
    found["targets"] = [tokenizer(text_target=line)["input_ids"] for line in asked["targets"]]
    found["decoded"] = [tokenizer.decode(ids, skip_special_tokens=True) for ids in found["targets"]]
    lengths = ((line, len(tokenizer(line)["input_ids"])) for line in (*asked["lines"], "a"))
    fits = ((line, length) for line, length in lengths if length + MORE <= (asked["longest"] or length + MORE))
    if asked["pipeline"] and (first := next(fits, None)):
        line, found["piped_prompt"] = first
        made = transformers.pipeline(asked["pipeline"], model=model, tokenizer=tokenizer)
        more = greedy | {"max_new_tokens": MORE}
        found["piped"] = made(line, return_tensors=True, **more)[0]["generated_token_ids"]
    return found


def labels_for(asked: Mapping[str, Any], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the labels of the texts' ids (B, L) that a head's loss is computed of."""
    kind, rows = asked["kind"], torch.arange(len(ids))
    if kind == "logits" and asked["auto"].endswith("MaskedLM"):
        return {"labels": torch.where((torch.arange(ids.size(1)) % 3 == 1).expand_as(ids), LABEL, -100)}
    if kind == "spans":
        return {"start_positions": rows + 1, "end_positions": rows + 2}
    if kind == "tokens":
        places = torch.arange(ids.size(1)).expand_as(ids)
        return {"labels": torch.where(places % 3 == 1, -100, places % asked["classes"])}
    if kind == "choices":
        return {"labels": torch.tensor([1])}
    if kind != "classification":
        return {}
    if asked["problem"] == "single_label_classification":
        return {"labels": rows % asked["classes"]}
    values = (rows[:, None] + torch.arange(asked["classes"])) % 2
    alone = asked["classes"] == 1 and asked["problem"] == "regression"
    return {"labels": values.float().squeeze(1) if alone else values.float()}


class NotOpenedError(Exception):
    """The folder cannot be opened here, or differs from ours; the message says why."""


def check_folder(
    folder: Path,
    asked: dict[str, Any],
    row_of: Mapping[int, int],
    outputs: Callable[[torch.Tensor, torch.Tensor | None], Mapping[str, torch.Tensor]],
    encode: Callable[[str], Sequence[int]] | None,
    loss: Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], torch.Tensor | None],
) -> str:
    """Open a folder in a process of its own and compare it with ours; return what was compared.

    Args:
        folder: the folder.
        asked: as `open_folder`, but with the ids of each of the `lines`, and what must come: `names` of classes or
            None, the `longest` input or None, the id of the `mask`, ids and token types of the `pair`, and `said`,
            whether config.json names the problem.
        row_of: our row of each of the folder's ids.
        outputs: our outputs by name, of (B, L) rows and segments.
        encode: our ids of a text, in the folder's numbers; None: it has no tokenizer.
        loss: our loss of outputs and labels; None: the head has none.

    Raises:
        NotOpenedError: it does not load, or something differs.
    """
    if importlib.util.find_spec("transformers") is None:
        return "not opened: transformers is not installed"
    with _opened(folder, asked) as found:
        if asked["names"] is not None:
            names = [name for _, name in sorted((int(n), name) for n, name in found["classes"].items())]
            _same("names of classes", names, asked["names"])
        said = f"opened by {asked['auto']} of transformers {found['release']}"
        if encode is None:
            return said
        _same("ids", found["plain"], [list(encode(text)) for text in TEXTS])
        _same("ids and token types of a pair", found["pair"], asked["pair"])
        if asked["longest"] is not None:
            _same("longest input after truncation", found.get("cut"), asked["longest"])
        real = torch.tensor(found["mask"]).bool()
        segments = None if found["segments"] is None else torch.tensor(found["segments"])
        rows = torch.tensor([[row_of[number] for number in row] for row in found["ids"]]).masked_fill(~real, 1)
        ours = outputs(rows, segments)
        order = torch.tensor([row_of[number] for number in sorted(row_of)])
        theirs = {name: value.double() for name, value in found["outputs"].items()}
        compared = [_outputs(asked["kind"], ours, theirs, real, order)]
        alone = torch.tensor(found["alone"])
        single = torch.tensor([[row_of[number] for number in row] for row in found["alone"]])
        expected = loss(outputs(single, torch.zeros_like(single)), labels_for(asked, alone))
        if found["loss"] is not None and expected is not None:
            _close("loss", torch.tensor(found["loss"]).double(), expected)
            compared.append("loss")
        if "piped_ids" in found:
            _piped(asked, found, row_of, order, outputs)
        return f"{said}: ids, {', '.join(compared)}{' and its pipeline' * ('piped' in found)} are ours"


def check_generating(
    folder: Path, asked: dict[str, Any], scores: Callable[[torch.Tensor], torch.Tensor], loss: float | None
) -> tuple[dict[str, float], str]:
    """Open the folder of a model that generates as `check_folder`; return differences of logits, what was compared.

    Args:
        folder: the folder.
        asked: as `open_folder`, but with the ids of each of the `lines`, and of each of the `targets` its ids and the
            text that they are decoded to.
        scores: our scores (B, T, V) of the output's tokens (B, T), after the inputs of the batch's rows or of none.
        loss: our loss of the batch; None: the model has none.

    Raises:
        NotOpenedError: it does not load, or something differs.
    """
    with _opened(folder, asked) as found:
        tokens = torch.tensor(asked["batch"].get("decoder_input_ids", asked["batch"]["input_ids"]))
        ours, compared = scores(tokens), ["logits", "logits with its cache"]
        expected = {"logits": ours[:, -TAIL:], "logits with its cache": ours[:, -1:]}
        apart = {name: _close(name, found["outputs"][name], expected[name]) for name in compared}
        if loss is not None:
            _close("loss", torch.tensor(found["loss"]).double(), torch.tensor(loss))
            compared.append("loss")
        if "chosen" in found:
            _greedy("generate", torch.tensor(found["chosen"]), asked["prompt"], asked, scores)
            compared.append("generate")
        if asked["text"]:
            targets = asked["targets"].values()
            _same("ids of its output", found["targets"], [ids for ids, _ in targets])
            _same("text of ids", found["decoded"], [text for _, text in targets])
            compared.insert(0, "ids")
        if "piped" in found:
            _greedy("pipeline", torch.tensor([found["piped"]]), found["piped_prompt"], asked, scores)
            compared.append("its pipeline")
        said = f"opened by {asked['auto']} of transformers {found['release']}"
        return apart, f"{said}: {', '.join(compared[:-1])} and {compared[-1]} are ours"


def _greedy(name: str, chosen: torch.Tensor, prompt: int, asked: Mapping[str, Any], scores: Callable) -> None:
    """Compare each token (B, T) that was chosen after a prompt with the best by our scores, up to </s>."""
    after = chosen[:, prompt:]
    if not after.size(1):
        raise NotOpenedError(f"its {name} gave nothing")
    ours = scores(chosen[:, :-1].masked_fill(chosen[:, :-1] == PAD, EOS))[:, prompt - 1 :].clone()
    size = measured(ours, ours)[1]
    ours[..., PAD] = -torch.inf
    if "decoder_input_ids" in asked["batch"]:  # no translation is empty
        ours[:, 0, EOS] = -torch.inf
    ended = (after == EOS).long().cumsum(1) - (after == EOS).long() > 0
    apart = (ours.amax(-1) - ours.gather(-1, after[..., None]).squeeze(-1)).masked_fill(ended, 0.0).max()
    if not agree(float(apart), size):
        raise NotOpenedError(f"its {name} takes a token whose score is {float(apart):.2g} below the best by ours")


@contextlib.contextmanager
def _opened(folder: Path, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give what the program found in a folder that loads as it is, with the lines' ids as asked.

    Raises:
        NotOpenedError: it does not load so.
    """
    try:
        found = _answer(folder, asked | {name: [*asked[name]] for name in ("lines", "targets") if name in asked})
        if found["missing"] or found["unread"]:
            raise NotOpenedError(
                f"transformers {found['release']} does not read it as it is "
                f"({[*found['missing'], *found['unread']][0]})"
                + "; a folder of relpos export transformers has these positions in every release"
                * bool(found["unread"])
            )
        if asked["text"]:
            _same("ids", found["lines"], [*asked["lines"].values()])
        yield found
    except NotOpenedError:
        if _opener:  # what a folder's own code did to the program ends with it
            _opener.pop().program.kill()
        raise


class _Opener:
    """The program that opens folders, begun by this process under this environment."""

    def __init__(self, owner: tuple) -> None:
        self.owner, self.place = owner, tempfile.TemporaryDirectory()
        read, write = os.pipe()
        self.program = subprocess.Popen(
            [sys.executable, "-c", BOOT, __file__, str(write), self.place.name],
            env=os.environ | {"PYTHONPATH": owner[1], "HF_MODULES_CACHE": self.place.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[write],
            text=True,
        )
        os.close(write)
        self.answers = os.fdopen(read, encoding="utf-8")

    def ask(self, folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
        """Return its answer.

        Raises:
            NotOpenedError: it has ended, or says why it does not open the folder.
        """
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([str(folder.absolute()), asked]), file=self.program.stdin, flush=True)
        if not (line := self.answers.readline()):
            status = _opener.pop().program.wait()
            raise NotOpenedError(f"transformers does not open it: its process ended with status {status}")
        found = json.loads(line)
        if "error" in found:
            raise NotOpenedError(f"transformers does not open it: {found['error'][:200]}")
        from relpos_fairseq.io.tensor_files import load

        return found | {"outputs": load(Path(self.place.name, OUTPUTS))}


_opener: list[_Opener] = []


def _answer(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    root = str(Path(__file__).resolve().parents[2])
    owner = (os.getpid(), os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]), sys.executable)
    if not _opener or _opener[0].owner != owner:  # a fork has one of its own
        _opener[:] = [_Opener(owner)]
    return _opener[0].ask(folder, asked)


def _outputs(kind: str, ours: Mapping, theirs: Mapping, real: torch.Tensor, order: torch.Tensor) -> str:
    """Compare the outputs of a batch; return their name."""
    name, pair = "logits", (theirs.get("logits"), ours.get(kind))
    if kind == "spans":
        name, pair = "span logits", (torch.stack([theirs["start_logits"], theirs["end_logits"]], -1), ours[kind])
    elif kind == "logits":
        pair = theirs.get("logits", theirs.get("prediction_logits")), ours[kind][..., order]
    elif not kind:
        name, pair = "hidden states", (theirs["last_hidden_state"], ours["features"])
    whole = kind in ("classification", "choices")  # one a text, not one a token
    _close(name, *(part if whole else part[real] for part in pair))
    return name


def _piped(asked: Mapping, found: Mapping, row_of: Mapping[int, int], order: torch.Tensor, outputs: Callable) -> None:
    """Compare the scores of a pipeline, where it can tell classes apart by their names."""
    rows = torch.tensor([[row_of[number] for number in found["piped_ids"]]])
    ours = outputs(rows, torch.zeros_like(rows))
    if asked["pipeline"] == "fill-mask":
        place = found["piped_ids"].index(asked["mask"])
        probabilities = ours["logits"][0, place, order].softmax(-1)
        for one in found["piped"]:
            _close("fill-mask", torch.tensor(one["score"]).double(), probabilities[sorted(row_of).index(one["token"])])
        return
    if asked["pipeline"] == "token-classification" and len({*asked["names"]}) == len(asked["names"]):
        probabilities = ours["tokens"][0].softmax(-1)
        for place, name, score in found["piped"]:
            expected = probabilities[place, asked["names"].index(name)]
            _close("token-classification", torch.tensor(score).double(), expected)
    if asked["pipeline"] != "text-classification":
        return
    logits = ours["classification"][0]
    scores = {"multi_label_classification": logits.sigmoid(), "regression": logits}.get(asked["problem"])
    if scores is None or (asked["problem"] == "regression" and not asked["said"]):
        scores = logits.sigmoid() if len(logits) == 1 else logits.softmax(-1)
    if len({*asked["names"]}) < len(scores):
        return
    named = {one["label"]: one["score"] for one in found["piped"]}
    _close("text-classification", torch.tensor([named[name] for name in asked["names"]]).double(), scores)


def measured(theirs: torch.Tensor, ours: torch.Tensor) -> tuple[float, float]:
    """Return the largest difference of two outputs, and our largest value, but for symbols that both never write."""
    wrong = (theirs.double() - ours.double()).masked_fill((theirs <= IMPOSSIBLE) & (ours <= IMPOSSIBLE), 0.0).abs()
    return float(wrong.max()), float(ours.masked_fill(ours <= IMPOSSIBLE, 0.0).abs().max())


def agree(apart: float, size: float) -> bool:
    """Tell whether outputs differ by no more than rounding, by what `measured` returns; NaN does not."""
    return apart <= TOLERANCE * max(1.0, size)


def _close(name: str, theirs: torch.Tensor, ours: torch.Tensor) -> float:
    if theirs.shape != ours.shape:
        raise NotOpenedError(f"its {name} have the shape {(*theirs.shape,)}, ours {(*ours.shape,)}")
    apart, size = measured(theirs, ours)
    if not agree(apart, size):
        raise NotOpenedError(f"its {name} differ from ours by {apart:.2g}")
    return apart


def _same(name: str, theirs: Any, ours: Any) -> None:
    if theirs != ours:
        raise NotOpenedError(f"its {name} are {str(theirs)[:80]}, ours {str(ours)[:80]}")


def serve(answers: int, place: str) -> None:
    """Answer requests of the standard input, a line of JSON each, on a file descriptor; tensors go into a folder."""
    with os.fdopen(answers, "w", encoding="utf-8") as file:
        for line in sys.stdin:
            try:
                found = open_folder(*json.loads(line))
                torch.save(found.pop("outputs"), os.path.join(place, OUTPUTS))
            except Exception as error:  # whatever a release makes of a folder
                lines = [part.strip() for part in str(error).splitlines() if part.strip()] or [""]
                said = " ".join(lines[: 1 + lines[0].endswith(":")])  # an announcement and what it announces
                found = {"error": f"{type(error).__name__}: {said}"}
            print(json.dumps(found), file=file, flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
