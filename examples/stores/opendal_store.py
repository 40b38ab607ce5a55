"""Stores that Apache OpenDAL knows, for kvserver: WebDAV, HDFS, OSS, Swift and many others (`pip install opendal`).

    url = "plugin://opendal_store:OpendalStore?scheme=webdav&endpoint=https://dav.internal/kv&username=kvserver"
    password_file = "/etc/kvserver/dav-password"

`scheme` chooses the service; other options go to it as they are. The password becomes the option that `password_as`
names (default: "password"). A service must create without replacing, and tell a tag of each object (an ETag): a read
that has no tag to hold on to could see two writes. `kvserver remote contract` finds out.
"""

from concurrent.futures import ThreadPoolExecutor

import opendal
from opendal.exceptions import ConditionNotMatch, NotFound, RangeNotSatisfied

from kvserver.remote.objects.driver import Named, Start
from kvserver.remote.store import Facts, StoreError

AT_A_TIME = 16
LISTED_AT_A_TIME = 1000


class OpendalStore:
    def __init__(self, options, password):
        self._scheme = options.pop("scheme")
        name = options.pop("password_as", "password")
        if password():
            options[name] = password()
        self._options = options
        self._operators = {}
        self._crew = ThreadPoolExecutor(AT_A_TIME)

    def _operator(self, within_s):
        """One whose calls end in that time."""
        if within_s not in self._operators:
            limit = opendal.layers.TimeoutLayer(timeout=within_s, io_timeout=within_s)
            self._operators[within_s] = opendal.Operator(self._scheme, **self._options).layer(limit)
        return self._operators[within_s]

    def facts(self):
        return Facts(
            f"opendal {self._scheme}", opendal.__version__, evicts=None, warnings=("see to it that old chunks go",)
        )

    def starts(self, names, most_bytes, *, within_s):
        return list(self._crew.map(lambda name: self._start(name, most_bytes, within_s), names))

    def _start(self, name, most_bytes, within_s):
        try:
            size = self._operator(within_s).stat(name).content_length
            count = min(size, most_bytes)
            return Start(self._operator(within_s).read(name, offset=0, size=count) if count else b"", size)
        except NotFound:
            return None
        except opendal.exceptions.Error as problem:
            return StoreError("remote-down", str(problem))

    def read(self, name, pieces, *, within_s):
        try:
            known = self._operator(within_s).stat(name)
            for offset, target in pieces:
                if offset + len(target) > known.content_length:
                    return False
                target[:] = self._operator(within_s).read(name, offset=offset, size=len(target), if_match=known.etag)
        except (NotFound, ConditionNotMatch, RangeNotSatisfied):
            return False
        return True

    def create(self, name, pieces, *, within_s):
        try:
            self._operator(within_s).write(name, b"".join(pieces), if_not_exists=True)  # views are slow here
        except ConditionNotMatch:
            return False
        return True

    def replace(self, name, value, *, within_s):
        self._operator(within_s).write(name, value)

    def touch(self, name, *, within_s):
        pass

    def remove(self, names, *, within_s):
        list(self._crew.map(self._operator(within_s).delete, names))

    def listed(self, beginning, *, within_s):
        page = []
        for entry in self._operator(within_s).list(beginning, recursive=True):
            if entry.path.endswith("/"):
                continue
            known = entry.metadata
            page.append(Named(entry.path, known.content_length, known.last_modified.timestamp()))
            if len(page) == LISTED_AT_A_TIME:
                yield page
                page = []
        yield page

    def close(self):
        self._crew.shutdown(wait=False)
