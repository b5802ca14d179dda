// Passes of a draft network that continues hidden states (EAGLE, multi-token prediction), each from token ids to the likeliest tokens, which the next one reads:
// a pass of a few rows takes a third of a millisecond, and Python between its ten small operations took longer.
#include "stack.h"

#if defined(__AVX512BF16__)

typedef struct {
    stack_args *stack;              // x, entered: filled in here
    rotate_args *rotate;            // those of `stack`, of which a pass that is followed by another moves `rows`, `slots`, cos and sin on by one position
    attention_args *attention;
    const int64_t *token_ids;       // [num_tokens]
    const int64_t *positions;       // [num_tokens]: position 0 reads no token; NULL: every position reads its own
    const bf16 *features;           // [num_tokens][hidden]
    const bf16 *embedding;          // [vocabulary][hidden]
    const bf16 *token_norm, *feature_norm;      // [hidden], or NULL: as they are
    const bf16 *project, *project_bias;         // [hidden][2 * hidden] packed: makes x of the pair; NULL: x is the feature, the first layer reads the pair
    const bf16 *final_norm;         // [hidden], or NULL
    const bf16 *head, *head_bias;   // [width][hidden] packed
    const int64_t *target_ids;      // [width]: the target's token of each column; NULL: the same
    const int64_t *picked;          // [num_picked]: the tokens of the pass that predict
    bf16 *pair;                     // scratch: [num_tokens][2 * hidden]
    bf16 *last, *normed;            // out: [num_picked][hidden], the last layer's output before and after the final norm
    bf16 *logits;                   // out: [num_picked][width]
    int64_t *best;                  // out: [num_passes][num_picked]
    float *confidence;              // out: [num_passes][num_picked], the largest probability
    int64_t num_passes;             // in more than one, every row has one token and predicts
    int64_t num_picked, width;
    int32_t feature_first;          // in the pair
    int32_t normed_residual;        // x is the normed feature
    int32_t norm_output;            // the next pass reads `normed`, not `last`
    int32_t direct;                 // the first layer reads what was projected, without its norm
    int32_t num_threads;
} draft_args;

static void place(bf16 *to, const bf16 *from, const bf16 *weight, int64_t width, float eps) {
    if (weight == NULL) { memcpy(to, from, (size_t)width * sizeof(bf16)); return; }
    norm_args args = {.x = from, .out = to, .weight = weight, .num_tokens = 1, .width = width, .num_threads = 1, .eps = eps};
    norm_bf16(&args);
}

static void enter(const draft_args *a) {
    stack_args *s = a->stack;
    const int64_t hidden = s->hidden;
    for (int64_t i = 0; i < s->num_tokens; i++) {
        bf16 *row = a->pair + i * 2 * hidden, *token = row + (a->feature_first ? hidden : 0), *feature = row + (a->feature_first ? 0 : hidden);
        if (a->positions && a->positions[i] == 0) memset(token, 0, (size_t)hidden * sizeof(bf16));
        else place(token, a->embedding + a->token_ids[i] * hidden, a->token_norm, hidden, s->eps);
        place(feature, a->features + i * hidden, a->feature_norm, hidden, s->eps);
        if (!a->project) memcpy(s->x + i * hidden, a->normed_residual ? feature : a->features + i * hidden, (size_t)hidden * sizeof(bf16));
    }
    s->entered = a->project ? (a->direct ? s->x : NULL) : a->pair;
    s->enter_size = a->project ? hidden : 2 * hidden;
    if (!a->project) return;
    linear_args args = {.x = a->pair, .weight = a->project, .bias = a->project_bias, .y = s->x, .num_tokens = s->num_tokens, .in = 2 * hidden,
                        .out = hidden, .stride = 2 * hidden, .num_threads = a->num_threads};
    linear_bf16(&args);
}

static float largest_probability(const bf16 *logits, int64_t width, int64_t best) {
    uint32_t bits = (uint32_t)logits[best].bits << 16;
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    const vec top = splat(largest);
    vec total = {0};
    for (int64_t i = 0; i < width; i += LANES) total += exp_of(load_bf16(logits + i) - top);
    return 1.0f / sum_of(total);
}

static void pass(const draft_args *a) {
    stack_args *s = a->stack;
    const int64_t hidden = s->hidden;
    enter(a);
    stack_bf16(s);
    for (int64_t i = 0; i < a->num_picked; i++) memcpy(a->last + i * hidden, s->x + a->picked[i] * hidden, (size_t)hidden * sizeof(bf16));
    if (a->final_norm) {
        norm_args args = {.x = a->last, .out = a->normed, .weight = a->final_norm, .num_tokens = a->num_picked, .width = hidden,
                          .num_threads = a->num_threads, .eps = s->eps};
        norm_bf16(&args);
    }
    linear_args args = {.x = a->final_norm ? a->normed : a->last, .weight = a->head, .bias = a->head_bias, .y = a->logits, .num_tokens = a->num_picked,
                        .in = hidden, .out = a->width, .stride = hidden, .num_threads = a->num_threads};
    linear_bf16(&args);
    argmax_args most = {.logits = a->logits, .out = a->best, .num_rows = a->num_picked, .width = a->width, .stride = a->width, .num_threads = a->num_threads};
    argmax_bf16(&most);
    for (int64_t i = 0; i < a->num_picked; i++) {
        a->confidence[i] = largest_probability(a->logits + i * a->width, a->width, a->best[i]);
        if (a->target_ids) a->best[i] = a->target_ids[a->best[i]];
    }
}

static void move_on(const draft_args *a) {
    rotate_args *r = a->rotate;
    int32_t *rows = (int32_t *)a->attention->rows;
    int64_t *slots = (int64_t *)r->slots;
    for (int64_t i = 0; i < r->num_tokens; i++) {
        const int32_t at = ++rows[3 * i + 1], size = r->block_size;
        slots[i] = (int64_t)a->attention->tables[i * a->attention->table_width + at / size] * size + at % size;
    }
    r->cos += r->num_tokens * (r->head_dim / 2);
    r->sin += r->num_tokens * (r->head_dim / 2);
}

EXPORT void draft_bf16(draft_args *a) {
    draft_args one = *a;
    for (int64_t i = 0; i < a->num_passes; i++) {
        if (i > 0) {
            move_on(a);
            one.token_ids = one.best;
            one.features = a->norm_output ? a->normed : a->last;
            one.positions = NULL;
            one.best += a->num_picked;
            one.confidence += a->num_picked;
        }
        pass(&one);
    }
}
#endif
