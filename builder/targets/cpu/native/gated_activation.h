// GatedActivation: [.., gate | up] -> activation(gate) · up, where gate and up are the two halves of one merged linear.
#pragma once
#include "activation.h"
#include "op.h"

class GatedActivation {
 public:
  static constexpr const char* kName = "GatedActivation";
  static constexpr ort::Input kInputs[] = {{ort::kFloat}};

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
    for (; i + 8 <= width; i += 8) store8(y + i, activate8(kind_, load8(gate + i)) * load8(up + i));
    for (; i < width; ++i) y[i] = activate8(kind_, splat8(gate[i]))[0] * up[i];
  }

  int64_t kind_;
};
