// Work for the threads that PyTorch already has: its OpenMP runtime is handed in by address, so nothing is linked and no second pool of
// threads fights for the cores. Without one (`set_threads` not called) everything runs on the calling thread.
#pragma once
#include <stdint.h>

typedef void (*body_fn)(void *context, int64_t item);

// Calls body(context, i) once for each 0 <= i < num_items; the first items start first. `num_threads` <= 1: in order, right here.
void run_parallel(body_fn body, void *context, int64_t num_items, int num_threads);
