"""ARC as its paper states it (Megiddo and Modha, FAST 2003, figure 4), for keys of one size.

One difference: when the recent half is exactly at its target, the frequent half always gives."""

from collections import OrderedDict

Keys = OrderedDict[str, None]


class TextbookArc:
    def __init__(self, capacity: int, unit: int = 1) -> None:
        """unit: units per key. The target is counted in units, and its steps are rounded down to them."""
        self.capacity = capacity
        self.unit = unit
        self.target = 0
        self.t1, self.t2, self.b1, self.b2 = Keys(), Keys(), Keys(), Keys()

    def ask(self, key: str) -> bool:
        """Asks for a key, which is cached from then on; returns whether it was cached before."""
        t1, t2, b1, b2, capacity = self.t1, self.t2, self.b1, self.b2, self.capacity
        if key in t1 or key in t2:
            (t1 if key in t1 else t2).pop(key)
            t2[key] = None
            return True
        if key in b1:
            self.target = min(capacity * self.unit, self.target + self.unit * max(len(b1), len(b2)) // len(b1))
            self._replace()
            del b1[key]
            t2[key] = None
            return False
        if key in b2:
            self.target = max(0, self.target - self.unit * max(len(b1), len(b2)) // len(b2))
            self._replace()
            del b2[key]
            t2[key] = None
            return False
        if len(t1) + len(b1) == capacity:
            if len(t1) < capacity:
                b1.popitem(last=False)
                self._replace()
            else:
                t1.popitem(last=False)
        elif len(t1) + len(t2) + len(b1) + len(b2) >= capacity:
            if len(t1) + len(t2) + len(b1) + len(b2) == 2 * capacity:
                b2.popitem(last=False)
            self._replace()
        t1[key] = None
        return False

    def _replace(self) -> None:
        if len(self.t1) + len(self.t2) < self.capacity:
            return
        if self.t1 and (len(self.t1) * self.unit > self.target or not self.t2):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None
