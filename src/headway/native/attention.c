// Attention over paged keys and values, for rows of any length: a prefill chunk, a plain decode, a verification.
//
// pages  [num_blocks][kv_heads][keys, values]; inside a block, tokens come in tiles of 16 so that one vector holds one dimension of 16 keys:
//        keys    [block_size / 16][head_dim / P][16][P]
//        values  [block_size / P][head_dim][P]
//        P = 2 for bf16 on a CPU with AVX-512 BF16 (its dot product takes pairs), else 1.
//
// A task is up to TILE query vectors of one row and one KV head; the query heads that share a KV head lie in one tile, so its keys are
// read once for all of them. Keys are taken CHUNK at a time with the running maximum and sum of the softmax (Milakov and Gimelshein,
// arXiv:1805.02867). Chunks begin at multiples of CHUNK of the sequence, so the result for a query does not depend on which queries share its
// pass: a verified draft gets the bits that plain decoding gives.
//
// Nodes of a tree of drafts lie in the slots behind the known tokens, parents before children; a node sees the known tokens and its path.
// Its scores are put in the order of the path, and so are the values of the path (in a copy), before anything is summed: the sums are
// those of a chain, bit for bit.
#include "kernels.h"
#include "parallel.h"

#define CHUNK 256
#define TILE 24
#define MAX_HEAD_DIM 256
#define MAX_NODES 128       // of a tree
#if defined(__AVX512F__)
#define ROWS 6      // query vectors at a time: ROWS x KEYS x REGS accumulators in registers
#define KEYS 4      // vectors of 16 keys, or of 16 dimensions of the values, at a time
#elif defined(__AVX2__)
#define ROWS 6
#define KEYS 1
#else
#define ROWS 2
#define KEYS 1
#endif
#define REGS (LANES / REG_LANES)

#define IMPLEMENTATION "attention_impl.h"
#include "each_type.h"

EXPORT int bf16_pack(void) {
#if defined(__AVX512BF16__)
    return 2;
#else
    return 1;
#endif
}

EXPORT uint32_t interface_number(void) { return INTERFACE; }
EXPORT int tile_rows(void) { return TILE; }
EXPORT int max_head_dim(void) { return MAX_HEAD_DIM; }
EXPORT int max_nodes(void) { return MAX_NODES; }
EXPORT void attention_f32(attention_args *args) { run_parallel(attend_task_f32, args, args->num_tasks, args->num_threads); }
EXPORT void attention_f16(attention_args *args) { run_parallel(attend_task_f16, args, args->num_tasks, args->num_threads); }
EXPORT void attention_bf16(attention_args *args) { run_parallel(attend_task_bf16, args, args->num_tasks, args->num_threads); }
EXPORT void move_f32(move_args *args) { run_parallel(move_task_f32, args, args->num_layers, args->num_threads); }
EXPORT void move_f16(move_args *args) { run_parallel(move_task_f16, args, args->num_layers, args->num_threads); }
EXPORT void move_bf16(move_args *args) { run_parallel(move_task_bf16, args, args->num_layers, args->num_threads); }
