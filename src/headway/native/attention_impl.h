// One element type of attention.c; included once per type. No include guard.

#if PACK == 2
typedef uint32_t NAME(unit);                    // two bf16: dimensions (2i, 2i + 1) of a query, or tokens (2i, 2i + 1) of the weights
#define BROADCAST(u) ((__m512bh)_mm512_set1_epi32((int)(u)))
#define FETCH(p) ((__m512bh)_mm512_loadu_si512(p))
#define MULTIPLY_ADD(acc, u, v) ((vec)_mm512_dpbf16_ps((__m512)(acc), u, v))
typedef __m512bh NAME(operand);
#else
typedef float NAME(unit);
#define BROADCAST(u) ((u) - (reg){0})
#define FETCH(p) REG_LOAD(p)
#define MULTIPLY_ADD(acc, u, v) ((acc) + (u) * (v))
typedef reg NAME(operand);
#endif

typedef struct {
    NAME(unit) q[TILE][MAX_HEAD_DIM / PACK];
    NAME(unit) weight[TILE][CHUNK / PACK];
    float score[TILE][CHUNK];
    float acc[TILE][MAX_HEAD_DIM];
    float top[TILE], total[TILE], fade[TILE];
    int first[TILE], last[TILE];                // positions a query sees: [first, last]
    float node[TILE][MAX_NODES];                // of a node: its scores along its path
    uint8_t path[TILE][MAX_NODES];              // and the nodes of the path, its own the last; empty where `depth` is 0
    int depth[TILE];
    ELEMENT tail[(MAX_NODES + 2) * MAX_HEAD_DIM];   // the values of one path
} NAME(scratch);

// score[r][16 * t ...] = q[r] . keys of tile t, for `rows` queries and `tiles` tiles. What lies `ahead` is fetched in the order of memory: the
// tiles themselves are read side by side, which a CPU's own prefetcher follows badly.
INLINE void NAME(score_block)(const NAME(unit) (*q)[MAX_HEAD_DIM / PACK], const ELEMENT *const *keys, float (*score)[CHUNK], int units, size_t ahead, int rows, int tiles) {
    const int parts = tiles * REGS;
    reg acc[ROWS][KEYS * REGS];
    for (int r = 0; r < rows; r++) for (int i = 0; i < parts; i++) acc[r][i] = (reg){0};
    int tile = 0, line = 0;
    for (int u = 0; u < units; u++) {
        NAME(operand) k[KEYS * REGS];
        const ELEMENT *later = keys[tile] + (size_t)line * LANES * PACK + ahead;
        for (int t = 0; t < tiles; t++) __builtin_prefetch(later + (size_t)t * LANES * PACK, 0, 2);
        for (int i = 0; i < parts; i++) k[i] = FETCH(keys[i / REGS] + (size_t)u * LANES * PACK + i % REGS * REG_LANES);
        line += tiles;
        if (line >= units) { line -= units; tile++; }
        for (int r = 0; r < rows; r++) {
            NAME(operand) x = BROADCAST(q[r][u]);
            for (int i = 0; i < parts; i++) acc[r][i] = MULTIPLY_ADD(acc[r][i], x, k[i]);
        }
    }
    for (int r = 0; r < rows; r++) for (int i = 0; i < parts; i++) reg_store_f32(&score[r][i * REG_LANES], acc[r][i]);
}

// acc[r][16 * d ...] += weight[r] . values, for `rows` queries, `dims` vectors of dimensions, `units` (pairs of) tokens of one block
INLINE void NAME(value_block)(const NAME(unit) (*weight)[CHUNK / PACK], const ELEMENT *values, float (*out)[MAX_HEAD_DIM], int units, int stride, ptrdiff_t ahead, int rows, int dims) {
    const int parts = dims * REGS;
    reg acc[ROWS][KEYS * REGS];
    for (int r = 0; r < rows; r++) for (int i = 0; i < parts; i++) acc[r][i] = reg_load_f32(&out[r][i * REG_LANES]);
    for (int u = 0; u < units; u++, values += stride) {
        NAME(operand) v[KEYS * REGS];
        for (int d = 0; d < dims; d++) __builtin_prefetch(values + (size_t)d * LANES * PACK + ahead, 0, 2);
        for (int i = 0; i < parts; i++) v[i] = FETCH(values + (size_t)i * REG_LANES * PACK);
        for (int r = 0; r < rows; r++) {
            NAME(operand) w = BROADCAST(weight[r][u]);
            for (int i = 0; i < parts; i++) acc[r][i] = MULTIPLY_ADD(acc[r][i], w, v[i]);
        }
    }
    for (int r = 0; r < rows; r++) for (int i = 0; i < parts; i++) reg_store_f32(&out[r][i * REG_LANES], acc[r][i]);
}

// Constant row and vector counts, so that the accumulators stay in registers.
#if ROWS == 6
#define BY_ROWS(call, n) switch (n) { case 1: call(1); break; case 2: call(2); break; case 3: call(3); break; case 4: call(4); break; case 5: call(5); break; default: call(6); }
#else
#define BY_ROWS(call, n) switch (n) { case 1: call(1); break; default: call(2); }
#endif
#if KEYS == 4
#define BY_KEYS(call, r, n) switch (n) { case 1: call(r, 1); break; case 2: call(r, 2); break; case 3: call(r, 3); break; default: call(r, 4); }
#else
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

static void NAME(add_values)(NAME(scratch) *s, const ELEMENT *values, int offset, int units, int head_dim, ptrdiff_t ahead, int from, int rows) {
    const int vectors = head_dim / LANES;
    for (int d = 0; d < vectors; d += KEYS) {
        const int dims = vectors - d < KEYS ? vectors - d : KEYS;
        (void)dims;
        const ELEMENT *part = values + (size_t)d * LANES * PACK;
        for (int r = from; r < rows; r += ROWS) {
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

static void NAME(cap)(float *score, int count, float scale, float softcap) {
    for (int i = 0; i < count; i += LANES) store_f32(score + i, tanh_of(load_f32(score + i) * (scale / softcap)) * softcap);
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

// Finds the paths of the queries that are nodes and their scores along them. `base`: slot of the first node.
static void NAME(follow_paths)(NAME(scratch) *s, const attention_args *a, const int32_t *row, const int32_t *table, const ELEMENT *pages, int base, const int32_t *parents, int first, int rows) {
    const int group = a->heads / a->kv_heads, block_size = a->block_size, head_dim = a->head_dim;
    const size_t half = (size_t)block_size * head_dim, block_stride = 2 * half * a->kv_heads;
    int most = -1;
    for (int r = 0; r < rows; r++) {
        const int own = row[1] + (first + r) / group - base;
        s->depth[r] = 0;
        if (own < 0) continue;
        most = own;
        for (int node = own; node >= 0; node = parents[node]) s->depth[r]++;
        int at = s->depth[r];
        for (int node = own; node >= 0; node = parents[node]) s->path[r][--at] = (uint8_t)node;
        s->last[r] = base + s->depth[r] - 1;
        s->first[r] = a->window > 0 && s->last[r] >= a->window ? s->last[r] - a->window + 1 : 0;
    }
    const int begin = base / LANES * LANES, end = base + most + 1;
    for (int at = begin; at < end;) {
        const ELEMENT *keys[KEYS];
        int tiles = 0;
        for (; tiles < KEYS && at + tiles * LANES < end; tiles++) {
            const int slot = at + tiles * LANES;
            keys[tiles] = pages + table[slot / block_size] * block_stride + (size_t)(slot % block_size) * head_dim;
        }
        NAME(make_scores)(s, keys, at - begin, head_dim / PACK, 0, rows, tiles);
        at += tiles * LANES;
    }
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < s->depth[r]; d++) s->node[r][d] = s->score[r][base - begin + s->path[r][d]];
}

// Adds the values at positions [from, end) of the chunk that begins at `begin`, by the path of each query; `from` is even.
static void NAME(add_paths)(NAME(scratch) *s, const attention_args *a, const int32_t *table, const ELEMENT *pages, int base, int begin, int from, int end, int first, int rows) {
    const int group = a->heads / a->kv_heads, block_size = a->block_size, head_dim = a->head_dim;
    const size_t half = (size_t)block_size * head_dim, block_stride = 2 * half * a->kv_heads;
    for (int r = 0; r < rows;) {
        int next = r + 1;               // the query heads of one token share its path
        while (next < rows && (first + next) / group == (first + r) / group) next++;
        const int stop = s->last[r] + 1 < end ? s->last[r] + 1 : end;
        for (int position = from; position < stop; position++) {
            const int slot = position < base ? position : base + s->path[r][position - base], inside = slot % block_size;
            const ELEMENT *value = pages + table[slot / block_size] * block_stride + half + (size_t)(inside / PACK) * PACK * head_dim + inside % PACK;
            ELEMENT *copy = s->tail + (size_t)((position - from) / PACK) * PACK * head_dim + (position - from) % PACK;
            for (int d = 0; d < head_dim; d++) copy[d * PACK] = value[d * PACK];
#if PACK == 2
            if (position + 1 == stop && (position - from) % 2 == 0)
                for (int d = 0; d < head_dim; d++) copy[2 * d + 1].bits = 0;
#endif
        }
        if (stop > from) NAME(add_values)(s, s->tail, from - begin, (stop - from + PACK - 1) / PACK, head_dim, 0, r, next);
        r = next;
    }
}

// Where the keys lie that a task reads `offset` tokens after its first ones; NULL where it reads none.
static const ELEMENT *NAME(first_keys)(const attention_args *a, int64_t item, int offset) {
    if (item >= a->num_tasks) return NULL;
    const int32_t *task = a->tasks + 4 * item, *row = a->rows + 3 * task[0], *table = a->tables + task[0] * a->table_width;
    const int group = a->heads / a->kv_heads, own = row[1] + task[2] / group, last = row[1] + (task[2] + task[3] - 1) / group;
    const int position = (a->window > 0 && own >= a->window ? (own - a->window + 1) / LANES * LANES : 0) + offset;
    if (position > last) return NULL;
    const size_t half = (size_t)a->block_size * a->head_dim;
    return (const ELEMENT *)a->pages + 2 * half * ((size_t)table[position / a->block_size] * a->kv_heads + task[1]) + (size_t)(position % a->block_size) * a->head_dim;
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
    const int base = a->trees ? a->trees[2 * task[0]] : -1;
    int lowest = s.first[0], high = s.last[rows - 1] + 1;
    if (base >= 0) {
        NAME(follow_paths)(&s, a, row, table, pages, base, a->parents + a->trees[2 * task[0] + 1], first, rows);
        high = 0;
        for (int r = 0; r < rows; r++) {
            lowest = s.first[r] < lowest ? s.first[r] : lowest;
            high = s.last[r] >= high ? s.last[r] + 1 : high;
        }
    }
    const int low = lowest / LANES * LANES, trunk = base >= 0 && base < high ? base / PACK * PACK : high;   // behind it, each its own values
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
            if (base >= 0)
                for (int d = begin > base ? begin - base : 0; d < s.depth[r] && base + d < end; d++) s.score[r][base + d - begin] = s.node[r][d];
            if (a->softcap > 0) NAME(cap)(s.score[r], end - begin, a->scale, a->softcap);
            NAME(soften)(&s, r, begin, end, a->softcap > 0 ? 1.0f : a->scale);
            if (s.fade[r] != 1.0f)
                for (int d = 0; d < head_dim; d += LANES) store_f32(&s.acc[r][d], load_f32(&s.acc[r][d]) * s.fade[r]);
        }
        const int shared = end < trunk ? end : trunk;
        for (int at = begin; at < shared;) {
            const int inside = at % block_size, room = block_size - inside, count = shared - at < room ? shared - at : room;
            const ELEMENT *values = pages + table[at / block_size] * block_stride + half + (size_t)inside * head_dim;
            const int next = at + CHUNK;
            const ELEMENT *next_keys = next < high ? pages + table[next / block_size] * block_stride + (size_t)(next % block_size) * head_dim
                                                   : NAME(first_keys)(a, item + a->num_threads, at - begin);   // of the task this thread is likely to take next
            NAME(add_values)(&s, values, at - begin, (count + PACK - 1) / PACK, head_dim, next_keys ? next_keys - values : 0, 0, rows);
            at += count;
        }
        if (trunk < end) NAME(add_paths)(&s, a, table, pages, base, begin, trunk > begin ? trunk : begin, end, first, rows);
    }
    for (int r = 0; r < rows; r++) {
        const int token = (first + r) / group;
        ELEMENT *out = (ELEMENT *)a->out + ((size_t)(row[0] + token) * a->heads + head * group + (first + r) % group) * head_dim;
        const float sink = a->sinks ? expf(a->sinks[head * group + (first + r) % group] - s.top[r]) : 0.0f;
        const float inverse = 1.0f / (s.total[r] + sink);
        for (int d = 0; d < head_dim; d += LANES) STORE(out + d, load_f32(&s.acc[r][d]) * inverse);
    }
}

// Keys and values of one layer, from slot to slot.
static void NAME(move_task)(void *context, int64_t layer) {
    const move_args *a = context;
    const int head_dim = a->head_dim, block_size = a->block_size;
    const size_t half = (size_t)block_size * head_dim;
    for (int64_t i = 0; i < a->num_moves; i++)
        for (int h = 0; h < a->kv_heads; h++) {
            ELEMENT *side[2];
            for (int j = 0; j < 2; j++) {
                const int64_t slot = j ? a->targets[i] : a->sources[i];
                side[j] = (ELEMENT *)a->pages[layer] + (slot / block_size * a->kv_heads + h) * 2 * half;
            }
            const int from = (int)(a->sources[i] % block_size), to = (int)(a->targets[i] % block_size);
            const ELEMENT *key = side[0] + from / LANES * LANES * head_dim + from % LANES * PACK;
            const ELEMENT *value = side[0] + half + from / PACK * head_dim * PACK + from % PACK;
            ELEMENT *new_key = side[1] + to / LANES * LANES * head_dim + to % LANES * PACK;
            ELEMENT *new_value = side[1] + half + to / PACK * head_dim * PACK + to % PACK;
            for (int d = 0; d < head_dim; d += PACK) memcpy(new_key + (size_t)d * LANES, key + (size_t)d * LANES, PACK * sizeof(ELEMENT));
            for (int d = 0; d < head_dim; d++) new_value[(size_t)d * PACK] = value[(size_t)d * PACK];
        }
}

#undef NAME
#undef ELEMENT
#undef LOAD
#undef REG_LOAD
#undef STORE
#undef PACK
#undef BROADCAST
#undef FETCH
#undef MULTIPLY_ADD
#undef BY_ROWS
#undef BY_KEYS
