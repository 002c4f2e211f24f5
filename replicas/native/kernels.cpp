// The C interface of the CPU kernels. Python mirrors each struct field by field (replicas/attention/native.py,
// replicas/sampling/native_draw.py and replicas/model/native_decoder.py). The caller owns all memory and keeps pointers valid during
// the call.

#include "attention.h"
#include "decoder.h"
#include "sampling.h"

#include <cstring>

namespace {

// Calls `call` with a value of the element type.
template <typename F>
void with_type(bool is_bfloat16, F&& call) {
    if (is_bfloat16)
        call(manta::BFloat16{});
    else
        call(float{});
}

manta::Team& team_of(MantaTeam* team) { return *reinterpret_cast<manta::Team*>(team); }

}  // namespace

extern "C" {

// A team of `num_members` threads, the caller's included. One thread at a time shares its loops with it; another one works alone.
MantaTeam* manta_team_create(int32_t num_members) { return reinterpret_cast<MantaTeam*>(new manta::Team(num_members)); }
void manta_team_destroy(MantaTeam* team) { delete &team_of(team); }

// The name of the instruction set that these kernels were built for.
const char* manta_variant() { return MANTA_VARIANT; }

struct MantaAttentionArgs {
    void *query, *key, *value, *out, *k_cache, *v_cache;
    const int32_t *tables, *query_starts, *context_lens;
    const int64_t* slots;
    int64_t num_tokens, num_requests, table_stride;
    int64_t num_heads, num_kv_heads, k_dim, v_dim, block_size;
    int64_t q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride;
    int64_t window;
    float scale, softcap;
    int32_t is_bfloat16;
    MantaTeam* team;
};

// The size in bytes of a struct that Python mirrors; -1 for an unknown name.
int64_t manta_struct_size(const char* name) {
    static const struct {
        const char* name;
        int64_t num_bytes;
    } sizes[] = {
        {"MantaAttentionArgs", sizeof(MantaAttentionArgs)}, {"MantaDrawSettings", sizeof(MantaDrawSettings)},
        {"MantaLinear", sizeof(MantaLinear)},               {"MantaLayer", sizeof(MantaLayer)},
        {"MantaDecoder", sizeof(MantaDecoder)},             {"MantaStep", sizeof(MantaStep)},
    };
    for (const auto& one : sizes)
        if (std::strcmp(one.name, name) == 0) return one.num_bytes;
    return -1;
}

// Writes this step's keys and values of one layer, then attends over everything the block tables name.
void manta_paged_attention(const MantaAttentionArgs* a) {
    const manta::Shape s{a->num_heads, a->num_kv_heads, a->k_dim, a->v_dim,   a->block_size,
                         a->q_token_stride, a->q_head_stride, a->scale, a->softcap, a->window};
    with_type(a->is_bfloat16, [&](auto type) {
        using T = decltype(type);
        T *k_cache = static_cast<T*>(a->k_cache), *v_cache = static_cast<T*>(a->v_cache);
        manta::write(static_cast<const T*>(a->key), static_cast<const T*>(a->value), k_cache, v_cache, a->slots, a->num_tokens, s,
                     a->k_token_stride, a->k_head_stride, a->v_token_stride, a->v_head_stride, team_of(a->team));
        manta::attend(static_cast<const T*>(a->query), k_cache, v_cache, static_cast<T*>(a->out), a->tables, a->table_stride,
                      a->query_starts, a->context_lens, a->num_requests, s, team_of(a->team));
    });
}

// out [num_rows, outputs rounded up to 16] = in [num_rows, k] times a packed weight: layers of drafting heads, and tests.
void manta_multiply(const float* in, int64_t num_rows, const MantaLinear* linear, float* out, MantaTeam* team) {
    manta::with_weight(*linear, [&](auto weight) {
        manta::Lines<float> prepared(num_rows * weight.prepared_floats());
        manta::multiply(in, num_rows, weight, out, prepared.begin(), team_of(team));
    });
}

#ifdef MANTA_BF16_DOT
// sums [num, LANES] += dot products of pairs of bfloat16 in a and b. Only for tests of this arithmetic.
void manta_add_dots(float* sums, const uint32_t* a, const uint32_t* b, int64_t num) {
    for (int64_t i = 0; i < num * manta::LANES; i += manta::LANES) {
        manta::Vector sum;
        manta::Words pairs, others;
        std::memcpy(&sum, sums + i, sizeof sum);
        std::memcpy(&pairs, a + i, sizeof pairs);
        std::memcpy(&others, b + i, sizeof others);
        manta::add_dot(sum, pairs, others);
        std::memcpy(sums + i, &sum, sizeof sum);
    }
}
#endif

#ifdef MANTA_INTEGER_DOT
// sums [num, WIDTH] += dot products of four unsigned bytes with four signed ones. Only for tests of this arithmetic.
void manta_add_byte_dots(int32_t* sums, const uint32_t* unsigned_bytes, const uint32_t* signed_bytes, int64_t num) {
    for (int64_t i = 0; i < num * manta::WIDTH; i += manta::WIDTH) {
        manta::Integers sum;
        manta::Words u, s;
        std::memcpy(&sum, sums + i, sizeof sum);
        std::memcpy(&u, unsigned_bytes + i, sizeof u);
        std::memcpy(&s, signed_bytes + i, sizeof s);
        manta::add_dot(sum, u, s);
        std::memcpy(sums + i, &sum, sizeof sum);
    }
}
#endif

// token_ids [num_rows] = the token drawn from each of `rows` of the logits.
void manta_draw(const float* logits, int64_t row_stride, int64_t vocab_size, const int64_t* rows, int64_t num_rows,
                const MantaDrawSettings* settings, int64_t* token_ids, MantaTeam* team) {
    std::vector<std::unique_ptr<manta::RowDraw>> draws(team_of(team).size());  // by member
    team_of(team).each(num_rows, 1, 1, [&](const manta::Piece& piece) {
        auto& draw = draws[piece.member];
        if (!draw) draw = std::make_unique<manta::RowDraw>(vocab_size);
        token_ids[piece.first] = draw->draw(logits + rows[piece.first] * row_stride, settings[piece.first]);
    });
}

// token_ids [num_rows] = the token with the largest logit in each of `rows`.
void manta_argmax(const float* logits, int64_t row_stride, int64_t vocab_size, const int64_t* rows, int64_t num_rows, int64_t* token_ids,
                  MantaTeam* team) {
    team_of(team).each(num_rows, 1, 1, [&](const manta::Piece& piece) {
        token_ids[piece.first] = manta::argmax(logits + rows[piece.first] * row_stride, vocab_size);
    });
}

// One whole step.
void manta_decoder_step(const MantaDecoder* model, const MantaStep* step) {
    with_type(model->is_bfloat16, [&](auto type) {
        using Decoder = manta::Decoder<decltype(type)>;
        const Decoder decoder{*model, *step};
        const auto finish = [&](const Decoder& rest, int64_t layer) {
            rest.attend_tokens(layer);
            rest.mlp_segment(layer);
        };
        const int64_t last = model->num_layers - 1;
        decoder.embed();
        for (int64_t layer = 0; layer < last; ++layer) {
            decoder.write_tokens(layer);
            finish(decoder, layer);
        }
        decoder.write_tokens(last);
        if (!manta::WantedTokens::pays(*step)) {
            finish(decoder, last);
            decoder.logits();
        } else if (step->num_logit_rows > 0) {
            const manta::WantedTokens wanted(*step, model->hidden_size, manta::padded(model->layers[last].qkv.num_outputs));
            const Decoder rest{*model, wanted.step};
            finish(rest, last);
            rest.logits();
        }
    });
}

enum MantaSegment : int32_t { MANTA_EMBED, MANTA_ATTENTION, MANTA_MLP, MANTA_LOGITS };

// One segment of a step; the caller may change `step->delta` between two segments.
void manta_decoder_segment(const MantaDecoder* model, const MantaStep* step, int32_t segment, int64_t layer) {
    with_type(model->is_bfloat16, [&](auto type) {
        const manta::Decoder<decltype(type)> decoder{*model, *step};
        switch (segment) {
            case MANTA_EMBED: return decoder.embed();
            case MANTA_ATTENTION: return decoder.attention_segment(layer);
            case MANTA_MLP: return decoder.mlp_segment(layer);
            default: return decoder.logits();
        }
    });
}
}
