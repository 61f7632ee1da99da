"""How the block refuses a value: in its own words, or in those of whoever sets its parameters."""

from collections.abc import Mapping


class OptionError(ValueError):
    """A value that the block cannot take: one sentence that names the parameter and what would be accepted.

    Args:
        sentence: in it ``{top_k}`` stands for the parameter of that name.
        values: what else stands in braces.
    """

    def __init__(self, sentence: str, **values):
        self.sentence = sentence
        self.values = values
        super().__init__(self.named({}))

    def named(self, names: Mapping[str, str]) -> str:
        """The sentence with other names for the parameters, such as the flags that set them."""
        return self.sentence.format_map(_Names({**names, **self.values}))


class _Names(dict):
    def __missing__(self, name: str) -> str:
        return name
