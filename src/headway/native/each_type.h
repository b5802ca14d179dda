// Includes IMPLEMENTATION once for each element type. No include guard.

#define NAME(x) x##_f32
#define ELEMENT f32
#define LOAD load_f32
#define REG_LOAD reg_load_f32
#define STORE store_f32
#define PACK 1
#include IMPLEMENTATION

#define NAME(x) x##_f16
#define ELEMENT f16
#define LOAD load_f16
#define REG_LOAD reg_load_f16
#define STORE store_f16
#define PACK 1
#include IMPLEMENTATION

#define NAME(x) x##_bf16
#define ELEMENT bf16
#define LOAD load_bf16
#define REG_LOAD reg_load_bf16
#define STORE store_bf16
#if defined(__AVX512BF16__)
#define PACK 2
#else
#define PACK 1
#endif
#include IMPLEMENTATION

#undef IMPLEMENTATION
