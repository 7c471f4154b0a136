// SPDX-License-Identifier: Apache-2.0
// `torch.ops.sparse_mla.sparse_decode_native` as a C++ function that torch calls itself: no argument becomes a Python object.
//
// torch is absent at build time. What is used of its stable C interface (torch/csrc/stable/c/shim.h, complete since torch 2.13) is listed
// below; Python looks the names up in the torch it has loaded. The convention: a kernel gets a stack of 64-bit values, owns them, and leaves
// its results at the bottom. Tensors and lists are owned handles, an optional is null or an owned pointer to the value.
//
// The kernel does the ordinary case. Everything else (an argument to be copied, of the wrong kind, out of range) it hands, as it came, to the
// operator `sparse_decode_native_in_python`, which has the same schema: one wording of errors, one way to copy.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace sparse_mla {

using StackValue = uint64_t;
using StackKernel = void (*)(StackValue* stack, uint64_t num_arguments, uint64_t num_results);

// F(name, arguments). All return int32_t: zero for success, or the number asked for.
#define SPARSE_MLA_TORCH_FUNCTIONS(F)                                                                                                     \
    F(aoti_torch_library_init_impl, (const char* library, const char* key, const char* file, uint32_t line, void** handle))              \
    F(torch_library_impl, (void* library, const char* name, StackKernel kernel, uint64_t version))                                       \
    F(aoti_torch_delete_library_object, (void* library))                                                                                  \
    F(torch_call_dispatcher, (const char* name, const char* overload, StackValue* stack, uint64_t version))                              \
    F(torch_list_size, (void* list, size_t* size))                                                                                        \
    F(torch_list_get_item, (void* list, size_t index, StackValue* value))                                                                 \
    F(torch_delete_list, (void* list))                                                                                                    \
    F(torch_delete_stable_ivalue, (StackValue* value))                                                                                    \
    F(aoti_torch_get_dim, (void* tensor, int64_t* dim))                                                                                   \
    F(aoti_torch_get_sizes, (void* tensor, int64_t** sizes))                                                                              \
    F(aoti_torch_get_strides, (void* tensor, int64_t** strides))                                                                          \
    F(aoti_torch_get_dtype, (void* tensor, int32_t* dtype))                                                                               \
    F(aoti_torch_get_device_type, (void* tensor, int32_t* device))                                                                        \
    F(torch_get_const_data_ptr, (void* tensor, const void** data))                                                                        \
    F(torch_get_mutable_data_ptr, (void* tensor, void** data))                                                                            \
    F(aoti_torch_empty_strided, (int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device, int32_t index, \
                                 void** tensor))                                                                                          \
    F(aoti_torch_delete_tensor_object, (void* tensor))                                                                                    \
    F(torch_get_num_threads, (uint32_t* threads))                                                                                         \
    F(aoti_torch_device_type_cpu, ())                                                                                                     \
    F(aoti_torch_dtype_bfloat16, ())                                                                                                      \
    F(aoti_torch_dtype_float32, ())                                                                                                       \
    F(aoti_torch_dtype_int32, ())                                                                                                         \
    F(aoti_torch_dtype_uint8, ())                                                                                                         \
    F(aoti_torch_dtype_int8, ())                                                                                                          \
    F(aoti_torch_dtype_float8_e4m3fn, ())

struct TorchFunctions {
#define SPARSE_MLA_MEMBER(name, arguments) int32_t(*name) arguments;
    SPARSE_MLA_TORCH_FUNCTIONS(SPARSE_MLA_MEMBER)
#undef SPARSE_MLA_MEMBER
};

// In the order of TorchFunctions.
#define SPARSE_MLA_NAME(name, arguments) #name,
constexpr const char* TORCH_FUNCTION_NAMES[] = {SPARSE_MLA_TORCH_FUNCTIONS(SPARSE_MLA_NAME)};
#undef SPARSE_MLA_NAME
static_assert(sizeof(TorchFunctions) == sizeof(TORCH_FUNCTION_NAMES));

constexpr int MAX_CACHE_DIM = 5;
constexpr int GEOMETRY_SIZE = 4;  // integers of PagedCache.geometry

// A cache may be a tensor of these; CacheKey::dtype is the place in this list.
constexpr const char* CACHE_DTYPES[] = {"uint8", "int8", "float8_e4m3fn", "bfloat16"};
constexpr int NUM_CACHE_DTYPES = 4;

// All that the layout of a cache depends on. Unused places are zero.
struct CacheKey {
    int64_t dim, dtype;
    int64_t sizes[MAX_CACHE_DIM], strides[MAX_CACHE_DIM];
    int64_t geometry[GEOMETRY_SIZE];
};

// Fields as in AttentionScope; offset: bytes from the tensor's start to the first page.
struct PageLayout {
    int64_t offset, kind, page_size, block_stride, data_step, scale_base, scale_step, num_slots;
};

// What Python answers for. Called without the GIL; each but `error_is_left` throws the Python error of its answer.
struct PythonSide {
    int (*target)();                                  // the CPU target of a call made now
    PageLayout (*page_layout)(const CacheKey& key);   // asked once a cache shape and thread
    bool (*error_is_left)();                          // whether Python left an error for this thread to raise
    void (*raise_left)();                             // throws it
    void (*raise_status)(Status status);              // throws what a call that did not end well means
    const Interrupt* interrupt;
};

// Registers the kernel under a dispatch key. Null: torch refused. The operator must not be registered twice.
void* register_torch_operator(const TorchFunctions& functions, const PythonSide& python, const char* key);
void unregister_torch_operator(void* library);

}  // namespace sparse_mla
