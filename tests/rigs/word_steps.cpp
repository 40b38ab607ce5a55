// Interrupts one side of a board between any two instructions, and lets the other side act there.
//
// One call is stepped by the processor's trap flag. Before its first instruction, its second, and so on, the other side
// does its own call in the signal handler. So no two processors have to meet, and every order of the two is tried.
// Prints how many orders there were; exits 1 with the first one after which not exactly one side has won, and 77 where
// the processor cannot be stepped like this.

#include <cinttypes>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <stdexcept>

#include "base/shared_memory.h"
#include "copy/board.h"

using namespace kv;

#if defined(__x86_64__)

#include <ucontext.h>

namespace {

constexpr uint32_t WORD = 3;
constexpr greg_t TRAP_FLAG = 0x100;

// What the handler needs. One thread does everything.
uint64_t steps_left;
bool stepping;
std::function<void()> interruption;

void on_trap(int, siginfo_t*, void* context) {
    greg_t& flags = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL];
    flags &= ~TRAP_FLAG;
    if (!stepping) return;
    if (steps_left == 0) {
        stepping = false;
        interruption();
    } else {
        --steps_left;
        flags |= TRAP_FLAG;
    }
}

// Does `call`, with `other` after that many of its instructions. False when it had fewer of them.
bool interrupted(uint64_t steps, const std::function<void()>& call, std::function<void()> other) {
    steps_left = steps;
    interruption = std::move(other);
    stepping = true;
    asm volatile("int3" ::: "memory");
    call();
    const bool ended_before = stepping;
    stepping = false;
    return !ended_before;
}

struct Sides {
    Board client, mover;
    uint64_t generation = 0;
};

// What one round is about: a word that both sides want.
struct Contest {
    const char* name;
    WordState from, to;  // the mover's swap
    WordState (Board::*abandon)(uint32_t, uint64_t);
};

constexpr Contest CONTESTS[] = {
    {"a store begins", WordState::LIVE, WordState::SUBMITTED, &Board::abandon_store},
    {"a store ends", WordState::SUBMITTED, WordState::DONE, &Board::abandon_store},
    {"a retrieve begins", WordState::LIVE, WordState::SUBMITTED, &Board::abandon_retrieve},
};

void prepare(Sides& sides, const Contest& contest) {
    const Word found = sides.client.read(WORD);
    sides.client.abandon_store(WORD, found.generation);
    sides.generation = sides.client.begin(WORD);
    if (contest.from == WordState::SUBMITTED) {
        sides.mover.swap(WORD, sides.generation, WordState::LIVE, WordState::SUBMITTED);
    }
}

// Whether the answers agree with each other and with the word. A store that the mover has begun may be abandoned next.
bool is_right(Sides& sides, const Contest& contest, bool mover_won, WordState told) {
    const Word found = sides.client.read(WORD);
    if (found.generation != sides.generation || found.state != told) return false;
    const bool client_won = told == WordState::ABANDONED;
    const bool one_after_the_other = contest.abandon == &Board::abandon_store && contest.to == WordState::SUBMITTED;
    return client_won ? !mover_won || one_after_the_other : mover_won && told == contest.to;
}

bool try_contest(Sides& sides, const Contest& contest, bool client_is_stepped, uint64_t& orders) {
    for (uint64_t steps = 0;; ++steps) {
        prepare(sides, contest);
        bool mover_won = false;
        WordState told{};
        const auto swap = [&] { mover_won = sides.mover.swap(WORD, sides.generation, contest.from, contest.to); };
        const auto abandon = [&] { told = (sides.client.*contest.abandon)(WORD, sides.generation); };
        const bool met = client_is_stepped ? interrupted(steps, abandon, swap) : interrupted(steps, swap, abandon);
        if (!met) return true;
        ++orders;
        if (is_right(sides, contest, mover_won, told)) continue;
        std::printf("%s, the %s interrupted after %" PRIu64
                    " instructions: the client was told %d, the mover's swap said %d, the word holds %d\n",
                    contest.name, client_is_stepped ? "client" : "mover", steps, static_cast<int>(told), mover_won,
                    static_cast<int>(sides.client.read(WORD).state));
        return false;
    }
}

std::optional<uint64_t> begun(Board& board) {
    try {
        return board.begin(WORD);
    } catch (const std::exception&) {
        return std::nullopt;  // it is in use
    }
}

// Two that begin the same word: one gets the next generation, the other is refused.
bool try_begin(Sides& sides, uint64_t& orders) {
    for (uint64_t steps = 0;; ++steps) {
        const uint64_t before = sides.client.read(WORD).generation;
        std::optional<uint64_t> one, two;
        const auto first = [&] { one = begun(sides.client); };
        const bool met = interrupted(steps, first, [&] { two = begun(sides.mover); });
        sides.client.abandon_store(WORD, before + 1);
        if (!met) return true;
        ++orders;
        if (one.has_value() != two.has_value() && one.value_or(0) + two.value_or(0) == before + 1) continue;
        std::printf("interrupted after %" PRIu64 " instructions, begin gave generations %" PRIu64 " and %" PRIu64
                    " after %" PRIu64 "; 0 means refused\n",
                    steps, one.value_or(0), two.value_or(0), before);
        return false;
    }
}

}  // namespace

int main() {
    struct sigaction action{};
    action.sa_sigaction = on_trap;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGTRAP, &action, nullptr);
    const Descriptor memory = create_memfd("board", 4096, /*huge_page_bytes=*/0, /*sealed=*/true);
    Sides sides{Board(memory.get(), WORD + 1), Board(memory.get(), WORD + 1)};
    uint64_t orders = 0;
    for (const Contest& contest : CONTESTS) {
        for (const bool client_is_stepped : {false, true}) {
            if (!try_contest(sides, contest, client_is_stepped, orders)) return 1;
        }
    }
    sides.client.abandon_store(WORD, sides.generation);  // whatever the last contest left
    if (!try_begin(sides, orders)) return 1;
    std::printf("%" PRIu64 "\n", orders);
    return 0;
}

#else

int main() { return 77; }

#endif
