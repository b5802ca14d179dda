// The records of stack.c; stack_native.py mirrors them field by field.
#pragma once
#include "kernels.h"

typedef struct {
    const void *input_norm, *post_norm, *q_norm, *k_norm;       // q_norm and k_norm: NULL, or [head_dim]
    product qkv, o, gate_up, down;
    int64_t window;                                             // 0: none
} layer_record;

// Tensors are bf16 or f32, as the function says.
typedef struct {
    const layer_record *layers;     // [num_layers]
    void *const *pages;             // [num_layers]
    const rotate_args *rotate;      // of this pass; what differs from layer to layer is filled in here
    const attention_args *attention;
    const void *entered;            // what the first layer's attention reads instead of its normed input, [num_tokens][enter_size]; NULL: nothing
    void *x;                        // [num_tokens][hidden], in and out
    void *normed, *qkv, *attended, *inner;  // scratch: [num_tokens][hidden], [qkv_size], [q_size], [inner_size]
    void *scratch;                  // scratch of linear_args for the widest input, or NULL
    void *const *outputs;           // [num_layers]: where a copy of each layer's output goes, [num_tokens][hidden], or NULL; NULL: nowhere
    int64_t num_layers, num_tokens, hidden, qkv_size, q_size, inner_size, enter_size;
    int32_t num_threads;
    float eps;
} stack_args;

void stack_bf16(stack_args *args);
