#include "disk/faults.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "disk/format.h"

namespace kv::disk {

void Faults::plan(uint64_t nth, Planned planned, bool lasting) {
    const std::lock_guard lock(mutex_);
    if (nth <= requests_) bad_argument("the request has passed already");
    if (lasting) {
        lasting_from_ = nth;
        lasting_ = planned;
    } else {
        planned_[nth] = planned;
    }
}

void Faults::release() {
    std::vector<std::pair<Request*, Io*>> held;
    {
        const std::lock_guard lock(mutex_);
        released_ = true;
        held = held_;
    }
    for (const auto& [request, io] : held) io->wake();
}

uint64_t Faults::requests() const {
    const std::lock_guard lock(mutex_);
    return requests_;
}

uint64_t Faults::stalled() const {
    const std::lock_guard lock(mutex_);
    return held_.size();
}

void Faults::record() {
    const std::lock_guard lock(mutex_);
    recording_ = true;
}

std::vector<Faults::Event> Faults::trace() const {
    const std::lock_guard lock(mutex_);
    return trace_;
}

Faults::Planned Faults::next(const Request& request, uint64_t& number) {
    const std::lock_guard lock(mutex_);
    number = ++requests_;
    if (recording_ && request.direction == Direction::WRITE) {
        const auto* const bytes = reinterpret_cast<const char*>(request.memory);
        trace_.push_back({"begin", number, request.file, request.offset, std::string(bytes, request.bytes)});
    }
    const auto found = planned_.find(number);
    if (found != planned_.end()) return found->second;
    return number >= lasting_from_ ? lasting_ : Planned{};
}

void Faults::ended(uint64_t number) {
    const std::lock_guard lock(mutex_);
    if (recording_) trace_.push_back({"end", number, File::PAYLOADS, 0, {}});
}

void Faults::flushed() {
    const std::lock_guard lock(mutex_);
    if (recording_) trace_.push_back({"flush", 0, File::PAYLOADS, 0, {}});
}

bool Faults::hold(Request& request, Io& io) {
    const std::lock_guard lock(mutex_);
    if (released_) return false;
    held_.emplace_back(&request, &io);
    return true;
}

std::vector<Request*> Faults::released(const Io& io) {
    const std::lock_guard lock(mutex_);
    std::vector<Request*> free;
    if (!released_) return free;
    std::erase_if(held_, [&](const auto& entry) {
        if (entry.second != &io) return false;
        free.push_back(entry.first);
        return true;
    });
    return free;
}

namespace {

// Passes requests on, each as a copy that may differ from the original.
class FaultyIo : public Io {
  public:
    FaultyIo(std::unique_ptr<Io> io, std::shared_ptr<Faults> faults) : io_(std::move(io)), faults_(std::move(faults)) {}

    void submit(Request& request) override {
        uint64_t number = 0;
        const Faults::Planned planned = faults_->next(request, number);
        auto passed = std::make_unique<Passed>(Passed{{request}, &request, planned, number, {}});
        const bool refused = planned.fault != Fault::ERROR && !is_aligned(request);
        if (planned.fault == Fault::ERROR || refused) {
            passed->changed.result = refused ? -EINVAL : -planned.error;
            ended_.push_back(std::move(passed));
            io_->wake();
            return;
        }
        change(*passed);
        Request& changed = passed->changed;
        under_way_.emplace(&changed, std::move(passed));
        if (planned.fault == Fault::STALL && faults_->hold(changed, *this)) return;
        pass_on(changed);
    }

    void start() override { io_->start(); }

    void collect(std::vector<Request*>& ended) override {
        for (Request* request : faults_->released(*this)) pass_on(*request);
        std::vector<Request*> inner;
        io_->collect(inner);
        for (const auto& passed : ended_) {
            finish(*passed);
            ended.push_back(passed->asked);
        }
        ended_.clear();
        for (Request* changed : inner) {
            auto entry = under_way_.extract(changed);
            finish(*entry.mapped());
            ended.push_back(entry.mapped()->asked);
        }
    }

    void wake() override { io_->wake(); }
    std::string name() const override { return io_->name() + ", with faults"; }

  private:
    struct Passed {
        Request changed;
        Request* asked;
        Faults::Planned planned;
        uint64_t number;
        std::unique_ptr<Block[]> copy;
    };

    // The requirements of O_DIRECT, checked here on every file system that a test may use.
    static bool is_aligned(const Request& request) {
        const auto memory = reinterpret_cast<uintptr_t>(request.memory);
        return request.file == File::HEADERS || (request.offset | memory | request.bytes) % BLOCK_BYTES == 0;
    }

    // Half of one block is rounded down to nothing.
    void pass_on(Request& changed) {
        if (changed.bytes != 0) {
            io_->submit(changed);
            return;
        }
        auto entry = under_way_.extract(&changed);
        ended_.push_back(std::move(entry.mapped()));
        io_->wake();
    }

    static void change(Passed& passed) {
        Request& changed = passed.changed;
        const bool writes = changed.direction == Direction::WRITE;
        switch (passed.planned.fault) {
            case Fault::SHORT:
                changed.bytes = half(changed);
                break;
            case Fault::TORN:
                if (writes) changed.bytes = half(changed);
                break;
            case Fault::MISDIRECT:
                changed.offset += unit(changed);
                break;
            case Fault::FLIP:
                if (!writes) break;
                passed.copy = std::make_unique<Block[]>((changed.bytes + BLOCK_BYTES - 1) / BLOCK_BYTES);
                std::memcpy(passed.copy.get(), changed.memory, changed.bytes);
                changed.memory = passed.copy[0].bytes;
                flip(changed, passed.number);
                break;
            case Fault::NONE:
            case Fault::ERROR:
            case Fault::RAGGED:
            case Fault::STALL:
                break;
        }
    }

    void finish(Passed& passed) {
        Request& asked = *passed.asked;
        asked.result = passed.changed.result;
        if (asked.result < 0) return;
        if (passed.planned.fault == Fault::RAGGED) asked.result = asked.bytes / 2 + 7;
        if (passed.planned.fault == Fault::TORN && asked.direction == Direction::WRITE) asked.result = asked.bytes;
        if (passed.planned.fault == Fault::FLIP && asked.direction == Direction::READ) flip(asked, passed.number);
        if (asked.direction == Direction::WRITE && asked.result == asked.bytes) faults_->ended(passed.number);
    }

    static uint64_t unit(const Request& request) { return request.file == File::PAYLOADS ? BLOCK_BYTES : ENTRY_BYTES; }
    static uint32_t half(const Request& request) {
        if (request.file == File::HEADERS) return request.bytes / 2;
        return static_cast<uint32_t>(request.bytes / 2 / BLOCK_BYTES * BLOCK_BYTES);
    }
    // A bit within the header's content, a different one each time.
    static void flip(const Request& request, uint64_t number) { request.memory[number * 37 % 192] ^= std::byte{0x10}; }

    const std::unique_ptr<Io> io_;
    const std::shared_ptr<Faults> faults_;
    std::unordered_map<Request*, std::unique_ptr<Passed>> under_way_;
    std::vector<std::unique_ptr<Passed>> ended_;  // ended without being passed on
};

}  // namespace

std::unique_ptr<Io> with_faults(std::unique_ptr<Io> io, std::shared_ptr<Faults> faults) {
    if (faults == nullptr) return io;
    return std::make_unique<FaultyIo>(std::move(io), std::move(faults));
}

}  // namespace kv::disk
