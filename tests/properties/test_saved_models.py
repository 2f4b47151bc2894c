"""What is said of a saved model by its tensors and its dictionary, of whatever names and sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relpos_fairseq.heads import CHOICES, CLASSIFIER, RANKING, SPANS, TOKENS, heads_in
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.text.dictionary import MASK, NSPECIAL, symbols_of_rows

NAMES = st.sampled_from(["mine", "my-head v2", "question_answering", "sentence_classification_head", "é"])
HEADS = st.dictionaries(st.tuples(st.sampled_from([CLASSIFIER, SPANS, TOKENS]), NAMES), st.integers(1, 9))


@given(HEADS, NAMES, st.sampled_from(["sentence_prediction", RANKING, "masked_lm"]))
def test_every_head_is_there_once_and_has_a_name_of_its_own(heads, trained, task):
    state = {f"{head.place}.{name}.out_proj.weight": torch.zeros(size, 2) for (head, name), size in heads.items()}
    state |= {name.replace("out_proj", "dense"): value for name, value in state.items()}
    found = heads_in(state, {"_name": task, "classification_head_name": trained})
    ranks = task == RANKING
    assert {(CLASSIFIER if one.head is CHOICES else one.head, one.name): one.outputs for one in found} == heads
    assert len({one.called for one in found}) == len(found) and all(one.called.endswith(one.name) for one in found)
    assert len({one.prefix for one in found}) == len(found) and all(
        f"{one.prefix}dense.weight" in state for one in found
    )
    own = [one for one in found if one.trained]
    assert [one.name for one in own] == [trained] * (task != "masked_lm" and (CLASSIFIER, trained) in heads)
    assert all((one.head is CHOICES) == ranks for one in own)


@given(st.integers(1, 9), st.booleans(), st.booleans(), st.integers(1, 20))
def test_a_dictionary_is_that_of_its_rows_alone(tmp_path_factory, words, listed, masked, rows):
    symbols = [f"w{number}" for number in range(words)] + [MASK] * listed
    path = tmp_path_factory.getbasetemp() / "dict.txt"
    path.write_text("".join(f"{symbol} 1\n" for symbol in symbols))
    own = NSPECIAL + len(symbols)
    if rows in (own, own + (masked and not listed)):
        found = symbols_of_rows(path, rows, masked)
        assert len(found) == rows and found[NSPECIAL:own] == symbols and found[own:] == [MASK] * (rows - own)
    else:
        with pytest.raises(UserError, match=f"makes {own}.* rows, and the model has {rows}|makes {own + 1} rows"):
            symbols_of_rows(path, rows, masked)
