// SPDX-License-Identifier: Apache-2.0
#include "parallel.h"

#include <cfenv>
#include <chrono>
#include <cstdlib>
#include <atomic>
#include <thread>

#include <omp.h>
#include <pthread.h>

namespace sparse_mla {

namespace {

constexpr size_t SCRATCH_ALIGN = 64;
constexpr auto POLL_PERIOD = std::chrono::milliseconds(50);

std::atomic<bool> forked_child{false};

// The child of a fork has the parent's libgomp state but none of its threads; a region would wait for them forever.
[[maybe_unused]] const int atfork_registered =
    pthread_atfork(nullptr, nullptr, [] { forked_child.store(true, std::memory_order_relaxed); });

// Scratch of one thread, kept between calls: a fresh megabyte costs 256 page faults, more than a whole small call.
struct Arena {
    uint8_t* data = nullptr;
    size_t bytes = 0;

    uint8_t* reserve(size_t wanted) {
        if (wanted <= bytes) return data;
        std::free(data);
        const size_t rounded = (wanted + 4095) / 4096 * 4096;
        data = static_cast<uint8_t*>(std::aligned_alloc(SCRATCH_ALIGN, rounded));
        bytes = data ? rounded : 0;
        return data;
    }
    ~Arena() { std::free(data); }
};

thread_local Arena thread_arena;
thread_local Arena call_arena;

}  // namespace

struct Region {
    std::atomic<int64_t> next{0};
    int64_t num_items = 0;
    std::atomic<bool> stop{false};
    std::atomic<bool> out_of_memory{false};
    std::atomic<int> finished{0};  // threads that left the phase
    const Interrupt* interrupt = nullptr;
    std::chrono::steady_clock::time_point last_poll;

    void poll() {
        if (!interrupt) return;
        const auto now = std::chrono::steady_clock::now();
        if (now - last_poll < POLL_PERIOD) return;
        last_poll = now;
        if (interrupt->poll(interrupt->context)) stop.store(true, std::memory_order_relaxed);
    }
};

bool Worker::stopped() {
    if (thread == 0) region->poll();
    return region->stop.load(std::memory_order_relaxed);
}

bool Worker::take(int64_t* item) {
    if (stopped()) return false;
    *item = region->next.fetch_add(1, std::memory_order_relaxed);
    return *item < region->num_items;
}

bool is_forked_child() { return forked_child.load(std::memory_order_relaxed); }

int threads_for(int num_threads, double estimated_us) { return estimated_us < MIN_PARALLEL_US ? 1 : num_threads; }

uint8_t* call_scratch(size_t bytes) { return call_arena.reserve(bytes ? bytes : 1); }

namespace {

void run_phase(Region& region, const Phase& phase, const Plan& plan, void* context, int thread) {
    std::fenv_t caller;
    std::fegetenv(&caller);
    std::fesetenv(FE_DFL_ENV);
    Worker worker{&region, thread, thread_arena.reserve(plan.scratch_bytes)};
    if (worker.scratch || plan.scratch_bytes == 0) {
        phase.body(context, worker);
    } else {
        region.out_of_memory.store(true, std::memory_order_relaxed);
        region.stop.store(true, std::memory_order_relaxed);
    }
    std::fesetenv(&caller);
}

void start_phase(Region& region, const Phase& phase) {
    region.next.store(0, std::memory_order_relaxed);
    region.num_items = phase.num_items;
    region.finished.store(0, std::memory_order_relaxed);
}

}  // namespace

Status run_phases(const Plan& plan, const Phase* phases, int num_phases, void* context) {
    Region region;
    region.interrupt = plan.interrupt;
    region.last_poll = std::chrono::steady_clock::now();
    int threads = is_forked_child() ? 1 : plan.num_threads;
    int64_t most_items = 0;
    for (int i = 0; i < num_phases; ++i) most_items = phases[i].num_items > most_items ? phases[i].num_items : most_items;
    if (threads > most_items) threads = most_items < 1 ? 1 : int(most_items);
    if (threads <= 1) {
        for (int i = 0; i < num_phases; ++i) {
            start_phase(region, phases[i]);
            run_phase(region, phases[i], plan, context, 0);
        }
    } else {
        start_phase(region, phases[0]);
#pragma omp parallel num_threads(threads)
        {
            const int thread = omp_get_thread_num();
            for (int i = 0; i < num_phases; ++i) {
                run_phase(region, phases[i], plan, context, thread);
                region.finished.fetch_add(1, std::memory_order_relaxed);
                // The calling thread alone can see Ctrl-C; while it waits for a long last item of another it keeps asking.
                if (thread == 0 && plan.interrupt) {
                    const int team = omp_get_num_threads();  // may be fewer than asked for (OMP_THREAD_LIMIT)
                    for (int spins = 0; region.finished.load(std::memory_order_relaxed) < team; ++spins) {
                        if (spins < 4096) continue;
                        region.poll();
                        std::this_thread::yield();
                    }
                }
                if (i + 1 < num_phases) {
#pragma omp barrier
#pragma omp single
                    start_phase(region, phases[i + 1]);
                }
            }
        }
    }
    if (region.out_of_memory.load()) return Status::OUT_OF_MEMORY;
    return region.stop.load() ? Status::INTERRUPTED : Status::OK;
}

}  // namespace sparse_mla
