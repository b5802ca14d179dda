// Decoder layers, one after the other, in one call: what decoder.py does with the kernels one by one, without returning to Python between them.
#include "kernels.h"

#if defined(__AVX512BF16__)

typedef struct {
    const bf16 *input_norm, *post_norm, *q_norm, *k_norm;       // q_norm and k_norm: NULL, or [head_dim]
    const bf16 *qkv, *qkv_bias, *o, *o_bias, *gate_up, *gate_up_bias, *down, *down_bias;    // packed; biases may be NULL
    int64_t window;                                             // 0: none
} layer_record;

typedef struct {
    const layer_record *layers;     // [num_layers]
    void *const *pages;             // [num_layers]
    const rotate_args *rotate;      // of this pass; what differs from layer to layer is filled in here
    const attention_args *attention;
    bf16 *x;                        // [num_tokens][hidden], in and out
    bf16 *normed, *qkv, *attended, *inner;  // scratch: [num_tokens][hidden], [qkv_size], [q_size], [inner_size]
    int64_t num_layers, num_tokens, hidden, qkv_size, q_size, inner_size;
    int32_t num_threads;
    float eps;
} stack_args;

static void normalise(const stack_args *a, const bf16 *weight) {
    norm_args args = {.x = a->x, .out = a->normed, .weight = weight, .num_tokens = a->num_tokens, .width = a->hidden,
                      .num_threads = a->num_threads, .eps = a->eps};
    norm_bf16(&args);
}

static void multiply(const stack_args *a, const bf16 *x, const bf16 *weight, const bf16 *bias, bf16 *residual, bf16 *y, int64_t in, int64_t out, int gated) {
    linear_args args = {.x = x, .weight = weight, .bias = bias, .residual = residual, .y = y, .num_tokens = a->num_tokens, .in = in, .out = out,
                        .stride = in, .num_threads = a->num_threads, .gated = gated};
    linear_bf16(&args);
}

EXPORT void stack_bf16(stack_args *a) {
    rotate_args rotate = *a->rotate;
    attention_args attention = *a->attention;
    rotate.qkv = attention.q = a->qkv;
    attention.out = a->attended;
    rotate.eps = a->eps;
    for (int64_t i = 0; i < a->num_layers; i++) {
        const layer_record *layer = &a->layers[i];
        normalise(a, layer->input_norm);
        multiply(a, a->normed, layer->qkv, layer->qkv_bias, NULL, a->qkv, a->hidden, a->qkv_size, 0);
        rotate.q_norm = layer->q_norm;
        rotate.k_norm = layer->k_norm;
        rotate.pages = a->pages[i];
        rotate_bf16(&rotate);
        attention.pages = a->pages[i];
        attention.window = (int32_t)layer->window;
        attention_bf16(&attention);
        multiply(a, a->attended, layer->o, layer->o_bias, a->x, a->x, a->q_size, a->hidden, 0);
        normalise(a, layer->post_norm);
        multiply(a, a->normed, layer->gate_up, layer->gate_up_bias, NULL, a->inner, a->hidden, 2 * a->inner_size, 1);
        multiply(a, a->inner, layer->down, layer->down_bias, a->x, a->x, a->inner_size, a->hidden, 0);
    }
}
#endif
