// One head's row of a KV pool: floats as they are, or int8 numbers with a scale, which is the largest magnitude / 127.
#pragma once
#include <float.h>

#include "simd.h"

typedef int8_t v8b __attribute__((vector_size(8), aligned(1), may_alias));

inline void store_row(const float* x, int64_t width, float* row, float*, int64_t) { memcpy(row, x, width * sizeof(float)); }

// A row of zeros has the scale 0. One with a NaN or an infinity has the scale infinity and zeros, which stand for NaN.
inline void store_row(const float* x, int64_t width, int8_t* row, float* scales, int64_t at) {
  float largest = 0.0f;
  for (int64_t d = 0; d < width; ++d) {
    const float magnitude = x[d] < 0 ? -x[d] : x[d];
    largest = magnitude <= largest ? largest : magnitude <= FLT_MAX ? magnitude : __builtin_inff();
  }
  const float scale = scales[at] = largest / 127.0f;
  const bool usable = scale > 0 && scale <= FLT_MAX;
  const v8 divisor = splat8(usable ? scale : 1.0f), magic = splat8(12582912.0f);  // 1.5·2^23 rounds, as in exp8
  for (int64_t d = 0; d < width; d += 8) {
    const v8 inside = min8(max8(usable ? load8(x + d) / divisor : splat8(0.0f), splat8(-127.0f)), splat8(127.0f));
    *reinterpret_cast<v8b*>(row + d) = __builtin_convertvector((inside + magic) - magic, v8b);
  }
}

// The row in floats: where it lies, or written to `wide`.
inline const float* load_row(const float* row, int64_t, const float*, int64_t, float*) { return row; }
inline const float* load_row(const int8_t* row, int64_t width, const float* scales, int64_t at, float* wide) {
  const v8 factor = splat8(scales[at]);
  for (int64_t d = 0; d < width; d += 8) {
    store8(wide + d, __builtin_convertvector(*reinterpret_cast<const v8b*>(row + d), v8) * factor);
  }
  return wide;
}

// Room for the rows of a chunk in floats; none where they are read in place.
template <typename T, int64_t kSize>
struct Wide {
  alignas(32) float data[kSize];
  float* at(int64_t place) { return data + place; }
};
template <int64_t kSize>
struct Wide<float, kSize> {
  float* at(int64_t) { return nullptr; }
};
