// Threads for the kernels: see parallel.c. PyTorch has a team of its own, which sleeps while the kernels work.
#pragma once
#include <stdint.h>

typedef void (*body_fn)(void *context, int64_t item);

// Calls body(context, i) once for each 0 <= i < num_items; the first items start first. `num_threads` <= 1: in order, right here.
void run_parallel(body_fn body, void *context, int64_t num_items, int num_threads);
