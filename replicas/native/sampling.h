// The next token of a row of logits: temperature, top_k, top_p and min_p, then the inverse CDF in token-id order.
//
// One thread processes a row in a fixed order, so its token does not depend on other rows. Tokens that tie with the last one kept are
// kept too. The plain reference is `filtered_probs` and `inverse_cdf` in replicas/sampling/sampler.py.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "vector.h"

extern "C" {

struct MantaDrawSettings {
    float temperature, min_p;  // min_p 0 keeps all
    int64_t top_k;             // the vocabulary's size keeps all
    double top_p;              // 1 keeps all
    double draw;               // uniform in [0, 1)
};
}

namespace manta {

using DrawSettings = MantaDrawSettings;

constexpr int64_t NO_TOKEN = -1;

// The first id with the largest logit, or NO_TOKEN where a logit is NaN or the largest is infinite.
inline int64_t argmax(const float* logits, int64_t size) {
    constexpr int64_t STRETCH = 1024;  // ids per stretch; only the stretch with the maximum is searched for its id
    float highest = MINUS_INFINITY;
    int64_t best = 0;
    for (int64_t start = 0; start < size; start += STRETCH) {
        const int64_t end = std::min(start + STRETCH, size), whole = end - (end - start) % WIDTH;
        Vector most = Vector{} + MINUS_INFINITY;
        Integers is_nan = {};
        for (int64_t i = start; i < whole; i += WIDTH) {
            const Vector x = load(logits + i);
            most = larger(x, most);
            is_nan |= x != x;
        }
        float here = largest(most);
        bool any_nan = false;
        for (int i = 0; i < WIDTH; ++i) any_nan |= is_nan[i] != 0;
        for (int64_t i = whole; i < end; ++i) {
            here = std::max(here, logits[i]);
            any_nan |= std::isnan(logits[i]);
        }
        if (any_nan) return NO_TOKEN;
        if (here > highest) highest = here, best = start;
    }
    return std::isinf(highest) ? NO_TOKEN : std::find(logits + best, logits + size, highest) - logits;
}

class RowDraw {
  public:
    explicit RowDraw(int64_t vocab_size)
        : size(vocab_size), num_spans((vocab_size + SPAN - 1) / SPAN), weights(num_spans * SPAN), sums(num_spans) {}

    // A token id, or NO_TOKEN where a logit is NaN or the largest is infinite.
    int64_t draw(const float* logits, const DrawSettings& s) {
        float highest = MINUS_INFINITY;
        int32_t num_nan = 0;
#pragma omp simd reduction(max : highest) reduction(+ : num_nan)
        for (int64_t i = 0; i < size; ++i) {
            highest = std::max(highest, logits[i]);
            num_nan += logits[i] != logits[i];
        }
        if (num_nan > 0 || std::isinf(highest)) return NO_TOKEN;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) weights[i] = logits[i] - highest;
        std::fill(weights.begin() + size, weights.end(), MINUS_INFINITY);
        const float least_logit = s.top_k < size ? kth_largest(s.top_k) : MINUS_INFINITY;
#pragma omp simd
        for (int64_t i = 0; i < num_spans * SPAN; ++i)
            weights[i] = weights[i] < least_logit ? 0.0f : exp_nonpositive(weights[i] / s.temperature);
        double total = sum_spans(0.0f);
        float least = s.min_p;  // the largest weight is 1
        if (s.top_p < 1) least = std::max(least, smallest_kept(s.top_p, total));
        if (least > 0) total = sum_spans(least);
        return inverse_cdf(s.draw * total, total, least);
    }

  private:
    static constexpr int64_t SPAN = 64;  // ids whose weights are summed before the search of the CDF
    int64_t size, num_spans;
    std::vector<float> weights, sums;  // [num_spans, SPAN] and [num_spans]
    std::vector<float> candidates;

    // The k-th largest of `weights`. The k-th largest of the spans' maxima is a lower bound, so few candidates remain.
    float kth_largest(int64_t k) {
        float bound = MINUS_INFINITY;
        if (k <= num_spans) {
            candidates.resize(num_spans);
            for (int64_t b = 0; b < num_spans; ++b) {
                float highest = MINUS_INFINITY;
#pragma omp simd reduction(max : highest)
                for (int64_t i = b * SPAN; i < (b + 1) * SPAN; ++i) highest = std::max(highest, weights[i]);
                candidates[b] = highest;
            }
            std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), std::greater<float>());
            bound = candidates[k - 1];
        }
        collect(bound);
        std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), std::greater<float>());
        return candidates[k - 1];
    }

    // The smallest weight of the smallest set of the largest weights with at least `top_p` of the total.
    float smallest_kept(double top_p, double total) {
        // The weights below this sum to less than the part that may be dropped.
        collect(static_cast<float>((1 - top_p) * total / static_cast<double>(size)) * 0.999f);
        const double target = top_p * total;
        auto first = candidates.begin(), end = candidates.end();
        double above = 0;  // sum of the weights larger than first .. end
        while (true) {
            if (end - first <= 1) return first == end ? 0.0f : *first;
            const float pivot = median(*first, *(first + (end - first) / 2), *(end - 1));
            const auto equal = std::partition(first, end, [&](float w) { return w > pivot; });
            const auto less = std::partition(equal, end, [&](float w) { return w == pivot; });
            double larger = 0;
            for (auto i = first; i != equal; ++i) larger += *i;
            const double reached = above + larger + static_cast<double>(pivot) * static_cast<double>(less - equal);
            if (above + larger >= target) {
                end = equal;
            } else if (reached >= target || less == end) {
                return pivot;
            } else {
                above = reached;
                first = less;
            }
        }
    }

    // Fills `candidates` with the weights that are at least `bound`, in id order.
    void collect(float bound) {
        candidates.clear();
        for (int64_t b = 0; b < num_spans; ++b) {
            int32_t num = 0;
            const float* span = &weights[b * SPAN];
#pragma omp simd reduction(+ : num)
            for (int64_t i = 0; i < SPAN; ++i) num += span[i] >= bound;
            if (num == 0) continue;
            for (int64_t i = 0; i < SPAN; ++i)
                if (span[i] >= bound) candidates.push_back(span[i]);
        }
    }

    // Fills `sums` with each span's sum of weights that are at least `least`; returns the total.
    double sum_spans(float least) {
        double total = 0;
        for (int64_t b = 0; b < num_spans; ++b) {
            const float* span = &weights[b * SPAN];
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < SPAN; ++i) sum += span[i] >= least ? span[i] : 0.0f;
            sums[b] = sum;
            total += sum;
        }
        return total;
    }

    // The first id whose cumulative weight exceeds `target`; the last id with a weight when rounding pushed `target` to the total.
    int64_t inverse_cdf(double target, double total, float least) const {
        int64_t span = -1, last = -1;
        double before = 0;
        for (int64_t b = 0; b < num_spans && span < 0; ++b) {
            if (sums[b] > 0) last = b;
            if (before + sums[b] > target && sums[b] > 0) span = b;
            else before += sums[b];
        }
        if (span < 0) {
            span = last;
            before = total - sums[span];
        }
        const double into = std::max(target - before, 0.0);
        double cumulated = 0;
        int64_t id = -1;
        for (int64_t i = span * SPAN; i < (span + 1) * SPAN; ++i) {
            if (weights[i] < least || weights[i] == 0) continue;
            id = i;
            cumulated += weights[i];
            if (cumulated > into) break;
        }
        return id;
    }

    static float median(float a, float b, float c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); }
};

}  // namespace manta
