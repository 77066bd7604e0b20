// BlockLinear: y[M, N] = x[M, K]·Wᵀ + bias, W in blocks (block_weight.h), x quantized by blocks (activations.h).
//
// A tile of 8 output rows is computed for up to 4 input rows at a time. Each 32-bit lane of a byte vector belongs to
// one output row, so products are summed inside their lane and no horizontal sum is ever needed. The order of the
// float additions does not depend on M: a token gives the same result alone and in a batch.
#pragma once
#include "activations.h"
#include "block_weight.h"

class BlockLinear {
 public:
  static constexpr const char* kName = "BlockLinear";
  static constexpr ort::Input kInputs[] = {{ort::kFloat}, {ort::kUInt8}, {ort::kFloat, true}};

  explicit BlockLinear(const ort::Attributes& attributes) : w_(attributes) {
    x_.columns = w_.columns;
    x_.block = w_.block;
    x_.blocks = w_.blocks;
  }

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
      for (int64_t m = task * rows_a_task; m < rows && m < (task + 1) * rows_a_task; ++m) {
        x_.quantize(m, x.data + m * w_.columns);
      }
    });
    if (w_.bits == 4) w_.block == 32 ? run<4, 8>(c, weight.data, bias.data, y, rows) : run<4, 4>(c, weight.data, bias.data, y, rows);
    else w_.block == 32 ? run<8, 8>(c, weight.data, bias.data, y, rows) : run<8, 4>(c, weight.data, bias.data, y, rows);
  }

 private:
  static constexpr int64_t kBytesATask = 48 << 10;  // enough work to pay for handing out a task

  template <int kBits, int kGroups>
  void run(ort::Context& c, const uint8_t* weight, const float* bias, float* y, int64_t rows) {
    const int64_t tiles = w_.tiles();
    int64_t share = kBytesATask / (w_.tile_bytes * (rows > 4 ? rows / 4 : 1));
    share = share < 1 ? 1 : share;
    const int64_t tasks = (tiles + share - 1) / share;
    c.parallel(tasks, [&](int64_t task) {
      for (int64_t t = tiles * task / tasks; t < tiles * (task + 1) / tasks; ++t) {
        const uint8_t* records = weight + t * w_.tile_bytes;
        int64_t m = 0;
        for (; m + 4 <= rows; m += 4) tile<kBits, kGroups, 4>(records, bias, t, m, y);
        for (; m < rows; ++m) tile<kBits, kGroups, 1>(records, bias, t, m, y);
      }
    });
  }

  template <int kBits, int kGroups, int kRows>
  void tile(const uint8_t* record, const float* bias, int64_t t, int64_t m, float* y) const {
    constexpr int kBlock = 4 * kGroups;
    __m256 total[kRows];
    for (int i = 0; i < kRows; ++i) total[i] = _mm256_setzero_ps();
    const int8_t* q = x_.q + m * w_.blocks * 2 * kBlock;
    const float* step = x_.step + m * w_.blocks;
    const int32_t* sum = x_.sum + m * w_.blocks;
    for (int64_t b = 0; b < w_.blocks; ++b, record += w_.record_bytes) {
      const __m256 scale = load_scales(record, w_.wide);
      const __m256 offset = w_.offset ? load_scales(record + w_.scale_bytes, w_.wide) : _mm256_setzero_ps();
      const auto* bytes = reinterpret_cast<const __m256i*>(record + w_.scale_bytes * (1 + w_.offset));
      __m256i dots[kRows];
      dot<kBits, kGroups, kRows>(bytes, q + b * 2 * kBlock, w_.blocks * 2 * kBlock, dots);
      for (int i = 0; i < kRows; ++i) {
        const int64_t at = i * w_.blocks + b;
        // 4-bit values are unsigned: the zero is taken off here, once a block. 8-bit ones are stored without it.
        if (kBits == 4) dots[i] = _mm256_sub_epi32(dots[i], _mm256_set1_epi32(int32_t(w_.zero) * sum[at]));
        const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(step[at]));
        total[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[i]), factor, total[i]);
        if (w_.offset) total[i] = _mm256_fmadd_ps(offset, _mm256_set1_ps(step[at] * float(sum[at])), total[i]);
      }
    }
    const int64_t n = 8 * t, valid = w_.rows - n < 8 ? w_.rows - n : 8;
    for (int i = 0; i < kRows; ++i) {
      float* out = y + (m + i) * w_.rows + n;
      alignas(32) float values[8];
      _mm256_store_ps(values, total[i]);
      for (int64_t j = 0; j < valid; ++j) out[j] = values[j] + (bias != nullptr ? bias[n + j] : 0.0f);
    }
  }

  // dots[i] = for each of 8 output rows, Σ q·x over one block, for input row i: 128·Σ q·high + Σ q·low.
  template <int kBits, int kGroups, int kRows>
  static void dot(const __m256i* bytes, const int8_t* x, int64_t stride, __m256i* dots) {
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (kBits == 4) {
      const __m256i nibble = _mm256_set1_epi8(15);
      __m256i group[kGroups];
      for (int g = 0; g < kGroups / 2; ++g) {
        const __m256i both = _mm256_loadu_si256(bytes + g);
        group[g] = _mm256_and_si256(both, nibble);
        group[g + kGroups / 2] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
      }
      for (int i = 0; i < kRows; ++i) {
        // Sums of at most 8 · 2 · 15 · 127 = 30,480 fit 16 bits.
        __m256i high = _mm256_maddubs_epi16(group[0], spread(x + i * stride));
        __m256i low = _mm256_maddubs_epi16(group[0], spread(x + i * stride + 4 * kGroups));
        for (int g = 1; g < kGroups; ++g) {
          high = _mm256_add_epi16(high, _mm256_maddubs_epi16(group[g], spread(x + i * stride + 4 * g)));
          low = _mm256_add_epi16(low, _mm256_maddubs_epi16(group[g], spread(x + i * stride + 4 * (g + kGroups))));
        }
        dots[i] = _mm256_add_epi32(_mm256_slli_epi32(_mm256_madd_epi16(high, ones), 7), _mm256_madd_epi16(low, ones));
      }
    } else {
      __m256i high[kRows], low[kRows];
      for (int i = 0; i < kRows; ++i) high[i] = low[i] = _mm256_setzero_si256();
      for (int g = 0; g < kGroups; ++g) {
        const __m256i value = _mm256_loadu_si256(bytes + g), magnitude = _mm256_abs_epi8(value);
        for (int i = 0; i < kRows; ++i) {
          // |q|·(sign(q)·x): the multiply-add wants one unsigned side. 2 · 128 · 127 = 32,512 fits 16 bits.
          const __m256i a = _mm256_sign_epi8(spread(x + i * stride + 4 * g), value);
          const __m256i b = _mm256_sign_epi8(spread(x + i * stride + 4 * (g + kGroups)), value);
          high[i] = _mm256_add_epi32(high[i], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, a), ones));
          low[i] = _mm256_add_epi32(low[i], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, b), ones));
        }
      }
      for (int i = 0; i < kRows; ++i) dots[i] = _mm256_add_epi32(_mm256_slli_epi32(high[i], 7), low[i]);
    }
  }

  // Four bytes, repeated in all eight lanes.
  static __m256i spread(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
  }

  BlockWeight w_;
  Activations x_;
};
