// GatedActivation: [.., gate | up] -> activation(gate) · up, where gate and up are the two halves of one merged linear.
#pragma once
#include "op.h"
#include "simd.h"

class GatedActivation {
 public:
  static constexpr const char* kName = "GatedActivation";
  static constexpr ort::Input kInputs[] = {{ort::kFloat}};
  enum Kind : int64_t { kSilu = 0, kGeluTanh = 1 };

  explicit GatedActivation(const ort::Attributes& attributes) : kind_(attributes.integer("activation")) {}

  void compute(ort::Context& c) {
    const auto x = c.input<const float>(0);
    const int64_t rows = x.rows(), width = x.width() / 2;
    float* y = c.output(x, width);
    if (c.error() != nullptr) return;
    const int64_t rows_a_task = 1 + 8192 / width;
    c.parallel((rows + rows_a_task - 1) / rows_a_task, [&](int64_t task) {
      for (int64_t m = task * rows_a_task; m < rows && m < (task + 1) * rows_a_task; ++m) {
        row(x.data + m * 2 * width, y + m * width, width);
      }
    });
  }

 private:
  void row(const float* gate, float* y, int64_t width) const {
    const float* up = gate + width;
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) store8(y + i, activate(load8(gate + i)) * load8(up + i));
    for (; i < width; ++i) y[i] = activate(splat8(gate[i]))[0] * up[i];
  }

  v8 activate(v8 x) const {
    // gelu_tanh is x·(1 + tanh u) / 2, which is x·sigmoid(2u): no cancellation for negative x.
    const v8 slope = splat8(1.5957691216f) * (x + splat8(0.044715f) * x * x * x);
    return x / (splat8(1.0f) + exp8(kind_ == kSilu ? -x : -slope));
  }

  int64_t kind_;
};
