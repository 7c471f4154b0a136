// SPDX-License-Identifier: Apache-2.0
// Threads: one OpenMP region per call, items handed out dynamically, results independent of who computes what.
//
// An operator describes its work as phases of independent items. Item boundaries depend on the shapes only, never on the
// thread count, so outputs are bit-identical for any number of threads. Between phases every thread waits.
//
// libgomp's pool does not survive fork: in a child process run_phases() uses the calling thread alone (see parallel.cc).
// Floating point runs with denormals kept and nearest rounding whatever the caller's mode was (torch.set_flush_denormal).
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparse_mla {

enum class Status { OK, OUT_OF_MEMORY, INTERRUPTED };

// Asked from time to time on the calling thread; true means the call must stop. May be null: never interrupted.
struct Interrupt {
    bool (*poll)(void* context);
    void* context;
};

struct Region;

// One thread's view of a running phase.
struct Worker {
    Region* region;
    int thread;
    uint8_t* scratch;  // [scratch_bytes] 64-byte aligned, this thread's own, contents undefined at the start of a phase

    bool take(int64_t* item);  // next item of the phase; false when none is left or the call stops
    bool stopped();            // polled between tiles; true when the result no longer matters
};

struct Phase {
    int64_t num_items;
    void (*body)(void* context, Worker& worker);  // loops over worker.take(); may not throw
};

struct Plan {
    int num_threads;          // upper bound, from torch.get_num_threads()
    size_t scratch_bytes;     // per thread
    const Interrupt* interrupt;
};

// Below this much work a second thread costs more than it gives.
constexpr double MIN_PARALLEL_US = 20.0;

// num_threads, or 1 when the whole work is estimated below MIN_PARALLEL_US.
int threads_for(int num_threads, double estimated_us);

Status run_phases(const Plan& plan, const Phase* phases, int num_phases, void* context);

// Shared scratch of one call, kept by the calling thread between calls; null when memory is exhausted.
uint8_t* call_scratch(size_t bytes);

// True in a child process forked from one that had loaded the library: everything runs on one thread.
bool is_forked_child();

}  // namespace sparse_mla
