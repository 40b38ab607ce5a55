"""One frame of every kind, and its bytes. They change only with messages.PROTOCOL."""

from kvserver.wire.messages import (
    Attach,
    Attached,
    Await,
    Awaited,
    Buffer,
    Clear,
    Cleared,
    Drain,
    Draining,
    Error,
    Explain,
    Explained,
    Found,
    Frame,
    GroupBlocks,
    GroupSpec,
    Hello,
    Lane,
    LaneOpen,
    Limits,
    Lookup,
    Offer,
    Offered,
    Pledge,
    Pledged,
    RegionRun,
    Register,
    Registered,
    Release,
    Released,
    Reply,
    Request,
    Retrieve,
    Retrieved,
    Staging,
    Status,
    StatusIs,
    Store,
    Stored,
    Unpledge,
    Unpledged,
    Unregister,
    Unregistered,
    Watch,
    Watched,
    Welcome,
)

DIGEST, KEY, PARENT = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
GROUP = GroupSpec(2, 11, "window", 7, 3, 1, 5, 4, [RegionRun(0, 13, 2, 2496, 130, 129)])
STATE = GroupSpec(6, 3, "state", 0, 1, 0, 1, 0, [RegionRun(0, 1, 1, 0, 255, 254)])

# fmt: off
GOLDEN: list[tuple[Frame, str]] = [
    (
        Hello(1, 6, "engine", 77, 3, -1, "kvclient 0.1"),
        "98a568656c6c6f0106a6656e67696e654d03ffac6b76636c69656e7420302e31",
    ),
    (
        Attach(2, b"0123456789abcdef"),
        "93a661747461636802c41030313233343536373839616263646566",
    ),
    (
        Lane(3, b"0123456789abcdef"),
        "93a46c616e6503c41030313233343536373839616263646566",
    ),
    (
        Offer(4),
        "92a56f6666657204",
    ),
    (
        Watch(5, 300),
        "93a5776174636805cd012c",
    ),
    (
        Register(6, "kv", DIGEST, 6, "rocm", "7@0:3:0.0", "dmabuf", "staged", "gold",
                 [Buffer(-1, b"hhh", 5005)], [GROUP, STATE], [Staging(b"ss", 1 << 20, 9)], 131_072, "llama"),
        "9fa8726567697374657206a26b76c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b"
        "1c1d1e1f06a4726f636da93740303a333a302e30a6646d61627566a6737461676564a4676f6c649193ffc403"
        "686868cd138d9299020ba677696e646f7707030105049196000d02cd09c0cc82cc81990603a5737461746500"
        "01000100919600010100ccffccfe9193c4027373ce0010000009ce00020000a56c6c616d61",
    ),
    (
        Unregister(7, 300),
        "93aa756e726567697374657207cd012c",
    ),
    (
        Lookup(8, DIGEST, KEY, 2),
        "95a66c6f6f6b757008c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc4"
        "20202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f02",
    ),
    (
        Release(9, 70_000),
        "93a772656c6561736509ce00011170",
    ),
    (
        Store(10, 300, 4095, 1 << 54, 30_000, 1, PARENT, KEY, [GroupBlocks(0, 2, b"\1\0\0\0\xff\xff\xff\xff")]),
        "9aa573746f72650acd012ccd0fffcf0040000000000000cd753001c420404142434445464748494a4b4c4d4e"
        "4f505152535455565758595a5b5c5d5e5fc420202122232425262728292a2b2c2d2e2f303132333435363738"
        "393a3b3c3d3e3f91930002c40801000000ffffffff",
    ),
    (
        Retrieve(11, 300, 70_000, 0, 1, 9, [GroupBlocks(1, 0, b"\7\0\0\0")], True),
        "99a872657472696576650bcd012cce0001117000010991930100c40407000000c3",
    ),
    (
        Clear(12, DIGEST),
        "93a5636c6561720cc420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    (
        Status((1 << 63) - 1),
        "92a6737461747573cf7fffffffffffffff",
    ),
    (
        Drain(14, 3),
        "93a5647261696e0e03",
    ),
    (
        Explain(15, b"", DIGEST),
        "94a76578706c61696e0fc400c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    (
        Await(16, DIGEST, KEY, 2),
        "95a5617761697410c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc420"
        "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f02",
    ),
    (
        Pledge(17, DIGEST, KEY, 60_000),
        "95a6706c6564676511c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc4"
        "20202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3fcdea60",
    ),
    (
        Unpledge(18, 300),
        "93a8756e706c6564676512cd012c",
    ),
    (
        Welcome(1, b"0123456789abcdef", "kvserver 0.1", 1 << 60, Limits(4096, 65_536, 64, 30_000)),
        "96a777656c636f6d6501c41030313233343536373839616263646566ac6b7673657276657220302e31cf1000"
        "00000000000094cd1000ce0001000040cd7530",
    ),
    (
        Attached(2),
        "92a8617474616368656402",
    ),
    (
        LaneOpen(3),
        "92a96c616e652d6f70656e03",
    ),
    (
        Offered(4, 9),
        "93a76f6666657265640409",
    ),
    (
        Watched(5, 2),
        "93a7776174636865640502",
    ),
    (
        Registered(6, 300, 2),
        "94aa7265676973746572656406cd012c02",
    ),
    (
        Unregistered(7),
        "92ac756e7265676973746572656407",
    ),
    (
        Found(8, 2, 70_000, 30_000, 1, "recovering"),
        "98a5666f756e640802ce00011170cd753001aa7265636f766572696e6700",
    ),
    (
        Released(9),
        "92a872656c656173656409",
    ),
    (
        Stored(10, 3, 2, 4242, "full"),
        "96a673746f7265640a0302cd1092a466756c6c",
    ),
    (
        Retrieved(11, 4242, 7),
        "94a97265747269657665640bcd109207",
    ),
    (
        Cleared(12, 5),
        "93a7636c65617265640c05",
    ),
    (
        Draining(14),
        "92a8647261696e696e670e",
    ),
    (
        Explained(15, b"[]"),
        "93a96578706c61696e65640fc4025b5d",
    ),
    (
        StatusIs(13, b"{}"),
        "93a97374617475732d69730dc4027b7d",
    ),
    (
        Awaited(16, 2, 70_000, 30_000, 1, "", 0, 3, "llama-0"),
        "9aa7617761697465641002ce00011170cd753001a00003a76c6c616d612d30",
    ),
    (
        Pledged(17, 300, 2, 5),
        "95a7706c656467656411cd012c0205",
    ),
    (
        Unpledged(18),
        "92a9756e706c656467656412",
    ),
    (
        Error(0, "resource", "jobs", "64 jobs are in flight, at most 64 may be"),
        "95a56572726f7200a87265736f75726365a46a6f6273d9283634206a6f62732061726520696e20666c696768"
        "742c206174206d6f7374203634206d6179206265",
    ),
]
# fmt: on

REQUESTS = [(frame, bytes.fromhex(golden)) for frame, golden in GOLDEN if isinstance(frame, Request)]
REPLIES = [(frame, bytes.fromhex(golden)) for frame, golden in GOLDEN if isinstance(frame, Reply)]
