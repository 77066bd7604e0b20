// A linear over blocks for many rows of x, where arithmetic is what takes the time: float32 products with panels.
//
// A panel is the float32 values of two tiles (16 output rows) over some blocks, in the L1 cache. Six rows of x meet it at
// a time, which fills 12 of the 16 vector registers with sums.
#pragma once
#include "block_rows.h"
#include "block_unpack.h"

class ManyRows {
 public:
  explicit ManyRows(const BlockWeight& w) : w_(w), unpack_(w) {}

  // Tiles begin .. end - 1 for the rows first .. last - 1, which are set already.
  template <int kBits, int kGroups>
  void part(const BlockRows& x, int64_t first, int64_t last, const uint8_t* weight, const float* bias, int64_t begin, int64_t end,
            float* y) const {
    for (; first < last; first += kRows) {
      const int64_t count = last - first < kRows ? last - first : kRows;
      int64_t t = begin;
      for (; t + 2 <= end; t += 2) tiles<kBits, kGroups, 2>(x, first, count, weight, bias, t, y);
      if (t < end) tiles<kBits, kGroups, 1>(x, first, count, weight, bias, t, y);
    }
  }

 private:
  static constexpr int64_t kRows = 96;   // rows of x that meet a panel before the next one is unpacked
  static constexpr int64_t kBlocks = 4;  // blocks of a panel

  template <int kTiles>
  struct Panel {
    __m256 values[kBlocks * 32][kTiles];  // W by column
  };

  template <int kBits, int kGroups, int kTiles>
  void tiles(const BlockRows& x, int64_t first, int64_t count, const uint8_t* weight, const float* bias, int64_t tile,
             float* y) const {
    Panel<kTiles> panel;
    __m256 total[kRows * kTiles];
    for (int64_t i = 0; i < count * kTiles; ++i) total[i] = _mm256_setzero_ps();
    for (int64_t begin = 0; begin < w_.blocks; begin += kBlocks) {
      const int64_t end = begin + kBlocks < w_.blocks ? begin + kBlocks : w_.blocks;
      for (int64_t b = begin; b < end; ++b) {
        for (int t = 0; t < kTiles; ++t) {
          fill<kBits, kGroups>(weight + (tile + t) * w_.tile_bytes + b * w_.record_bytes, t, (b - begin) * 4 * kGroups, panel);
        }
      }
      for (int64_t m = 0; m < count; m += 6) {
        const int64_t left = count - m;
        __m256* sums = total + m * kTiles;
        if (left >= 6) multiply<kGroups, 6>(x, first + m, begin, end, panel, sums);
        else if (left == 5) multiply<kGroups, 5>(x, first + m, begin, end, panel, sums);
        else if (left == 4) multiply<kGroups, 4>(x, first + m, begin, end, panel, sums);
        else if (left == 3) multiply<kGroups, 3>(x, first + m, begin, end, panel, sums);
        else if (left == 2) multiply<kGroups, 2>(x, first + m, begin, end, panel, sums);
        else multiply<kGroups, 1>(x, first + m, begin, end, panel, sums);
      }
    }
    for (int64_t m = 0; m < count; ++m) {
      for (int t = 0; t < kTiles; ++t) store_tile(w_, total[m * kTiles + t], bias, tile + t, first + m, y);
    }
  }

  // One block of tile t becomes the panel's columns from `column` on.
  template <int kBits, int kGroups, int kTiles>
  void fill(const uint8_t* record, int t, int64_t column, Panel<kTiles>& panel) const {
    prefetch(w_, record + kTiles * w_.tile_bytes);  // of the tiles that come next
    const __m256 scale = unpack_.scale(record);
    const __m256 offset = w_.offset ? unpack_.offset(record) : _mm256_setzero_ps();
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
      const __m256i bytes = unpack_.bytes<kBits, kGroups>(record, g);
      for (int j = 0; j < 4; ++j) {
        panel.values[column + 4 * g + j][t] = _mm256_fmadd_ps(unpack_.values(bytes, j), scale, offset);
      }
    }
  }

  // Adds blocks begin .. end - 1 of the rows m .. m + kCount - 1 to their sums [kCount, kTiles].
  template <int kGroups, int kCount, int kTiles>
  void multiply(const BlockRows& x, int64_t m, int64_t begin, int64_t end, const Panel<kTiles>& panel, __m256* sums) const {
    constexpr int kBlock = 4 * kGroups;
    __m256 sum[kCount][kTiles];
    for (int i = 0; i < kCount; ++i) {
      for (int t = 0; t < kTiles; ++t) sum[i][t] = sums[i * kTiles + t];
    }
    const __m256(*values)[kTiles] = panel.values;
    for (int64_t b = begin; b < end; ++b, values += kBlock) {
      const float* columns = x.values(b, m);
#pragma GCC unroll 4
      for (int k = 0; k < kBlock; ++k) {
        __m256 value[kTiles];
        for (int t = 0; t < kTiles; ++t) value[t] = values[k][t];
        for (int i = 0; i < kCount; ++i) {
          const __m256 column = _mm256_broadcast_ss(columns + i * kBlock + k);
          for (int t = 0; t < kTiles; ++t) sum[i][t] = _mm256_fmadd_ps(value[t], column, sum[i][t]);
        }
      }
    }
    for (int i = 0; i < kCount; ++i) {
      for (int t = 0; t < kTiles; ++t) sums[i * kTiles + t] = sum[i][t];
    }
  }

  BlockWeight w_;
  BlockUnpack unpack_;
};
