// SPDX-License-Identifier: Apache-2.0
#include "torch_operator.h"

#include <cstring>
#include <stdexcept>

#include "targets.h"

namespace sparse_mla {

namespace {

constexpr uint64_t WRITTEN_FOR = uint64_t(2) << 56 | uint64_t(13) << 48;  // torch 2.13: later ones keep its conventions for us

TorchFunctions torch;
PythonSide python;
int32_t cpu, bfloat16, float32, int32, cache_dtypes[NUM_CACHE_DTYPES];  // torch's numbers of them

// In the order of SCHEMA in ops/sparse_decode.py.
enum Argument { Q, CACHE0, INDICES0, LENGTH0, CACHE1, INDICES1, LENGTH1, GEOMETRY, SOFTMAX_SCALE, ATTN_SINK, OUT_DTYPE, MEMORY_LIMIT, CHECKS };
constexpr int FOR_SCOPE1 = CACHE1 - CACHE0;

void* handle(StackValue value) { return reinterpret_cast<void*>(value); }
void* optional_handle(StackValue value) { return value ? handle(*reinterpret_cast<StackValue*>(value)) : nullptr; }

// The arguments of a call, freed unless handed on.
struct Arguments {
    StackValue* stack;
    ~Arguments() { free(); }
    void free() {
        if (!stack) return;
        for (const int tensor : {Q, CACHE0, INDICES0}) torch.aoti_torch_delete_tensor_object(handle(stack[tensor]));
        for (const int tensor : {LENGTH0, CACHE1, INDICES1, LENGTH1, ATTN_SINK}) {
            if (!stack[tensor]) continue;
            torch.aoti_torch_delete_tensor_object(optional_handle(stack[tensor]));
            torch.torch_delete_stable_ivalue(reinterpret_cast<StackValue*>(stack[tensor]));
        }
        torch.torch_delete_list(handle(stack[GEOMETRY]));
        stack = nullptr;
    }
};

// A tensor this call made, freed unless released.
struct Result {
    void* tensor = nullptr;
    void* data = nullptr;
    // Contiguous. False when torch cannot.
    bool allocate(int dim, const int64_t* sizes, int32_t dtype) {
        int64_t strides[4], stride = 1;
        for (int i = dim - 1; i >= 0; --i) {
            strides[i] = stride;
            stride *= sizes[i] > 1 ? sizes[i] : 1;
        }
        return !torch.aoti_torch_empty_strided(dim, sizes, strides, dtype, cpu, 0, &tensor) &&
               !torch.torch_get_mutable_data_ptr(tensor, &data);
    }
    StackValue release() {
        const StackValue value = reinterpret_cast<StackValue>(tensor);
        tensor = nullptr;
        return value;
    }
    ~Result() {
        if (tensor) torch.aoti_torch_delete_tensor_object(tensor);
    }
};

struct Tensor {
    int64_t dim;
    int64_t *sizes, *strides;
    int32_t dtype;
    const void* data;

    // False: not a plain tensor in this machine's memory.
    bool read(void* tensor) {
        int32_t device;
        return !torch.aoti_torch_get_device_type(tensor, &device) && device == cpu && !torch.aoti_torch_get_dim(tensor, &dim) &&
               !torch.aoti_torch_get_sizes(tensor, &sizes) && !torch.aoti_torch_get_strides(tensor, &strides) &&
               !torch.aoti_torch_get_dtype(tensor, &dtype) && !torch.torch_get_const_data_ptr(tensor, &data);
    }
    bool is(int wanted_dim, int32_t wanted_dtype) const {  // and its last dimension is contiguous
        return dim == wanted_dim && dtype == wanted_dtype && (strides[dim - 1] == 1 || sizes[dim - 1] == 1);
    }
};

// A vector of `size` elements, or null for an absent one.
template <typename T>
bool read_vector(StackValue value, int32_t dtype, int64_t size, const T** data) {
    *data = nullptr;
    if (!value) return true;
    Tensor t;
    if (!t.read(optional_handle(value)) || !t.is(1, dtype) || t.sizes[0] != size) return false;
    *data = static_cast<const T*>(t.data);
    return true;
}

// The layouts this thread asked for last. Serving meets a handful of cache shapes.
const PageLayout& page_layout(const CacheKey& key) {
    constexpr int KEPT = 16;
    struct Known {
        CacheKey key;
        PageLayout layout;
    };
    thread_local Known known[KEPT];
    thread_local int count = 0, next = 0;
    for (int i = 0; i < count; ++i) {
        if (std::memcmp(&known[i].key, &key, sizeof key) == 0) return known[i].layout;
    }
    const PageLayout layout = python.page_layout(key);
    Known& place = known[next];
    next = (next + 1) % KEPT;
    count = count < KEPT ? count + 1 : KEPT;
    place = {key, layout};
    return place.layout;
}

bool read_scope(void* cache, void* indices, StackValue length, const int64_t* geometry, const AttentionParams& p, AttentionScope* scope) {
    Tensor data, lists;
    if (!data.read(cache) || data.dim > MAX_CACHE_DIM || !lists.read(indices) || !lists.is(3, int32)) return false;
    if (lists.sizes[0] != p.b || lists.sizes[1] != p.s_q || !read_vector(length, int32, p.b, &scope->topk_length)) return false;
    CacheKey key{};
    key.dim = data.dim;
    while (key.dtype < NUM_CACHE_DTYPES && cache_dtypes[key.dtype] != data.dtype) ++key.dtype;
    if (key.dtype == NUM_CACHE_DTYPES) return false;
    for (int i = 0; i < data.dim; ++i) key.sizes[i] = data.sizes[i], key.strides[i] = data.strides[i];
    std::memcpy(key.geometry, geometry, sizeof key.geometry);
    const PageLayout& layout = page_layout(key);
    scope->data = static_cast<const uint8_t*>(data.data) + layout.offset;
    scope->kind = RecordKind(layout.kind);
    scope->page_size = layout.page_size, scope->block_stride = layout.block_stride, scope->data_step = layout.data_step;
    scope->scale_base = layout.scale_base, scope->scale_step = layout.scale_step, scope->num_slots = layout.num_slots;
    scope->indices = static_cast<const int32_t*>(lists.data);
    scope->index_stride_b = lists.strides[0], scope->index_stride_s = lists.strides[1], scope->topk = lists.sizes[2];
    return true;
}

// The call as the core takes it, results aside; *q_sizes: borrowed. False: something is out of the ordinary.
bool read_call(const StackValue* stack, AttentionParams& p, const int64_t** q_sizes) {
    Tensor q;
    if (!q.read(handle(stack[Q])) || !q.is(4, bfloat16) || q.sizes[3] != HEAD_DIM || q.sizes[2] < 1) return false;
    *q_sizes = q.sizes;
    p.q = static_cast<const uint16_t*>(q.data);
    p.q_stride_b = q.strides[0], p.q_stride_s = q.strides[1], p.q_stride_h = q.strides[2];
    p.b = q.sizes[0], p.s_q = q.sizes[1], p.h_q = q.sizes[2];
    if (!read_vector(stack[ATTN_SINK], float32, p.h_q, &p.attn_sink)) return false;
    const int32_t out_dtype = int32_t(stack[OUT_DTYPE]);
    if (out_dtype != bfloat16 && out_dtype != float32) return false;
    p.out_float = out_dtype == float32;
    double scale;
    std::memcpy(&scale, &stack[SOFTMAX_SCALE], sizeof scale);
    p.softmax_scale = float(scale);

    p.num_scopes = stack[CACHE1] && stack[INDICES1] ? 2 : 1;
    size_t listed;
    int64_t geometry[2 * GEOMETRY_SIZE];
    if (torch.torch_list_size(handle(stack[GEOMETRY]), &listed) || listed != size_t(p.num_scopes * GEOMETRY_SIZE)) return false;
    for (size_t i = 0; i < listed; ++i) {
        StackValue value;
        if (torch.torch_list_get_item(handle(stack[GEOMETRY]), i, &value)) return false;
        geometry[i] = int64_t(value);
    }
    return read_scope(handle(stack[CACHE0]), handle(stack[INDICES0]), stack[LENGTH0], geometry, p, &p.scopes[0]) &&
           (p.num_scopes == 1 || read_scope(optional_handle(stack[CACHE1]), optional_handle(stack[INDICES1]), stack[LENGTH1],
                                            geometry + GEOMETRY_SIZE, p, &p.scopes[1]));
}

// Takes the arguments as they are and leaves two results, or throws.
void in_python(StackValue* stack) {
    if (torch.torch_call_dispatcher("sparse_mla::sparse_decode_native_in_python", "", stack, WRITTEN_FOR)) {
        throw std::runtime_error("sparse_decode: torch could not call sparse_decode_native_in_python.");
    }
    if (python.error_is_left()) {
        for (int i = 0; i < 2; ++i) torch.aoti_torch_delete_tensor_object(handle(stack[i]));
        python.raise_left();
    }
}

void sparse_decode(StackValue* stack, uint64_t, uint64_t) {
    Arguments arguments{stack};
    Result out, lse;
    AttentionParams p{};
    const int64_t* q_sizes;
    uint32_t threads;
    if (!read_call(stack, p, &q_sizes) || (stack[CHECKS] && has_bad_slot(p)) || torch.torch_get_num_threads(&threads) ||
        !out.allocate(4, q_sizes, p.out_float ? float32 : bfloat16) || !lse.allocate(3, q_sizes, float32)) {
        arguments.stack = nullptr;
        return in_python(stack);
    }
    p.out = out.data, p.lse = static_cast<float*>(lse.data);
    p.plan = {int(threads), 0, python.interrupt};
    const Status status = operators_of(TargetId(python.target()))->sparse_decode(p);
    if (status != Status::OK) python.raise_status(status);
    arguments.free();
    stack[0] = out.release(), stack[1] = lse.release();
}

}  // namespace

void* register_torch_operator(const TorchFunctions& functions, const PythonSide& python_side, const char* key) {
    torch = functions, python = python_side;
    cpu = torch.aoti_torch_device_type_cpu();
    bfloat16 = torch.aoti_torch_dtype_bfloat16(), float32 = torch.aoti_torch_dtype_float32(), int32 = torch.aoti_torch_dtype_int32();
    const int32_t listed[NUM_CACHE_DTYPES] = {torch.aoti_torch_dtype_uint8(), torch.aoti_torch_dtype_int8(),
                                              torch.aoti_torch_dtype_float8_e4m3fn(), bfloat16};
    std::memcpy(cache_dtypes, listed, sizeof listed);
    void* library = nullptr;
    if (torch.aoti_torch_library_init_impl("sparse_mla", key, "csrc/torch_operator.cc", __LINE__, &library)) return nullptr;
    if (torch.torch_library_impl(library, "sparse_decode_native", sparse_decode, WRITTEN_FOR)) {
        torch.aoti_torch_delete_library_object(library);
        return nullptr;
    }
    return library;
}

void unregister_torch_operator(void* library) { torch.aoti_torch_delete_library_object(library); }

}  // namespace sparse_mla
