// The values of a weight in blocks (block_weight.h) as floats, eight output rows at a time.
//
// A byte vector holds 4 columns of 8 rows, one row in each 32-bit lane. A shuffle moves the byte of one column to the
// top of its lane and clears the rest, which makes the lane (q - zero)·2^24 as a signed integer: exact in a float, and
// the scale takes the 2^-24. Where q is unsigned and may use all 8 bits, the byte goes to the bottom instead.
#pragma once
#include "block_weight.h"

class BlockUnpack {
 public:
  explicit BlockUnpack(const BlockWeight& w)
      : wide_(w.wide), scale_bytes_(w.scale_bytes), quants_(w.scale_bytes * (1 + w.offset)), zero_(_mm256_set1_epi8(char(w.zero))) {
    const bool top = w.bits == 4 || w.zero != 0;
    factor_ = _mm256_set1_ps(top ? 1.0f / (1 << 24) : 1.0f);
    for (int column = 0; column < 4; ++column) {
      alignas(32) int8_t from[32];
      for (int i = 0; i < 32; ++i) from[i] = i % 4 == (top ? 3 : 0) ? int8_t(i % 16 / 4 * 4 + column) : int8_t(-128);
      column_[column] = _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
    }
  }

  // The bytes q - zero of columns 4g .. 4g + 3 of a record whose blocks have 4 · kGroups columns.
  template <int kBits, int kGroups>
  __m256i bytes(const uint8_t* record, int g) const {
    const auto* vectors = reinterpret_cast<const __m256i*>(record + quants_);
    if constexpr (kBits == 8) return _mm256_sub_epi8(_mm256_loadu_si256(vectors + g), zero_);
    __m256i both = _mm256_loadu_si256(vectors + g % (kGroups / 2));
    if (g >= kGroups / 2) both = _mm256_srli_epi16(both, 4);
    return _mm256_sub_epi8(_mm256_and_si256(both, _mm256_set1_epi8(15)), zero_);
  }

  // Column j of 4: what `scale` times it is scale · (q - zero).
  __m256 values(__m256i bytes, int j) const { return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(bytes, column_[j])); }

  __m256 scale(const uint8_t* record) const { return _mm256_mul_ps(load_scales(record, wide_), factor_); }
  __m256 offset(const uint8_t* record) const { return load_scales(record + scale_bytes_, wide_); }

 private:
  int64_t wide_, scale_bytes_, quants_;
  __m256i zero_, column_[4];
  __m256 factor_;
};
