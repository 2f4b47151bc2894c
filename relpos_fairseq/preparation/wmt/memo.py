"""A dictionary that remembers a function's results, in bounded memory."""

from collections.abc import Callable, Hashable


class Memo(dict):
    """Results by argument: at least the `size` latest, at most twice as many.

    What was not asked for while `size` others were computed is forgotten; the rest moves on.

    Args:
        function: Gives the result, a string, of an argument.
        size: Of each of the two generations.
    """

    def __init__(self, function: Callable[[Hashable], str], size: int):
        super().__init__()
        self.function, self.size = function, size
        self.older: dict[Hashable, str] = {}

    def __missing__(self, argument: Hashable) -> str:
        """Computes what is not remembered."""
        result = self.older.get(argument)
        if result is None:
            result = self.function(argument)
        if len(self) >= self.size:
            self.older = dict(self)
            self.clear()
        self[argument] = result
        return result
