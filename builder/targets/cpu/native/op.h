// One C++ class an operator -> the table of callbacks that onnxruntime wants.
//
// A kernel class has kName, kInputs (type and whether it is optional, in order), a constructor from Attributes, and
// `void compute(Context&)` that makes one float32 output. Errors of onnxruntime's own calls stick to the Context and
// are returned to it after compute.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "abi.h"

// Placement new without the standard library's <new>.
struct Place {
  void* memory;
};
inline void* operator new(size_t, Place place) noexcept { return place.memory; }
inline void operator delete(void*, Place) noexcept {}

namespace ort {

struct Input {
  ElementType type;
  bool optional = false;
};

// Scratch memory that is kept from call to call. A session runs one step at a time, so kernels may own their scratch.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  ~Buffer() { free(data_); }
  T* at_least(size_t count) {
    if (count > capacity_) {
      free(data_);
      capacity_ = count + count / 2;
      data_ = static_cast<T*>(aligned_alloc(64, (capacity_ * sizeof(T) + 63) / 64 * 64));
      if (data_ == nullptr) abort();
    }
    return data_;
  }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t capacity_ = 0;
};

template <typename T>
struct Tensor {
  static constexpr size_t kMaxRank = 4;
  T* data = nullptr;
  size_t rank = 0;
  int64_t dims[kMaxRank] = {};

  explicit operator bool() const { return data != nullptr; }
  int64_t width() const { return rank == 0 ? 1 : dims[rank - 1]; }
  int64_t rows() const {  // product of all axes but the last
    int64_t product = 1;
    for (size_t i = 0; i + 1 < rank; ++i) product *= dims[i];
    return product;
  }
};

class Attributes {
 public:
  Attributes(Api api, const KernelInfo* info, Status** error) : api_(api), info_(info), error_(error) {}
  int64_t integer(const char* name) const { return get<int64_t>(name); }
  float real(const char* name) const { return get<float>(name); }
  int64_t integer(const char* prefix, const char* name) const {
    char joined[32] = {};
    strncat(strncat(joined, prefix, 15), name, 15);
    return get<int64_t>(joined);
  }

 private:
  template <typename T>
  T get(const char* name) const {
    T value{};
    Status* status = api_.attribute(info_, name, &value);
    if (status != nullptr && *error_ != nullptr) api_.release(status);
    else if (status != nullptr) *error_ = status;
    return value;
  }
  Api api_;
  const KernelInfo* info_;
  Status** error_;
};

class Context {
 public:
  Context(Api api, KernelContext* context) : api_(api), context_(context) {}
  Status* error() const { return error_; }

  void fail(const char* text) { note(api_.create_status(kInvalidArgument, text)); }

  // An absent optional input gives a false Tensor. T without const: a buffer that the operator updates in place.
  template <typename T>
  Tensor<T> input(size_t index) {
    Tensor<T> tensor;
    const Value* value = nullptr;
    if (note(api_.input(context_, index, &value)) || value == nullptr) return tensor;
    ShapeInfo* shape = nullptr;
    if (note(api_.shape(value, &shape))) return tensor;
    note(api_.rank(shape, &tensor.rank));
    if (tensor.rank > Tensor<T>::kMaxRank) fail("an input has more than 4 axes");
    else note(api_.dims(shape, tensor.dims, tensor.rank));
    api_.release(shape);
    void* data = nullptr;
    note(api_.data(value, &data));
    tensor.data = static_cast<T*>(data);
    return tensor;
  }

  // The output: `like` with its last axis replaced by `width`.
  template <typename T>
  float* output(const Tensor<T>& like, int64_t width) {
    int64_t dims[Tensor<T>::kMaxRank];
    memcpy(dims, like.dims, sizeof dims);
    dims[like.rank - 1] = width;
    return output(dims, like.rank);
  }

  float* output(const int64_t* dims, size_t rank) {
    Value* value = nullptr;
    void* data = nullptr;
    if (!note(api_.output(context_, 0, dims, rank, &value))) note(api_.data(value, &data));
    return static_cast<float*>(data);
  }

  // Calls function(i) for every i in [0, total) on onnxruntime's own threads; one task runs on the caller's.
  template <typename Function>
  void parallel(int64_t total, Function&& function) {
    if (total == 1) return function(int64_t{0});
    if (total <= 0) return;
    auto task = [](void* user, size_t i) { (*static_cast<typename Plain<Function>::type*>(user))(int64_t(i)); };
    note(api_.parallel_for(context_, task, size_t(total), &function));
  }

 private:
  template <typename T>
  struct Plain { using type = T; };
  template <typename T>
  struct Plain<T&> { using type = T; };

  bool note(Status* status) {
    if (status == nullptr) return false;
    if (error_ == nullptr) error_ = status;
    else api_.release(status);
    return true;
  }

  Api api_;
  KernelContext* context_;
  Status* error_ = nullptr;
};

template <typename Kernel>
struct Op : CustomOp {
  struct Instance {
    Instance(Api api, const Attributes& attributes) : api(api), kernel(attributes) {}
    Api api;
    Kernel kernel;
  };

  Op() : CustomOp{} {
    version = kApiVersion;
    name = [](const CustomOp*) { return Kernel::kName; };
    provider = [](const CustomOp*) -> const char* { return nullptr; };
    input_type = [](const CustomOp*, size_t i) -> int { return Kernel::kInputs[i].type; };
    input_count = [](const CustomOp*) -> size_t { return sizeof Kernel::kInputs / sizeof(Input); };
    output_type = [](const CustomOp*, size_t) -> int { return kFloat; };
    output_count = [](const CustomOp*) -> size_t { return 1; };
    input_characteristic = [](const CustomOp*, size_t i) -> int { return Kernel::kInputs[i].optional ? 1 : 0; };
    output_characteristic = [](const CustomOp*, size_t) -> int { return 0; };
    input_memory_type = [](const CustomOp*, size_t) -> int { return 0; };
    create_kernel_v2 = [](const CustomOp*, const void* const* table, const KernelInfo* info, void** out) -> Status* {
      const Api api{table};
      Status* error = nullptr;
      void* memory = aligned_alloc(64, (sizeof(Instance) + 63) / 64 * 64);
      if (memory == nullptr) return api.create_status(kFail, "out of memory");
      *out = new (Place{memory}) Instance(api, Attributes(api, info, &error));
      return error;
    };
    compute_v2 = [](void* self, KernelContext* context) -> Status* {
      auto* instance = static_cast<Instance*>(self);
      Context c(instance->api, context);
      instance->kernel.compute(c);
      return c.error();
    };
    destroy = [](void* self) {
      static_cast<Instance*>(self)->~Instance();
      free(self);
    };
  }
};

}  // namespace ort
