"""The service manager's store of descriptors, as the supervisor sees it."""

from kvserver.supervisor.systemd import Manager


class Keeper(Manager):
    """Passes on the kept descriptors; the processes of an earlier start end after some looks."""

    def __init__(self, kept: dict[str, int], looks: int = 0, deaf: str = "") -> None:
        """deaf: the name that systemd fails to forget."""
        super().__init__({})
        self._kept = kept
        self._deaf = deaf
        self.looks = looks
        self.forgotten: list[str] = []
        self.keeps: list[str] = []

    def left_behind(self, *_: object) -> list[int] | None:
        self.looks -= 1
        return [4711] if self.looks >= 0 else []

    def forget(self, name: str) -> bool:
        self.forgotten.append(name)
        return name != self._deaf

    def keep(self, name: str, descriptor: int) -> bool:
        self.keeps.append(name)
        return True
