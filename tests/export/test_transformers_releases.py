"""Exported folders in the oldest and the newest transformers, each in an environment of its own."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from helpers import FULL, ROOT
from helpers.commands import relpos, train
from helpers.exported import CLASSIFIED, fairseqs, hub_of, write_checkpoint
from helpers.formats import FORMATS, change_checkpoint
from helpers.releases import installed, run_in
from helpers.tokenizers import SENTENCES, TRAINED, lines, write_folders
from helpers.tokenizers import train as train_kind
from relpos_fairseq.text import load_tokenizer
from relpos_fairseq.text.transformers_files import transformers_files

OLDEST, _, NEWEST = RELEASES = ("4.44.2", "4.46.3", "5.24.0")  # 4.46 copies no code of a folder
READING, IDS, WRITING = (RELEASES,) * 3 if FULL else ((OLDEST,), (NEWEST,), ())  # releases of each test
SCRIPT = Path(__file__).with_name("use_in_transformers.py")


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """What gives the Python with a release, which all tests share."""
    return partial(installed, tmp_path_factory.mktemp("environments"))


@pytest.fixture(scope="module")
def translator(corpus, tmp_path_factory):
    """A translation model of one update."""
    folder = tmp_path_factory.mktemp("translated") / "model"
    train(corpus, folder, "--position-scheme", "m4", "--max-update", "1")
    return folder / "checkpoint_last.pt"


RANKED = CLASSIFIED | {"_name": "sentence_ranking"}
# What the checkpoint of a folder has, and the head that is asked.
FOLDERS = {
    "masked": ({}, {}),
    "classified": ({"classes": 3, "task": CLASSIFIED}, {"classification_head_name": "mine"}),
    "answering": ({"spans": True, "scheme": "t5"}, {"span_head_name": "spans"}),
    "named": ({"tokens": 3}, {"token_head_name": "entities"}),
    "ranked": (
        {"classes": 1, "task": CLASSIFIED | {"_name": "sentence_ranking"}},
        {"classification_head_name": "mine"},
    ),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folders, their checkpoints' models and hubs."""
    models = {}
    for name, (more, _) in FOLDERS.items():
        folder = tmp_path_factory.mktemp(name)
        model, checkpoint = write_checkpoint(folder, "bpe", **more)
        assert relpos("export", "transformers", checkpoint, "--out", folder / "out") == 0
        models[name] = folder / "out", model, hub_of(folder, model, "bpe")
    return models


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("release", READING)
@torch.no_grad()
def test_a_release_uses_the_folders(release, exported, translator, interpreter, tmp_path):
    python = interpreter(release)
    assert relpos("export", "transformers", translator, "--out", tmp_path / "translated") == 0
    for name, (folder, _, _) in exported.items():
        (tmp_path / name).symlink_to(folder)
    done = run_in(tmp_path, python, SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["transformers"] == release

    for name, (_, model, hub) in exported.items():
        rows = [hub.encode("the old house"), hub.encode("a mouse hears")]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, True, 1)
        ours, theirs = model(tokens, **FOLDERS[name][1])[0], torch.tensor(found[name])
        ours = {"answering": ours[..., 0], "ranked": ours.mT}.get(name, ours)
        real = slice(None) if name in ("classified", "ranked") else tokens != 1
        torch.testing.assert_close(theirs[real], ours[real], rtol=0, atol=1e-5)

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "translated", trust_remote_code=True)
    source = tokenizer(["w1 w2 w3", "w4"], padding=True, return_tensors="pt")["input_ids"]
    assert found["translated"] == fairseqs(translator, source)

    hub = exported["masked"][2]
    filled = {row["token"]: row["score"] for row in found["fill-mask"]}
    tokens = torch.tensor([[0, *map(hub.dictionary.index, hub._pieces("the old <mask> hears", masked=True)), 2]])
    probabilities = hub.model(tokens)[0][tokens == hub.dictionary.index("<mask>")][0].softmax(-1)
    assert len(filled) > 50
    for token, score in filled.items():
        assert abs(probabilities[token] - score) < 1e-5
    model, hub = exported["classified"][1:]
    expected = hub.predict("mine", hub.encode("the old")).exp()[0].tolist()
    given = {row["label"]: row["score"] for row in found["text-classification"]}
    assert given == pytest.approx(dict(zip(("yes", "no", "perhaps"), expected, strict=True)), 1e-4)
    model, hub = exported["named"][1:]
    rows = hub.encode("the old")
    scores = model(rows[None], token_head_name="entities")[0][0].softmax(-1)
    assert [place for place, *_ in found["token-classification"]] == list(range(1, len(rows) - 1))
    for place, name, score in found["token-classification"]:
        assert abs(scores[place, ("yes", "no", "perhaps").index(name)] - score) < 1e-5
    assert ("question-answering" in found) == release.startswith("4")
    if "question-answering" in found:
        assert found["question-answering"]["answer"] in "a new mouse makes the old house"
    assert found["trained"]["last"] < 0.5 * found["trained"]["first"], found["trained"]
    assert found["trained"]["accuracy"] == 1.0


LOAD = """
import json, sys
from pathlib import Path
from transformers import AutoTokenizer
folder = Path(sys.argv[1])
texts = json.loads((folder / "texts.json").read_text())
for place in filter(Path.is_dir, folder.iterdir()):
    tokenizer = AutoTokenizer.from_pretrained(place)
    own = [text.replace("<mask>", tokenizer.mask_token) for text in texts]
    found = [tokenizer(text, add_special_tokens=False).input_ids for text in own]
    (place / "found.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("release", IDS)
def test_a_release_gives_our_ids(release, interpreter, tmp_path):
    """Of every setting of a folder, and of every kind that is trained here, masks too."""
    folders = write_folders(tmp_path / "read")
    tokenizers = {name: load_tokenizer(folder) for name, folder in folders.items()}
    tokenizers |= {name: train_kind(name, tmp_path / "trained" / name) for name in TRAINED}
    texts = [*SENTENCES, "covid19[E1] Covid19 [E1]covid19", *lines()]
    masked = ["A man is riding a <mask>.", "A <mask>, a woman", "<mask> <mask> is (<mask>)"]
    written = tmp_path / "written"
    for name, tokenizer in tokenizers.items():
        (written / name).mkdir(parents=True)
        for file, text in transformers_files(tokenizer, tokenizer.numbers | specials(tokenizer), 1, False).items():
            (written / name / file).write_text(text, encoding="utf-8")
    (written / "texts.json").write_text(json.dumps(texts + masked))
    subprocess.run([interpreter(release), "-c", LOAD, written], check=True, capture_output=True)
    for name, tokenizer in tokenizers.items():
        numbers = tokenizer.numbers | specials(tokenizer)
        found = json.loads((written / name / "found.json").read_text())
        expected = [tokenizer.encode(text).pieces for text in texts]
        if not set(tokenizer.added) - set(tokenizer.names.values()):
            expected += [tokenizer.encode_masked(text) for text in masked]
        for text, pieces, ids in zip(texts + masked, expected, found, strict=False):
            assert ids == [numbers[piece] for piece in pieces], (name, text)


def specials(tokenizer) -> dict[str, int]:
    """Numbers for the special symbols that a tokenizer trained here has not."""
    missing = [name for name in ("<s>", "<pad>", "</s>", "<unk>", "<mask>") if name not in tokenizer.numbers]
    return {name: len(tokenizer.numbers) + n for n, name in enumerate(missing)}


COMMANDS = """
import json, sys
from relpos_fairseq.cli.main import main
print([main(words) for words in json.loads(sys.argv[1])])
"""


OURS = {"argparse", "legacy", "dataclass", "ours", "exported", "translation"}  # formats that are run by our code


@pytest.mark.slow
@pytest.mark.parametrize("release", (OLDEST, NEWEST))
def test_a_release_compares_every_format(release, interpreter, tmp_path):
    """The newest runs no BERT of relative positions: it says so, and nothing is called exact."""
    sources = {name: make(tmp_path / name.replace(" ", "-")) for name, make in FORMATS.items()}
    commands = [["convert", str(path), "--to", "same", "--out", f"made-{n}"] for n, path in enumerate(sources.values())]
    done = run_in(tmp_path, interpreter(release), "-c", COMMANDS, json.dumps(commands))
    assert done.stdout.splitlines()[-1] == str([0] * len(FORMATS)), done.stdout + done.stderr[-500:]
    said = dict(zip(sources, done.stdout.split("source    ")[1:], strict=True))
    unrun = {"opennmt", "xl"} | ({"bert relative"} if release == NEWEST else set())
    assert {name for name, lines in said.items() if "compared  no: " in lines} == unrun
    assert {name for name, lines in said.items() if "exact     yes" in lines} == said.keys() - unrun
    theirs = {name for name, lines in said.items() if f"transformers {release}" in lines}
    assert theirs - OURS == said.keys() - OURS - {"opennmt", "xl"}


@pytest.mark.slow
@pytest.mark.nightly  # opens folders in processes of the newest release
def test_a_release_without_relative_positions_publishes_none(interpreter, tmp_path):
    """Its closing check refuses the folder, and names the export that it reads; fp16 is loaded as fp32."""
    for name, scheme, more in (("m4", "m4", {"position_clip_distance": "0"}), ("half", "learned", {})):
        (tmp_path / name).mkdir()
        _, checkpoint = write_checkpoint(tmp_path / name, "bpe", scheme, **more)
    change_checkpoint(
        checkpoint,
        lambda state: state["model"].update({n: v.half() for n, v in state["model"].items() if v.is_floating_point()}),
    )
    commands = [
        ["convert", "m4/model.pt", "--to", "hf-roberta", "--out", "no"],
        ["convert", "half/model.pt", "--to", "hf-roberta", "--out", "out0"],
        ["export", "transformers", "half/model.pt", "--out", "out1"],
    ]
    done = run_in(tmp_path, interpreter(NEWEST), "-c", COMMANDS, json.dumps(commands))
    assert done.stdout.splitlines()[-1] == "[2, 0, 0]" and not (tmp_path / "no").exists(), done.stderr[-500:]
    assert "distance_embedding.weight); a folder of relpos export transformers has these" in done.stderr
    assert done.stdout.count("of transformers 5.24.0: ids, logits, loss and its pipeline are ours") == 2


@pytest.mark.slow
@pytest.mark.parametrize("release", WRITING)
def test_a_release_exports_models_that_generate(release, interpreter):
    """Its own process writes the folder, and the closing check opens it: translation, language models, memory."""
    python = interpreter(release)
    chosen = [Path(__file__).with_name("test_closing_generation.py"), "-k", "said or any_length"]
    run = [python, "-m", "pytest", "-q", *chosen]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace")
    assert done.returncode == 0, done.stdout[-3000:]
