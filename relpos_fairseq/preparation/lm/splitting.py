"""One text into contiguous train, valid and test: by lines, or exactly by characters or bytes."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import atomic_path
from relpos_fairseq.preparation.lm.reading import Piece, measure, read_pieces, size_of

SPLITS = ("train", "valid", "test")


def parse_fractions(text: str) -> list[Fraction]:
    """Reads `0.9,0.05,0.05`.

    Raises:
        PreparationError: Not two or three positive numbers with the sum 1.
    """
    try:
        fractions = [Fraction(part) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        fractions = []
    if len(fractions) not in (2, 3) or min(fractions) <= 0 or sum(fractions) != 1:
        raise PreparationError(
            "--split must be two or three positive numbers with the sum 1 (train, valid, test), "
            f"such as 0.9,0.05,0.05; got {text}"
        )
    return fractions


def split_text(
    paths: Sequence[Path], outputs: Sequence[Path], fractions: Sequence[Fraction], options: dict
) -> dict[str, int]:
    """Writes a text's contiguous parts as plain files.

    Args:
        paths: The text's files, one after another.
        outputs: The parts' files.
        fractions: The parts' shares of the lines; at the levels of characters and bytes, of those.
        options: level, on_bad_line.

    Returns:
        How many lines or characters each part has.

    Raises:
        PreparationError: A part would be empty.
    """
    level, on_bad_line = options["level"], options["on_bad_line"]
    exact = level in ("char", "byte")
    total = measure(paths, level, on_bad_line)["size" if exact else "lines"]
    ends = [int(total * sum(fractions[: i + 1])) for i in range(len(fractions))]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    for path, size in zip(outputs, sizes, strict=True):
        if size < 1:
            unit = "characters" if exact else "lines"
            raise PreparationError(
                f"--split leaves {path.stem} empty: the text has {total:,} {unit}"
            )
    pieces = read_pieces(paths, level, on_bad_line)
    with ExitStack() as stack:
        files = [
            stack.enter_context(stack.enter_context(atomic_path(path)).open("wb"))
            for path in outputs
        ]
        for place, piece in place_pieces(pieces, ends, exact):
            text = piece.text if isinstance(piece.text, bytes) else piece.text.encode("utf-8")
            files[place].write(text + b"\n" * piece.ends)
    return {path.stem: size for path, size in zip(outputs, sizes, strict=True)}


def place_pieces(
    pieces: Iterator[Piece], ends: Sequence[int], exact: bool
) -> Iterator[tuple[int, Piece]]:
    """Pairs pieces with the number of their part; where parts are exact, cuts them at the ends."""
    done = place = 0
    for piece in pieces:
        while exact and done + size_of(piece) > ends[place]:
            cut = ends[place] - done
            if cut:
                yield place, piece._replace(text=piece.text[:cut], ends=False)
                piece = piece._replace(text=piece.text[cut:], begins=False)
            done, place = ends[place], place + 1
        if not exact and done == ends[place]:
            place += 1
        yield place, piece
        done += size_of(piece) if exact else 1
