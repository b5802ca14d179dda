// A draft by a network that continues the target's hidden states (EAGLE, multi-token prediction), in one call: what was committed since is read, and each
// further pass reads the likeliest token of the one before. A pass of a few rows takes a third of a millisecond; Python between its operations took longer.
#include "stack.h"

#if defined(MULTIPLIES)

typedef struct {
    const stack_args *stack;        // of the first pass; x and entered are filled in here
    const int64_t *token_ids;       // [num_tokens]
    const int64_t *positions;       // [num_tokens]: position 0 reads no token; NULL: every position reads its own
    const bf16 *const *hidden;      // [num_parts][num_hidden]: the target's hidden states, of one part after the other, each [lengths[part]][hidden_size]
    const int64_t *lengths;         // [num_parts], num_tokens in all
    const bf16 *const *hidden_norms;    // [num_hidden], each [hidden_size]; NULL: as they are
    const bf16 *wide_norm;          // [num_hidden * hidden_size], or NULL: as they are
    product fuse;                   // [hidden][num_hidden * hidden_size]: makes a feature of a position's hidden states side by side; no weight: they are it
    bf16 *wide;                     // scratch: [num_tokens][num_hidden * hidden_size]; may be `features` where nothing is fused
    bf16 *features;                 // [num_tokens][hidden], in, or with `hidden` out
    const bf16 *embedding;          // [vocabulary][hidden]
    const bf16 *token_norm, *feature_norm;      // [hidden], or NULL: as they are
    product project;                // [hidden][2 * hidden]: makes x of the pair; no weight: x is the feature, the first layer reads the pair
    const bf16 *final_norm;         // [hidden], or NULL
    product head;                   // [width][hidden]
    const int64_t *target_ids;      // [width]: the target's token of each column; NULL: the same
    const int64_t *picked;          // [num_picked]: the tokens of the first pass that predict
    bf16 *pair;                     // scratch: [num_tokens][2 * hidden]
    bf16 *last, *normed;            // out: [num_picked][hidden], the last layer's output before and after the final norm
    bf16 *logits;                   // out: [num_picked][width]
    int64_t *best;                  // out: [num_passes][num_picked]
    float *confidence;              // out: [num_passes][num_picked], the largest probability
    int32_t *rows, *tasks;          // scratch of more than one pass: [num_picked][3], [num_picked * tasks_per_row][4] as in attention_args
    int64_t *slots;                 // likewise, [num_picked] as in rotate_args
    int64_t num_passes;             // in more than one, the last token of every row predicts, tables reach to the end, and so do cos and sin
    int64_t num_parts, num_hidden, hidden_size, num_picked, width, tasks_per_row;
    int32_t feature_first;          // in the pair
    int32_t normed_residual;        // x is the normed feature
    int32_t norm_output;            // the next pass reads `normed`, not `last`
    int32_t direct;                 // the first layer reads what was projected, without its norm
    int32_t num_threads;
} draft_args;

static void multiply(const draft_args *a, const bf16 *x, const product *w, bf16 *y, int64_t num_tokens, int64_t in, int64_t out) {
    linear_args args = {.x = x, .weight = w->weight, .scales = w->scales, .scratch = a->stack->scratch, .bias = w->bias, .y = y, .num_tokens = num_tokens,
                        .in = in, .out = out, .stride = in, .num_threads = a->num_threads};
    linear_bf16(&args);
}

static void place(bf16 *to, const bf16 *from, const bf16 *weight, int64_t width, float eps) {
    if (weight == NULL) {
        if (to != from) memcpy(to, from, (size_t)width * sizeof(bf16));
        return;
    }
    norm_args args = {.x = from, .out = to, .weight = weight, .num_tokens = 1, .width = width, .num_threads = 1, .eps = eps};
    norm_bf16(&args);
}

static void fuse(const draft_args *a) {
    const int64_t size = a->hidden_size, width = a->num_hidden * size;
    bf16 *to = a->wide;
    for (int64_t part = 0; part < a->num_parts; part++) {
        for (int64_t i = 0; i < a->lengths[part]; i++, to += width) {
            for (int64_t h = 0; h < a->num_hidden; h++) {
                place(to + h * size, a->hidden[part * a->num_hidden + h] + i * size, a->hidden_norms ? a->hidden_norms[h] : NULL, size, a->stack->eps);
            }
            place(to, to, a->wide_norm, width, a->stack->eps);
        }
    }
    if (a->fuse.weight) multiply(a, a->wide, &a->fuse, a->features, a->stack->num_tokens, width, a->stack->hidden);
}

static void enter(const draft_args *a, stack_args *s) {
    const int64_t hidden = s->hidden;
    for (int64_t i = 0; i < s->num_tokens; i++) {
        bf16 *row = a->pair + i * 2 * hidden, *token = row + (a->feature_first ? hidden : 0), *feature = row + (a->feature_first ? 0 : hidden);
        if (a->positions && a->positions[i] == 0) memset(token, 0, (size_t)hidden * sizeof(bf16));
        else place(token, a->embedding + a->token_ids[i] * hidden, a->token_norm, hidden, s->eps);
        place(feature, a->features + i * hidden, a->feature_norm, hidden, s->eps);
        if (!a->project.weight) memcpy((bf16 *)s->x + i * hidden, a->normed_residual ? feature : a->features + i * hidden, (size_t)hidden * sizeof(bf16));
    }
    s->entered = a->project.weight ? (a->direct ? s->x : NULL) : a->pair;
    s->enter_size = a->project.weight ? hidden : 2 * hidden;
    if (a->project.weight) multiply(a, a->pair, &a->project, s->x, s->num_tokens, 2 * hidden, hidden);
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

static void pass(const draft_args *a, stack_args *s) {
    const int64_t hidden = s->hidden;
    enter(a, s);
    stack_bf16(s);
    for (int64_t i = 0; i < a->num_picked; i++) memcpy(a->last + i * hidden, (const bf16 *)s->x + (a->picked ? a->picked[i] : i) * hidden, (size_t)hidden * sizeof(bf16));
    if (a->final_norm) {
        norm_args args = {.x = a->last, .out = a->normed, .weight = a->final_norm, .num_tokens = a->num_picked, .width = hidden,
                          .num_threads = a->num_threads, .eps = s->eps};
        norm_bf16(&args);
    }
    multiply(a, a->final_norm ? a->normed : a->last, &a->head, a->logits, a->num_picked, hidden, a->width);
    argmax_args most = {.logits = a->logits, .out = a->best, .num_rows = a->num_picked, .width = a->width, .stride = a->width, .num_threads = a->num_threads};
    argmax_bf16(&most);
    for (int64_t i = 0; i < a->num_picked; i++) {
        a->confidence[i] = largest_probability(a->logits + i * a->width, a->width, a->best[i]);
        if (a->target_ids) a->best[i] = a->target_ids[a->best[i]];
    }
}

// From rows that end in a token that predicts to rows of the one token behind it.
static void move_on(const draft_args *a, stack_args *s, rotate_args *r, attention_args *t) {
    const int32_t size = r->block_size, group = r->heads / r->kv_heads, tiles = (int32_t)a->tasks_per_row / r->kv_heads;
    for (int32_t i = 0; i < a->num_picked; i++) {
        const int32_t at = t->rows[3 * i + 1] + t->rows[3 * i + 2];
        memcpy(a->rows + 3 * i, (int32_t[]){i, at, 1}, 3 * sizeof(int32_t));
        a->slots[i] = (int64_t)t->tables[i * t->table_width + at / size] * size + at % size;
        for (int32_t j = 0; j < a->tasks_per_row; j++) {
            const int32_t first = group * (j % tiles) / tiles, end = group * (j % tiles + 1) / tiles;
            memcpy(a->tasks + 4 * (i * a->tasks_per_row + j), (int32_t[]){i, j / tiles, first, end - first}, 4 * sizeof(int32_t));
        }
    }
    r->cos += s->num_tokens * r->angle_stride;
    r->sin += s->num_tokens * r->angle_stride;
    r->slots = a->slots;
    t->rows = a->rows;
    t->tasks = a->tasks;
    t->num_tasks = a->num_picked * a->tasks_per_row;
    s->num_tokens = r->num_tokens = a->num_picked;
}

EXPORT void draft_bf16(draft_args *a) {
    draft_args one = *a;
    stack_args stack = *a->stack;
    rotate_args rotate = *stack.rotate;
    attention_args attention = *stack.attention;
    stack.rotate = &rotate;
    stack.attention = &attention;
    if (a->hidden) fuse(a);
    for (int64_t i = 0; i < a->num_passes; i++) {
        if (i > 0) {
            move_on(a, &stack, &rotate, &attention);
            one.token_ids = one.best;
            one.features = a->norm_output ? a->normed : a->last;
            one.positions = one.picked = NULL;
            one.best += a->num_picked;
            one.confidence += a->num_picked;
        }
        pass(&one, &stack);
    }
}
#endif
