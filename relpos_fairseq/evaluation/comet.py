"""Score translations by COMET, whose own program does it: its requirements exclude those of other parts here.

`comet-score` is run from this environment or from PATH, so that it may be installed into one of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TypedDict

import numpy as np
from sacrebleu.significance import estimate_ci

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.packages import remedy
from relpos_fairseq.io.processes import run_tool
from relpos_fairseq.io.reading import read_json

PROGRAM = "comet-score"


class _Segment(TypedDict):
    """What is read of a sentence in the program's JSON."""

    COMET: float


def find_program() -> str:
    """Return the path of `comet-score`, in this environment or on PATH.

    Raises:
        UserError: there is none.
    """
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(PROGRAM, path=places)
    if found is None:
        raise UserError(
            f"--comet needs the program {PROGRAM}, which is not on PATH: {remedy('comet')}, best in an environment of "
            f"its own (its numpy and protobuf are older), and add that environment's bin/ to PATH"
        )
    return found


def comet(program: str, model: str, source: list[str], systems: list[list[str]], reference: list[str]) -> np.ndarray:
    """Return COMET's score of each sentence (systems, sentences).

    Args:
        program: as `find_program` returns it.
        model: a name, such as Unbabel/wmt22-comet-da, or a file .ckpt.
        source: a sentence a line.
        systems: translations of these sentences.
        reference: of these sentences.

    Raises:
        ToolError: the program failed.
    """
    import torch

    folder = Path(tempfile.mkdtemp(prefix="relpos-comet-"))  # which stays with its log where the program fails

    def write(file: str, lines: list[str]) -> str:
        # The program parts lines at a carriage return too.
        (folder / file).write_text("".join(f"{line}\n".replace("\r", " ") for line in lines), "utf-8")
        return str(folder / file)

    command = [program, "--quiet", "--only_system", "--model", model, "--to_json", str(folder / "scores.json")]
    command += ["-s", write("source", source), "-r", write("reference", reference), "-t"]
    command += [write(f"system{number}", lines) for number, lines in enumerate(systems)]
    run_tool([*command, "--gpus", str(int(torch.cuda.is_available()))], folder / "log", torch.get_num_threads())
    told = read_json(folder / "scores.json", dict[str, list[_Segment]], "run it again")
    shutil.rmtree(folder)
    return np.array([[one["COMET"] for one in segments] for segments in told.values()])


def bootstrap(scores: np.ndarray, samples: int, seed: int) -> tuple[list[tuple[float, float]], float]:
    """Return the mean and half of the 95 % interval of two systems, and p, by sacrebleu's paired bootstrap.

    Args:
        scores: (2, sentences) of the baseline and the system; a system's own is their mean.
        samples: resamples.
        seed: of them.
    """
    drawn = np.random.default_rng(seed).integers(scores.shape[1], size=(samples, scores.shape[1]))
    baseline, system = (own[drawn].mean(axis=1) for own in scores)
    differences = np.abs(system - baseline)
    real = abs(scores[1].mean() - scores[0].mean())
    p = (np.sum(differences - differences.mean() > real) + 1) / (samples + 1) if real else 1.0
    return [estimate_ci(means) for means in (baseline, system)], float(p)
