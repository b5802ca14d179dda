// The least probability that top_k and top_p keep of each row, without sorting: three histograms over the bits of the floats, each finer
// than the one before (11, 11 and 9 bits: positive floats order like their bits), end at the exact value.
#include <stdlib.h>

#include "kernels.h"
#include "parallel.h"

#define BINS 2048

typedef struct { int64_t count[BINS]; double sum[BINS]; } histogram;

static uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, sizeof bits); return bits; }

// Of the values >= floor, the largest v for which (the number of those >= v, or their sum) reaches `target`; the least of all if none does.
// `spare` has room for `num` values.
static float reach(const float *values, int64_t num, float floor, int by_count, double target, float *spare, histogram *h) {
    static const int shifts[] = {20, 9, 0}, widths[] = {11, 11, 9};
    double above = 0.0;
    uint32_t prefix = 0;
    for (int level = 0; level < 3; level++) {
        const int shift = shifts[level], num_bins = 1 << widths[level];
        const uint32_t mask = (uint32_t)num_bins - 1;
        memset(h, 0, sizeof *h);
        for (int64_t i = 0; i < num; i++)
            if (values[i] >= floor) {
                const uint32_t bin = (bits_of(values[i]) >> shift) & mask;
                h->count[bin]++;
                h->sum[bin] += values[i];
            }
        int found = -1, least = 0;
        for (int bin = num_bins - 1; bin >= 0 && found < 0; bin--) {
            if (h->count[bin] == 0) continue;
            least = bin;
            const double more = by_count ? (double)h->count[bin] : h->sum[bin];
            if (above + more >= target) found = bin;
            else above += more;
        }
        if (found < 0) {            // rounding: all of them together fall short of the target by a hair
            found = least;
            above -= by_count ? (double)h->count[least] : h->sum[least];
        }
        prefix = (prefix << widths[level]) | (uint32_t)found;
        int64_t kept = 0;
        for (int64_t i = 0; i < num; i++)
            if (values[i] >= floor && bits_of(values[i]) >> shift == prefix) spare[kept++] = values[i];
        values = spare;
        num = kept;
    }
    return num ? values[0] : floor;
}

static void floor_task(void *context, int64_t row) {
    const floor_args *a = context;
    const float *probs = a->probs + row * a->width;
    const int64_t top_k = a->top_k[row];
    const double top_p = a->top_p[row];
    float *spare = malloc((size_t)a->width * sizeof(float));
    histogram *h = malloc(sizeof *h);
    if (spare == NULL || h == NULL) { free(spare); free(h); a->floors[row] = NAN; return; }
    float floor = a->floors[row];
    if (top_k > 0 && top_k < a->width) floor = fmaxf(floor, reach(probs, a->width, 0.0f, 1, (double)top_k, spare, h));
    if (top_p < 1.0) {
        double mass = 1.0;
        if (floor > 0.0f) {
            mass = 0.0;
            for (int64_t i = 0; i < a->width; i++) mass += probs[i] >= floor ? probs[i] : 0.0f;
        }
        floor = fmaxf(floor, reach(probs, a->width, floor, 0, top_p * mass, spare, h));
    }
    a->floors[row] = floor;
    free(spare);
    free(h);
}

EXPORT void floor_f32(floor_args *a) { run_parallel(floor_task, a, a->num_rows, a->num_threads); }
