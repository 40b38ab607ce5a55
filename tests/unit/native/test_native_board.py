"""Job words: every transition, and races between processes with exactly one winner."""

from __future__ import annotations

import multiprocessing
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import Synchronized

import pytest

from kvserver.transfer.native import ABANDONED, DONE, FAILED, FREE, LIVE, SUBMITTED, Board, create_memfd
from tests.gpu.table import ROOT, build_program

WORDS = 13
ROOMS = ("copy/board", "base/shared_memory", "base/check")
ENDS = (FREE, DONE, ABANDONED, FAILED)


@pytest.fixture
def fd() -> Iterator[int]:
    made = create_memfd("board", WORDS * 8)
    yield made
    os.close(made)


def put(fd: int, word: int, generation: int, state: int) -> None:
    os.pwrite(fd, struct.pack("<Q", generation << 8 | state), word * 8)


def test_a_new_board_is_free(fd: int) -> None:
    board = Board(fd, WORDS)
    assert [board.state(word) for word in range(WORDS)] == [(0, FREE)] * WORDS


@pytest.mark.parametrize("state", ENDS)
def test_begin_takes_a_word_that_is_at_an_end_to_its_next_generation(fd: int, state: int) -> None:
    put(fd, 3, 41, state)
    board = Board(fd, WORDS)
    assert board.begin(3) == 42
    assert board.state(3) == (42, LIVE)
    assert board.state(2) == (0, FREE)


@pytest.mark.parametrize("state", [LIVE, SUBMITTED])
def test_begin_refuses_a_word_in_use(fd: int, state: int) -> None:
    put(fd, 3, 41, state)
    board = Board(fd, WORDS)
    with pytest.raises(ValueError, match="word 3 is in use: generation 41"):
        board.begin(3)
    assert board.state(3) == (41, state)


@pytest.mark.parametrize("state", [FREE, LIVE, SUBMITTED, DONE, ABANDONED, FAILED])
def test_abandoning_a_store_ends_what_is_open_and_changes_no_end(fd: int, state: int) -> None:
    put(fd, 5, 7, state)
    board = Board(fd, WORDS)
    after = ABANDONED if state in (LIVE, SUBMITTED) else state
    assert board.abandon_store(5, 7) == after
    assert board.state(5) == (7, after)


@pytest.mark.parametrize("state", [FREE, LIVE, SUBMITTED, DONE, ABANDONED, FAILED])
def test_abandoning_a_retrieve_ends_only_what_has_not_begun(fd: int, state: int) -> None:
    put(fd, 5, 7, state)
    board = Board(fd, WORDS)
    after = ABANDONED if state == LIVE else state
    assert board.abandon_retrieve(5, 7) == after
    assert board.state(5) == (7, after)


def test_another_generation_cannot_be_abandoned(fd: int) -> None:
    put(fd, 5, 7, LIVE)
    board = Board(fd, WORDS)
    for abandon in (board.abandon_store, board.abandon_retrieve):
        with pytest.raises(ValueError, match="generation 7, not 6"):
            abandon(5, 6)
    assert board.state(5) == (7, LIVE)


def test_words_outside_of_the_board_are_refused(fd: int) -> None:
    board = Board(fd, WORDS)
    calls: list[Callable[[], object]] = [
        lambda: board.begin(WORDS),
        lambda: board.state(WORDS),
        lambda: board.abandon_store(WORDS, 0),
        lambda: board.abandon_retrieve(WORDS, 0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"word={WORDS}"):
            call()
    with pytest.raises(ValueError, match="needs 112 bytes, its file has 104"):
        Board(fd, WORDS + 1)
    with pytest.raises(ValueError, match="board of 0 words"):
        Board(fd, 0)


def test_a_closed_board_says_so(fd: int) -> None:
    board = Board(fd, WORDS)
    board.close()
    board.close()
    with pytest.raises(ValueError, match="already closed"):
        board.state(1)


RACES = 3000


def race_to_abandon(fd: int, won: Synchronized[int]) -> None:
    """Abandons word 1 of every generation; counts how often it succeeded."""
    board = Board(fd, WORDS)
    count = 0
    for generation in range(1, RACES + 1):
        while board.state(0) != (generation, LIVE):
            pass
        count += board.abandon_store(1, generation) == ABANDONED
        board.abandon_store(0, generation)
    won.value = count


def test_two_processes_racing_for_a_word_agree_on_who_won(fd: int) -> None:
    """Both processes abandon each generation of word 1, one as a store, one as a retrieve; word 0 keeps them in step.

    Both see it abandoned, and no generation is skipped or comes back."""
    context = multiprocessing.get_context("fork")
    won = context.Value("q", -1)
    other = context.Process(target=race_to_abandon, args=(fd, won))
    other.start()
    board = Board(fd, WORDS)
    mine = 0
    for generation in range(1, RACES + 1):
        assert board.begin(1) == generation
        assert board.begin(0) == generation
        mine += board.abandon_retrieve(1, generation) == ABANDONED
        while board.state(0)[1] == LIVE:
            assert other.is_alive() or board.state(0)[1] != LIVE
        assert board.state(1) == (generation, ABANDONED)
    other.join(60)
    assert other.exitcode == 0
    assert (mine, won.value) == (RACES, RACES)


CANNOT_STEP = 77


def test_exactly_one_side_gets_a_word_at_whatever_instruction_the_other_is_interrupted() -> None:
    """A C++ program that uses the processor's trap flag compares both sides' answers with the word."""
    sources = [ROOT / "tests/rigs/word_steps.cpp", *(ROOT / "csrc" / f"{room}.cpp" for room in ROOMS)]
    program = build_program("word_steps", sources)
    done = subprocess.run([program], capture_output=True, text=True, timeout=100, check=False)
    if done.returncode == CANNOT_STEP:
        pytest.skip("only x86-64 is stepped like this")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert int(done.stdout) > 100, "orders that were tried"


def count_up(fd: int, times: int, begun: Synchronized[int]) -> None:
    board = Board(fd, WORDS)
    done = 0
    while done < times:
        try:
            generation = board.begin(2)
        except ValueError:
            continue
        assert board.abandon_store(2, generation) == ABANDONED
        done += 1
    begun.value = done


def test_no_generation_is_given_out_twice(fd: int) -> None:
    context = multiprocessing.get_context("fork")
    counts = [context.Value("q", 0) for _ in range(2)]
    others = [context.Process(target=count_up, args=(fd, RACES, count)) for count in counts]
    for other in others:
        other.start()
    for other in others:
        other.join(60)
    assert [other.exitcode for other in others] == [0, 0]
    assert Board(fd, WORDS).state(2) == (2 * RACES, ABANDONED)
