"""The load for engines: the same for one seed, sharing exactly the intended parts."""

from benchmarks.vllm_load.asks import Ask, Prompt, Span, Workload, token_ids
from benchmarks.vllm_load.workloads import Chat, Evicted, LongDocuments, Permutations

VOCABULARY = 97


def text(prompt: Prompt, seed: int = 5) -> list[int]:
    return token_ids(prompt, seed=seed, vocabulary=VOCABULARY)


def asks(workload: Workload) -> list[Ask]:
    """All requests in the order of their lines; none of these workloads has forks."""
    found = [step for phase in workload.phases for line in phase.lines for step in line.steps]
    assert all(isinstance(step, Ask) for step in found)
    return found  # type: ignore[return-value]


def shared(one: Prompt, other: Prompt) -> int:
    """Number of leading tokens that both share."""
    pairs = list(zip(text(one), text(other), strict=False))
    return next((place for place, (mine, its) in enumerate(pairs) if mine != its), len(pairs))


def test_a_span_is_the_same_text_everywhere_and_its_shorter_namesake_begins_it() -> None:
    assert text((Span("a", 3), Span("b", 4)))[3:] == text((Span("b", 4),))
    assert text((Span("a", 37),))[:11] == text((Span("a", 11),))


def test_text_follows_from_seed_and_name_and_from_nothing_else() -> None:
    assert text((Span("a", 5),)) == [5, 54, 96, 4, 81]
    assert text((Span("a", 29),)) != text((Span("b", 29),))
    assert text((Span("a", 29),), seed=5) != text((Span("a", 29),), seed=6)


def test_documents_are_all_read_before_any_is_asked_about_again() -> None:
    options = LongDocuments(documents=3, document_tokens=50, questions=2, question_tokens=7, output_tokens=4, users=2)
    workload = options.draw(1)
    first, again = (asks(Workload("", (phase,))) for phase in workload.phases)
    assert [ask.name for ask in first] == ["0.0", "1.0", "2.0"]
    assert {ask.name for ask in again} == {"0.1", "0.2", "1.1", "1.2", "2.1", "2.2"}
    assert {ask.kind for ask in first} | {ask.kind for ask in again} == {"first", "again"}
    assert all(ask.prompt_tokens == 57 and ask.output_tokens == 4 for ask in [*first, *again])
    assert [phase.users for phase in workload.phases] == [2, 2]
    of_two = next(ask for ask in again if ask.name == "2.1")
    assert [shared(of_two.prompt, ask.prompt) for ask in first] == [0, 0, 50]


def test_a_turn_of_a_chat_begins_with_all_of_the_turn_before() -> None:
    options = Chat(users=2, turns=3, system_tokens=11, history_tokens=5, question_tokens=3, answer_tokens=2, join_s=1.5)
    workload = options.draw(1)
    mine, other = [line.steps for line in workload.phases[0].lines]
    assert [ask.prompt_tokens for ask in mine] == [19, 24, 29]  # type: ignore[union-attr]
    assert [shared(mine[0].prompt, ask.prompt) for ask in mine] == [19, 19, 19]  # type: ignore[union-attr]
    assert shared(mine[2].prompt, other[2].prompt) == 11  # type: ignore[union-attr]
    assert [ask.kind for ask in mine] == ["first", "again", "again"]  # type: ignore[union-attr]
    assert [line.start_s for line in workload.phases[0].lines] == [0.0, 1.5]


def test_permutations_share_the_documents_with_which_they_begin_alike() -> None:
    options = Permutations(documents=3, document_tokens=13, orders=99, system_tokens=4, question_tokens=2)
    found = asks(options.draw(2))
    assert len(found) == 6  # there are no more orders
    assert len({tuple(sorted(ask.prompt[1:-1])) for ask in found}) == 1
    pairs = [shared(one.prompt, other.prompt) for one in found for other in found if one is not other]
    assert set(pairs) == {4, 17}  # with two of three shared, so is the third; questions differ
    assert [ask.kind for ask in found].count("first") == 3


def test_an_evicted_prompt_is_asked_thrice_the_last_time_behind_enough_else() -> None:
    options = Evicted(lengths="20,41", rest_tokens=3, repeats=2, filler_tokens=10, forget_tokens=25, output_tokens=5)
    in_order = asks(options.draw(1))
    kinds = [ask.kind for ask in in_order]
    once = ["cold 20", "own 20", "cold 41", "own 41", *["filler"] * 3, "evicted 20", "evicted 41"]
    assert kinds == once * 2
    assert in_order[2].prompt == in_order[3].prompt == in_order[8].prompt
    found = {ask.name: ask for ask in in_order}
    assert found["41.1 cold"].prompt_tokens == 44
    assert not shared(found["41.0 cold"].prompt, found["41.1 cold"].prompt)
