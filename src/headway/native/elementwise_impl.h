// One element type of elementwise.c; included once per type. No include guard. `width` and `head_dim` are multiples of 16, but for argmax.

static void NAME(norm_task)(void *context, int64_t token) {
    const norm_args *a = context;
    const ELEMENT *x = (const ELEMENT *)a->x + token * a->width, *weight = a->weight;
    ELEMENT *out = (ELEMENT *)a->out + token * a->width;
    vec squares = {0};
    for (int64_t i = 0; i < a->width; i += LANES) { const vec y = LOAD(x + i); squares += y * y; }
    const float scale = 1.0f / sqrtf(sum_of(squares) / (float)a->width + a->eps);
    for (int64_t i = 0; i < a->width; i += LANES) STORE(out + i, LOAD(x + i) * scale * (LOAD(weight + i) + a->offset));
}

// Rotates `count` <= 16 pairs (x[i], x[i + half]), normed first unless `norm` is NULL.
INLINE void NAME(rotate_pairs)(ELEMENT *x, const ELEMENT *norm, float scale, float offset, const float *cos, const float *sin, int half) {
    vec low = LOAD(x), high = LOAD(x + half);
    if (norm) {
        low *= scale * (LOAD(norm) + offset);
        high *= scale * (LOAD(norm + half) + offset);
    }
    const vec c = load_f32(cos), s = load_f32(sin);
    STORE(x, low * c - high * s);
    STORE(x + half, high * c + low * s);
}

// One head of one token: RMS norm (unless `norm` is NULL), then the rotation of pairs (i, i + head_dim / 2), in place.
INLINE void NAME(rotate_head)(ELEMENT *x, const ELEMENT *norm, const float *cos, const float *sin, int head_dim, float eps, float offset) {
    const int half = head_dim / 2;
    float scale = 1.0f;
    if (norm) {
        vec squares = {0};
        for (int i = 0; i < head_dim; i += LANES) { const vec y = LOAD(x + i); squares += y * y; }
        scale = 1.0f / sqrtf(sum_of(squares) / (float)head_dim + eps);
    }
    int i = 0;
    for (; i + LANES <= half; i += LANES) NAME(rotate_pairs)(x + i, norm ? norm + i : NULL, scale, offset, cos + i, sin + i, half);
    if (i < half) {                             // head_dim 80: 8 pairs are left
        const int rest = half - i;
        ELEMENT pairs[2 * LANES] = {0}, weights[2 * LANES] = {0};
        float c[LANES] = {0}, s[LANES] = {0};
        memcpy(pairs, x + i, (size_t)rest * sizeof(ELEMENT));
        memcpy(pairs + LANES, x + half + i, (size_t)rest * sizeof(ELEMENT));
        if (norm) {
            memcpy(weights, norm + i, (size_t)rest * sizeof(ELEMENT));
            memcpy(weights + LANES, norm + half + i, (size_t)rest * sizeof(ELEMENT));
        }
        memcpy(c, cos + i, (size_t)rest * sizeof(float));
        memcpy(s, sin + i, (size_t)rest * sizeof(float));
        NAME(rotate_pairs)(pairs, norm ? weights : NULL, scale, offset, c, s, LANES);
        memcpy(x + i, pairs, (size_t)rest * sizeof(ELEMENT));
        memcpy(x + half + i, pairs + LANES, (size_t)rest * sizeof(ELEMENT));
    }
}

static void NAME(rotate_task)(void *context, int64_t token) {
    const rotate_args *a = context;
    const int head_dim = a->head_dim;
    ELEMENT *x = (ELEMENT *)a->qkv + token * a->stride;
    const float *cos = a->cos + token * a->angle_stride, *sin = a->sin + token * a->angle_stride;
    for (int h = 0; h < a->heads; h++) NAME(rotate_head)(x + h * head_dim, a->q_norm, cos, sin, head_dim, a->eps, a->offset);
    const int64_t slot = a->slots[token], block = slot / a->block_size, offset = slot % a->block_size;
    const size_t half = (size_t)a->block_size * head_dim;
    for (int h = 0; h < a->kv_heads; h++) {
        ELEMENT *key = x + (a->heads + h) * head_dim;
        const ELEMENT *value = x + (a->heads + a->kv_heads + h) * head_dim;
        NAME(rotate_head)(key, a->k_norm, cos, sin, head_dim, a->eps, a->offset);
        ELEMENT *keys = (ELEMENT *)a->pages + (block * a->kv_heads + h) * 2 * half, *values = keys + half;
        keys += offset / LANES * LANES * head_dim + offset % LANES * PACK;
        values += offset / PACK * head_dim * PACK + offset % PACK;
        for (int d = 0; d < head_dim; d += PACK) memcpy(keys + (size_t)d * LANES, key + d, PACK * sizeof(ELEMENT));
        for (int d = 0; d < head_dim; d++) values[(size_t)d * PACK] = value[d];
#if PACK == 2
        // The other value of the pair is not written in this pass: it may be anything, and 0 * NaN is NaN.
        if (offset % 2 == 0 && (token + 1 == a->num_tokens || a->slots[token + 1] != slot + 1))
            for (int d = 0; d < head_dim; d++) values[2 * (size_t)d + 1].bits = 0;
#endif
    }
}

INLINE vec NAME(load_some)(const ELEMENT *p, int64_t count, float missing) {
    vec x = splat(missing);
    ELEMENT some[LANES] = {0};
    memcpy(some, p, (size_t)count * sizeof(ELEMENT));
    const vec y = LOAD(some);
    for (int i = 0; i < count; i++) x[i] = y[i];
    return x;
}

static void NAME(softcap_task)(void *context, int64_t token) {
    const softcap_args *a = context;
    ELEMENT *x = (ELEMENT *)a->x + token * a->width;
    for (int64_t i = 0; i < a->width; i += LANES) {
        const int64_t count = a->width - i < LANES ? a->width - i : LANES;
        ELEMENT some[LANES];
        STORE(some, tanh_of(NAME(load_some)(x + i, count, 0.0f) / a->softcap) * a->softcap);
        memcpy(x + i, some, (size_t)count * sizeof(ELEMENT));
    }
}

// The maximum of each stretch first, then a search through the first stretch that has the largest. A NaN counts as larger than anything.
static void NAME(argmax_task)(void *context, int64_t row) {
    const argmax_args *a = context;
    const ELEMENT *x = (const ELEMENT *)a->logits + row * a->stride;
    float top = -INFINITY;
    int64_t winner = 0;
    for (int64_t begin = 0; begin < a->width && top == top; begin += STRETCH) {
        const int64_t end = begin + STRETCH < a->width ? begin + STRETCH : a->width;
        vec most = splat(-INFINITY);
        ivec nan = {0};
        for (int64_t i = begin; i < end; i += LANES) {
            const vec y = end - i >= LANES ? LOAD(x + i) : NAME(load_some)(x + i, end - i, -INFINITY);
            most = vmax(y, most);
            nan |= y != y;
        }
        int any_nan = 0;
        for (int i = 0; i < LANES; i++) any_nan |= nan[i];
        const float best = any_nan ? NAN : max_of(most);
        if (best > top || any_nan) { top = best; winner = begin; }
    }
    for (int64_t i = winner; i < a->width; i++) {
        const float y = NAME(load_some)(x + i, 1, 0.0f)[0];
        if (top == top ? y == top : y != y) { a->out[row] = i; return; }
    }
    a->out[row] = 0;
}

#undef NAME
#undef ELEMENT
#undef LOAD
#undef REG_LOAD
#undef STORE
#undef PACK
