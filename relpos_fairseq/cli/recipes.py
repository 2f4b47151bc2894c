"""`relpos recipes|path`: what an installation carries, and where it lies."""

from collections.abc import Sequence

from relpos_fairseq.cli.command import command
from relpos_fairseq.io.options import OutFolder, argument, option


@command("recipes", "the recipes of examples/: listed, or copied to a folder")
class Recipes:
    """List the recipes of examples/, each with its first line, or copy those of a task to a folder.

        relpos recipes
        relpos recipes translation --out examples/translation
        relpos recipes all --out examples

    Copies run as they stand there: commands in their pages and comments are for the folder that has
    examples/. A copy never replaces a file that was changed since.
    """

    name: str | None = argument("a task's folder, or all", nargs="?", metavar="NAME", default=None)
    out: OutFolder | None = option(None, "folder to copy to")

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.io.recipes import copy_recipes, list_recipes

        if (self.name is None) != (self.out is None):
            raise ValueError("NAME and --out go together: relpos recipes translation --out examples/translation")
        if self.name is None or self.out is None:
            print(list_recipes())
        else:
            copy_recipes(self.name, self.out)


@command("path", "the folder of this package, for fairseq's --user-dir")
class PathOf:
    """Print the folder of this package.

        fairseq-train DATA --user-dir "$(relpos path)" ...

    `--user-dir relpos_fairseq` is the same where fairseq and this package are installed side by side.
    """

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.io.processes import USER_DIR

        print(USER_DIR)
