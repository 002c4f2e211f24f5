// Checks the thread team without Python and without OpenMP; built with the thread sanitizer (test_replicas_native_team.py).
// Each test stops one thread at one of its claim points, for each thread and point in turn, and ends with status 1 on a wrong result.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace {

std::atomic<int> stopped_member{-1}, stopped_point{-1};
thread_local int member_here = 0, num_points = 0;
std::atomic<int> num_stops{0};

void claim_point() {
    if (member_here != stopped_member.load(std::memory_order_relaxed) || num_points++ != stopped_point.load(std::memory_order_relaxed)) return;
    num_stops.fetch_add(1, std::memory_order_relaxed);
    std::this_thread::sleep_for(std::chrono::microseconds(500));
}

}  // namespace

#define MANTA_CLAIM_POINT() claim_point()
#include "attention.h"
#include "matmul.h"

namespace {

void expect(bool is_right, const char* what) {
    if (is_right) return;
    std::printf("wrong: %s (member %d stopped at point %d)\n", what, stopped_member.load(), stopped_point.load());
    std::exit(1);
}

// Every item of every pass once, and visible to the caller afterwards.
void check_loops(manta::Team& team) {
    static constexpr int64_t SHAPES[][3] = {{1, 1, 1}, {2, 1, 1}, {7, 2, 1}, {40, 3, 2}, {5, 8, 3}, {64, 1, 1}};
    for (const auto& [num, grain, passes] : SHAPES) {
        std::vector<int> counts(num * passes);  // plain numbers: the sanitizer sees a piece that two threads hold
        team.each(num, grain, passes, [&, num = num](const manta::Piece& piece) {
            member_here = piece.member;
            for (int64_t i = piece.first; i < piece.first + piece.num; ++i) ++counts[piece.pass * num + i];
        });
        for (int count : counts) expect(count == 1, "an item was computed not once");
    }
}

std::vector<float> numbers(int64_t num, uint32_t seed) {
    std::vector<float> made(num);
    for (auto& x : made) x = static_cast<float>((seed = seed * 1664525u + 1013904223u) >> 8) / (1 << 24) - 0.5f;
    return made;
}

std::vector<float> product(manta::Team& team, int64_t num_rows) {
    constexpr int64_t NUM_K = 96, NUM_OUTPUTS = 200;
    static const std::vector<float> panels = numbers(208 * NUM_K, 1), rows = numbers(64 * NUM_K, 2);
    const manta::PackedWeight<manta::Float32> weight{reinterpret_cast<const uint32_t*>(panels.data()), nullptr, NUM_OUTPUTS, NUM_K};
    manta::Lines<float> prepared(num_rows * weight.prepared_floats());
    std::vector<float> out(num_rows * weight.stride());
    manta::multiply(rows.data(), num_rows, weight, out.data(), prepared.begin(), team);
    return out;
}

std::vector<float> attended(manta::Team& team) {
    constexpr int64_t HEADS = 4, KV_HEADS = 2, DIM = 16, BLOCK = 16, NUM_TOKENS = 40;
    const manta::Shape shape{HEADS, KV_HEADS, DIM, DIM, BLOCK, HEADS * DIM, DIM, 0.25f, 0.0f, 0};
    static const std::vector<float> query = numbers(NUM_TOKENS * HEADS * DIM, 3), key = numbers(NUM_TOKENS * KV_HEADS * DIM, 4);
    std::vector<float> k_cache(4 * KV_HEADS * DIM * BLOCK), v_cache(k_cache.size()), out(query.size());
    std::vector<int64_t> slots(NUM_TOKENS);
    for (int64_t t = 0; t < NUM_TOKENS; ++t) slots[t] = t < 24 ? t : 32 + t - 24;  // blocks 0 and 1; 2 and 3
    const int32_t tables[] = {0, 1, 2, 3}, starts[] = {0, 24, 40}, lens[] = {24, 16};
    manta::write(key.data(), key.data(), k_cache.data(), v_cache.data(), slots.data(), NUM_TOKENS, shape, KV_HEADS * DIM, DIM, KV_HEADS * DIM,
                 DIM, team);
    manta::attend(query.data(), k_cache.data(), v_cache.data(), out.data(), tables, 2, starts, lens, 2, shape, team);
    return out;
}

}  // namespace

int main() {
    manta::Team alone(1);
    const auto one_row = product(alone, 1), many_rows = product(alone, 37), attention = attended(alone);
    for (int size : {2, 3}) {
        int num_tried = 0;
        for (int member = 0; member < size; ++member)
            for (int point = 0; point < 60; point += point < 12 ? 1 : 7) {
                stopped_member = -1;
                manta::Team team(size);
                num_points = 0;
                stopped_point = point, stopped_member = member;
                for (int round = 0; round < 3; ++round) check_loops(team);
                expect(product(team, 1) == one_row, "one row");
                expect(product(team, 37) == many_rows, "many rows");
                expect(attended(team) == attention, "attention");
                ++num_tried;
            }
        std::printf("%d members: %d runs, %d stops\n", size, num_tried, num_stops.exchange(0));
    }
    // Two callers at once: one shares with the team, the other works alone.
    manta::Team team(2);
    std::thread other([&] {
        for (int i = 0; i < 50; ++i) check_loops(team);
    });
    for (int i = 0; i < 50; ++i) check_loops(team);
    other.join();
    std::puts("right");
}
