"""Messages over the sockets between the server's own processes, and the ends of those sockets."""

import pytest

from kvserver.ipc.fd_sockets import Receiver, pair, send


@pytest.mark.parametrize("unread", [0, 1, 3])
def test_an_end_that_dies_with_frames_unread_is_heard_out_and_then_gone(unread: int) -> None:
    ours, theirs = pair()
    with ours:
        for word in (b"its last", b"words"):
            send(theirs, word)
        for _ in range(unread):
            send(ours, b"nobody reads this")
        theirs.close()
        receiver = Receiver(64)
        assert [bytes(receiver.receive(ours)[0]) for _ in range(4)] == [b"its last", b"words", b"", b""]
