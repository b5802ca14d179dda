// y = x W^T (+ bias) (+ residual), or silu(gate) * up of two such products, in bf16 or f32, for any number of tokens: a decode step of a few tokens is bound by reading W once, a prefill by arithmetic.
//
// W is packed in panels of PANEL outputs, of which a task reads a stream: as many as there are registers for with several tokens, since memory is quickest read
// from one end to the other, each line once. In bf16 a panel is [in / 2][PANEL][2], so that one vector holds pairs of inputs; int8 is laid out likewise, with
// one scale per output: half the bytes, and x becomes 16-bit integers, which lose less than bf16 does. In f32 it is [in / 2][2][PANEL]. While the panels of a
// tile are multiplied, those of the next one are fetched into the second-level cache, a share per group of tokens: reading and arithmetic overlap instead of
// adding up. Without dot products of bf16 in hardware, x becomes floats first and each pair of weights two vectors of floats.
// On a CPU with AMX bf16 and int8 go through its tiles: linear_tiles.h.
#include "kernels.h"
#include "parallel.h"
#include "tiles.h"

#define TILE 32                 // outputs that are finished together: a vector of them, and the one that it is the gate of
#if defined(__AVX512F__)
#define PANEL 32
#define MAX_ROWS 12             // tokens at a time: MAX_ROWS x 2 accumulators in registers
#define MANY_ROWS 0             // no limit
#else
#define PANEL 16
#define MAX_ROWS 6              // MAX_ROWS x 2 accumulators, of 16 registers
#define MANY_ROWS 16            // more take so long that nothing needs fetching ahead: it only disturbs
#endif
#if defined(__AVX512BF16__)
#define FEW_ROWS 5              // so few leave the CPU's own prefetcher ahead of the arithmetic
#elif defined(__AVX512F__)
#define FEW_ROWS 1
#else
#define FEW_ROWS 0
#endif
#define WORTH_A_THREAD 16384    // elements
#define UPPER ((int32_t)0xffff0000)

EXPORT int linear_panel(void) {
#if defined(MULTIPLIES)
    return PANEL;
#else
    return 0;
#endif
}

// Whether bf16 products need `scratch`, too.
EXPORT int linear_expands(void) {
#if defined(__AVX512BF16__)
    return 0;
#else
    return 1;
#endif
}

// 1: products go through the CPU's tiles, 2: through emulated ones, 0: neither.
EXPORT int linear_tiles(void) { return TILE_KIND; }

// Whether what `linear_tiles` says may run in this process.
EXPORT int linear_tiles_permitted(void) { return tiles_permitted(); }

#if defined(MULTIPLIES)

// Sizes of an element: 2 is bf16, 4 is f32, and of weights 1 is int8.

INLINE void finish(const linear_args *a, vec first, vec second, int64_t token, int64_t column, const int size) {
    if (a->bias) { first += load(a->bias, column, size); second += load(a->bias, column + LANES, size); }
    if (a->gated) {
        // All are x / (1 + e^-g): by tanh, gelu's g is sqrt(8 / pi) (x + 0.044715 x^3). e^88 is the largest power of e that f32 holds, and the quotient is 0 there.
        vec g = first;
        if (a->gated == 2) g = first * (1.5957691216057308f + 0.07135481282553954f * first * first);
        if (a->gated == 3) {
            first = -vmax(-first, splat(-7.0f));
            second = 1.0f - vmax(-vmax(second, splat(-7.0f)), splat(-7.0f));
            g = first * 1.702f;
        }
        store(a->y, token * (a->out / 2) + column / 2, first / (1.0f + exp_of(-vmax(g, splat(-88.0f)))) * second, size);
        return;
    }
    const int64_t to = token * a->out + column;
    store(a->y, to, a->residual ? first + load(a->residual, to, size) : first, size);
    store(a->y, to + LANES, a->residual ? second + load(a->residual, to + LANES, size) : second, size);
}

// x as floats: as it is, or what `expand` made of it.
INLINE const float *floats(const linear_args *a, int64_t token, const int size) {
    return size == 4 ? (const float *)a->x + token * a->stride : (const float *)a->scratch + token * a->in;
}

// In what follows `next`, of which `num_next` units are fetched meanwhile, is the panel to come. A unit is two inputs of a panel.
INLINE void fetch(const char *next, int64_t unit, const int size) {
    for (int i = 0; i < 2 * PANEL * size; i += 64) __builtin_prefetch(next + unit * 2 * PANEL * size + i, 0, 2);
}

#if defined(TILES)
#include "linear_tiles.h"
#endif

#if defined(__AVX512F__)
#if defined(__AVX512BF16__)
INLINE void multiply_pairs(const linear_args *a, const bf16 *panel, const char *next, int64_t num_next, int64_t first, int64_t column, const int rows) {
    const int64_t units = a->in / 2;
    vec acc[MAX_ROWS][2];
    const uint32_t *x[MAX_ROWS];
    for (int r = 0; r < rows; r++) {
        x[r] = (const uint32_t *)(const void *)((const bf16 *)a->x + (first + r) * a->stride);
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
    for (; u < num_next; u++) { fetch(next, u, 2); STEP }
    for (; u < units; u++) { STEP }
#undef STEP
    for (int r = 0; r < rows; r++) finish(a, acc[r][0], acc[r][1], first + r, column, 2);
}
#endif

// A vector of the unit's weights as floats: 16 outputs, from `begin`, of its even or its odd input. In bf16 each half of a pair is the upper half of a float.
INLINE vec weights_of(const char *unit, const int begin, const int odd, const int size) {
    if (size == 4) return load_f32((const f32 *)(const void *)unit + odd * PANEL + begin);
    const __m512i pairs = _mm512_loadu_si512(unit + 4 * begin);
    return odd ? (vec)((ivec)pairs & UPPER) : (vec)_mm512_slli_epi32(pairs, 16);
}

INLINE void multiply_floats(const linear_args *a, const char *panel, const char *next, int64_t num_next, int64_t first, int64_t column, const int rows,
                            const int size) {
    const int64_t units = a->in / 2;
    vec acc[MAX_ROWS][2];
    const float *x[MAX_ROWS];
    for (int r = 0; r < rows; r++) {
        x[r] = floats(a, first + r, size);
        acc[r][0] = acc[r][1] = (vec){0};
    }
    int64_t u = 0;
#define STEP \
    const char *unit = panel + u * 2 * PANEL * size; \
    const vec even0 = weights_of(unit, 0, 0, size), odd0 = weights_of(unit, 0, 1, size); \
    const vec even1 = weights_of(unit, LANES, 0, size), odd1 = weights_of(unit, LANES, 1, size); \
    for (int r = 0; r < rows; r++) { \
        const float even = x[r][2 * u], odd = x[r][2 * u + 1]; \
        acc[r][0] += even0 * even; \
        acc[r][1] += even1 * even; \
        acc[r][0] += odd0 * odd; \
        acc[r][1] += odd1 * odd; \
    }
    for (; u < num_next; u++) { fetch(next, u, size); STEP }
    for (; u < units; u++) { STEP }
#undef STEP
    for (int r = 0; r < rows; r++) finish(a, acc[r][0], acc[r][1], first + r, column, size);
}
#else
// What follows is loaded again: x kept in registers would put sums into memory.
#define LOAD_AGAIN __asm__ volatile("" ::: "memory")

// Beside the sums of MAX_ROWS no register is left for a mask: two shifts, the choice inside the outer one, or GCC sees through them and makes a mask again.
INLINE __m256 weights_of(const char *unit, const int vector, const int odd, const int size) {
    if (size == 4) return _mm256_loadu_ps((const float *)(const void *)unit + odd * PANEL + vector * 8);
    const __m256i pairs = _mm256_loadu_si256((const __m256i *)(const void *)(unit + vector * 32));
    return _mm256_castsi256_ps(_mm256_slli_epi32(odd ? _mm256_srli_epi32(pairs, 16) : pairs, 16));
}

INLINE void multiply_panel(const linear_args *a, const char *panel, const char *next, int64_t num_next, int64_t first, const int rows, float (*sums)[LANES],
                           const int size) {
    const int64_t units = a->in / 2;
    const float *x[MAX_ROWS];
    __m256 acc[MAX_ROWS][2];
    for (int r = 0; r < rows; r++) {
        x[r] = floats(a, first + r, size);
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    }
    for (int64_t u = 0; u < units; u++) {
        const char *unit = panel + u * 2 * PANEL * size;
        if (u < num_next) fetch(next, u, size);
        for (int odd = 0; odd < 2; odd++) {
            const __m256 w0 = weights_of(unit, 0, odd, size), w1 = weights_of(unit, 1, odd, size);
            for (int r = 0; r < rows; r++) {
                const __m256 of_x = _mm256_broadcast_ss(x[r] + 2 * u + odd);
                acc[r][0] = _mm256_fmadd_ps(w0, of_x, acc[r][0]);
                acc[r][1] = _mm256_fmadd_ps(w1, of_x, acc[r][1]);
            }
            LOAD_AGAIN;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) _mm256_storeu_ps(sums[r] + v * 8, acc[r][v]);
}

INLINE void multiply_floats(const linear_args *a, const char *tile, const char *next, int64_t num_next, int64_t first, int64_t column, const int rows,
                            const int size) {
    const int64_t bytes = a->in * PANEL * size;
    float sums[2][MAX_ROWS][LANES];
    for (int i = 0; i < 2; i++) multiply_panel(a, tile + i * bytes, next + i * bytes, num_next, first, rows, sums[i], size);
    for (int r = 0; r < rows; r++) finish(a, load_f32(sums[0][r]), load_f32(sums[1][r]), first + r, column, size);
}
#endif

#if !defined(__AVX512BF16__)
static void expand(void *context, int64_t token) {
    const linear_args *a = context;
    const bf16 *x = (const bf16 *)a->x + token * a->stride;
    float *to = (float *)a->scratch + token * a->in;
    int64_t i = 0;
    for (; i + LANES <= a->in; i += LANES) store_f32(to + i, load_bf16(x + i));
    for (; i < a->in; i++) {
        const uint32_t bits = (uint32_t)x[i].bits << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}
#endif

// The same with int8 weights and what quantise made of x: integers, so exact whatever the order, until the two scales are applied.
INLINE void finish_int8(const linear_args *a, ivec first, ivec second, int64_t token, int64_t column) {
    const float scale = ((const float *)a->scratch)[token];
    finish(a, __builtin_convertvector(first, vec) * (load_f32(a->scales + column) * scale),
           __builtin_convertvector(second, vec) * (load_f32(a->scales + column + LANES) * scale), token, column, 2);
}

INLINE const int16_t *quantised(const linear_args *a, int64_t token) {
    return (const int16_t *)((const float *)a->scratch + a->num_tokens) + token * a->in;
}

#if defined(__AVX512F__)
INLINE ivec add_products(ivec sum, __m512i x, __m512i w) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpwssd_epi32((__m512i)sum, x, w);
#else
    return sum + (ivec)_mm512_madd_epi16(x, w);
#endif
}

INLINE void multiply_int8(const linear_args *a, const int8_t *panel, const char *next, int64_t num_next, int64_t first, int64_t column, const int rows) {
    const int64_t units = a->in / 2;
    const char *x[MAX_ROWS];
    ivec acc[MAX_ROWS][2];
    for (int r = 0; r < rows; r++) {
        x[r] = (const char *)quantised(a, first + r);
        acc[r][0] = acc[r][1] = (ivec){0};
    }
    int64_t u = 0;
#define STEP \
    const __m512i w0 = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)(panel + u * 2 * PANEL))); \
    const __m512i w1 = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)(panel + u * 2 * PANEL + PANEL))); \
    for (int r = 0; r < rows; r++) { \
        int32_t bits; \
        memcpy(&bits, x[r] + 4 * u, sizeof bits); \
        const __m512i pair = _mm512_set1_epi32(bits); \
        acc[r][0] = add_products(acc[r][0], pair, w0); \
        acc[r][1] = add_products(acc[r][1], pair, w1); \
    }
    for (; u < num_next; u++) { fetch(next, u, 1); STEP }
    for (; u < units; u++) { STEP }
#undef STEP
    for (int r = 0; r < rows; r++) finish_int8(a, acc[r][0], acc[r][1], first + r, column);
}
#else
INLINE void multiply_panel_int8(const linear_args *a, const int8_t *panel, const char *next, int64_t num_next, int64_t first, const int rows, ivec *sums) {
    const int64_t units = a->in / 2;
    const char *x[MAX_ROWS];
    __m256i acc[MAX_ROWS][2];
    for (int r = 0; r < rows; r++) {
        x[r] = (const char *)quantised(a, first + r);
        acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    }
    for (int64_t u = 0; u < units; u++) {
        const int8_t *unit = panel + u * 2 * PANEL;
        if (u < num_next) fetch(next, u, 1);
        const __m256i w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)unit));
        const __m256i w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)(unit + 16)));
        for (int r = 0; r < rows; r++) {
            int32_t bits;
            memcpy(&bits, x[r] + 4 * u, sizeof bits);
            const __m256i pair = _mm256_set1_epi32(bits);
            acc[r][0] = _mm256_add_epi32(acc[r][0], _mm256_madd_epi16(pair, w0));
            acc[r][1] = _mm256_add_epi32(acc[r][1], _mm256_madd_epi16(pair, w1));
        }
        LOAD_AGAIN;
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) _mm256_storeu_si256((__m256i *)(void *)(sums + r) + v, acc[r][v]);
}

INLINE void multiply_int8(const linear_args *a, const int8_t *tile, const char *next, int64_t num_next, int64_t first, int64_t column, const int rows) {
    const int64_t bytes = a->in * PANEL;
    ivec sums[2][MAX_ROWS];
    for (int i = 0; i < 2; i++) multiply_panel_int8(a, tile + i * bytes, next + i * bytes, num_next, first, rows, sums[i]);
    for (int r = 0; r < rows; r++) finish_int8(a, sums[0][r], sums[1][r], first + r, column);
}
#endif

// To the nearest integers; what is not in [-32768, 32767] becomes the nearer end.
INLINE void store_rounded(int16_t *to, vec x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)x)));
#else
    union { vec all; __m256 half[2]; } in = {x};
    const __m256i whole = _mm256_packs_epi32(_mm256_cvtps_epi32(in.half[0]), _mm256_cvtps_epi32(in.half[1]));   // by quarters: 0, 2, 1, 3
    _mm256_storeu_si256((__m256i *)(void *)to, _mm256_permute4x64_epi64(whole, 0xd8));
#endif
}

// One token's x as 16-bit integers and their scale. As large as 32-bit sums of `in` products with int8 allow: 14 bits and a sign at 576 inputs, 10 at 8,960.
static void quantise(void *context, int64_t token) {
    const linear_args *a = context;
    const bf16 *x = (const bf16 *)a->x + token * a->stride;
    float *x_scales = a->scratch;
    int16_t *to = (int16_t *)(x_scales + a->num_tokens) + token * a->in;
    const int64_t most = INT32_MAX / (127 * a->in);
    const float limit = most < INT16_MAX ? (float)most : INT16_MAX;
    vec largest = {0};
    ivec wrong = {0};
    for (int64_t i = 0; i < a->in; i += LANES) {
        const vec v = load_bf16(x + i);
        largest = vmax(largest, vmax(v, -v));
        wrong |= v != v;
    }
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= wrong[i];
    const float found = max_of(largest), inverse = found > 0 ? limit / found : 0;
    x_scales[token] = any ? NAN : found / limit;
    for (int64_t i = 0; i < a->in; i += LANES) {
        store_rounded(to + i, load_bf16(x + i) * inverse);
    }
}

// One stream of panels per thread, but several where there are many panels: threads then finish together even if one is held up.
static int64_t tasks_for(const linear_args *a) {
    const int64_t tiles = a->out / TILE, threads = a->num_threads > 1 ? a->num_threads : 1, tasks = tiles > 64 * threads ? 8 * threads : threads;
    return tasks < tiles ? tasks : tiles;
}

INLINE void multiply(const linear_args *a, const char *tile, const char *next, int64_t num_next, int64_t first, int64_t column, const int rows,
                     const int size) {
    if (size == 1) { multiply_int8(a, (const int8_t *)tile, next, num_next, first, column, rows); return; }
#if defined(__AVX512BF16__)
    if (size == 2) { multiply_pairs(a, (const bf16 *)(const void *)tile, next, num_next, first, column, rows); return; }
#endif
    multiply_floats(a, tile, next, num_next, first, column, rows, size);
}

INLINE void some_tiles(const linear_args *a, int64_t task, const int size) {
    const int64_t tiles = a->out / TILE, num_tasks = tasks_for(a), bytes = a->in * TILE * size;
    const int64_t begin = tiles * task / num_tasks, end = tiles * (task + 1) / num_tasks;
#if defined(TILES)
    if (by_tiles(a, size)) { tiles_of_task(a, begin, end, size); return; }
#endif
    const int64_t groups = (a->num_tokens + MAX_ROWS - 1) / MAX_ROWS, units = a->in / 2;
    const int fetches = !(size == 2 && a->num_tokens <= FEW_ROWS) && (!MANY_ROWS || a->num_tokens <= MANY_ROWS);
    for (int64_t t = begin; t < end; t++) {
        const char *tile = (const char *)a->weight + t * bytes, *next = t + 1 < tiles ? tile + bytes : tile;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t first = a->num_tokens * g / groups, rows = a->num_tokens * (g + 1) / groups - first;
            const int64_t from = units * g / groups, num_next = fetches ? units * (g + 1) / groups - from : 0;
            const char *fetched = next + from * 2 * PANEL * size;
#define CASE(R) case R: multiply(a, tile, fetched, num_next, first, t * TILE, R, size); break;
#if defined(__AVX512F__)
            switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) }
#else
            switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#endif
#undef CASE
        }
    }
}

static void f32_task(void *context, int64_t task) { some_tiles(context, task, 4); }
static void bf16_task(void *context, int64_t task) { some_tiles(context, task, 2); }
static void int8_task(void *context, int64_t task) { some_tiles(context, task, 1); }

EXPORT void linear_f32(linear_args *a) { run_parallel(f32_task, a, tasks_for(a), a->num_threads); }

EXPORT void linear_bf16(linear_args *a) {
    void (*task)(void *, int64_t) = a->scales ? int8_task : bf16_task, (*prepare)(void *, int64_t) = a->scales ? quantise : NULL;
#if !defined(__AVX512BF16__)
    if (!a->scales) prepare = expand;
#endif
#if defined(TILES)
    if (by_tiles(a, 2)) prepare = NULL;     // x is multiplied as it is
#endif
    if (prepare) run_parallel(prepare, a, a->num_tokens, a->num_tokens * a->in < WORTH_A_THREAD ? 1 : a->num_threads);
    run_parallel(task, a, tasks_for(a), a->num_threads);
}
#endif
