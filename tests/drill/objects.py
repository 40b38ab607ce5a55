"""Deliberate bugs in stores of objects and in the door for plug-ins. Their unit tests are asked."""

from tests.drill.bugs import Bug
from tests.drill.copies import Copy, noticed_by

OBJECTS = "kvserver/remote/objects"
STORE, LOG, CLOUDS, PLUGIN = (f"{OBJECTS}/{name}.py" for name in ("store", "log", "clouds", "plugin"))
OWN_TESTS = (
    *("tests/unit/remote/test_plugins.py", "tests/unit/remote/test_objects.py"),
    *("tests/unit/remote/test_contract.py", "tests/unit/remote/test_driver_contract.py"),
    *("-k", "not directory and not valkey and not cluster and not azure and not opendal and not (contract and s3)"),
)


def notice(bug: Bug) -> str:
    return noticed_by(bug, hunt)


def hunt(copy: Copy) -> str:
    return copy.failing_test(OWN_TESTS)


BUGS = (
    Bug("P1", "payloads of another write are given", STORE, r"found is None or came != expected", "found is None"),
    Bug("P1", "payloads of an object that is gone are given", STORE, r"found is None or came != expected", "False"),
    Bug("P1", "a head counts whatever the size of its object", STORE, r"start\.bytes != whole_bytes", "False"),
    Bug("P1", "a read of two requests may see two writes", CLOUDS, r"if number and told != tag:", "if False:"),
    Bug("P1", "two requests without a tag are one read", CLOUDS, r"if number and tag is None:", "if False:"),
    Bug("P1", "a plug-in reads into the arena", PLUGIN, r"bytearray\(len\(target\)\) for", "target for"),
    Bug(
        "P1",
        "an answer of another type is believed",
        PLUGIN,
        r"if not isinstance\(is_there, bool\):",
        "if is_there is None:",
    ),
    Bug(
        "P1",
        "a bucket that is not there is an empty one",
        CLOUDS,
        r"if not _is_not_there\(missing\): raise return None",
        "return None",
    ),
    Bug("P1", "an empty object is none", CLOUDS, r'return Start\(b"", 0\)', "return None"),
    Bug(
        "P1",
        "notes lie where a rule removes chunks",
        STORE,
        r'NOTES = f"kv\{FORMAT\}\.notes"',
        'NOTES = f"kv{FORMAT}/notes"',
    ),
    Bug(
        "P1",
        "a store that replaces is taken",
        STORE,
        r"raise self\._lacks\(\"a write that is",
        'self._lacks("a write that is',
    ),
    Bug(
        "P2",
        "beginnings are asked for however late it is",
        CLOUDS,
        r"if time\.monotonic\(\) > due_s: return",
        "if False:\n            return",
    ),
    Bug("P2", "a plug-in is waited for", PLUGIN, r"run\.ended\.wait\(within_s\)", "run.ended.wait()"),
    Bug("P2", "calls of a plug-in that hang are not counted", PLUGIN, r"_HUNG\[self\._name\] \+= is_hung", "pass"),
    Bug(
        "P2",
        "a plug-in that has hung once is never called again",
        PLUGIN,
        r"_HUNG\[self\._name\] -= run\.is_hung",
        "pass",
    ),
    Bug(
        "P5",
        "whoever has begun an object of announcements removes nothing",
        LOG,
        r"self\._sweep\(mine\.epoch\)",
        "pass",
    ),
    Bug(
        "P5",
        "a list of announcements may have no end",
        LOG,
        r"if len\(found\) > LISTED_MAX or time\.monotonic\(\) > due_s:",
        "if False:",
    ),
    Bug(
        "P5",
        "announcements that cannot be written pile up",
        LOG,
        r'mine\.waiting\.clear\(\) mine\.name = ""',
        'mine.name = ""',
    ),
    Bug(
        "P8",
        "announcements are read anew again and again",
        LOG,
        r"offsets\[one\.name\] = offset \+ len\(piece\)",
        "pass",
    ),
    Bug("P8", "each announcement is a request", LOG, r"now_s < mine\.written_s \+ self\._every_s", "False"),
    Bug(
        "P8",
        "an object of announcements loses what it had",
        LOG,
        r"content = mine\.content \+ mine\.waiting",
        "content = bytes(mine.waiting)",
    ),
    Bug(
        "P8",
        "what waits for its time is not written when others read",
        LOG,
        r"if self\._mine\.epoch == epoch: self\._write\(self\._mine\)",
        "if False:\n            pass",
    ),
    Bug(
        "P8",
        "a large chunk is sent although it is there",
        STORE,
        r"head\.payload_bytes > ASKED_FIRST_BYTES and",
        "False and",
    ),
    Bug(
        "P8",
        "a whole chunk is read by a request for each shard",
        CLOUDS,
        r"if runs and offset - end <= GAP_BYTES_MAX:",
        "if runs and offset < end:",
    ),
)
