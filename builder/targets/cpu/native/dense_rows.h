// y[m][n] = Σ_k w[n][k]·x[m][k] + bias[n] in float32, for rows of x that lie anywhere.
//
// Four rows of w times up to three of x fill the sixteen vector registers. Every sum is taken in the same order whatever
// the block it is computed in: a row of x gives the same result alone and among others.
#pragma once
#include "simd.h"

template <int kN, int kM>
inline void dense_block(const float* w, const float* const* x, int64_t width, const float* bias, float* const* y) {
  v8 sums[kN][kM] = {};
  int64_t k = 0;
  for (; k + 8 <= width; k += 8) {
    for (int n = 0; n < kN; ++n) {
      const v8 weight = load8(w + n * width + k);
      for (int m = 0; m < kM; ++m) sums[n][m] += weight * load8(x[m] + k);
    }
  }
  for (int n = 0; n < kN; ++n) {
    for (int m = 0; m < kM; ++m) {
      float sum = sum8(sums[n][m]);
      for (int64_t rest = k; rest < width; ++rest) sum += w[n * width + rest] * x[m][rest];
      y[m][n] = sum + (bias != nullptr ? bias[n] : 0.0f);
    }
  }
}

template <int kN>
inline void dense_block_of(int64_t m, const float* w, const float* const* x, int64_t width, const float* bias, float* const* y) {
  if (m == 1) dense_block<kN, 1>(w, x, width, bias, y);
  else if (m == 2) dense_block<kN, 2>(w, x, width, bias, y);
  else dense_block<kN, 3>(w, x, width, bias, y);
}

// Rows begin .. end - 1 of w [.., width] for all `count` rows of x; y + m·stride is the result row of x[m].
inline void dense_rows(const float* w, int64_t begin, int64_t end, int64_t width, const float* bias,
                       const float* const* x, int64_t count, float* y, int64_t stride) {
  for (int64_t first = 0; first < count; first += 3) {
    const int64_t m = count - first < 3 ? count - first : 3;
    int64_t n = begin;
    float* out[3];
    auto place = [&] {
      for (int64_t i = 0; i < m; ++i) out[i] = y + (first + i) * stride + n;
      return bias != nullptr ? bias + n : nullptr;
    };
    for (; n + 4 <= end; n += 4) {
      const float* of_rows = place();
      dense_block_of<4>(m, w + n * width, x + first, width, of_rows, out);
    }
    for (; n < end; ++n) {
      const float* of_row = place();
      dense_block_of<1>(m, w + n * width, x + first, width, of_row, out);
    }
  }
}
