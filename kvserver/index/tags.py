"""Which tenants may own chunks in a namespace."""

TAGS_MAX = 64


class Tags:
    """Tags of tenants (wire/tenants.py). After TAGS_MAX tags any tenant may own some."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: set[int] = set()

    def add(self, tag: int) -> None:
        if len(self._known) <= TAGS_MAX:
            self._known.add(tag)

    def may_be(self, tag: int) -> bool:
        """Whether the tenant may own some. True for all tenants while no tag is known."""
        return tag in self._known or not self._known or len(self._known) > TAGS_MAX
