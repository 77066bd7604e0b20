// The part of onnxruntime's C ABI that these operators use, declared by position.
//
// OrtApi is a table of function pointers that grows only at its end: a position, once released, never changes.
// All positions below exist since API version 17. No C++ standard library is used anywhere in this folder, so that
// the result depends on libc alone and any C++17 compiler can build it.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace ort {

struct Status;
struct SessionOptions;
struct CustomOpDomain;
struct KernelInfo;
struct KernelContext;
struct Value;
struct ShapeInfo;

constexpr uint32_t kApiVersion = 17;
enum ElementType : int { kFloat = 1, kUInt8 = 2, kInt8 = 3, kInt32 = 6 };
enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

struct ApiBase {
  const void* const* (*get_api)(uint32_t version);
  const char* (*version_string)();
};

struct Api {
  const void* const* table;

  Status* create_status(ErrorCode code, const char* text) const {
    return at<Status* (*)(int, const char*)>(0)(code, text);
  }
  Status* create_domain(const char* name, CustomOpDomain** out) const {
    return at<Status* (*)(const char*, CustomOpDomain**)>(26)(name, out);
  }
  Status* domain_add(CustomOpDomain* domain, const void* op) const {
    return at<Status* (*)(CustomOpDomain*, const void*)>(27)(domain, op);
  }
  Status* add_domain(SessionOptions* options, CustomOpDomain* domain) const {
    return at<Status* (*)(SessionOptions*, CustomOpDomain*)>(28)(options, domain);
  }
  Status* data(const Value* value, void** out) const {
    return at<Status* (*)(const Value*, void**)>(51)(value, out);
  }
  Status* rank(const ShapeInfo* shape, size_t* out) const {
    return at<Status* (*)(const ShapeInfo*, size_t*)>(61)(shape, out);
  }
  Status* dims(const ShapeInfo* shape, int64_t* out, size_t count) const {
    return at<Status* (*)(const ShapeInfo*, int64_t*, size_t)>(62)(shape, out, count);
  }
  Status* shape(const Value* value, ShapeInfo** out) const {
    return at<Status* (*)(const Value*, ShapeInfo**)>(65)(value, out);
  }
  Status* attribute(const KernelInfo* info, const char* name, float* out) const {
    return at<Status* (*)(const KernelInfo*, const char*, float*)>(85)(info, name, out);
  }
  Status* attribute(const KernelInfo* info, const char* name, int64_t* out) const {
    return at<Status* (*)(const KernelInfo*, const char*, int64_t*)>(86)(info, name, out);
  }
  Status* input(const KernelContext* context, size_t index, const Value** out) const {
    return at<Status* (*)(const KernelContext*, size_t, const Value**)>(90)(context, index, out);
  }
  Status* output(KernelContext* context, size_t index, const int64_t* dims, size_t rank, Value** out) const {
    return at<Status* (*)(KernelContext*, size_t, const int64_t*, size_t, Value**)>(91)(context, index, dims, rank, out);
  }
  void release(Status* status) const { at<void (*)(Status*)>(93)(status); }
  void release(ShapeInfo* shape) const { at<void (*)(ShapeInfo*)>(99)(shape); }
  Status* parallel_for(const KernelContext* context, void (*task)(void*, size_t), size_t total, void* user) const {
    return at<Status* (*)(const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*)>(274)(
        context, task, total, 0, user);
  }

 private:
  template <typename Function>
  Function at(size_t position) const {
    return reinterpret_cast<Function>(const_cast<void*>(table[position]));
  }
};

// OrtCustomOp: callbacks in order. Null means "not used"; the first one is superseded by create_kernel_v2.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, const void* const* api, const KernelInfo*);
  const char* (*name)(const CustomOp*);
  const char* (*provider)(const CustomOp*);
  int (*input_type)(const CustomOp*, size_t);
  size_t (*input_count)(const CustomOp*);
  int (*output_type)(const CustomOp*, size_t);
  size_t (*output_count)(const CustomOp*);
  void (*compute)(void* kernel, KernelContext*);
  void (*destroy)(void* kernel);
  int (*input_characteristic)(const CustomOp*, size_t);
  int (*output_characteristic)(const CustomOp*, size_t);
  int (*input_memory_type)(const CustomOp*, size_t);
  const void* variadic[4];
  Status* (*create_kernel_v2)(const CustomOp*, const void* const* api, const KernelInfo*, void** kernel);
  Status* (*compute_v2)(void* kernel, KernelContext*);
  const void* later[7];
};

}  // namespace ort
