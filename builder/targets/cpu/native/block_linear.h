// BlockLinear: y[M, N] = x[M, K]·Wᵀ + bias, W in blocks (block_weight.h) that are unpacked as they are used.
//
//   y[m, n] = Σ_b scale[n, b] · (Σ_k x[m, k]·(q[n, k] - zero)) + offset[n, b] · Σ_k x[m, k]     k: columns of block b
//
// All sums are float32. One row of x and many take different ways (single_row.h, many_rows.h).
#pragma once
#include "block_rows.h"
#include "many_rows.h"
#include "single_row.h"

class BlockLinear {
 public:
  static constexpr const char* kName = "BlockLinear";
  static constexpr ort::Input kInputs[] = {{ort::kFloat}, {ort::kUInt8}, {ort::kFloat, true}};

  explicit BlockLinear(const ort::Attributes& attributes, const char* prefix = "")
      : w_(attributes, prefix), x_(w_), single_(w_), many_(w_) {}

  void compute(ort::Context& c) {
    const auto x = c.input<const float>(0);
    const auto weight = c.input<const uint8_t>(1);
    const auto bias = c.input<const float>(2);
    float* y = c.output(x, w_.rows);
    if (c.error() != nullptr) return;
    const int64_t rows = x.rows();
    x_.allocate(rows);
    const int64_t rows_a_task = 16;
    c.parallel((rows + rows_a_task - 1) / rows_a_task, [&](int64_t task) {
      for (int64_t m = task * rows_a_task; m < rows && m < (task + 1) * rows_a_task; ++m) x_.set(m, x.data + m * w_.columns);
    });
    const int64_t fours = (w_.tiles() + 3) / 4;
    const int64_t share = 4 * w_.tile_bytes < kBytesATask ? kBytesATask / (4 * w_.tile_bytes) : 1;
    const int64_t tasks = (fours + share - 1) / share;
    c.parallel(tasks, [&](int64_t task) {
      const int64_t end = 4 * (fours * (task + 1) / tasks);
      part(weight.data, bias.data, 4 * (fours * task / tasks), end < w_.tiles() ? end : w_.tiles(), 0, rows, y);
    });
  }

 protected:
  static constexpr int64_t kBytesATask = 48 << 10;  // of weights: enough to pay for handing out a task

  // Tiles begin .. end - 1 for the rows first .. last - 1, which are set already.
  void part(const uint8_t* weight, const float* bias, int64_t begin, int64_t end, int64_t first, int64_t last, float* y) const {
    if (w_.bits == 4 && w_.block == 32) part<4, 8>(weight, bias, begin, end, first, last, y);
    else if (w_.bits == 4) part<4, 4>(weight, bias, begin, end, first, last, y);
    else if (w_.block == 32) part<8, 8>(weight, bias, begin, end, first, last, y);
    else part<8, 4>(weight, bias, begin, end, first, last, y);
  }

  template <int kBits, int kGroups>
  void part(const uint8_t* weight, const float* bias, int64_t begin, int64_t end, int64_t first, int64_t last, float* y) const {
    if (last - first == 1) single_.part<kBits, kGroups>(x_, first, weight, bias, begin, end, y);
    else many_.part<kBits, kGroups>(x_, first, last, weight, bias, begin, end, y);
  }

  BlockWeight w_;
  BlockRows x_;
  SingleRow single_;
  ManyRows many_;
};
