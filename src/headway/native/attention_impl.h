// One element type of attention.c; included once per type. No include guard.

#if PACK == 2
typedef uint32_t NAME(unit);                    // two bf16: dimensions (2i, 2i + 1) of a query, or tokens (2i, 2i + 1) of the weights
#define BROADCAST(u) ((__m512bh)_mm512_set1_epi32((int)(u)))
#define FETCH(p) ((__m512bh)_mm512_loadu_si512(p))
#define MULTIPLY_ADD(acc, u, v) ((vec)_mm512_dpbf16_ps((__m512)(acc), u, v))
typedef __m512bh NAME(operand);
#else
typedef float NAME(unit);
#define BROADCAST(u) splat(u)
#define FETCH(p) LOAD(p)
#define MULTIPLY_ADD(acc, u, v) ((acc) + (u) * (v))
typedef vec NAME(operand);
#endif

typedef struct {
    NAME(unit) q[TILE][MAX_HEAD_DIM / PACK];
    NAME(unit) weight[TILE][CHUNK / PACK];
    float score[TILE][CHUNK];
    float acc[TILE][MAX_HEAD_DIM];
    float top[TILE], total[TILE], fade[TILE];
    int first[TILE], last[TILE];                // positions a query sees: [first, last]
} NAME(scratch);

// score[r][16 * t ...] = q[r] . keys of tile t, for `rows` queries and `tiles` tiles
INLINE void NAME(score_block)(const NAME(unit) (*q)[MAX_HEAD_DIM / PACK], const ELEMENT *const *keys, float (*score)[CHUNK], int units, size_t ahead, int rows, int tiles) {
    vec acc[ROWS][KEYS];
    for (int r = 0; r < rows; r++) for (int t = 0; t < tiles; t++) acc[r][t] = (vec){0};
    for (int u = 0; u < units; u++) {
        NAME(operand) k[KEYS];
        for (int t = 0; t < tiles; t++) {
            k[t] = FETCH(keys[t] + (size_t)u * LANES * PACK);
            __builtin_prefetch(keys[t] + (size_t)u * LANES * PACK + ahead, 0, 2);
        }
        for (int r = 0; r < rows; r++) {
            NAME(operand) x = BROADCAST(q[r][u]);
            for (int t = 0; t < tiles; t++) acc[r][t] = MULTIPLY_ADD(acc[r][t], x, k[t]);
        }
    }
    for (int r = 0; r < rows; r++) for (int t = 0; t < tiles; t++) store_f32(&score[r][t * LANES], acc[r][t]);
}

// acc[r][16 * d ...] += weight[r] . values, for `rows` queries, `dims` vectors of dimensions, `units` (pairs of) tokens of one block
INLINE void NAME(value_block)(const NAME(unit) (*weight)[CHUNK / PACK], const ELEMENT *values, float (*out)[MAX_HEAD_DIM], int units, int stride, ptrdiff_t ahead, int rows, int dims) {
    vec acc[ROWS][KEYS];
    for (int r = 0; r < rows; r++) for (int d = 0; d < dims; d++) acc[r][d] = load_f32(&out[r][d * LANES]);
    for (int u = 0; u < units; u++, values += stride) {
        NAME(operand) v[KEYS];
        for (int d = 0; d < dims; d++) {
            v[d] = FETCH(values + (size_t)d * LANES * PACK);
            __builtin_prefetch(values + (size_t)d * LANES * PACK + ahead, 0, 2);
        }
        for (int r = 0; r < rows; r++) {
            NAME(operand) w = BROADCAST(weight[r][u]);
            for (int d = 0; d < dims; d++) acc[r][d] = MULTIPLY_ADD(acc[r][d], w, v[d]);
        }
    }
    for (int r = 0; r < rows; r++) for (int d = 0; d < dims; d++) store_f32(&out[r][d * LANES], acc[r][d]);
}

// Constant row and vector counts, so that the accumulators stay in registers.
#if ROWS == 6
#define BY_ROWS(call, n) switch (n) { case 1: call(1); break; case 2: call(2); break; case 3: call(3); break; case 4: call(4); break; case 5: call(5); break; default: call(6); }
#define BY_KEYS(call, r, n) switch (n) { case 1: call(r, 1); break; case 2: call(r, 2); break; case 3: call(r, 3); break; default: call(r, 4); }
#else
#define BY_ROWS(call, n) switch (n) { case 1: call(1); break; default: call(2); }
#define BY_KEYS(call, r, n) call(r, 1)
#endif

static void NAME(make_scores)(NAME(scratch) *s, const ELEMENT *const *keys, int offset, int units, size_t ahead, int rows, int tiles) {
    for (int r = 0; r < rows; r += ROWS) {
        const int n = rows - r < ROWS ? rows - r : ROWS;
        float (*score)[CHUNK] = (float (*)[CHUNK])&s->score[r][offset];
#define CALL2(R, T) NAME(score_block)(&s->q[r], keys, score, units, ahead, R, T)
#define CALL(R) BY_KEYS(CALL2, R, tiles)
        BY_ROWS(CALL, n)
#undef CALL
#undef CALL2
    }
}

static void NAME(add_values)(NAME(scratch) *s, const ELEMENT *values, int offset, int units, int head_dim, ptrdiff_t ahead, int rows) {
    const int vectors = head_dim / LANES;
    for (int d = 0; d < vectors; d += KEYS) {
        const int dims = vectors - d < KEYS ? vectors - d : KEYS;
        (void)dims;
        const ELEMENT *part = values + (size_t)d * LANES * PACK;
        for (int r = 0; r < rows; r += ROWS) {
            const int n = rows - r < ROWS ? rows - r : ROWS;
            const NAME(unit) (*weight)[CHUNK / PACK] = (const NAME(unit) (*)[CHUNK / PACK])&s->weight[r][offset / PACK];
            float (*out)[MAX_HEAD_DIM] = (float (*)[MAX_HEAD_DIM])&s->acc[r][d * LANES];
#define CALL2(R, D) NAME(value_block)(weight, part, out, units, head_dim * PACK, ahead, R, D)
#define CALL(R) BY_KEYS(CALL2, R, dims)
            BY_ROWS(CALL, n)
#undef CALL
#undef CALL2
        }
    }
}

// Scores of positions [begin, end) -> softmax weights relative to the running maximum; `fade` is what earlier sums shrink by.
static void NAME(soften)(NAME(scratch) *s, int r, int begin, int end, float scale) {
    float *score = s->score[r];
    const int width = (end - begin + LANES - 1) / LANES * LANES;
    const int first = s->first[r] - begin, last = s->last[r] - begin;
    if (first > 0 || last < width - 1) {
        const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int i = 0; i < width; i += LANES) {
            ivec seen = (lane + i >= first) & (lane + i <= last);
            vec x = load_f32(score + i);
            store_f32(score + i, (vec)(((ivec)x & seen) | ((ivec)splat(-INFINITY) & ~seen)));
        }
    }
    vec most = splat(-INFINITY);
    for (int i = 0; i < width; i += LANES) most = vmax(load_f32(score + i), most);
    const float top = fmaxf(s->top[r], max_of(most) * scale);
    const float base = top == -INFINITY ? 0.0f : top;
    s->fade[r] = s->top[r] == -INFINITY ? 0.0f : expf(s->top[r] - top);
    s->top[r] = top;
    vec total = {0};
    for (int i = 0; i < width; i += LANES) {
        vec e = exp_of(load_f32(score + i) * scale - base);
        total += e;
#if PACK == 2
        *(hvec_u *)((uint16_t *)s->weight[r] + i) = round_bf16(e);
#else
        store_f32(&s->weight[r][i], e);
#endif
    }
    s->total[r] = s->total[r] * s->fade[r] + sum_of(total);
}

static void NAME(load_queries)(NAME(scratch) *s, const attention_args *a, const int32_t *row, int head, int first, int rows) {
    const int group = a->heads / a->kv_heads;
    for (int r = 0; r < rows; r++) {
        const int token = (first + r) / group, position = row[1] + token;
        const ELEMENT *q = (const ELEMENT *)a->q + (row[0] + token) * a->q_stride + (size_t)(head * group + (first + r) % group) * a->head_dim;
#if PACK == 2
        memcpy(s->q[r], q, (size_t)a->head_dim * sizeof(ELEMENT));
#else
        for (int d = 0; d < a->head_dim; d += LANES) store_f32(&s->q[r][d], LOAD(q + d));
#endif
        s->last[r] = position;
        s->first[r] = a->window > 0 && position >= a->window ? position - a->window + 1 : 0;
        s->top[r] = -INFINITY;
        s->total[r] = 0.0f;
        memset(s->acc[r], 0, (size_t)a->head_dim * sizeof(float));
    }
}

static void NAME(attend_task)(void *context, int64_t item) {
    const attention_args *a = context;
    const int32_t *task = a->tasks + 4 * item, *row = a->rows + 3 * task[0], *table = a->tables + task[0] * a->table_width;
    const int head = task[1], first = task[2], group = a->heads / a->kv_heads, head_dim = a->head_dim, block_size = a->block_size;
    const int rows = task[3];
    const size_t half = (size_t)block_size * head_dim;
    const ELEMENT *pages = (const ELEMENT *)a->pages + 2 * half * head;
    const size_t block_stride = 2 * half * a->kv_heads;
    if (rows < 1 || rows > TILE) return;
    NAME(scratch) s __attribute__((aligned(64)));
    NAME(load_queries)(&s, a, row, head, first, rows);
    const int low = s.first[0] / LANES * LANES, high = s.last[rows - 1] + 1;
    for (int chunk = low / CHUNK * CHUNK; chunk < high; chunk += CHUNK) {
        const int begin = chunk > low ? chunk : low, end = chunk + CHUNK < high ? chunk + CHUNK : high;
        for (int at = begin; at < end;) {
            const ELEMENT *keys[KEYS];
            int tiles = 0;
            for (; tiles < KEYS && at + tiles * LANES < end; tiles++) {
                const int position = at + tiles * LANES;
                keys[tiles] = pages + table[position / block_size] * block_stride + (size_t)(position % block_size) * head_dim;
            }
            NAME(make_scores)(&s, keys, at - begin, head_dim / PACK, half, rows, tiles);
            at += tiles * LANES;
        }
        for (int r = 0; r < rows; r++) {
            NAME(soften)(&s, r, begin, end, a->scale);
            if (s.fade[r] != 1.0f)
                for (int d = 0; d < head_dim; d += LANES) store_f32(&s.acc[r][d], load_f32(&s.acc[r][d]) * s.fade[r]);
        }
        for (int at = begin; at < end;) {
            const int inside = at % block_size, room = block_size - inside, count = end - at < room ? end - at : room;
            const ELEMENT *values = pages + table[at / block_size] * block_stride + half + (size_t)inside * head_dim;
            const int next = at + CHUNK < high ? at + CHUNK : at;
            const ELEMENT *next_keys = pages + table[next / block_size] * block_stride + (size_t)(next % block_size) * head_dim;
            NAME(add_values)(&s, values, at - begin, (count + PACK - 1) / PACK, head_dim, next_keys - values, rows);
            at += count;
        }
    }
    for (int r = 0; r < rows; r++) {
        const int token = (first + r) / group;
        ELEMENT *out = (ELEMENT *)a->out + ((size_t)(row[0] + token) * a->heads + head * group + (first + r) % group) * head_dim;
        const float inverse = 1.0f / s.total[r];
        for (int d = 0; d < head_dim; d += LANES) STORE(out + d, load_f32(&s.acc[r][d]) * inverse);
    }
}

#undef NAME
#undef ELEMENT
#undef LOAD
#undef STORE
#undef PACK
#undef BROADCAST
#undef FETCH
#undef MULTIPLY_ADD
#undef BY_ROWS
#undef BY_KEYS
