// Activations as integers: per block of a row, x = step · (2^shift · high + low), two signed bytes.
//
// The 8-bit multiply-add sums pairs of products in 16 bits. Weights of 4 bits leave room for 8-bit parts, which makes
// 16-bit activations; beside weights of 8 bits the parts have 7 bits, which makes 14. The largest |x| of the block has
// the largest value, so the error of an x is at most half of 1/32,639 or 1/8,127 of it (of plain int8: 1/127). The
// weights are read once for both parts.
#pragma once
#include <immintrin.h>

#include "op.h"

struct Activations {
  int64_t columns, block, blocks;
  int shift;                // bits of the low part: 7 or 8
  int8_t* parts = nullptr;  // [rows, blocks, 2, block]: high, then low
  float* step = nullptr;    // [rows, blocks]
  float* sum = nullptr;     // [rows, blocks]: sum of 2^shift · high + low, an integer below 2^24
  float* mass = nullptr;    // [rows, blocks]: step · sum, the sum of x

  int64_t row_bytes() const { return blocks * 2 * block; }

  void allocate(int64_t rows) {
    parts = parts_.at_least(rows * row_bytes());
    step = floats_.at_least(3 * rows * blocks);
    sum = step + rows * blocks;
    mass = sum + rows * blocks;
  }

  void quantize(int64_t row, const float* x) {
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t valid = columns - b * block;
      alignas(32) float padded[32] = {};
      const float* source = x + b * block;
      if (valid < block) {
        memcpy(padded, source, valid * sizeof(float));
        source = padded;
      }
      quantize_block(source, row * blocks + b);
    }
  }

  int32_t largest() const { return ((1 << (shift - 1)) - 1) * ((1 << shift) + 1); }

 private:
  void quantize_block(const float* x, int64_t at) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 top = _mm256_setzero_ps();
    for (int64_t i = 0; i < block; i += 8) top = _mm256_max_ps(top, _mm256_andnot_ps(sign, _mm256_loadu_ps(x + i)));
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    const float top_x = _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
    // A block of denormals counts as zeros: its inverse would be infinite.
    const __m256 inverse = _mm256_set1_ps(top_x > 1e-30f ? float(largest()) / top_x : 0.0f);
    const __m256i half_a_part = _mm256_set1_epi32(1 << (shift - 1));
    int8_t* out = parts + at * 2 * block;
    __m256i total = _mm256_setzero_si256();
    for (int64_t i = 0; i < block; i += 8) {
      const __m256i value = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));
      const __m256i high = _mm256_srai_epi32(_mm256_add_epi32(value, half_a_part), shift);
      store_bytes(out + i, high);
      store_bytes(out + block + i, _mm256_sub_epi32(value, _mm256_slli_epi32(high, shift)));
      total = _mm256_add_epi32(total, value);
    }
    __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1));
    step[at] = top_x / float(largest());
    sum[at] = float(_mm_cvtsi128_si32(sums));
    mass[at] = step[at] * sum[at];
  }

  static void store_bytes(int8_t* out, __m256i values) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(words, words));
  }

  ort::Buffer<int8_t> parts_;
  ort::Buffer<float> floats_;
};
