"""How much is known of the records on disk, by itself."""

import pytest

from kvserver.service.state.recovery import Recovery


def listed() -> Recovery:
    recovery = Recovery()
    recovery.begin_listing()
    recovery.found_namespace(b"n", b"document", newest=7)
    recovery.begin_telling(records=5)
    recovery.take_not(3)
    return recovery


def test_what_a_mover_that_ended_has_told_counts_no_more() -> None:
    recovery = listed()
    recovery.begin_anew()
    assert not recovery.listed
    assert (recovery.documents, recovery.newest, recovery.records, recovery.not_taken) == ({}, {}, 0, 0)


def test_a_mover_that_ends_after_everything_was_told_changes_nothing() -> None:
    recovery = listed()
    recovery.end()
    recovery.begin_anew()
    assert recovery.complete


def test_records_cannot_be_told_before_their_namespaces_are_listed() -> None:
    recovery = Recovery()
    with pytest.raises(AssertionError, match="no transition from 'waiting' to 'telling'"):
        recovery.begin_telling(records=5)
