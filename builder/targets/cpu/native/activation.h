// The activations of gated linears and of experts, eight values at a time.
#pragma once
#include "simd.h"

enum Activation : int64_t { kSilu = 0, kGeluTanh = 1, kRelu = 2, kRelu2 = 3, kSigmoid = 4 };

// slope belongs to silu alone: x·sigmoid(slope·x).
inline v8 activate8(int64_t kind, v8 x, float slope = 1.0f) {
  const v8 one = splat8(1.0f);
  if (kind == kSilu) return x / (one + exp8(-splat8(slope) * x));
  if (kind == kGeluTanh) {
    // x·(1 + tanh u) / 2 is x·sigmoid(2u): no cancellation for negative x.
    return x / (one + exp8(splat8(-1.5957691216f) * (x + splat8(0.044715f) * x * x * x)));
  }
  if (kind == kSigmoid) return one / (one + exp8(-x));
  const v8 positive = max8(x, splat8(0.0f));
  return kind == kRelu ? positive : positive * positive;
}
