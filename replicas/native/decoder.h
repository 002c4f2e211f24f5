// The step of a llama-like decoder: embedding, layers of attention and gated MLP, final norm, logits.
//
// Letters: T tokens of the packed step, N rows whose logits are wanted. Activations and all sums are float; embedding and KV are
// float or bfloat16, and each linear has its own element type. Each layer is two segments. A segment leaves its contribution in
// `delta`, and the next segment first adds it to the residual stream: between two segments the ranks of a tensor-parallel group sum
// their deltas.
#pragma once

#include "attention.h"
#include "matmul.h"

extern "C" {

struct MantaTeam;  // manta::Team

enum MantaElement : int32_t { MANTA_FLOAT32, MANTA_BFLOAT16, MANTA_INT8, MANTA_INT4 };

struct MantaLinear {
    const uint32_t* panels;  // layout: packed_weight.h
    const float* units;      // null unless the weights are quantized
    const float* bias;       // or null
    int64_t num_outputs, num_k;
    int32_t element;
};

struct MantaLayer {
    const float *input_norm, *post_norm, *q_norm, *k_norm;  // the last two are null where the family has none
    MantaLinear qkv, out, gate_up, down;                    // fused along the outputs: q, k, v; gate, up
    void *k_cache, *v_cache;
    int64_t window;
};

struct MantaDecoder {
    const void* embedding;  // [vocabulary, hidden], not packed
    const float* final_norm;
    MantaLinear lm_head;
    const MantaLayer* layers;
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, block_size;
    float norm_eps, scale;
    int32_t is_bfloat16;
    MantaTeam* team;
};

struct MantaStep {
    const int64_t *token_ids, *positions, *slots, *logit_rows;
    const int32_t *tables, *query_starts, *context_lens;
    const float *cos, *sin;  // [positions, head_dim]
    float *hidden, *delta;   // [T, hidden_size], [T, hidden_size rounded up to 16]
    float *normed, *wide, *narrow;  // scratch: [T, hidden_size]; [T, widest projection]; [T, widest input of a projection]
    float* prepared;         // scratch: [T, widest prepared input of a projection]
    float* logits;           // [N, vocabulary rounded up to 16]
    int64_t num_tokens, num_requests, table_stride, num_logit_rows;
};
}

namespace manta {

// Calls `call` with the linear's packed weight, typed by its element.
template <typename F>
void with_weight(const MantaLinear& linear, F&& call) {
    const auto as = [&](auto element) {
        call(PackedWeight<decltype(element)>{linear.panels, linear.units, linear.num_outputs, linear.num_k});
    };
    switch (linear.element) {
        case MANTA_FLOAT32: return as(Float32{});
        case MANTA_BFLOAT16: return as(BFloat16Element{});
        case MANTA_INT8: return as(Int8{});
        default: return as(Int4{});
    }
}

inline int64_t padded(int64_t num_outputs) { return divide_up(num_outputs, PANEL) * PANEL; }

// The tokens of a step whose logits are wanted, each as a request of its own. Once the last layer has written its keys and values, the
// other tokens are not needed: the hidden states and queries of the wanted ones move to the first rows.
class WantedTokens {
    std::vector<int64_t> rows;
    std::vector<int32_t> tables, query_starts, context_lens;

  public:
    MantaStep step;

    // Many tokens of one request are faster in that request's tiles.
    static bool pays(const MantaStep& step) { return step.num_logit_rows * 8 <= step.num_tokens; }

    WantedTokens(const MantaStep& whole, int64_t hidden_size, int64_t width) : query_starts{0}, step(whole) {
        int64_t request = 0;
        for (int64_t n = 0; n < whole.num_logit_rows; ++n) {
            const int64_t t = whole.logit_rows[n];
            while (whole.query_starts[request + 1] <= t) ++request;
            const int32_t* table = whole.tables + request * whole.table_stride;
            tables.insert(tables.end(), table, table + whole.table_stride);
            context_lens.push_back(static_cast<int32_t>(whole.positions[t] + 1));
            query_starts.push_back(static_cast<int32_t>(n + 1));
            rows.push_back(n);
            std::copy_n(whole.hidden + t * hidden_size, hidden_size, whole.hidden + n * hidden_size);
            std::copy_n(whole.wide + t * width, width, whole.wide + n * width);
        }
        step.logit_rows = rows.data();
        step.tables = tables.data(), step.query_starts = query_starts.data(), step.context_lens = context_lens.data();
        step.num_tokens = step.num_requests = whole.num_logit_rows;
    }
    WantedTokens(const WantedTokens&) = delete;
};

// One step of the model; T is the type of embedding and KV.
template <typename T>
struct Decoder {
    const MantaDecoder& model;
    const MantaStep& step;

    void embed() const {
        const T* table = static_cast<const T*>(model.embedding);
        for (int64_t t = 0; t < step.num_tokens; ++t) {
            const T* from = table + step.token_ids[t] * model.hidden_size;
            float* to = step.hidden + t * model.hidden_size;
            for (int64_t i = 0; i < model.hidden_size; ++i) to[i] = to_float(from[i]);
        }
    }

    // hidden += delta
    void add_delta() const {
        const int64_t stride = padded(model.hidden_size);
        for_tokens([&](int64_t t) {
            float* to = step.hidden + t * model.hidden_size;
            const float* from = step.delta + t * stride;
            for (int64_t i = 0; i < model.hidden_size; ++i) to[i] += from[i];
        });
    }

    void attention_segment(int64_t index) const {
        write_tokens(index);
        attend_tokens(index);
    }

    // Computes the queries, keys and values of a layer and writes the latter two to its cache.
    void write_tokens(int64_t index) const {
        const MantaLayer& layer = model.layers[index];
        if (index > 0) add_delta();
        normalize(layer.input_norm);
        project(step.normed, layer.qkv, step.wide);
        const int64_t width = padded(layer.qkv.num_outputs);
        const int64_t num_rotated = model.num_heads + model.num_kv_heads;
        for_tokens([&](int64_t t) {
            const int64_t angles = step.positions[t] * model.head_dim;
            for (int64_t h = 0; h < num_rotated; ++h) {
                float* head = step.wide + t * width + h * model.head_dim;
                const float* norm = h < model.num_heads ? layer.q_norm : layer.k_norm;
                if (norm != nullptr) rms_norm(head, norm, model.head_dim, head);
                rotate(head, step.cos + angles, step.sin + angles);
            }
        });
        const float* key = step.wide + model.num_heads * model.head_dim;
        const float* value = key + model.num_kv_heads * model.head_dim;
        write(key, value, static_cast<T*>(layer.k_cache), static_cast<T*>(layer.v_cache), step.slots, step.num_tokens, shape(layer), width,
              model.head_dim, width, model.head_dim, team());
    }

    void attend_tokens(int64_t index) const {
        const MantaLayer& layer = model.layers[index];
        attend(step.wide, static_cast<const T*>(layer.k_cache), static_cast<const T*>(layer.v_cache), step.narrow, step.tables,
               step.table_stride, step.query_starts, step.context_lens, step.num_requests, shape(layer), team());
        project(step.narrow, layer.out, step.delta);
    }

    void mlp_segment(int64_t index) const {
        const MantaLayer& layer = model.layers[index];
        add_delta();
        normalize(layer.post_norm);
        project(step.normed, layer.gate_up, step.wide);
        const int64_t width = padded(layer.gate_up.num_outputs), size = model.intermediate_size;
        for_tokens([&](int64_t t) {
            const float *gate = step.wide + t * width, *up = gate + size;
            float* to = step.narrow + t * size;
#pragma omp simd
            for (int64_t i = 0; i < size; ++i) to[i] = silu(gate[i]) * up[i];
        });
        project(step.narrow, layer.down, step.delta);
    }

    void logits() const {
        add_delta();
        for (int64_t n = 0; n < step.num_logit_rows; ++n)
            rms_norm(step.hidden + step.logit_rows[n] * model.hidden_size, model.final_norm, model.hidden_size,
                     step.normed + n * model.hidden_size);
        if (step.num_logit_rows > 0) project_rows(step.normed, step.num_logit_rows, model.lm_head, step.logits);
    }

  private:
    void normalize(const float* weight) const {
        for_tokens([&](int64_t t) {
            rms_norm(step.hidden + t * model.hidden_size, weight, model.hidden_size, step.normed + t * model.hidden_size);
        });
    }

    // RMSNorm (arXiv 1910.07467); `to` may be `from`.
    void rms_norm(const float* from, const float* weight, int64_t size, float* to) const {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; ++i) sum += from[i] * from[i];
        const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + model.norm_eps);
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) to[i] = weight[i] * (from[i] * scale);
    }

    // Rotary position embedding in the half-split order of llama checkpoints.
    void rotate(float* head, const float* cos, const float* sin) const {
        const int64_t half = model.head_dim / 2;
        for (int64_t i = 0; i < half; ++i) {
            const float low = head[i], high = head[i + half];
            head[i] = low * cos[i] - high * sin[i];
            head[i + half] = high * cos[i + half] + low * sin[i + half];
        }
    }

    static float silu(float x) {
        const float e = exp_nonpositive(-std::abs(x));
        return x * (x >= 0 ? 1.0f : e) / (1.0f + e);
    }

    Shape shape(const MantaLayer& layer) const {
        return {model.num_heads, model.num_kv_heads, model.head_dim, model.head_dim, model.block_size, padded(layer.qkv.num_outputs),
                model.head_dim,  model.scale,        0.0f,           layer.window};
    }

    void project(const float* from, const MantaLinear& linear, float* to) const { project_rows(from, step.num_tokens, linear, to); }

    void project_rows(const float* from, int64_t num_rows, const MantaLinear& linear, float* to) const {
        with_weight(linear, [&](auto weight) { multiply(from, num_rows, weight, to, step.prepared, team()); });
        if (linear.bias == nullptr) return;
        const int64_t stride = padded(linear.num_outputs);
        for (int64_t r = 0; r < num_rows; ++r)
            for (int64_t i = 0; i < linear.num_outputs; ++i) to[r * stride + i] += linear.bias[i];
    }

    template <typename F>
    void for_tokens(F&& call) const {
        team().each(step.num_tokens, FEW_TOKENS, [&](int64_t t, int) { call(t); });
    }

    Team& team() const { return *reinterpret_cast<Team*>(model.team); }
};

}  // namespace manta
