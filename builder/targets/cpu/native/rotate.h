// RoPE of one head: the first 2·half of `width` channels are rotated, the rest copied; all are multiplied by `factor`.
#pragma once
#include <stdint.h>

inline void rotate(const float* x, float* y, int64_t width, const float* cos, const float* sin, int64_t half, bool interleaved, float factor) {
  const int64_t apart = interleaved ? 1 : half, stride = interleaved ? 2 : 1;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i * stride], b = x[i * stride + apart];
    y[i * stride] = (a * cos[i] - b * sin[i]) * factor;
    y[i * stride + apart] = (b * cos[i] + a * sin[i]) * factor;
  }
  for (int64_t i = 2 * half; i < width; ++i) y[i] = x[i] * factor;
}
