// Rows of x as a linear over blocks reads them: [block][row][column], so that a block of many rows is one stream.
//
// The last block is padded with zeros where the weight's blocks reach beyond x. Beside them lie the sums of x over each
// block, which a weight's offset is multiplied with.
#pragma once
#include "block_weight.h"
#include "simd.h"

class BlockRows {
 public:
  explicit BlockRows(const BlockWeight& w) : columns_(w.columns), block_(w.block), blocks_(w.blocks), sums_(w.offset) {}

  // For `rows` rows; each is to be set then. Rows may be set by several threads.
  void allocate(int64_t rows) {
    count_ = rows;
    values_ = values_buffer_.at_least(rows * blocks_ * block_);
    if (sums_) mass_ = mass_buffer_.at_least(rows * blocks_);
  }

  void set(int64_t m, const float* x) {
    for (int64_t b = 0; b < blocks_; ++b) {
      const int64_t left = columns_ - b * block_, width = left < block_ ? left : block_;
      float* out = values_ + (b * count_ + m) * block_;
      memcpy(out, x + b * block_, width * sizeof(float));
      for (int64_t i = width; i < block_; ++i) out[i] = 0;
      if (!sums_) continue;
      v8 sum = load8(out);
      for (int64_t i = 8; i < block_; i += 8) sum += load8(out + i);
      mass_[b * count_ + m] = sum8(sum);
    }
  }

  // [rows, block columns]: block b of the rows from m on.
  const float* values(int64_t b, int64_t m) const { return values_ + (b * count_ + m) * block_; }
  // The sum of row m over block b; only for weights with an offset.
  const float* mass(int64_t b, int64_t m) const { return mass_ + b * count_ + m; }

 private:
  int64_t columns_, block_, blocks_, sums_, count_ = 0;
  float *values_ = nullptr, *mass_ = nullptr;
  ort::Buffer<float> values_buffer_, mass_buffer_;
};
