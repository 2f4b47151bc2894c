"""Memory as a value: what it keeps, in which order, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from relpos_fairseq.modules.memory import Memory, MemoryCarrier, StreamMemory, carried, number_documents

LAYERS, WIDTH = 2, 3


def states(length: int, rows: int, seed: int = 0) -> list[Tensor]:
    """One (T, B, C) tensor a layer."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, rows, WIDTH, generator=generator) for _ in range(LAYERS)]


def memory(length: int = 4, rows: int = 2) -> Memory:
    """A memory of `length` tokens a row."""
    empty = Memory.empty(LAYERS, rows, WIDTH, torch.zeros(1))
    return empty.extend(states(length, rows), length)


def contents(value: Memory, row: int) -> list[list[list[float]]]:
    """What each layer remembers of a row, oldest first."""
    return [state[value.valid[row], row].tolist() for state in value.states]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_extend_is_appending_to_lists(data: st.DataObject) -> None:
    """Segments with padding anywhere and boundaries anywhere, beside one list a row."""
    rows, mem_len = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 6))
    kept = Memory.empty(LAYERS, rows, WIDTH, torch.zeros(1))
    expected = [[[] for _ in range(LAYERS)] for _ in range(rows)]
    for number in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.integers(1, 4))
        flags = st.lists(st.booleans(), min_size=rows * length, max_size=rows * length)
        padding, starts = (torch.tensor(data.draw(flags), dtype=torch.bool).view(rows, length) for _ in range(2))
        new = states(length, rows, number)
        some = bool(padding.any())
        documents = number_documents(starts, padding if some else None)
        kept = kept.extend(new, mem_len, padding=padding if some else None, documents=documents)
        for row in range(rows):
            for t in range(length):
                if padding[row, t]:
                    continue
                for layer in range(LAYERS):
                    if starts[row, t]:
                        expected[row][layer].clear()
                    expected[row][layer].append(new[layer][t, row].tolist())
                    del expected[row][layer][: max(0, len(expected[row][layer]) - mem_len)]
    assert len(kept) <= mem_len
    for row in range(rows):
        assert contents(kept, row) == expected[row]
        valid = kept.valid[row].long()
        assert (valid.diff() >= 0).all()  # real slots end the row


def test_rows_are_selected_and_reset() -> None:
    value = memory()
    swapped = value.reorder(torch.tensor([1, 0, 1]))
    assert [contents(swapped, row) for row in range(3)] == [contents(value, row) for row in (1, 0, 1)]
    reset = value.reset_rows(torch.tensor([True, False]))
    assert contents(reset, 0) == [[], []]
    assert contents(reset, 1) == contents(value, 1)
    assert value.valid.all()  # a value: nothing changed in place
    assert contents(value.last(1), 0) == [layer[-1:] for layer in contents(value, 0)]


def test_saved_and_restored() -> None:
    """state_dict is plain tensors; what comes back is equal to the bit."""
    value = memory().reset_rows(torch.tensor([True, False]))
    saved = value.state_dict()
    assert all(type(part) is Tensor for part in saved.values())
    restored = Memory.from_state_dict(saved)
    assert torch.equal(restored.valid, value.valid)
    for one, other in zip(restored.states, value.states, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match=r"saved memory has states \(L, M, B, C\) .*\['states'\]"):
        Memory.from_state_dict({"states": saved["states"]})


def test_gradients_end_in_memory() -> None:
    leaf = torch.randn(3, 1, WIDTH, requires_grad=True)
    kept = Memory.empty(1, 1, WIDTH, torch.zeros(1)).extend([leaf * 2], 3)
    assert not kept.states[0].requires_grad
    with pytest.raises(ValueError, match="must be detached"):
        Memory((leaf,), torch.ones(1, 3, dtype=torch.bool))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mem_len", [0, 2, 5, 6, 9])
def test_nothing_is_kept_beside_the_slots(padded: bool, mem_len: int) -> None:
    """A view of all slots would keep those that are forgotten."""
    padding = torch.tensor([[False, True], [False, False]]) if padded else None
    longer = memory(4).extend(states(2, 2, 1), mem_len, padding=padding)
    assert len(longer) == min(mem_len, 6)
    for part in (*longer.states, longer.valid):
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_type_follows_the_model() -> None:
    value = memory().to(torch.zeros(1, dtype=torch.bfloat16))
    assert {state.dtype for state in value.states} == {torch.bfloat16}
    assert value.valid.dtype == torch.bool
    longer = value.extend(states(2, 2), 6)
    assert {state.dtype for state in longer.states} == {torch.float32}


def test_it_moves_as_a_whole() -> None:
    """A reader of samples on the CPU may hand a model its own memory of another device."""
    value = memory().to(torch.zeros(1, dtype=torch.bfloat16)).on(torch.device("meta"))
    assert {state.device.type for state in (*value.states, value.valid)} == {"meta"}
    assert {state.dtype for state in value.states} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("layers", "batch", "width", "message"),
    [
        (3, 2, WIDTH, "2 layers of width 3 and the model has 3 of width 3: .* another model"),
        (2, 2, 8, "2 layers of width 3 and the model has 2 of width 8: .* another model"),
        (2, 5, WIDTH, "memory has 2 rows and the input 5: .*reorder"),
    ],
)
def test_what_does_not_fit(layers: int, batch: int, width: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memory().check(layers, batch, width)


def test_shapes_are_checked() -> None:
    state, valid = torch.zeros(4, 2, WIDTH), torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="at least one layer"):
        Memory((), valid)
    with pytest.raises(ValueError, match=r"must all be \(M, B, C\)"):
        Memory((state, state[1:]), valid)
    with pytest.raises(ValueError, match=r"valid must be \(B, M\) = \(2, 4\), got \(4, 2\)"):
        Memory((state,), valid.t())


def test_a_carrier_is_read_through() -> None:
    value = memory()
    assert carried(MemoryCarrier(value)) is value
    assert carried(value) is value
    assert carried(MemoryCarrier()) is None
    with pytest.raises(ValueError, match="memory must be a Memory, a carrier of one or None"):
        carried([torch.zeros(1)])


def test_blocks_of_a_stream_follow_each_other() -> None:
    """Each block has the memory that the one before it left; another block is an error."""
    stream, found = StreamMemory(), []
    for step in range(3):
        with stream.block(step, step, torch.device("cpu")) as carrier:
            found.append(0 if carrier.memory is None else carrier.memory.valid.size(1))
            carrier.memory = memory(step + 1)
    assert found == [0, 1, 2] and stream.state_dict()["next_step"] == 3
    with pytest.raises(ValueError, match="block 5 of the stream came where block 3 follows"), stream.block(5, 5, "cpu"):
        pass
