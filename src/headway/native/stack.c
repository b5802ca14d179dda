// Decoder layers, one after the other, in one call: what decoder.py does with the kernels one by one, without returning to Python between them.
#include "stack.h"

#if defined(MULTIPLIES)

static void normalise(const stack_args *a, const bf16 *weight) {
    norm_args args = {.x = a->x, .out = a->normed, .weight = weight, .num_tokens = a->num_tokens, .width = a->hidden,
                      .num_threads = a->num_threads, .eps = a->eps};
    norm_bf16(&args);
}

static void multiply(const stack_args *a, const bf16 *x, const product *w, bf16 *residual, bf16 *y, int64_t in, int64_t out, int gated) {
    linear_args args = {.x = x, .weight = w->weight, .scales = w->scales, .scratch = a->scratch, .bias = w->bias, .residual = residual, .y = y, .num_tokens = a->num_tokens, .in = in, .out = out,
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
        if (i == 0 && a->entered) {
            multiply(a, a->entered, &layer->qkv, NULL, a->qkv, a->enter_size, a->qkv_size, 0);
        } else {
            normalise(a, layer->input_norm);
            multiply(a, a->normed, &layer->qkv, NULL, a->qkv, a->hidden, a->qkv_size, 0);
        }
        rotate.q_norm = layer->q_norm;
        rotate.k_norm = layer->k_norm;
        rotate.pages = a->pages[i];
        rotate_bf16(&rotate);
        attention.pages = a->pages[i];
        attention.window = (int32_t)layer->window;
        attention_bf16(&attention);
        multiply(a, a->attended, &layer->o, a->x, a->x, a->q_size, a->hidden, 0);
        normalise(a, layer->post_norm);
        multiply(a, a->normed, &layer->gate_up, NULL, a->inner, a->hidden, 2 * a->inner_size, 1);
        multiply(a, a->inner, &layer->down, a->x, a->x, a->inner_size, a->hidden, 0);
        if (a->outputs && a->outputs[i]) memcpy(a->outputs[i], a->x, (size_t)(a->num_tokens * a->hidden) * sizeof(bf16));
    }
}
#endif
