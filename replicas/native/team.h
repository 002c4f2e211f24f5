// A team of threads that share the loops of the kernels: the calling thread and workers that the team owns.
//
// A loop is cut into pieces, which threads claim one after another, first those of their own share, then those that others have left.
// A loop ends once every claimed piece is done. It does not wait for a worker that has claimed nothing, so a worker that another process
// keeps from its core costs at most the piece that it holds. Who waits spins for a moment and then sleeps, so that a thread that is ready
// to run gets the core.
//
// A share's pieces are one number, which a claim lowers by one. Whoever has claimed a piece may read the loop, for it does not end before
// the piece is done; a worker that comes late reads nothing else and simply claims pieces of the next loop.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "governor.h"

// Tests stop threads here: before and after each claim, and before a thread reports its pieces.
#ifndef MANTA_CLAIM_POINT
#define MANTA_CLAIM_POINT()
#endif

namespace manta {

// A piece of a loop: items first .. first + num - 1 in pass `pass`, computed by thread `member` of the team; the caller is member 0.
struct Piece {
    int64_t first, num, pass;
    int member;
};

class Team {
  public:
    // The workers run on the cores that the calling thread may use.
    explicit Team(int num_members) : shares(std::max(num_members, 1)), workers(shares.size() - 1) {
        for (size_t i = 0; i < workers.size(); ++i) workers[i].thread = std::thread([this, i] { serve(static_cast<int>(i) + 1); });
    }
    Team(const Team&) = delete;
    ~Team() {
        is_ending.store(true);
        for (auto& worker : workers) {
            worker.wake();
            worker.thread.join();
        }
    }

    int size() const { return static_cast<int>(shares.size()); }

    // Calls `body(piece)` for pieces of up to `grain` of the items 0 .. num - 1, in each of `num_passes` passes; passes over the same items
    // follow each other on mostly the same thread. Pieces run in any order on any threads, at the same time; all are done on return. A
    // caller that finds the team at work for another thread computes its loop alone.
    template <typename F>
    void each(int64_t num, int64_t grain, int64_t num_passes, F&& body) {
        const Loop whole{call_body<std::remove_reference_t<F>>, &body, num, grain, num_passes};
        const bool is_small = num <= grain && num_passes == 1;
        if (is_small || workers.empty() || is_busy.test_and_set(std::memory_order_acquire)) return alone(whole);
        const auto start = Clock::now();
        if (governor.wants_workers(start))
            share(whole, start);
        else
            alone(whole);
        is_busy.clear(std::memory_order_release);
    }

    // Calls `body(i, member)` for each item; loops of up to `few` items run on the caller.
    template <typename F>
    void each(int64_t num, int64_t few, F&& body) {
        const int64_t grain = num <= few ? num : divide_up(num, PIECES_A_MEMBER * size());
        each(num, grain, 1, [&](const Piece& piece) {
            for (int64_t i = piece.first; i < piece.first + piece.num; ++i) body(i, piece.member);
        });
    }

  private:
    using Clock = std::chrono::steady_clock;
    static constexpr int64_t PIECES_A_MEMBER = 4;
    static constexpr auto MAX_SPIN = std::chrono::microseconds(50);

    struct alignas(64) Share {
        std::atomic<uint32_t> num_left{0};  // pieces that nobody has claimed
    };
    struct alignas(64) Worker {
        std::thread thread;
        std::atomic<uint32_t> is_asleep{0};
        RunDelay delay;

        void wake() {
            if (is_asleep.load() != 0 && is_asleep.exchange(0) != 0) wake_all(is_asleep);
        }
    };
    // The loop at work. The caller writes it before it fills the shares; a worker reads it only between a claim and its report.
    struct Loop {
        void (*call)(const void* body, const Piece& piece);
        const void* body;
        int64_t num, grain, num_passes;
    };

    static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
    static void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
        syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
    }
    static void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }

    // Spins until `is_ready()`, for at most MAX_SPIN; returns whether it is.
    template <typename F>
    static bool spin_until(F&& is_ready) {
        for (const auto end = Clock::now() + MAX_SPIN; Clock::now() < end;)
            for (int i = 0; i < 32; ++i) {
                if (is_ready()) return true;
#if defined(__x86_64__) || defined(__i386__)
                __builtin_ia32_pause();
#elif defined(__aarch64__)
                asm volatile("yield");
#endif
            }
        return is_ready();
    }

    // One copy of the body's code for every way in which a loop runs: the compiler may round another copy differently.
    template <typename Body>
    static __attribute__((noinline)) void call_body(const void* body, const Piece& piece) {
        (*static_cast<Body*>(const_cast<void*>(body)))(piece);
    }

    static void alone(const Loop& whole) {
        for (int64_t first = 0; first < whole.num; first += whole.grain)
            for (int64_t pass = 0; pass < whole.num_passes; ++pass)
                whole.call(whole.body, {first, std::min(whole.grain, whole.num - first), pass, 0});
    }

    int64_t first_of(int member) const { return member * loop.num / size(); }
    uint32_t num_pieces(int member) const {
        return static_cast<uint32_t>(divide_up(first_of(member + 1) - first_of(member), loop.grain) * loop.num_passes);
    }

    void share(const Loop& whole, Clock::time_point start) {
        loop = whole;
        uint32_t total = 0;
        for (int m = 0; m < size(); ++m) total += num_pieces(m);
        num_undone.store(total, std::memory_order_relaxed);
        for (int m = 0; m < size(); ++m) shares[m].num_left.store(num_pieces(m), std::memory_order_release);
        num_loops.fetch_add(1);
        for (auto& worker : workers) worker.wake();
        work(0);
        await_rest();
        const auto end = Clock::now();
        governor.note(end, end - start, [this] { return delays_s(); });
    }

    // Seconds that the team's threads were ready to run without a core since the last call, of all together.
    double delays_s() {
        if (caller != std::this_thread::get_id()) {
            caller = std::this_thread::get_id();
            caller_delay.follow_caller();
        }
        double sum = caller_delay.since_last();
        for (auto& worker : workers) sum += worker.delay.since_last();
        return sum;
    }

    void await_rest() {
        const auto is_done = [&] { return num_undone.load(std::memory_order_acquire) == 0; };
        if (spin_until(is_done)) return;
        caller_sleeps.store(true);
        for (uint32_t left; (left = num_undone.load()) != 0;) sleep_while(num_undone, left);
        caller_sleeps.store(false, std::memory_order_relaxed);
    }

    // Claims pieces until none is left.
    void work(int member) {
        uint32_t num_done = 0;
        for (int turn = 0; turn < size(); ++turn) {
            const int owner = (member + turn) % size();
            std::atomic<uint32_t>& num_left = shares[owner].num_left;
            MANTA_CLAIM_POINT();
            for (uint32_t left = num_left.load(std::memory_order_acquire); left > 0;) {
                if (!num_left.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
                MANTA_CLAIM_POINT();
                const int64_t piece = num_pieces(owner) - left;
                const int64_t first = first_of(owner) + piece / loop.num_passes * loop.grain;
                loop.call(loop.body, {first, std::min(loop.grain, first_of(owner + 1) - first), piece % loop.num_passes, member});
                ++num_done;
                left = num_left.load(std::memory_order_acquire);
            }
        }
        MANTA_CLAIM_POINT();
        if (num_done > 0 && num_undone.fetch_sub(num_done) == num_done && caller_sleeps.load()) wake_all(num_undone);
    }

    void serve(int member) {
        Worker& self = workers[member - 1];
        self.delay.follow_caller();
        uint32_t seen = 0;
        const auto is_called = [&] { return num_loops.load(std::memory_order_acquire) != seen || is_ending.load(std::memory_order_relaxed); };
        while (true) {
            if (!spin_until(is_called)) {
                self.is_asleep.store(1);
                while (!(num_loops.load() != seen || is_ending.load()) && self.is_asleep.load() != 0) sleep_while(self.is_asleep, 1);
                self.is_asleep.store(0);
            }
            if (is_ending.load()) return;
            seen = num_loops.load(std::memory_order_acquire);
            work(member);
        }
    }

    std::vector<Share> shares;
    Loop loop{};
    Governor governor;  // the caller's, as are the next two
    std::thread::id caller;
    RunDelay caller_delay;
    std::atomic_flag is_busy = ATOMIC_FLAG_INIT;
    alignas(64) std::atomic<uint32_t> num_loops{0};
    std::atomic<bool> is_ending{false};
    alignas(64) std::atomic<uint32_t> num_undone{0};  // pieces not reported as done
    std::atomic<bool> caller_sleeps{false};
    std::vector<Worker> workers;  // last: the threads use all of the above
};

}  // namespace manta
