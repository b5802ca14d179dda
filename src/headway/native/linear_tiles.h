// linear.c's products by tiles: 16 tokens x 16 outputs x 32 inputs an instruction, over the panels that it packs anyway. Included by linear.c.
//
// Up to 32 tokens share a read of the weights. int8 weights become bf16, which holds them exactly, so x stays as it is. The order in which a
// token's products are summed is that of the inputs, 32 at a time, whatever tokens share the pass.
#pragma once

#define TILE_TOKENS 16
#define TILE_UNITS 16               // of two inputs each
#define GROUP (2 * TILE_TOKENS)     // tokens that are multiplied together

// Tiles by number: sums of the first and the second TILE_TOKENS tokens with 16 outputs each, x of both, weights of
// both. Macros, since the instructions carry them.
#define SUMS_00 0
#define SUMS_01 1
#define SUMS_10 2
#define SUMS_11 3
#define X_0 4
#define X_1 5
#define W_0 6
#define W_1 7

INLINE int by_tiles(const linear_args *a, const int size) { return size <= 2 && a->in % (2 * TILE_UNITS) == 0; }

INLINE void shape_for(int rows) {
    const int first = rows < TILE_TOKENS ? rows : TILE_TOKENS, second = rows > TILE_TOKENS ? rows - TILE_TOKENS : 1;
    const tile_shapes shapes = shapes_of((const int[]){first, first, second, second, first, second, TILE_UNITS, TILE_UNITS});
    tile_shape(&shapes);
}

// TILE_UNITS units of int8 weights of 16 outputs, `stride` bytes from unit to unit, as bf16.
INLINE void widen(bf16 (*to)[2 * LANES], const int8_t *from, int64_t stride) {
    for (int u = 0; u < TILE_UNITS; u++)
        for (int i = 0; i < 2 * LANES; i++) {
            const float value = from[u * stride + i];
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            to[u][i].bits = (uint16_t)(bits >> 16);     // exact: 8 bits are enough for 127
        }
}

// One tile of linear.c, TILE outputs, for `rows` tokens from `first` on; `shape_for(rows)` was called.
INLINE void multiply_tiles(const linear_args *a, const char *weights, const char *next, int64_t num_next, int64_t first, int64_t column, int rows, const int size) {
    const int64_t units = a->in / 2, stride = 2 * PANEL * size, x_stride = a->stride * 2;
    const char *second_half = weights + (PANEL == TILE ? 2 * LANES * size : a->in * PANEL * size);
    const char *x = (const char *)a->x + first * x_stride, *more_x = x + TILE_TOKENS * x_stride;
    const int two = rows > TILE_TOKENS;
    bf16 wide[2][TILE_UNITS][2 * LANES] __attribute__((aligned(64)));
    tile_zero(SUMS_00);
    tile_zero(SUMS_01);
    if (two) { tile_zero(SUMS_10); tile_zero(SUMS_11); }
    for (int64_t u = 0; u < units; u += TILE_UNITS) {
        for (int64_t i = u; i < u + TILE_UNITS && i < num_next; i++) fetch(next, i, size);
        if (size == 1) {
            widen(wide[0], (const int8_t *)weights + u * stride, stride);
            widen(wide[1], (const int8_t *)second_half + u * stride, stride);
            tile_load(W_0, wide[0], sizeof wide[0][0]);
            tile_load(W_1, wide[1], sizeof wide[1][0]);
        } else {
            tile_load(W_0, weights + u * stride, stride);
            tile_load(W_1, second_half + u * stride, stride);
        }
        tile_load(X_0, x + 4 * u, x_stride);
        tile_multiply(SUMS_00, X_0, W_0);
        tile_multiply(SUMS_01, X_0, W_1);
        if (two) {
            tile_load(X_1, more_x + 4 * u, x_stride);
            tile_multiply(SUMS_10, X_1, W_0);
            tile_multiply(SUMS_11, X_1, W_1);
        }
    }
    float sums[GROUP][TILE] __attribute__((aligned(64)));
    tile_store(SUMS_00, sums[0], sizeof sums[0]);
    tile_store(SUMS_01, sums[0] + LANES, sizeof sums[0]);
    if (two) {
        tile_store(SUMS_10, sums[TILE_TOKENS], sizeof sums[0]);
        tile_store(SUMS_11, sums[TILE_TOKENS] + LANES, sizeof sums[0]);
    }
    for (int r = 0; r < rows; r++) {
        vec one = load_f32(sums[r]), other = load_f32(sums[r] + LANES);
        if (size == 1) { one *= load_f32(a->scales + column); other *= load_f32(a->scales + column + LANES); }
        finish(a, one, other, first + r, column, 2);
    }
}

INLINE void tiles_of_task(const linear_args *a, int64_t begin, int64_t end, const int size) {
    const int64_t tiles = a->out / TILE, bytes = a->in * TILE * size, groups = (a->num_tokens + GROUP - 1) / GROUP, units = a->in / 2;
    const int fetches = !(size == 2 && a->num_tokens <= FEW_ROWS);
    int shaped = 0;     // for so many tokens
    for (int64_t t = begin; t < end; t++) {
        const char *weights = (const char *)a->weight + t * bytes, *next = t + 1 < tiles ? weights + bytes : weights;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t first = a->num_tokens * g / groups, from = units * g / groups;
            const int rows = (int)(a->num_tokens * (g + 1) / groups - first);
            if (rows != shaped) { shape_for(rows); shaped = rows; }
            multiply_tiles(a, weights, next + from * 2 * PANEL * size, fetches ? units * (g + 1) / groups - from : 0, first, t * TILE, rows, size);
        }
    }
    tile_release();     // or every switch of threads would save 8 KB
}
