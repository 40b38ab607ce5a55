"""Workloads drawn from a seed: the requests of each user, and which beginnings they share.

The first three are known from LMCache's benchmark. In a chat, the answers within later prompts are drawn too, and
are not the engine's: all arms get the same prompts, whatever they answer.
"""

import math
import random
from dataclasses import dataclass, field

from benchmarks.vllm_load.asks import Ask, Fork, Line, Phase, Prompt, Span, Workload


@dataclass(frozen=True, kw_only=True)
class LongDocuments:
    """Documents are read one after another, then each is asked about again, in any order."""

    documents: int = field(default=8, metadata={"help": "how many"})
    document_tokens: int = field(default=2048, metadata={"help": "tokens of each"})
    questions: int = field(default=2, metadata={"help": "of each document, after all have been read"})
    question_tokens: int = field(default=32, metadata={"help": "behind the document"})
    output_tokens: int = field(default=16, metadata={"help": "of each answer"})
    users: int = field(default=2, metadata={"help": "requests at a time"})

    def draw(self, seed: int) -> Workload:
        def line(document: int, question: int) -> Line:
            name = f"{document}.{question}"
            prompt = (
                Span(f"document {document}", self.document_tokens),
                Span(f"question {name}", self.question_tokens),
            )
            return Line((Ask(name, "again" if question else "first", prompt, self.output_tokens),))

        first = [line(document, 0) for document in range(self.documents)]
        again = [
            line(document, 1 + question) for document in range(self.documents) for question in range(self.questions)
        ]
        random.Random(f"order {seed}").shuffle(again)
        return Workload("documents", (Phase(first, self.users), Phase(again, self.users)))


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Users with a common system prompt hold conversations; each request sends the whole conversation."""

    users: int = field(default=6, metadata={"help": "conversations at a time, never more; the next begins as one ends"})
    conversations: int = field(default=0, metadata={"help": "altogether; 0: one for each user"})
    turns: int = field(default=5, metadata={"help": "of each conversation"})
    system_tokens: int = field(default=256, metadata={"help": "that all conversations begin with"})
    history_tokens: int = field(default=1024, metadata={"help": "of each conversation before its first turn"})
    question_tokens: int = field(default=64, metadata={"help": "that each turn adds"})
    answer_tokens: int = field(default=64, metadata={"help": "that each answer has, and adds to the next prompt"})
    think_s: float = field(default=2.0, metadata={"help": "mean pause between answer and question; uniform, ± half"})
    join_s: float = field(default=1.0, metadata={"help": "between the first questions of two users"})

    def draw(self, seed: int) -> Workload:
        thinking = random.Random(f"think {seed}")
        lines = []
        for talk in range(self.conversations or self.users):
            prompt: Prompt = (Span("system", self.system_tokens), Span(f"history {talk}", self.history_tokens))
            steps = []
            for turn in range(self.turns):
                prompt = (*prompt, Span(f"question {talk}.{turn}", self.question_tokens))
                think_s = self.think_s * thinking.uniform(0.5, 1.5) if turn else 0.0
                kind = "again" if turn else "first"
                steps.append(Ask(f"{talk}.{turn}", kind, prompt, self.answer_tokens, think_s))
                prompt = (*prompt, Span(f"answer {talk}.{turn}", self.answer_tokens))
            lines.append(Line(tuple(steps), start_s=talk * self.join_s if talk < self.users else 0.0))
        return Workload("chat", (Phase(lines, self.users),))


@dataclass(frozen=True, kw_only=True)
class Permutations:
    """The same documents in many orders: a prefix cache helps only with equal documents at the beginning."""

    documents: int = field(default=4, metadata={"help": "in each prompt"})
    document_tokens: int = field(default=768, metadata={"help": "tokens of each"})
    orders: int = field(default=16, metadata={"help": "prompts; no more than there are orders"})
    system_tokens: int = field(default=256, metadata={"help": "that all prompts begin with"})
    question_tokens: int = field(default=32, metadata={"help": "behind the documents, another each time"})
    output_tokens: int = field(default=16, metadata={"help": "of each answer"})
    users: int = field(default=2, metadata={"help": "requests at a time"})

    def draw(self, seed: int) -> Workload:
        rng = random.Random(f"orders {seed}")
        orders: dict[tuple[int, ...], None] = {}
        while len(orders) < min(self.orders, math.factorial(self.documents)):
            orders[tuple(rng.sample(range(self.documents), self.documents))] = None
        lines, led = [], set()
        for number, order in enumerate(orders):
            documents = [Span(f"document {document}", self.document_tokens) for document in order]
            prompt = (
                Span("system", self.system_tokens),
                *documents,
                Span(f"question {number}", self.question_tokens),
            )
            kind = "again" if order[0] in led else "first"
            led.add(order[0])
            lines.append(Line((Ask(str(number), kind, prompt, self.output_tokens),)))
        return Workload("permutations", (Phase(lines, self.users),))


@dataclass(frozen=True, kw_only=True)
class Evicted:
    """One user asks prompts twice each, then enough others that the engine forgets them, then asks once more."""

    lengths: str = field(default="256,1024,4096", metadata={"help": "tokens of the prefixes, with commas"})
    rest_tokens: int = field(default=7, metadata={"help": "behind the prefix: what always is computed"})
    repeats: int = field(default=1, metadata={"help": "of each length in a round"})
    output_tokens: int = field(default=8, metadata={"help": "of each answer"})
    filler_tokens: int = field(default=512, metadata={"help": "of each prompt that pushes others out"})
    forget_tokens: int = field(default=16384, metadata={"help": "of all of them together: more than the engine's pool"})

    def draw(self, seed: int) -> Workload:
        lengths = [int(length) for length in self.lengths.split(",")]
        steps: list[Ask | Fork] = []
        for repeat in range(self.repeats):
            for length in lengths:
                steps += [self._ask("cold", length, repeat), self._ask("own", length, repeat)]
            for number in range(-(-self.forget_tokens // self.filler_tokens)):
                filler = (Span(f"filler {repeat} {number}", self.filler_tokens),)
                steps.append(Ask(f"filler {repeat} {number}", "filler", filler, 1))
            steps += [self._ask("evicted", length, repeat) for length in lengths]
        return Workload("evicted", (Phase([Line(tuple(steps))], 1),))

    def _ask(self, kind: str, length: int, repeat: int) -> Ask:
        name = f"{length}.{repeat}"
        prompt = (Span(f"prefix {name}", length), Span(f"rest {name}", self.rest_tokens))
        return Ask(f"{name} {kind}", f"{kind} {length}", prompt, self.output_tokens)


@dataclass(frozen=True, kw_only=True)
class Misses:
    """Prompts that nobody has asked before: the cost of a cache where it cannot help."""

    prompts: int = field(default=20, metadata={"help": "in each round"})
    prompt_tokens: int = field(default=1024, metadata={"help": "of each"})
    output_tokens: int = field(default=16, metadata={"help": "of each answer"})
    users: int = field(default=1, metadata={"help": "requests at a time"})

    def draw(self, seed: int) -> Workload:
        lines = [
            Line((Ask(str(number), "first", (Span(f"prompt {number}", self.prompt_tokens),), self.output_tokens),))
            for number in range(self.prompts)
        ]
        return Workload("misses", (Phase(lines, self.users),))
