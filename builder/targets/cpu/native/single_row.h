// A linear over blocks for one row of x, where reading the weights is what takes the time: no value is stored on the way.
//
// A sum is a chain of additions that wait for one another, so four tiles are computed side by side.
#pragma once
#include "block_rows.h"
#include "block_unpack.h"

class SingleRow {
 public:
  explicit SingleRow(const BlockWeight& w) : w_(w), unpack_(w) {}

  // Tiles begin .. end - 1 for row m.
  template <int kBits, int kGroups>
  void part(const BlockRows& x, int64_t m, const uint8_t* weight, const float* bias, int64_t begin, int64_t end, float* y) const {
    int64_t t = begin;
    for (; t + kSide <= end; t += kSide) tiles<kBits, kGroups, kSide>(x, m, weight, bias, t, y);
    for (; t < end; ++t) tiles<kBits, kGroups, 1>(x, m, weight, bias, t, y);
  }

 private:
  static constexpr int kSide = 4;

  template <int kBits, int kGroups, int kTiles>
  void tiles(const BlockRows& x, int64_t m, const uint8_t* weight, const float* bias, int64_t tile, float* y) const {
    const uint8_t* record = weight + tile * w_.tile_bytes;
    __m256 total[kTiles];
    for (int t = 0; t < kTiles; ++t) total[t] = _mm256_setzero_ps();
    for (int64_t b = 0; b < w_.blocks; ++b, record += w_.record_bytes) {
      const float* columns = x.values(b, m);
      __m256 sum[kTiles];
      for (int t = 0; t < kTiles; ++t) {
        sum[t] = _mm256_setzero_ps();
        prefetch(w_, record + (kTiles + t) * w_.tile_bytes);  // of the tiles that come next
      }
#pragma GCC unroll 8
      for (int g = 0; g < kGroups; ++g) {
        __m256i bytes[kTiles];
        for (int t = 0; t < kTiles; ++t) bytes[t] = unpack_.bytes<kBits, kGroups>(record + t * w_.tile_bytes, g);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const __m256 column = _mm256_broadcast_ss(columns + 4 * g + j);
          for (int t = 0; t < kTiles; ++t) sum[t] = _mm256_fmadd_ps(unpack_.values(bytes[t], j), column, sum[t]);
        }
      }
      for (int t = 0; t < kTiles; ++t) {
        const uint8_t* scales = record + t * w_.tile_bytes;
        total[t] = _mm256_fmadd_ps(sum[t], unpack_.scale(scales), total[t]);
        if (w_.offset) total[t] = _mm256_fmadd_ps(unpack_.offset(scales), _mm256_broadcast_ss(x.mass(b, m)), total[t]);
      }
    }
    for (int t = 0; t < kTiles; ++t) store_tile(w_, total[t], bias, tile + t, m, y);
  }

  BlockWeight w_;
  BlockUnpack unpack_;
};
