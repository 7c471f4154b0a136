// SPDX-License-Identifier: Apache-2.0
// Python bindings, the only file that knows nanobind. Pointers, strides and sizes arrive as integers that Python has validated;
// the GIL is released while the core runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <new>

#include "targets.h"

namespace nb = nanobind;
using namespace sparse_mla;

namespace {

template <typename T>
T* pointer(nb::handle h) {
    return reinterpret_cast<T*>(nb::cast<uintptr_t>(h));
}

// Runs the pending signal handlers (Ctrl-C) on the calling thread; true when one raised. The exception stays set.
bool poll_signals(void*) {
    const nb::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;
}

const Interrupt POLL_SIGNALS{poll_signals, nullptr};

void finish(Status status) {
    if (status == Status::OUT_OF_MEMORY) throw std::bad_alloc();
    if (status == Status::INTERRUPTED) throw nb::python_error();
}

const Operators& operators(int target) { return *operators_of(TargetId(target)); }

// (data, kind, page_size, block_stride, data_step, scale_base, scale_step, num_slots, indices, stride_b, stride_s, topk, length)
AttentionScope attention_scope(const nb::tuple& t) {
    const auto integer = [&](int i) { return nb::cast<int64_t>(t[i]); };
    return {pointer<const uint8_t>(t[0]), RecordKind(integer(1)), integer(2), integer(3), integer(4), integer(5), integer(6), integer(7),
            pointer<const int32_t>(t[8]), integer(9), integer(10), integer(11), pointer<const int32_t>(t[12])};
}

// False: a slot is out of range (or a length negative) and nothing was written; the caller finds out which and raises.
bool attention(int target, int num_threads, bool checks, bool skip_out_of_range, uintptr_t q, int64_t q_stride_b, int64_t q_stride_s,
               int64_t q_stride_h, int64_t b, int64_t s_q, int64_t h_q, const nb::tuple& scope0, nb::object scope1, float softmax_scale,
               uintptr_t attn_sink, uintptr_t out, bool out_float, uintptr_t lse, uintptr_t max_logits) {
    AttentionParams p{};
    p.q = reinterpret_cast<const uint16_t*>(q);
    p.q_stride_b = q_stride_b, p.q_stride_s = q_stride_s, p.q_stride_h = q_stride_h;
    p.b = b, p.s_q = s_q, p.h_q = h_q;
    p.num_scopes = scope1.is_none() ? 1 : 2;
    p.scopes[0] = attention_scope(scope0);
    if (p.num_scopes == 2) p.scopes[1] = attention_scope(nb::cast<nb::tuple>(scope1));
    p.skip_out_of_range = skip_out_of_range;
    p.softmax_scale = softmax_scale;
    p.attn_sink = reinterpret_cast<const float*>(attn_sink);
    p.out = reinterpret_cast<void*>(out);
    p.out_float = out_float;
    p.lse = reinterpret_cast<float*>(lse);
    p.max_logits = reinterpret_cast<float*>(max_logits);
    p.plan = {num_threads, 0, &POLL_SIGNALS};
    Status status;
    {
        const nb::gil_scoped_release release;
        BadSlot bad;
        if (checks && find_bad_slot(p, &bad)) return false;
        status = operators(target).sparse_decode(p);
    }
    finish(status);
    return true;
}

void merge(int target, int num_threads, nb::tuple outs, bool outs_float, nb::tuple lses, uintptr_t attn_sink, int64_t num_heads, int64_t rows,
           int64_t dim, uintptr_t out, bool out_float, uintptr_t lse) {
    const size_t parts = nb::len(outs);
    const std::unique_ptr<const void*[]> out_list(new const void*[parts]);
    const std::unique_ptr<const float*[]> lse_list(new const float*[parts]);
    for (size_t i = 0; i < parts; ++i) {
        out_list[i] = pointer<const void>(outs[i]);
        lse_list[i] = pointer<const float>(lses[i]);
    }
    const MergeParams p{int64_t(parts), rows, dim, out_list.get(), outs_float, lse_list.get(), reinterpret_cast<const float*>(attn_sink),
                        num_heads, reinterpret_cast<void*>(out), out_float, reinterpret_cast<float*>(lse), {num_threads, 0, &POLL_SIGNALS}};
    Status status;
    {
        const nb::gil_scoped_release release;
        status = operators(target).merge_partials(p);
    }
    finish(status);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The compiled core. sparse_mla.backends.native is its only user.";
    m.def("targets", [] {
        nb::list names;
        for (int t = 0; t < NUM_TARGETS; ++t) {
            const char* why = target_absence(TargetId(t));
            names.append(nb::make_tuple(TARGET_NAMES[t], why ? why : ""));
        }
        return names;
    }, "(name, why it cannot run here or \"\") of every CPU target, best first; the position is the target's number.");
    m.def("formats", [] {
        nb::list formats;
        for (const RecordFormat& f : RECORD_FORMATS)
            formats.append(nb::make_tuple(f.name, f.dim, f.data_bytes, f.scale_bytes, f.elements_per_sf));
        return formats;
    }, "(name, dim, data_bytes, scale_bytes, elements_per_sf) of every record format of formats.h.");
    m.def("decode_record", [](int target, int kind, uintptr_t data, uintptr_t scales, uintptr_t out) {
        operators(target).decode_record(RecordKind(kind), reinterpret_cast<const uint8_t*>(data), reinterpret_cast<const uint8_t*>(scales),
                                        reinterpret_cast<float*>(out));
    }, "One main record to 512 floats through the decoder of a target.");
    m.def("peak_loop", [](int target, int64_t rounds) {
        const nb::gil_scoped_release release;
        return operators(target).peak_loop(rounds);
    }, "Runs the register-only loop of the target's widest dot or FMA; returns the floating point operations done.");
    m.def("attention", &attention);
    m.def("merge_partials", &merge);
    m.def("is_forked_child", &is_forked_child);
}
