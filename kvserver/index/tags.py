"""Whose chunks there may be somewhere, as far as it is worth remembering."""

TAGS_MAX = 64


class Tags:
    """Tags of tenants (wire/tenants.py). Of more than TAGS_MAX nobody keeps count: then it may be anybody's."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: set[int] = set()

    def add(self, tag: int) -> None:
        if len(self._known) <= TAGS_MAX:
            self._known.add(tag)

    def may_be(self, tag: int) -> bool:
        """Whether there may be something of that tenant's. Where nobody is known, too."""
        return tag in self._known or not self._known or len(self._known) > TAGS_MAX
