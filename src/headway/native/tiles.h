// Tiles of 16 rows of 64 bytes and the few instructions on them that the kernels use: AMX where the build has it, or, with EMULATE_TILES,
// the same in plain C, by which what is built on them is tested on every machine. Tile numbers are constants.
#pragma once
#include "simd.h"

#if defined(__AMX_BF16__) || defined(EMULATE_TILES)
#define TILES

// Byte for byte what LDTILECFG reads.
typedef struct { uint8_t palette, start_row, reserved[14]; uint16_t colsb[16]; uint8_t rows[16]; } tile_shapes;

// `num_rows` of each of the eight tiles, all 64 bytes wide.
INLINE tile_shapes shapes_of(const int *num_rows) {
    tile_shapes found = {.palette = 1};
    for (int t = 0; t < 8; t++) { found.colsb[t] = 64; found.rows[t] = (uint8_t)num_rows[t]; }
    return found;
}
#endif

#if defined(EMULATE_TILES)
#define TILE_KIND 2
typedef struct { tile_shapes shapes; char bytes[8][16][64]; } tile_file;
static _Thread_local tile_file emulated;

INLINE void tile_shape(const tile_shapes *to) { memset(&emulated, 0, sizeof emulated); emulated.shapes = *to; }
INLINE void tile_release(void) { memset(&emulated, 0, sizeof emulated); }
INLINE void tile_zero(const int t) { memset(emulated.bytes[t], 0, sizeof emulated.bytes[t]); }
INLINE void tile_load(const int t, const void *from, int64_t stride) {
    tile_zero(t);
    for (int r = 0; r < emulated.shapes.rows[t]; r++) memcpy(emulated.bytes[t][r], (const char *)from + r * stride, 64);
}
INLINE void tile_store(const int t, void *to, int64_t stride) {
    for (int r = 0; r < emulated.shapes.rows[t]; r++) memcpy((char *)to + r * stride, emulated.bytes[t][r], 64);
}
INLINE float element_of(const int t, int row, int i) {
    uint32_t bits = 0;
    memcpy((char *)&bits + 2, emulated.bytes[t][row] + 2 * i, 2);
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}
// sums[m][n] += sum over k of x[m][k] * w[k / 2][2 n + k % 2]; x and w in bf16, 32 k at most.
INLINE void tile_multiply(const int sums, const int x, const int w) {
    for (int m = 0; m < emulated.shapes.rows[sums]; m++)
        for (int n = 0; n < 16; n++) {
            float sum, products = 0;
            for (int k = 0; k < 2 * emulated.shapes.rows[w]; k++) products += element_of(x, m, k) * element_of(w, k / 2, 2 * n + k % 2);
            memcpy(&sum, emulated.bytes[sums][m] + 4 * n, sizeof sum);
            sum += products;
            memcpy(emulated.bytes[sums][m] + 4 * n, &sum, sizeof sum);
        }
}
// Whether this process may use tiles; asked once, for all its threads.
INLINE int tiles_permitted(void) { return 1; }

#elif defined(__AMX_BF16__)
#define TILE_KIND 1
#include <sys/syscall.h>
#include <unistd.h>
// Not the compiler's intrinsics: GCC's do not say which memory they read, so what was just written for them could be left out.
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
INLINE void tile_shape(const tile_shapes *to) { __asm__ volatile("ldtilecfg %0" :: "m"(*to) : "memory"); }
INLINE void tile_release(void) { __asm__ volatile("tilerelease" ::: "memory"); }
#define tile_zero(t) __asm__ volatile("tilezero %%tmm" TEXT(t) ::)
#define tile_load(t, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" TEXT(t) :: "r"((const void *)(from)), "r"((int64_t)(stride)) : "memory")
#define tile_store(t, to, stride) \
    __asm__ volatile("tilestored %%tmm" TEXT(t) ", (%0,%1,1)" :: "r"((void *)(to)), "r"((int64_t)(stride)) : "memory")
#define tile_multiply(sums, x, w) \
    __asm__ volatile("tdpbf16ps %%tmm" TEXT(w) ", %%tmm" TEXT(x) ", %%tmm" TEXT(sums) ::)
INLINE int tiles_permitted(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 };      // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA: Linux 5.16 and later, where the machine has them
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#else
#define TILE_KIND 0
INLINE int tiles_permitted(void) { return 0; }
#endif
