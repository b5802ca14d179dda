// The argument records of all kernels; ops.py, attention_native.py and stack_native.py mirror them field by field.
#pragma once
#include "simd.h"

#define EXPORT __attribute__((visibility("default")))

// Whether matrix products are worth while: elsewhere the platform's own library knows the CPU better.
#if defined(__AVX512F__) || defined(__AVX2__)
#define MULTIPLIES
#endif

#ifndef INTERFACE
#error "INTERFACE is the checksum of these sources, which setup.py sets: a library left over from an earlier build is refused instead of misread"
#endif

typedef struct {
    void *q;                    // [num_tokens][heads][head_dim], `q_stride` elements from token to token
    void *out;                  // [num_tokens][heads][head_dim], dense
    const void *pages;
    const int32_t *tables;      // [num_rows][table_width]
    const int32_t *rows;        // [num_rows][3]: first token in the pass, start, length
    const int32_t *tasks;       // [num_tasks][4]: row, KV head, first query vector (token * group + head in group), how many: 1 ... TILE
    const int32_t *trees;       // NULL: every row is a chain; else [num_rows][2]: slot of the row's first node or -1, its first entry in `parents`
    const int32_t *parents;     // by node: the node it follows, -1: the token before the tree
    const float *sinks;         // [heads]: a score that takes its share of the weight and has no value, or NULL
    int64_t q_stride, table_width, num_tasks;
    int32_t heads, kv_heads, head_dim, block_size, window, num_threads;
    float scale, softcap;       // a score s is softcap * tanh(scale * s / softcap); 0: scale * s
} attention_args;

typedef struct {
    void *qkv;                  // [num_tokens][heads + 2 * kv_heads][head_dim], `stride` elements from token to token; q and k are rotated in place
    void *pages;                // as in attention.c
    const float *cos, *sin;     // [num_tokens][head_dim / 2], `angle_stride` elements from token to token
    const int64_t *slots;       // [num_tokens]: block * block_size + offset
    const void *q_norm, *k_norm;    // [head_dim] RMS norms before the rotation (Qwen3), or NULL
    int64_t num_tokens, stride, angle_stride;
    int32_t heads, kv_heads, head_dim, block_size, num_threads;
    float eps, offset;          // what is added to the norms' weights
} rotate_args;

typedef struct {
    const void *x;              // [num_tokens][width], dense
    void *out;
    const void *weight;         // [width]
    int64_t num_tokens, width;
    int32_t num_threads;
    float eps, offset;          // what is added to the weight
} norm_args;

typedef struct {
    const void *x;              // [num_tokens][in], `stride` elements from token to token
    const void *weight;         // packed: of x's type, with `scales` int8
    const float *scales;        // [out], or NULL; of f32 always NULL
    void *scratch;              // with `scales`: num_tokens * (4 + 2 * in) bytes; else, of bf16 where linear_expands(), num_tokens * 4 * in, or NULL
    const void *bias;           // [out], or NULL
    const void *residual;       // [num_tokens][out], or NULL
    void *y;                    // [num_tokens][out], with `gated` [num_tokens][out / 2]
    int64_t num_tokens, in, out, stride;
    int32_t num_threads;
    int32_t gated;              // W holds gates and ups in turn, 16 outputs each: 1: silu(gate) * up, 2: gelu(gate) * up by tanh, 3: gpt-oss's, 0: no gates
} linear_args;

typedef struct {
    void *x;                    // [num_tokens][width], dense, in and out: softcap * tanh(x / softcap)
    int64_t num_tokens, width;
    int32_t num_threads;
    float softcap;
} softcap_args;

typedef struct { const void *weight; const float *scales; const void *bias; } product;    // as in linear_args

typedef struct {
    const void *x;              // [num_tokens][hidden]
    const void *residual;       // [num_tokens][hidden], or NULL
    void *y;                    // [num_tokens][hidden]
    const void *logits;         // of the router: [num_tokens][num_experts], `stride` elements from token to token
    const float *choice_bias;   // [num_experts]: added to scores to choose, not to weigh; or NULL
    const product *gate_up, *down;      // [num_experts]
    int32_t *chosen, *order;    // what follows is scratch: [num_tokens * per_token] both
    float *weights;             // [num_tokens * per_token]
    void *rows, *inner, *made;  // [num_tokens][hidden], [num_tokens][inner_size], [num_tokens][hidden]
    float *sums;                // [num_tokens][hidden]
    int32_t *starts;            // [num_experts + 1]
    float *scores;              // [2][num_experts]
    void *scratch;              // of linear_args for the wider input
    int64_t num_tokens, hidden, inner_size, stride;
    int32_t num_experts, per_token, num_groups, groups_kept, sigmoid, normalised, gated, num_threads;
    float scale;                // of weights
} experts_args;

typedef struct {
    const void *logits;         // [num_rows][width], `stride` elements from row to row
    int64_t *out;               // [num_rows]: first index of the maximum; of the first NaN if there is one
    int64_t num_rows, width, stride;
    int32_t num_threads;
} argmax_args;

typedef struct {
    const float *probs;         // [num_rows][width], dense, >= 0
    float *floors;              // [num_rows], in and out: nothing below is kept
    const int64_t *top_k;       // [num_rows], 0: off
    const double *top_p;        // [num_rows], 1: off
    int64_t num_rows, width;
    int32_t num_threads;
} floor_args;

typedef struct {
    void *const *pages;         // [num_layers], as in attention.c
    const int64_t *sources, *targets;   // [num_moves] slots; done in this order
    int64_t num_moves, num_layers;
    int32_t kv_heads, head_dim, block_size, num_threads;
} move_args;

typedef struct {
    const int32_t *tables;      // [num_rows][table_width]
    int32_t *rows;              // [num_rows][3], as in attention_args: the first token is filled in
    const int64_t *positions;   // [num_angles]: the pass's tokens, and those of passes that follow
    const float *inv_freq;      // [half]; 0: the pair is not turned
    int64_t *slots;             // out: [num_tokens]
    float *cos, *sin;           // out: [num_angles][half]
    int32_t *tasks;             // out: [num_tasks][4], with room for one per KV head and tile of a row, and TASKS_PER_THREAD more per thread
    int64_t num_rows, table_width, num_angles, half, num_tasks;     // num_tasks: out
    int32_t heads, kv_heads, block_size, num_threads;
    float factor;               // on cos and sin of pairs that are turned
} plan_args;

int tile_rows(void);
void attention_f32(attention_args *args);
void attention_bf16(attention_args *args);
void rotate_f32(rotate_args *args);
void rotate_bf16(rotate_args *args);
void norm_f32(norm_args *args);
void norm_bf16(norm_args *args);
void linear_f32(linear_args *args);
void linear_bf16(linear_args *args);
void argmax_bf16(argmax_args *args);
