// y = x W^T (+ bias) (+ residual), or silu(gate) * up of two such products, in bf16, for any number of tokens: a decode step of a few tokens is bound by reading W once, a prefill by arithmetic.
//
// W is packed in panels of PANEL outputs: [out / PANEL][in / 2][PANEL][2], so that one vector holds a pair of inputs of 16 outputs and a task reads one
// stream. While a panel is multiplied, the next one is fetched into the second-level cache, a share of it per group of tokens: reading and arithmetic overlap
// instead of adding up.
#include "kernels.h"
#include "parallel.h"

#define PANEL 32
#define MAX_ROWS 12             // tokens at a time: MAX_ROWS x 2 accumulators in registers

EXPORT int linear_panel(void) {
#if defined(__AVX512BF16__)
    return PANEL;
#else
    return 0;
#endif
}

#if defined(__AVX512BF16__)

INLINE void multiply(const linear_args *a, const bf16 *panel, const bf16 *next, int64_t num_next, int64_t first, int64_t column, const int rows) {
    const int64_t units = a->in / 2;
    const uint32_t *x[MAX_ROWS];
    vec acc[MAX_ROWS][2];
    for (int r = 0; r < rows; r++) {
        x[r] = (const uint32_t *)(const void *)(a->x + (first + r) * a->stride);
        acc[r][0] = acc[r][1] = (vec){0};
    }
    int64_t u = 0;
#define STEP \
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel + u * 2 * PANEL), w1 = (__m512bh)_mm512_loadu_si512(panel + u * 2 * PANEL + PANEL); \
    for (int r = 0; r < rows; r++) { \
        const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)x[r][u]); \
        acc[r][0] = (vec)_mm512_dpbf16_ps((__m512)acc[r][0], pair, w0); \
        acc[r][1] = (vec)_mm512_dpbf16_ps((__m512)acc[r][1], pair, w1); \
    }
    for (; u < num_next; u++) {
        __builtin_prefetch(next + u * 2 * PANEL, 0, 2);
        __builtin_prefetch(next + u * 2 * PANEL + PANEL, 0, 2);
        STEP
    }
    for (; u < units; u++) { STEP }
    for (int r = 0; r < rows; r++) {
        for (int h = 0; a->bias && h < 2; h++) acc[r][h] += load_bf16(a->bias + column + h * LANES);
        if (a->gated) {
            const vec gate = acc[r][0];
            // e^88 is the largest power of e that f32 holds, and the quotient is 0 there.
            store_bf16(a->y + (first + r) * (a->out / 2) + column / 2, gate / (1.0f + exp_of(-vmax(gate, splat(-88.0f)))) * acc[r][1]);
            continue;
        }
        for (int h = 0; h < 2; h++) {
            const int64_t to = (first + r) * a->out + column + h * LANES;
            store_bf16(a->y + to, a->residual ? acc[r][h] + load_bf16(a->residual + to) : acc[r][h]);
        }
    }
}

// One stream of panels per thread, but several where there are many panels: threads then finish together even if one is held up.
static int64_t tasks_for(const linear_args *a) {
    const int64_t panels = a->out / PANEL, threads = a->num_threads > 1 ? a->num_threads : 1, tasks = panels > 64 * threads ? 8 * threads : threads;
    return tasks < panels ? tasks : panels;
}

static void linear_task(void *context, int64_t task) {
    const linear_args *a = context;
    const int64_t panels = a->out / PANEL, num_tasks = tasks_for(a);
    const int64_t begin = panels * task / num_tasks, end = panels * (task + 1) / num_tasks;
    const int64_t groups = (a->num_tokens + MAX_ROWS - 1) / MAX_ROWS, units = a->in / 2;
    for (int64_t p = begin; p < end; p++) {
        const bf16 *panel = a->weight + p * a->in * PANEL, *next = p + 1 < panels ? panel + a->in * PANEL : panel;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t first = a->num_tokens * g / groups, rows = a->num_tokens * (g + 1) / groups - first;
            const int64_t from = units * g / groups, num_next = units * (g + 1) / groups - from;
#define CASE(R) case R: multiply(a, panel, next + from * 2 * PANEL, num_next, first, p * PANEL, R); break;
            switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) }
        }
    }
}

EXPORT void linear_bf16(linear_args *a) { run_parallel(linear_task, a, tasks_for(a), a->num_threads); }
#endif
