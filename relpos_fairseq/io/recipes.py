"""The recipes of examples/, which a wheel carries in the package: listed by their first lines, and copied."""

import shutil
from pathlib import Path

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_folder, found_below
from relpos_fairseq.io.processes import USER_DIR

RECIPES = (".yaml", ".sh", ".sbatch", ".py")
ALL = "all"


def folder_of_recipes() -> Path:
    """Return examples/ of this installation: in the package of a wheel, beside that of a checkout.

    Raises:
        UserError: there is neither.
    """
    for folder in (USER_DIR / "examples", USER_DIR.parent / "examples"):
        if (folder / "translation").is_dir():
            return folder
    raise UserError(f"{USER_DIR} has no examples in it or beside it: install a wheel, or from a checkout")


def list_recipes() -> str:
    """Return a line for each recipe: its name below examples/, and the first line of what it says of itself."""
    folder = folder_of_recipes()
    said = {path.relative_to(folder).as_posix(): _first_line(path) for path in _files(folder, RECIPES)}
    width = max(map(len, said))
    return "\n".join(f"{name:{width}}  {line}".rstrip() for name, line in said.items())


def copy_recipes(name: str, out: Path) -> None:
    """Copy recipes and pages of a folder of examples/, or of all of it, to a folder.

    Args:
        name: the folder's, or `all`.
        out: is there whole or not at all.

    Raises:
        UserError: there are no such recipes, or `out` holds files of others.
    """
    folder = folder_of_recipes()
    tasks = {path.relative_to(folder).parts[0] for path in _files(folder, RECIPES) if path.parent != folder}
    if name not in {ALL, *tasks}:
        raise UserError(f"there is no folder of recipes {name}: name one of {', '.join([ALL, *sorted(tasks)])}")
    source = folder if name == ALL else folder / name
    with atomic_folder(out) as copy:
        for path in _files(source, (*RECIPES, ".md")):
            target = copy / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)  # an installation may be read-only


def _files(folder: Path, kinds: tuple[str, ...]) -> list[Path]:
    return [path for path in found_below(folder) if path.suffix in kinds]


def _first_line(path: Path) -> str:
    """Return the first line of a file's comment or docstring."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#!"):
            return line.lstrip('#" ') if line[:1] in '#"' else ""
    return ""
