// What lies between the matrix products of a layer: RMS norm, rotation and K/V write; and behind them: softcap, argmax.
// One task is one token (for argmax one row of logits); few tokens run on the calling thread, where waking another would cost more.
#include "kernels.h"
#include "parallel.h"

#define WORTH_A_THREAD 16384    // elements
#define STRETCH 1024

#define IMPLEMENTATION "elementwise_impl.h"
#include "each_type.h"

static int threads_for(int64_t elements, int num_threads) { return elements < WORTH_A_THREAD ? 1 : num_threads; }

#define DEFINE(TYPE) \
    EXPORT void norm_##TYPE(norm_args *a) { run_parallel(norm_task_##TYPE, a, a->num_tokens, threads_for(a->num_tokens * a->width, a->num_threads)); } \
    EXPORT void rotate_##TYPE(rotate_args *a) { run_parallel(rotate_task_##TYPE, a, a->num_tokens, threads_for(a->num_tokens * a->stride, a->num_threads)); } \
    EXPORT void softcap_##TYPE(softcap_args *a) { run_parallel(softcap_task_##TYPE, a, a->num_tokens, threads_for(a->num_tokens * a->width, a->num_threads)); } \
    EXPORT void argmax_##TYPE(argmax_args *a) { run_parallel(argmax_task_##TYPE, a, a->num_rows, threads_for(a->num_rows * a->width, a->num_threads)); }
DEFINE(f32)
DEFINE(f16)
DEFINE(bf16)
