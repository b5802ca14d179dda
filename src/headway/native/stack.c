// Decoder layers, one after the other, in one call: what decoder.py does with the kernels one by one, without returning to Python between them.
#include "stack.h"

#if defined(MULTIPLIES)

typedef struct {
    void (*norm)(norm_args *);
    void (*linear)(linear_args *);
    void (*rotate)(rotate_args *);
    void (*attention)(attention_args *);
    size_t size;                    // of an element
} kernels;

static const kernels of_f32 = {norm_f32, linear_f32, rotate_f32, attention_f32, sizeof(f32)};
static const kernels of_bf16 = {norm_bf16, linear_bf16, rotate_bf16, attention_bf16, sizeof(bf16)};

static void normalise(const stack_args *a, const kernels *k, const void *weight) {
    norm_args args = {.x = a->x, .out = a->normed, .weight = weight, .num_tokens = a->num_tokens, .width = a->hidden,
                      .num_threads = a->num_threads, .eps = a->eps};
    k->norm(&args);
}

static void multiply(const stack_args *a, const kernels *k, const void *x, const product *w, const void *residual, void *y, int64_t in, int64_t out, int gated) {
    linear_args args = {.x = x, .weight = w->weight, .scales = w->scales, .scratch = a->scratch, .bias = w->bias, .residual = residual, .y = y,
                        .num_tokens = a->num_tokens, .in = in, .out = out, .stride = in, .num_threads = a->num_threads, .gated = gated};
    k->linear(&args);
}

static void run(const stack_args *a, const kernels *k) {
    rotate_args rotate = *a->rotate;
    attention_args attention = *a->attention;
    rotate.qkv = attention.q = a->qkv;
    attention.out = a->attended;
    rotate.eps = a->eps;
    for (int64_t i = 0; i < a->num_layers; i++) {
        const layer_record *layer = &a->layers[i];
        if (i == 0 && a->entered) {
            multiply(a, k, a->entered, &layer->qkv, NULL, a->qkv, a->enter_size, a->qkv_size, 0);
        } else {
            normalise(a, k, layer->input_norm);
            multiply(a, k, a->normed, &layer->qkv, NULL, a->qkv, a->hidden, a->qkv_size, 0);
        }
        rotate.q_norm = layer->q_norm;
        rotate.k_norm = layer->k_norm;
        rotate.pages = a->pages[i];
        k->rotate(&rotate);
        attention.pages = a->pages[i];
        attention.window = (int32_t)layer->window;
        k->attention(&attention);
        multiply(a, k, a->attended, &layer->o, a->x, a->x, a->q_size, a->hidden, 0);
        normalise(a, k, layer->post_norm);
        multiply(a, k, a->normed, &layer->gate_up, NULL, a->inner, a->hidden, 2 * a->inner_size, 1);
        multiply(a, k, a->inner, &layer->down, a->x, a->x, a->inner_size, a->hidden, 0);
        if (a->outputs && a->outputs[i]) memcpy(a->outputs[i], a->x, (size_t)(a->num_tokens * a->hidden) * k->size);
    }
}

EXPORT void stack_f32(stack_args *a) { run(a, &of_f32); }
EXPORT void stack_bf16(stack_args *a) { run(a, &of_bf16); }
#endif
