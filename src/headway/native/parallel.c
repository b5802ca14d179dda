#include "parallel.h"
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

// GOMP_parallel of libgomp; LLVM's and Intel's runtimes export it as well.
typedef void (*start_fn)(void (*fn)(void *), void *data, unsigned num_threads, unsigned flags);
static start_fn start_team = NULL;

EXPORT void set_threads(start_fn start) { start_team = start; }

typedef struct { body_fn body; void *context; int64_t num_items; int64_t next; } team;

static void work(void *data) {
    team *t = data;
    for (;;) {
        int64_t item = __atomic_fetch_add(&t->next, 1, __ATOMIC_RELAXED);
        if (item >= t->num_items) return;
        t->body(t->context, item);
    }
}

void run_parallel(body_fn body, void *context, int64_t num_items, int num_threads) {
    team t = {body, context, num_items, 0};
    if (num_items <= 1 || num_threads <= 1 || start_team == NULL) work(&t);
    else start_team(work, &t, (unsigned)(num_items < num_threads ? num_items : num_threads), 0);
}
