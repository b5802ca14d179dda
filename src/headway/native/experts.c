// A mixture of experts: every token is multiplied by the few experts that its router's scores choose. Tokens are grouped by expert, so that an expert's
// weights are read once for all of its tokens. A token's sum runs over its experts in the order of their numbers, whichever tokens share the pass.
#include <float.h>
#include "kernels.h"
#include "parallel.h"

#if defined(MULTIPLIES)

// scores[0]: what an expert weighs, scores[1]: by what it is chosen.
static void score(const experts_args *a, int64_t token, const int size) {
    float *weigh = a->scores, *choose = a->scores + a->num_experts, top = -INFINITY, total = 0;
    for (int e = 0; e < a->num_experts; e++) {
        const int64_t i = token * a->stride + e;
        uint32_t bits = 0;
        if (size == 2) bits = (uint32_t)((const bf16 *)a->logits)[i].bits << 16;
        else memcpy(&bits, (const f32 *)a->logits + i, sizeof bits);
        memcpy(weigh + e, &bits, sizeof bits);
        top = fmaxf(top, weigh[e]);
    }
    for (int e = 0; e < a->num_experts; e++) {
        weigh[e] = a->sigmoid ? 1.0f / (1.0f + expf(-weigh[e])) : expf(weigh[e] - top);
        total += weigh[e];
    }
    for (int e = 0; e < a->num_experts; e++) {
        if (!a->sigmoid) weigh[e] /= total;
        choose[e] = weigh[e] + (a->choice_bias ? a->choice_bias[e] : 0.0f);
        if (choose[e] != choose[e]) choose[e] = -FLT_MAX;     // not a number, but a choice: a token's experts are always different ones
    }
}

static int largest(const float *from, int count) {
    int best = 0;
    for (int i = 1; i < count; i++) best = from[i] > from[best] ? i : best;
    return best;
}

// Experts of all but the groups with the largest sums of their two best are no choice (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
static void drop_groups(const experts_args *a) {
    float *choose = a->scores + a->num_experts;
    const int size = a->num_experts / a->num_groups;
    for (int left = a->num_groups; left > a->groups_kept; left--) {
        int worst = -1;
        float least = INFINITY;
        for (int g = a->num_groups; g-- > 0;) {
            const float *of = choose + g * size;
            if (of[0] == -INFINITY) continue;
            const int first = largest(of, size);
            float second = size > 1 ? -INFINITY : 0.0f;
            for (int i = 0; i < size; i++) second = i != first && of[i] > second ? of[i] : second;
            if (of[first] + second < least) { least = of[first] + second; worst = g; }
        }
        for (int i = 0; worst >= 0 && i < size; i++) choose[worst * size + i] = -INFINITY;
    }
}

static void choose(const experts_args *a, int64_t token, const int size) {
    score(a, token, size);
    if (a->num_groups > 1) drop_groups(a);
    float total = 0;
    for (int j = 0; j < a->per_token; j++) {
        const int e = largest(a->scores + a->num_experts, a->num_experts);
        a->scores[a->num_experts + e] = -INFINITY;
        a->chosen[token * a->per_token + j] = e;
        a->weights[token * a->per_token + j] = a->scores[e];
        total += a->scores[e];
    }
    for (int j = 0; j < a->per_token; j++) a->weights[token * a->per_token + j] *= a->scale / (a->normalised ? total : 1.0f);
}

// `order`: choices by expert, by token; those of expert e are [starts[e], starts[e + 1]).
static void group(const experts_args *a) {
    const int64_t count = a->num_tokens * a->per_token;
    memset(a->starts, 0, (size_t)(a->num_experts + 1) * sizeof *a->starts);
    for (int64_t i = 0; i < count; i++) a->starts[a->chosen[i] + 1]++;
    for (int e = 0; e < a->num_experts; e++) a->starts[e + 1] += a->starts[e];
    for (int64_t i = 0; i < count; i++) a->order[a->starts[a->chosen[i]]++] = (int32_t)i;
    for (int e = a->num_experts; e > 0; e--) a->starts[e] = a->starts[e - 1];
    a->starts[0] = 0;
}

static void multiply(const experts_args *a, const product *w, const void *x, void *y, int64_t num_tokens, int64_t in, int64_t out, int gated, const int size) {
    linear_args args = {.x = x, .weight = w->weight, .scales = w->scales, .scratch = a->scratch, .bias = w->bias, .y = y, .num_tokens = num_tokens,
                        .in = in, .out = out, .stride = in, .num_threads = a->num_threads, .gated = gated};
    if (size == 4) linear_f32(&args);
    else linear_bf16(&args);
}

INLINE void run(const experts_args *a, const int size) {
    const int64_t hidden = a->hidden;
    for (int64_t t = 0; t < a->num_tokens; t++) choose(a, t, size);
    group(a);
    memset(a->sums, 0, (size_t)(a->num_tokens * hidden) * sizeof(float));
    for (int e = 0; e < a->num_experts; e++) {
        const int32_t *order = a->order + a->starts[e];
        const int64_t count = a->starts[e + 1] - a->starts[e];
        if (!count) continue;
        for (int64_t i = 0; i < count; i++)
            memcpy((char *)a->rows + i * hidden * size, (const char *)a->x + order[i] / a->per_token * hidden * size, (size_t)(hidden * size));
        multiply(a, a->gate_up + e, a->rows, a->inner, count, hidden, 2 * a->inner_size, a->gated, size);
        multiply(a, a->down + e, a->inner, a->made, count, a->inner_size, hidden, 0, size);
        for (int64_t i = 0; i < count; i++) {
            float *sum = a->sums + order[i] / a->per_token * hidden;
            const float weight = a->weights[order[i]];
            for (int64_t d = 0; d < hidden; d += LANES) store_f32(sum + d, load_f32(sum + d) + load(a->made, i * hidden + d, size) * weight);
        }
    }
    for (int64_t i = 0; i < a->num_tokens * hidden; i += LANES) {
        const vec sum = load_f32(a->sums + i);
        store(a->y, i, a->residual ? sum + load(a->residual, i, size) : sum, size);
    }
}

EXPORT void experts_f32(experts_args *a) { run(a, 4); }
EXPORT void experts_bf16(experts_args *a) { run(a, 2); }
#endif
