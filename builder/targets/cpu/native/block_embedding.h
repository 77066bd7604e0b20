// BlockEmbedding: rows of a weight in blocks, as float32: ids [T] int32 -> [T, K]. Reads the table that a tied lm_head uses.
#pragma once
#include "block_weight.h"

class BlockEmbedding {
 public:
  static constexpr const char* kName = "BlockEmbedding";
  static constexpr ort::Input kInputs[] = {{ort::kInt32}, {ort::kUInt8}};

  explicit BlockEmbedding(const ort::Attributes& attributes) : w_(attributes) {}

  void compute(ort::Context& c) {
    const auto ids = c.input<const int32_t>(0);
    const auto weight = c.input<const uint8_t>(1);
    const int64_t count = ids.rows() * ids.width();
    const int64_t dims[] = {count, w_.columns};
    float* y = c.output(dims, 2);
    if (c.error() != nullptr) return;
    for (int64_t t = 0; t < count; ++t) {
      if (ids.data[t] < 0 || ids.data[t] >= w_.rows) return c.fail("a token id is outside the embedding table");
      row(weight.data + ids.data[t] / 8 * w_.tile_bytes, ids.data[t] % 8, y + t * w_.columns);
    }
  }

 private:
  void row(const uint8_t* record, int64_t lane, float* out) const {
    const int64_t groups = w_.block / 4;
    for (int64_t b = 0; b < w_.blocks; ++b, record += w_.record_bytes) {
      alignas(32) float scale[8], offset[8] = {};
      _mm256_store_ps(scale, load_scales(record, w_.wide));
      if (w_.offset) _mm256_store_ps(offset, load_scales(record + w_.scale_bytes, w_.wide));
      const uint8_t* q = record + w_.scale_bytes * (1 + w_.offset) + lane * 4;
      for (int64_t k = 0; k < w_.block && b * w_.block + k < w_.columns; ++k) {
        const int64_t g = k / 4, half = groups / 2;
        const int64_t value = w_.bits == 8 ? q[g * 32 + k % 4] : (q[g % half * 32 + k % 4] >> (g < half ? 0 : 4)) & 15;
        out[b * w_.block + k] = scale[lane] * float(value - w_.zero) + offset[lane];
      }
    }
  }

  BlockWeight w_;
};
