"""`relpos benchmark sampling`: rows of ours and of transformers' model of the same shape."""

from __future__ import annotations

import re

import pytest
import torch

from helpers.lm_models import randomized
from relpos_fairseq.models.building import build_generating
from relpos_fairseq.saved.checkpoint import OURS, checkpoint_of

pytest.importorskip("transformers")
VALUES = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_layers": 2, "decoder_attention_heads": 2}
VALUES |= {"position_scheme": "m4", "tokens_per_sample": 20}


def checkpoint(folder, kind: str):
    values = VALUES | ({"mem_len": 8} if kind.endswith("xl") else {})
    model = randomized(build_generating(kind, values, (24, 24))).float()
    task = {"_name": OURS[kind].task, "tokens_per_sample": 20}
    made = checkpoint_of(kind, values, model.state_dict(), task)
    (folder / "text").mkdir()
    (folder / "text" / "dict.txt").write_text("".join(f"w{number} 1\n" for number in range(20)))
    torch.save(made, folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["relpos_transformer_lm", "relpos_transformer_xl"])
def test_rows(kind, tmp_path, shell, timed_here):
    """The prompt is longer than a segment; two rows at a time."""
    options = "--prompt-tokens 25 --tokens 60 --batch-size 2 --rounds 1"
    lines = shell(f"benchmark sampling {options}", checkpoint(tmp_path, kind)).splitlines()
    rows = [line.strip("| ").split("|") for line in lines if re.search(r"^\|.*\d\.\d", line)]
    names = ["relpos sample fp32", "transformers fp32", "relpos sample int8", "transformers int8"]
    assert [row[0].strip() for row in rows] == (names[:3] if kind.endswith("xl") else names)
    assert all(float(cell.replace(",", "")) > 0 for row in rows for cell in row[1:-1])
