"""One text into contiguous train, valid and test: by lines, or exactly by characters or bytes."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import open_together
from relpos_fairseq.engine.lines import Part
from relpos_fairseq.preparation.lm.reading import measure, read_text, size_of


def parse_fractions(text: str) -> list[Fraction]:
    """Read `0.9,0.05,0.05`: two or three positive numbers with the sum 1."""
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
    """Write a text's contiguous parts as plain files; none may be empty.

    Args:
        paths: The text's files, one after another.
        outputs: The parts' files.
        fractions: The parts' shares of the lines; at the levels of characters and bytes, of those.
        options: level, on_bad_line.

    Returns:
        How many lines or characters each part has.
    """
    level, on_bad_line = options["level"], options["on_bad_line"]
    exact = level in ("char", "byte")
    total = measure(paths, level, on_bad_line)["size" if exact else "lines"]
    ends = [int(total * sum(fractions[: i + 1])) for i in range(len(fractions))]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    for path, size in zip(outputs, sizes, strict=True):
        if size < 1:
            unit = "characters" if exact else "lines"
            raise PreparationError(f"--split leaves {path.stem} empty: the text has {total:,} {unit}")
    parts = read_text(paths, level, on_bad_line)
    with open_together(*outputs) as files:
        for place, part in place_parts(parts, ends, exact):
            text = part.text if isinstance(part.text, bytes) else part.text.encode("utf-8")
            files[place].write(text + b"\n" * part.ends)
    return {path.stem: size for path, size in zip(outputs, sizes, strict=True)}


def place_parts(parts: Iterator[Part], ends: Sequence[int], exact: bool) -> Iterator[tuple[int, Part]]:
    """Pair parts with the number of their part; where parts are exact, cuts them at the ends."""
    done = place = 0
    for part in parts:
        while exact and done + size_of(part) > ends[place]:
            cut = ends[place] - done
            if cut:
                yield place, part._replace(text=part.text[:cut], ends=False)
                part = part._replace(text=part.text[cut:], begins=False)
            done, place = ends[place], place + 1
        if not exact and done == ends[place]:
            place += 1
        yield place, part
        done += size_of(part) if exact else 1
