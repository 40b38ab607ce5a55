"""A store for kvserver in one SQLite file: about the least that passes `kvserver remote contract`.

    url = "plugin://sqlite_store:SqliteStore?path=/var/lib/kv/shared.db"

For servers of one machine: SQLite's locks do not reach over network file systems.
"""

import sqlite3
import threading
import time

from kvserver.remote.objects.driver import Named, Start
from kvserver.remote.store import Facts

TABLE = "CREATE TABLE IF NOT EXISTS objects (name TEXT PRIMARY KEY, value BLOB NOT NULL, written_s REAL NOT NULL)"


class SqliteStore:
    def __init__(self, options, password):
        self._path = options["path"]
        self._local = threading.local()
        self._ask("PRAGMA journal_mode = WAL", 5)
        self._ask(TABLE, 5)

    def _ask(self, question, within_s, *values):
        if not hasattr(self._local, "db"):  # a connection belongs to its thread
            self._local.db = sqlite3.connect(self._path, isolation_level=None)
        self._local.db.execute(f"PRAGMA busy_timeout = {int(1000 * within_s)}")
        return self._local.db.execute(question, values)

    def facts(self):
        return Facts("sqlite", sqlite3.sqlite_version, evicts=False, warnings=("nothing removes old chunks",))

    def starts(self, names, most_bytes, *, within_s):
        question = "SELECT substr(value, 1, ?), length(value) FROM objects WHERE name = ?"
        found = [self._ask(question, within_s, most_bytes, name).fetchone() for name in names]
        return [None if row is None else Start(row[0] or b"", row[1]) for row in found]

    def read(self, name, pieces, *, within_s):
        row = self._ask("SELECT value FROM objects WHERE name = ?", within_s, name).fetchone()
        if row is None or any(offset + len(target) > len(row[0]) for offset, target in pieces):
            return False
        for offset, target in pieces:
            target[:] = row[0][offset : offset + len(target)]
        return True

    def create(self, name, pieces, *, within_s):
        question = "INSERT INTO objects VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
        return self._ask(question, within_s, name, b"".join(pieces), time.time()).rowcount == 1

    def replace(self, name, value, *, within_s):
        self._ask("INSERT OR REPLACE INTO objects VALUES (?, ?, ?)", within_s, name, value, time.time())

    def touch(self, name, *, within_s):
        pass

    def remove(self, names, *, within_s):
        for name in names:
            self._ask("DELETE FROM objects WHERE name = ?", within_s, name)

    def listed(self, beginning, *, within_s):
        question = "SELECT name, length(value), written_s FROM objects WHERE name >= ? AND name < ?"
        rows = self._ask(question, within_s, beginning, beginning[:-1] + "0").fetchall()  # "0" comes behind "/"
        yield [Named(*row) for row in rows]

    def close(self):
        pass
