// Whether a team's workers help or hinder. Beside another busy process a worker often holds a piece of a loop while it waits for its core,
// and the caller waits with it; the caller alone is faster then. Linux counts how long each thread was ready to run without a core: where
// that is a large part of the time that loops take, the governor sends the workers to sleep, and tries them again after a while.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>

namespace manta {

// How long one thread has waited for a core, ready to run. Always 0 where the kernel does not tell.
class RunDelay {
  public:
    RunDelay() = default;
    RunDelay(const RunDelay&) = delete;
    ~RunDelay() { follow(-1); }

    // Follows the calling thread from now on.
    void follow_caller() { follow(open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)); }

    // Seconds since the last call. Callable from any thread, by one at a time.
    double since_last() {
        char text[64];
        const int from = file.load(std::memory_order_acquire);
        const ssize_t size = from < 0 ? 0 : pread(from, text, sizeof text - 1, 0);
        if (size <= 0) return 0;
        text[size] = 0;
        unsigned long long running = 0, waiting = 0;  // nanoseconds
        if (std::sscanf(text, "%llu %llu", &running, &waiting) != 2) return 0;
        const unsigned long long before = last;
        last = waiting;
        return before == UNKNOWN || waiting < before ? 0 : static_cast<double>(waiting - before) * 1e-9;
    }

  private:
    static constexpr unsigned long long UNKNOWN = ~0ull;

    void follow(int other) {
        const int before = file.exchange(other);
        if (before >= 0) close(before);
    }

    std::atomic<int> file{-1};
    unsigned long long last = UNKNOWN;
};

class Governor {
  public:
    using Clock = std::chrono::steady_clock;
    using Duration = std::chrono::duration<double>;

    // Whether the next loop should have workers.
    bool wants_workers(Clock::time_point now) {
        if (!is_resting) return true;
        if (now < rest_end) return false;
        is_resting = false;
        is_fresh = is_trying = true;
        return true;
    }

    // After a loop with workers, which took `loop`. `delays` are those of the caller and of the workers.
    template <typename Delays>
    void note(Clock::time_point end, Duration loop, Delays&& delays) {
        if (is_fresh) {  // delays from before do not count
            is_fresh = false;
            together = Duration::zero();
            delays();
        }
        together += loop;
        if (together < WINDOW) return;
        const double share = delays() / together.count();
        together = Duration::zero();
        delay_share = is_trying ? share : delay_share + SMOOTHING * (share - delay_share);
        is_trying = false;
        if (delay_share < MAX_DELAY_SHARE) {
            rest = MIN_REST;
            return;
        }
        is_resting = true;
        rest_end = end + std::chrono::duration_cast<Clock::duration>(rest);
        rest = std::min(rest * 2, MAX_REST);
    }

  private:
    // A share of 1 is one thread that always waits. Measured on two cores: 0.01 alone, 1 beside a busy process, 0.3 in single windows.
    static constexpr double MAX_DELAY_SHARE = 0.5, SMOOTHING = 0.4;
    static constexpr Duration WINDOW{0.01}, MIN_REST{0.05}, MAX_REST{0.4};

    bool is_resting = false;
    bool is_fresh = true;    // the next loop starts a new window
    bool is_trying = false;  // this window decides alone whether the workers rest on
    Clock::time_point rest_end{};
    Duration rest = MIN_REST, together{};
    double delay_share = 0;
};

}  // namespace manta
