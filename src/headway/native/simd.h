// Vectors of 16 floats in GCC's portable vector extension (GCC and clang; AVX-512, AVX2, NEON, or plain scalar code), and the three
// element types that tensors have: f32, bf16, f16. Instruction sets differ by compiler flags only, except where noted.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));
typedef float vec_u __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t hvec_u __attribute__((vector_size(32), aligned(2), may_alias));

// As wide as a register: loops that keep sums must name them one by one, GCC keeps what is wider in memory.
#if defined(__AVX2__) && !defined(__AVX512F__)
typedef float reg __attribute__((vector_size(32)));
#else
typedef vec reg;
#endif
#define REG_LANES ((int)(sizeof(reg) / sizeof(float)))
typedef float reg_u __attribute__((vector_size(sizeof(reg)), aligned(4), may_alias));

typedef float f32;
typedef struct { uint16_t bits; } bf16;
typedef struct { uint16_t bits; } f16;

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec load_f32(const f32 *p) { return *(const vec_u *)p; }
INLINE void store_f32(f32 *p, vec x) { *(vec_u *)p = x; }

#if defined(__AVX2__) && !defined(__AVX512F__)
INLINE reg reg_load_f32(const f32 *p) { return *(const reg_u *)p; }
INLINE reg reg_load_f16(const f16 *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE reg reg_load_bf16(const bf16 *p) { return (reg)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16); }
INLINE vec load_bf16(const bf16 *p) {
    union { reg half[2]; vec all; } out = {{reg_load_bf16(p), reg_load_bf16(p + REG_LANES)}};
    return out.all;
}
INLINE void reg_store_f32(f32 *p, reg x) { *(reg_u *)p = x; }
#else
#define reg_store_f32 store_f32
#define reg_load_f32 load_f32
#define reg_load_f16 load_f16
#define reg_load_bf16 load_bf16
INLINE vec load_bf16(const bf16 *p) { return (vec)(__builtin_convertvector(*(const hvec_u *)p, uvec) << 16); }
#endif

// Rounds to nearest even; a NaN stays a NaN.
INLINE hvec round_bf16(vec x) {
#if defined(__AVX512BF16__)
    return (hvec)_mm512_cvtneps_pbh((__m512)x);
#else
    uvec bits = (uvec)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uvec nan = (uvec)(x != x);
    return __builtin_convertvector((rounded & ~nan) | (((bits >> 16) | 0x40) & nan), hvec);
#endif
}
INLINE void store_bf16(bf16 *p, vec x) { *(hvec_u *)p = round_bf16(x); }

INLINE vec load_f16(const f16 *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    union { __m256 half[2]; vec all; } out;
    out.half[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    out.half[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)));
    return out.all;
#else
    vec out;
    for (int i = 0; i < LANES; i++) { _Float16 x; memcpy(&x, p + i, 2); out[i] = (float)x; }
    return out;
#endif
}
INLINE void store_f16(f16 *p, vec x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    union { vec all; __m256 half[2]; } in = {x};
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(in.half[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(in.half[1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < LANES; i++) { _Float16 y = (_Float16)x[i]; memcpy(p + i, &y, 2); }
#endif
}

// Of elements of `size` bytes: 2 is bf16, 4 is f32.
INLINE vec load(const void *from, int64_t i, const int size) { return size == 4 ? load_f32((const f32 *)from + i) : load_bf16((const bf16 *)from + i); }
INLINE void store(void *to, int64_t i, vec x, const int size) {
    if (size == 4) store_f32((f32 *)to + i, x);
    else store_bf16((bf16 *)to + i, x);
}

INLINE vec vmax(vec a, vec b) { ivec more = a > b; return (vec)(((ivec)a & more) | ((ivec)b & ~more)); }
INLINE vec keep_if(ivec condition, vec x) { return (vec)((ivec)x & condition); }

INLINE float sum_of(vec x) {
    float s = 0;
    for (int step = 8; step; step >>= 1)
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    s = x[0];
    return s;
}
INLINE float max_of(vec x) {
    float m = x[0];
    for (int i = 1; i < LANES; i++) m = x[i] > m ? x[i] : m;
    return m;
}

// e^x for x <= 88, relative error below 1e-6 (2^f by its Taylor series on [-1/2, 1/2]); 0 below -87.
INLINE vec exp_of(vec x) {
    vec t = x * 1.44269504088896341f;
    ivec tiny = x < -87.0f;
    t = vmax(t, splat(-126.0f));
    vec shifted = t + 12582912.0f;              // 1.5 * 2^23: rounds to the nearest integer
    ivec n = (ivec)shifted - 0x4b400000;
    vec f = t - (shifted - 12582912.0f);
    vec p = splat(1.5252734e-5f);
    p = p * f + 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return keep_if(~tiny, (vec)((ivec)p + (n << 23)));
}

// Absolute error below 2e-7.
INLINE vec tanh_of(vec x) {
    const vec e = exp_of(-2.0f * vmax(x, -x)), t = (1.0f - e) / (1.0f + e);
    return (vec)((ivec)t | ((ivec)x & (int32_t)0x80000000));
}
