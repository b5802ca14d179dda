#define _GNU_SOURCE     // sched_getcpu
#include "parallel.h"
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <time.h>

// Threads that take items while they run and are waited for only while they hold one. A team with a barrier waits for every thread, also for
// one that has not been on a core since: with another busy program on the cores that is a time slice at each of some hundred barriers a step.
// A thread gives its core away only while it holds no item: when the owner of the job runs on the same one, which it would only hold up, and
// when it has run for a while, so that the scheduler has no cause to take it off in the middle of an item.

enum { MAX_THREADS = 64 };
static const int64_t SPIN_NS = 200000;      // a thread looks for work so long before it sleeps: longer than what lies between two products
static const int64_t TURN_NS = 500000;      // then it offers its core to others: less than a time slice, 0.7 ms at the least on Linux

typedef struct { body_fn body; void *context; int32_t num_items, num_threads; } job_record;

static pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER;    // held by the thread whose job it is
static job_record job;
static uint64_t ticket;         // number << 32 | next item; an even number is a job's, an odd one says that a job is being written
static int32_t num_done;        // items of the job
static int32_t owner_core;
static int32_t num_started;     // threads
static pthread_mutex_t asleep = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_there = PTHREAD_COND_INITIALIZER, job_done = PTHREAD_COND_INITIALIZER;
static int32_t num_asleep, owner_asleep;

static void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int32_t current_core(void) {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;      // unknown
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// Takes items until none is left. A ticket that is still the same when it is taken belongs to a job that is not done: what was read of it held.
static void take_items(int index) {
    uint64_t seen = __atomic_load_n(&ticket, __ATOMIC_ACQUIRE);
    for (;;) {
        const job_record now = job;
        const uint32_t item = (uint32_t)seen;
        if (index >= now.num_threads || item >= (uint32_t)now.num_items) return;
        if (!__atomic_compare_exchange_n(&ticket, &seen, seen + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) continue;
        now.body(now.context, item);
        if (__atomic_add_fetch(&num_done, 1, __ATOMIC_SEQ_CST) == now.num_items && __atomic_load_n(&owner_asleep, __ATOMIC_SEQ_CST)) {
            pthread_mutex_lock(&asleep);
            pthread_cond_signal(&job_done);
            pthread_mutex_unlock(&asleep);
        }
        seen++;
    }
}

static int beside_owner(void) {
    const int32_t core = current_core();
    return core >= 0 && core == __atomic_load_n(&owner_core, __ATOMIC_RELAXED);
}

static void *serve(void *argument) {
    const int index = (int)(intptr_t)argument;
    uint64_t last = 0;
    int64_t until = now_ns() + SPIN_NS, turn_ends = now_ns() + TURN_NS;
    for (int turns = 0;; turns++) {
        const uint64_t number = __atomic_load_n(&ticket, __ATOMIC_ACQUIRE) >> 32;
        if (number != last) {
            last = number;
            const int in_the_way = beside_owner();
            if (!in_the_way) take_items(index);
            int64_t now = now_ns();
            if (in_the_way || now > turn_ends) {
                sched_yield();
                now = now_ns();
                turn_ends = now + TURN_NS;
            }
            until = now + SPIN_NS;
        } else if (turns % 32 == 0 && now_ns() > until) {
            pthread_mutex_lock(&asleep);
            __atomic_add_fetch(&num_asleep, 1, __ATOMIC_SEQ_CST);
            while (__atomic_load_n(&ticket, __ATOMIC_SEQ_CST) >> 32 == last) pthread_cond_wait(&work_there, &asleep);
            __atomic_sub_fetch(&num_asleep, 1, __ATOMIC_SEQ_CST);
            pthread_mutex_unlock(&asleep);
        } else {
            pause_core();
        }
    }
    return NULL;
}

static void forget_threads(void) {      // a forked child has none
    num_started = num_asleep = owner_asleep = 0;
    pthread_mutex_init(&owner, NULL);
    pthread_mutex_init(&asleep, NULL);
    pthread_cond_init(&work_there, NULL);
    pthread_cond_init(&job_done, NULL);
}

static void start_threads(int num) {
    static int registered;
    if (!registered) registered = !pthread_atfork(NULL, NULL, forget_threads);
    while (num_started < num) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)(num_started + 1))) return;
        pthread_detach(thread);
        num_started++;
    }
}

static void wait_until_done(int32_t num_items) {
    const int64_t until = now_ns() + SPIN_NS;
    for (int turns = 1; __atomic_load_n(&num_done, __ATOMIC_ACQUIRE) < num_items; turns++) {
        if (turns % 32 == 0 && now_ns() > until) {      // its thread is not on a core
            pthread_mutex_lock(&asleep);
            __atomic_store_n(&owner_asleep, 1, __ATOMIC_SEQ_CST);
            while (__atomic_load_n(&num_done, __ATOMIC_SEQ_CST) < num_items) pthread_cond_wait(&job_done, &asleep);
            __atomic_store_n(&owner_asleep, 0, __ATOMIC_SEQ_CST);
            pthread_mutex_unlock(&asleep);
            return;
        }
        pause_core();
    }
}

void run_parallel(body_fn body, void *context, int64_t num_items, int num_threads) {
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    if (num_items <= 1 || num_threads <= 1 || num_items > INT32_MAX || pthread_mutex_trylock(&owner)) {   // or another thread's job is running
        for (int64_t item = 0; item < num_items; item++) body(context, item);
        return;
    }
    start_threads(num_threads - 1);
    const uint64_t number = __atomic_load_n(&ticket, __ATOMIC_RELAXED) >> 32;
    __atomic_store_n(&ticket, (number + 1) << 32 | UINT32_MAX, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    job = (job_record){body, context, (int32_t)num_items, num_threads};
    num_done = 0;
    __atomic_store_n(&owner_core, current_core(), __ATOMIC_RELAXED);
    __atomic_store_n(&ticket, (number + 2) << 32, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&num_asleep, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&asleep);
        pthread_cond_broadcast(&work_there);
        pthread_mutex_unlock(&asleep);
    }
    take_items(0);
    wait_until_done((int32_t)num_items);
    pthread_mutex_unlock(&owner);
}
