// What the rows of a pass mean token by token and task by task: once per pass, in one call. In Python it was a fifth of a millisecond at one request,
// since the weights that a pass reads have pushed everything else out of the caches.
#include <math.h>
#include "kernels.h"

#define TASKS_PER_THREAD 3      // rows are cut finer when a pass has few tasks, so that threads finish together

static int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t tiles_of(int64_t vectors, int64_t most) { return (vectors + most - 1) / most; }

// How many query vectors a task takes at most.
static int64_t vectors_per_task(const plan_args *a, int64_t tile, int64_t group) {
    int64_t whole = 0, longest = 0;
    const int64_t enough = TASKS_PER_THREAD * at_least(a->num_threads, 1);
    for (int64_t i = 0; i < a->num_rows; i++) {
        const int64_t vectors = a->rows[3 * i + 2] * group;
        whole += tiles_of(vectors, tile) * a->kv_heads;
        longest = at_least(longest, vectors);
    }
    if (whole >= enough) return tile;
    const int64_t most = at_least(group, tiles_of(longest * whole, enough));
    return most < tile ? most : tile;
}

// Keys times vectors of a task.
static int64_t work(const plan_args *a, const int32_t *task, int64_t group) {
    return (a->rows[3 * task[0] + 1] + (task[2] + task[3] - 1) / group) * task[3];
}

// Those with the most to do first, each tile once per KV head.
static void make_tasks(plan_args *a) {
    const int64_t group = a->heads / a->kv_heads, most = vectors_per_task(a, tile_rows(), group);
    int64_t num = 0;
    for (int64_t i = a->num_rows; i-- > 0;) {
        const int64_t vectors = a->rows[3 * i + 2] * group;
        for (int64_t tile = tiles_of(vectors, most); tile-- > 0;) {
            const int32_t first = (int32_t)(tile * most), count = (int32_t)(vectors - first < most ? vectors - first : most);
            const int32_t task[4] = {(int32_t)i, 0, first, count};
            int64_t to = num++;
            for (; to > 0 && work(a, a->tasks + 4 * (to - 1), group) < work(a, task, group); to--) memcpy(a->tasks + 4 * to, a->tasks + 4 * (to - 1), sizeof task);
            memcpy(a->tasks + 4 * to, task, sizeof task);
        }
    }
    a->num_tasks = num * a->kv_heads;
    for (int64_t i = a->num_tasks; i-- > 0;) {
        int32_t task[4];
        memcpy(task, a->tasks + 4 * (i / a->kv_heads), sizeof task);
        task[1] = (int32_t)(i % a->kv_heads);
        memcpy(a->tasks + 4 * i, task, sizeof task);
    }
}

EXPORT void plan(plan_args *a) {
    int64_t token = 0;
    for (int64_t i = 0; i < a->num_rows; i++) {
        a->rows[3 * i] = (int32_t)token;
        for (int32_t at = a->rows[3 * i + 1], end = at + a->rows[3 * i + 2]; at < end; at++, token++) {
            a->slots[token] = (int64_t)a->tables[i * a->table_width + at / a->block_size] * a->block_size + at % a->block_size;
        }
    }
    for (int64_t i = 0; i < a->num_angles; i++) {
        for (int64_t j = 0; j < a->half; j++) {
            const float angle = (float)a->positions[i] * a->inv_freq[j], factor = a->inv_freq[j] ? a->factor : 1.0f;
            a->cos[i * a->half + j] = cosf(angle) * factor;
            a->sin[i * a->half + j] = sinf(angle) * factor;
        }
    }
    make_tasks(a);
}
