// SPDX-License-Identifier: Apache-2.0
// Python bindings, the only file that knows nanobind. Pointers, strides and sizes arrive as integers that Python has validated;
// the GIL is released while the core runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "targets.h"
#include "torch_operator.h"

namespace nb = nanobind;
using namespace sparse_mla;

// pybind11's base of exceptions that set the Python error themselves; torch's Python side is built with pybind11 and lets them through.
// Declared as pybind11 declares it (unchanged since 2.0), because a catch clause goes by the name of the type.
namespace pybind11 {
class builtin_exception : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
    virtual void set_error() const = 0;
};
}  // namespace pybind11

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

int64_t item(const nb::tuple& t, int i) { return nb::cast<int64_t>(t[i]); }

// (data, (kind, page_size, block_stride, data_step, scale_base, scale_step, num_slots), indices, strides of indices, topk, length):
// tuples that Python has at hand are passed on as they are, taking them apart costs less here.
AttentionScope attention_scope(const nb::tuple& t) {
    const nb::tuple layout = nb::borrow<nb::tuple>(t[1]), strides = nb::borrow<nb::tuple>(t[3]);
    return {pointer<const uint8_t>(t[0]), RecordKind(item(layout, 0)), item(layout, 1), item(layout, 2), item(layout, 3), item(layout, 4),
            item(layout, 5), item(layout, 6), pointer<const int32_t>(t[2]), item(strides, 0), item(strides, 1), item(t, 4),
            pointer<const int32_t>(t[5])};
}

// The number of the target whose code ran. -1: a slot is out of range (or a length negative) and nothing was written; the caller
// finds out which and raises.
int attention(int target, int num_threads, bool checks, bool skip_out_of_range, uintptr_t q, const nb::tuple& shape, const nb::tuple& strides,
              const nb::tuple& scope0, const nb::tuple& scope1, float softmax_scale, uintptr_t attn_sink, uintptr_t out, bool out_float,
              uintptr_t lse, uintptr_t max_logits) {
    AttentionParams p{};
    p.q = reinterpret_cast<const uint16_t*>(q);
    p.q_stride_b = item(strides, 0), p.q_stride_s = item(strides, 1), p.q_stride_h = item(strides, 2);
    p.b = item(shape, 0), p.s_q = item(shape, 1), p.h_q = item(shape, 2);
    p.num_scopes = nb::len(scope1) == 0 ? 1 : 2;
    p.scopes[0] = attention_scope(scope0);
    if (p.num_scopes == 2) p.scopes[1] = attention_scope(scope1);
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
        if (checks && has_bad_slot(p)) return -1;
        status = operators(target).sparse_decode(p);
    }
    finish(status);
    return int(p.ran);
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

// The integers of a tuple, in order.
struct Fields {
    nb::tuple tuple;
    size_t next = 0;
    int64_t integer() { return nb::cast<int64_t>(tuple[next++]); }
    template <typename T>
    T* address() {
        return reinterpret_cast<T*>(nb::cast<uintptr_t>(tuple[next++]));
    }
};

// Runs a core function without the GIL; operators that write caches are not interrupted, the signal is delivered afterwards.
template <typename Params>
void run_core(Status (*function)(Params&), Params& params, bool deliver_signals = false) {
    Status status;
    {
        const nb::gil_scoped_release release;
        status = function(params);
    }
    finish(status);
    if (deliver_signals && PyErr_CheckSignals() != 0) throw nb::python_error();
}

// In the order of IndexParams.
void read_index_params(Fields f, IndexParams& p) {
    p.keys.kind = RecordKind(f.integer());
    p.keys.data = f.address<const uint8_t>(), p.keys.scales = f.address<const uint8_t>();
    p.keys.num_pages = f.integer(), p.keys.page_size = f.integer();
    p.keys.data_page_stride = f.integer(), p.keys.scale_page_stride = f.integer();
    p.keys.data_step = f.integer(), p.keys.scale_step = f.integer();
    p.q = f.address<const uint8_t>(), p.q_stride_row = f.integer(), p.q_stride_head = f.integer();
    p.q_sf = f.address<const uint8_t>(), p.q_sf_stride_row = f.integer(), p.q_sf_stride_head = f.integer();
    p.weights = f.address<const void>(), p.weights_float = f.integer() != 0;
    p.weights_stride_row = f.integer(), p.weights_stride_head = f.integer();
    p.rows = f.integer(), p.heads = f.integer();
    p.block_table = f.address<const int32_t>(), p.table_stride = f.integer(), p.table_width = f.integer(), p.rows_per_table = f.integer();
    p.starts = f.address<const int32_t>(), p.ends = f.address<const int32_t>();
    p.blocks = f.address<const int32_t>(), p.blocks_stride = f.integer(), p.num_blocks = f.integer();
    p.block_size = f.integer(), p.blocks_from_row = f.integer() != 0;
    p.width = f.integer(), p.score_float = f.integer() != 0;
}

// False: a key that would be read does not exist; nothing was written.
bool index_logits(int target, int num_threads, bool checks, const nb::tuple& inputs, uintptr_t out, int64_t columns, int64_t out_stride) {
    IndexLogitsParams p{};
    read_index_params({inputs}, p);
    p.out = reinterpret_cast<void*>(out), p.columns = columns, p.out_stride = out_stride;
    p.plan = {num_threads, 0, &POLL_SIGNALS};
    if (checks && !index_inputs_are_sound(p)) return false;
    run_core(operators(target).index.index_logits, p);
    return true;
}

// None: as above. Else (row, entry) of the first NaN score, (-1, -1) without one.
nb::object index_topk(int target, int num_threads, bool checks, const nb::tuple& inputs, int64_t k, uintptr_t out, bool raise_on_nan) {
    IndexTopkParams p{};
    read_index_params({inputs}, p);
    p.k = k, p.out = reinterpret_cast<int32_t*>(out), p.raise_on_nan = raise_on_nan;
    p.plan = {num_threads, 0, &POLL_SIGNALS};
    if (checks && !index_inputs_are_sound(p)) return nb::none();
    run_core(operators(target).index.index_topk, p);
    return nb::make_tuple(p.nan_row, p.nan_entry);
}

// -2: begin or end out of range, nothing was written. Else the first row with a NaN candidate, -1 without one.
int64_t topk(int target, int num_threads, uintptr_t logits, bool logits_float, int64_t rows, int64_t n, int64_t row_stride, int64_t k,
             uintptr_t begin, uintptr_t end, bool skip_neg_inf, uintptr_t out) {
    TopkParams p{reinterpret_cast<const void*>(logits), logits_float, rows, n, row_stride, k, reinterpret_cast<const int32_t*>(begin),
                 reinterpret_cast<const int32_t*>(end), skip_neg_inf, reinterpret_cast<int32_t*>(out), -1, {num_threads, 0, &POLL_SIGNALS}};
    if (!topk_bounds_are_sound(p)) return -2;
    run_core(operators(target).index.topk, p);
    return p.nan_row;
}

int64_t candidate_blocks(int target, int num_threads, uintptr_t logits, bool logits_float, int64_t rows, int64_t n, int64_t row_stride,
                         uintptr_t lengths, int64_t block_size, int64_t k, uintptr_t out) {
    CandidateBlocksParams p{reinterpret_cast<const void*>(logits), logits_float, rows, n, row_stride, reinterpret_cast<const int32_t*>(lengths),
                            block_size, k, reinterpret_cast<int32_t*>(out), -1, {num_threads, 0, &POLL_SIGNALS}};
    if (!candidate_lengths_are_sound(p)) return -2;
    run_core(operators(target).index.candidate_blocks, p);
    return p.nan_row;
}

void softmax_pool(int target, int num_threads, const nb::tuple& fields) {
    Fields f{fields};
    SoftmaxPoolParams p{};
    p.score = f.address<const float>(), p.latent = f.address<const float>();
    p.n = f.integer(), p.ratio = f.integer(), p.dim = f.integer();
    p.score_stride_n = f.integer(), p.score_stride_r = f.integer(), p.latent_stride_n = f.integer(), p.latent_stride_r = f.integer();
    p.out = f.address<void>(), p.out_float = f.integer() != 0;
    p.plan = {num_threads, 0, &POLL_SIGNALS};
    run_core(operators(target).index.softmax_pool, p);
}

// False: the step is not legal and nothing was written.
bool compress(int target, int num_threads, const nb::tuple& fields) {
    Fields f{fields};
    CompressParams p{};
    p.score = f.address<const float>(), p.latent = f.address<const float>();
    p.n = f.integer(), p.dim = f.integer(), p.score_stride = f.integer(), p.latent_stride = f.integer();
    p.state = f.address<float>();
    p.state_stride_slot = f.integer(), p.state_stride_ring = f.integer(), p.state_stride_plane = f.integer(), p.state_stride_dim = f.integer();
    p.num_slots = f.integer(), p.ring = f.integer();
    p.slots = f.address<const int64_t>(), p.context_lens = f.address<const int64_t>(), p.cu_seqlens_q = f.address<const int64_t>();
    p.sequences = f.integer(), p.ratio = f.integer(), p.max_rows = f.integer(), p.num_out = f.integer();
    p.rows = f.address<void>(), p.rows_float = f.integer() != 0;
    p.closes = f.address<bool>(), p.positions = f.address<int32_t>(), p.owners = f.address<int32_t>();
    p.plan = {num_threads, 0, nullptr};
    if (!compress_step_is_sound(p)) return false;
    run_core(operators(target).index.compress, p, true);
    return true;
}

// False: a position has no row in the table; nothing was written.
bool rope(int target, int num_threads, const nb::tuple& fields) {
    Fields f{fields};
    RopeParams p{};
    p.x = f.address<const void>(), p.is_float = f.integer() != 0;
    p.n = f.integer(), p.h = f.integer(), p.d = f.integer(), p.x_stride_n = f.integer(), p.x_stride_h = f.integer();
    p.positions = f.address<const void>(), p.positions_long = f.integer() != 0;
    p.table = f.address<const float>(), p.table_stride = f.integer(), p.max_pos = f.integer();
    p.inverse = f.integer() != 0, p.out = f.address<void>();
    p.plan = {num_threads, 0, &POLL_SIGNALS};
    if (!rope_positions_are_sound(p)) return false;
    run_core(operators(target).index.rope, p);
    return true;
}

void project(int target, int num_threads, uintptr_t x, int64_t x_stride, uintptr_t weight, int64_t weight_stride, int64_t rows, int64_t n,
             int64_t k, uintptr_t out, bool out_float) {
    ProjectParams p{reinterpret_cast<const uint16_t*>(x), x_stride, reinterpret_cast<const uint16_t*>(weight), weight_stride, rows, n, k,
                    reinterpret_cast<void*>(out), out_float, {num_threads, 0, &POLL_SIGNALS}};
    run_core(operators(target).index.project, p);
}

// (address, kind, page_size, block_stride, data_step, scale_base, scale_step, num_slots)
RecordCache record_cache(const nb::tuple& t) {
    Fields f{t};
    uint8_t* data = f.address<uint8_t>();
    const RecordKind kind = RecordKind(f.integer());
    const int64_t page_size = f.integer(), block_stride = f.integer(), data_step = f.integer(), scale_base = f.integer();
    const int64_t scale_step = f.integer(), num_slots = f.integer();
    return {data, kind, page_size, block_stride, data_step, scale_base, scale_step, num_slots};
}

// 0: stored; 1: a slot is out of range; 2: a value is not finite. Nothing was written unless 0.
int store_records(int target, int num_threads, const nb::tuple& cache, uintptr_t x, bool x_float, int64_t x_stride, uintptr_t slots,
                  bool slots_long, int64_t n, int e4m3_max, int on_nonfinite) {
    StoreParams p{record_cache(cache), reinterpret_cast<const void*>(x), x_float, x_stride, reinterpret_cast<const void*>(slots), slots_long, n,
                  e4m3_max, Nonfinite(on_nonfinite), false, {num_threads, 0, nullptr}};
    if (!slots_are_sound(p.slots, slots_long, n, p.cache.num_slots)) return 1;
    run_core(operators(target).index.store_records, p, true);
    return p.nonfinite_found ? 2 : 0;
}

// False: a slot is out of range; nothing was written.
bool load_records(int target, int num_threads, const nb::tuple& cache, uintptr_t slots, bool slots_long, int64_t n, uintptr_t out, bool out_float) {
    LoadParams p{record_cache(cache), reinterpret_cast<const void*>(slots), slots_long, n, reinterpret_cast<void*>(out), out_float,
                 {num_threads, 0, &POLL_SIGNALS}};
    if (!slots_are_sound(p.slots, slots_long, n, p.cache.num_slots)) return false;
    run_core(operators(target).index.load_records, p);
    return true;
}

// --- torch's operator: what torch_operator.cc asks of Python ---

struct DropWithGil {
    void operator()(PyObject* object) const {
        const nb::gil_scoped_acquire gil;
        Py_DECREF(object);
    }
};

// A Python error on its way through torch's C++ to Python: it arrives there as the same object. C++ callers see its text.
class PythonError final : public pybind11::builtin_exception {
public:
    PythonError(nb::object error, const char* text) : builtin_exception(text), error_(error.release().ptr(), DropWithGil()) {}
    void set_error() const override { PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error_.get())), error_.get()); }

private:
    std::shared_ptr<PyObject> error_;
};

// With the GIL held.
[[noreturn]] void raise_through_torch(nb::object error) {
    const nb::object text = nb::steal(PyObject_Str(error.ptr()));
    if (!text.is_valid()) PyErr_Clear();
    const std::string words = text.is_valid() ? nb::cast<std::string>(text) : "an error without words";
    throw PythonError(std::move(error), words.c_str());
}

template <typename Function>
auto asking_python(Function function) {
    const nb::gil_scoped_acquire gil;
    try {
        return function();
    } catch (nb::python_error& error) {
        raise_through_torch(nb::borrow(error.value()));
    }
}

// Of one process; never freed, since torch may call until the end.
struct TorchSide {
    nb::object page_layout, target;      // functions of backends/native.py
    nb::object environment, variable;    // where the text of SPARSE_MLA_CPU_TARGET lies: config.place_of
    PyObject* text = nullptr;            // the text last seen, kept alive: another text is another object
    int number = -1;                     // the target it names
    void* library = nullptr;
};
TorchSide* torch_side = nullptr;
thread_local PyObject* left_error = nullptr;

int ask_target() {
    return asking_python([] {
        TorchSide& side = *torch_side;
        PyObject* text = nullptr;
        if (!side.environment.is_none()) {
            text = PyDict_GetItemWithError(side.environment.ptr(), side.variable.ptr());
            if (text == side.text && side.number >= 0) return side.number;
        }
        const int number = nb::cast<int>(side.target());
        Py_XINCREF(text);
        Py_XDECREF(side.text);
        side.text = text;
        side.number = side.environment.is_none() ? -1 : number;
        return number;
    });
}

nb::tuple tuple_of(const int64_t* values, int64_t count) {
    nb::list list;
    for (int64_t i = 0; i < count; ++i) list.append(values[i]);
    return nb::tuple(list);
}

PageLayout ask_page_layout(const CacheKey& key) {
    return asking_python([&] {
        const nb::tuple answer = nb::cast<nb::tuple>(torch_side->page_layout(
            tuple_of(key.sizes, key.dim), tuple_of(key.strides, key.dim), CACHE_DTYPES[key.dtype], tuple_of(key.geometry, GEOMETRY_SIZE)));
        const nb::tuple t = nb::cast<nb::tuple>(answer[1]);
        return PageLayout{item(answer, 0), item(t, 0), item(t, 1), item(t, 2), item(t, 3), item(t, 4), item(t, 5), item(t, 6)};
    });
}

bool error_is_left() { return left_error != nullptr; }

void raise_left() {
    const nb::gil_scoped_acquire gil;
    raise_through_torch(nb::steal(std::exchange(left_error, nullptr)));
}

void raise_status(Status status) {
    asking_python([&] {
        if (status == Status::OUT_OF_MEMORY) PyErr_NoMemory();
        nb::raise_python_error();  // INTERRUPTED: poll_signals left the error set
    });
}

constexpr PythonSide PYTHON_SIDE{ask_target, ask_page_layout, error_is_left, raise_left, raise_status, &POLL_SIGNALS};

// False: torch refused.
bool register_torch(const nb::tuple& addresses, const std::string& key, nb::object page_layout, nb::object target, nb::object environment,
                    nb::object variable) {
    Fields f{addresses};
    uintptr_t list[sizeof(TorchFunctions) / sizeof(uintptr_t)];
    for (uintptr_t& address : list) address = uintptr_t(f.integer());
    TorchFunctions functions;
    std::memcpy(&functions, list, sizeof functions);
    torch_side = new TorchSide{std::move(page_layout), std::move(target), std::move(environment), std::move(variable)};
    torch_side->library = register_torch_operator(functions, PYTHON_SIDE, key.c_str());
    return torch_side->library != nullptr;
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
        for (int kind = 0; kind < NUM_RECORD_KINDS; ++kind) {
            const RecordFormat& f = RECORD_FORMATS[kind];
            formats.append(nb::make_tuple(f.name, f.dim, f.data_bytes, f.scale_bytes, f.elements_per_sf));
        }
        return formats;
    }, "(name, dim, data_bytes, scale_bytes, elements_per_sf) of every record format of formats.h.");
    m.attr("BF16_ROW") = int(BF16_ROW);
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
    m.def("index_logits", &index_logits);
    m.def("index_topk", &index_topk);
    m.def("index_topk_scratch_bytes", [](int target, int64_t rows, int64_t heads, int64_t k, int threads) {
        return operators(target).index.index_topk_scratch(rows, heads, k, threads);
    }, "Scratch of one index_topk call in bytes, all threads together.");
    m.def("topk", &topk);
    m.def("candidate_blocks", &candidate_blocks);
    m.def("softmax_pool", &softmax_pool);
    m.def("compress", &compress);
    m.def("rope", &rope);
    m.def("project", &project);
    m.def("store_records", &store_records);
    m.def("load_records", &load_records);
    m.def("torch_functions", [] {
        nb::list names;
        for (const char* name : TORCH_FUNCTION_NAMES) names.append(name);
        return names;
    }, "Names of the functions of torch's C interface that the operator needs, in the order of `register_torch_operator`.");
    m.def("register_torch_operator", &register_torch, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
    m.def("unregister_torch_operator", [] { unregister_torch_operator(torch_side->library); });
    m.def("leave_error", [](nb::object error) {
        PyObject* before = std::exchange(left_error, error.release().ptr());
        Py_XDECREF(before);
    }, "The error that the operator raises once sparse_decode_native_in_python, which it called on this thread, has returned.");
    m.def("decode_index", [](int target, int kind, uintptr_t data, uintptr_t scales, uintptr_t out) {
        operators(target).index.decode_index(RecordKind(kind), reinterpret_cast<const uint8_t*>(data), reinterpret_cast<const uint8_t*>(scales),
                                             reinterpret_cast<float*>(out));
    }, "One index record to 128 floats through the decoder of a target.");
}
