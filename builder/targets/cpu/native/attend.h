// Attention of a few query rows of one kv head over a range of keys, by the online softmax.
//
// Keys are visited in chunks of kChunk positions, always at multiples of kChunk: the order of the sums, and so the
// result, does not depend on how the range was shared out between tasks.
#pragma once
#include <float.h>

#include "cache_row.h"
#include "simd.h"

constexpr int64_t kChunk = 64;    // keys whose scores are held at once
constexpr int64_t kMaxRows = 32;  // query rows (tokens × heads of the group) a task
constexpr int64_t kMaxWidth = 512;

// Where the keys and values of one sequence and kv head are. T: float, or int8_t with a scale for each row.
template <typename T>
struct CachedHead {
  const T* keys;
  const T* values;
  const float *key_scales, *value_scales;  // [slots, kv_heads]
  const int32_t* table;  // block of each `block_size` positions
  int64_t block_size, key_stride, value_stride, kv_heads, head;  // strides between slots, in elements

  int64_t slot(int64_t position) const { return int64_t(table[position / block_size]) * block_size + position % block_size; }
};

struct Rules {
  int64_t key_width, value_width;  // multiples of 8
  int64_t window;                  // 0: none
  float softcap;                   // 0: none
};

struct QueryRow {
  const float* q;  // scaled already
  int64_t position;
  float slope;     // ALiBi
};

// What has been summed so far: Σ e^(s - top), and values weighted by e^(s - top).
struct RowState {
  float top, total;
  float* values;
};

// scores[j] = q·keys[j] for kRows rows at a time: each key is read once for all of them.
template <int kRows>
inline void score(const QueryRow* rows, const float* const* keys, int64_t count, int64_t width, float (*scores)[kChunk]) {
  for (int64_t j = 0; j < count; ++j) {
    v8 sums[kRows];
    for (int r = 0; r < kRows; ++r) sums[r] = splat8(0.0f);
    for (int64_t d = 0; d < width; d += 8) {
      const v8 key = load8(keys[j] + d);
      for (int r = 0; r < kRows; ++r) sums[r] += key * load8(rows[r].q + d);
    }
    for (int r = 0; r < kRows; ++r) scores[r][j] = sum8(sums[r]);
  }
}

// state.values += Σ weights[j]·values[j], 16 channels at a time.
template <int kRows>
inline void accumulate(RowState* states, const float (*weights)[kChunk], const float* const* values, int64_t count, int64_t width) {
  int64_t d = 0;
  for (; d + 16 <= width; d += 16) {
    v8 a[kRows], b[kRows];
    for (int r = 0; r < kRows; ++r) a[r] = load8(states[r].values + d), b[r] = load8(states[r].values + d + 8);
    for (int64_t j = 0; j < count; ++j) {
      const v8 x = load8(values[j] + d), y = load8(values[j] + d + 8);
      for (int r = 0; r < kRows; ++r) {
        const v8 weight = splat8(weights[r][j]);
        a[r] += weight * x;
        b[r] += weight * y;
      }
    }
    for (int r = 0; r < kRows; ++r) store8(states[r].values + d, a[r]), store8(states[r].values + d + 8, b[r]);
  }
  for (; d < width; d += 8) {
    for (int r = 0; r < kRows; ++r) {
      v8 a = load8(states[r].values + d);
      for (int64_t j = 0; j < count; ++j) a += splat8(weights[r][j]) * load8(values[j] + d);
      store8(states[r].values + d, a);
    }
  }
}

// Turns scores into weights e^(s - top) for the keys [first, first + count) that the row may see; others get 0.
inline void soften(const QueryRow& row, RowState& state, float* scores, int64_t first, int64_t count, const Rules& rules) {
  const int64_t last_seen = row.position - first;  // index of the last key that it may see
  const int64_t first_seen = rules.window > 0 ? last_seen - rules.window + 1 : 0;
  float top = -FLT_MAX;
  if (rules.softcap > 0) {
    for (int64_t j = 0; j < kChunk; j += 8) {
      store8(scores + j, splat8(rules.softcap) * tanh8(load8(scores + j) / splat8(rules.softcap)));
    }
  }
  for (int64_t j = 0; j < kChunk; ++j) {
    if (j >= count || j > last_seen || j < first_seen) {
      scores[j] = -FLT_MAX;
      continue;
    }
    scores[j] += row.slope * float(j - last_seen);
    top = scores[j] > top ? scores[j] : top;
  }
  if (top == -FLT_MAX) {
    memset(scores, 0, kChunk * sizeof(float));
    return;
  }
  top = top > state.top ? top : state.top;
  const float shrink = state.total > 0 ? exp1(state.top - top) : 0.0f;
  v8 total = splat8(0.0f);
  for (int64_t j = 0; j < kChunk; j += 8) {
    const v8 s = load8(scores + j);
    v8 weight = exp8(s - splat8(top));
    weight = s > splat8(-FLT_MAX) ? weight : splat8(0.0f);
    store8(scores + j, weight);
    total += weight;
  }
  state.top = top;
  state.total = state.total * shrink + sum8(total);
  for (int64_t d = 0; d < rules.value_width; d += 8) store8(state.values + d, load8(state.values + d) * splat8(shrink));
}

// Folds the keys [begin, end) into the states of `count` rows.
template <typename T>
inline void attend(const CachedHead<T>& cache, const QueryRow* rows, RowState* states, int64_t count, int64_t begin, int64_t end, const Rules& rules) {
  float scores[4][kChunk];
  const float *keys[kChunk], *values[kChunk];
  Wide<T, kChunk * kMaxWidth> wide_keys, wide_values;
  for (int64_t first = begin; first < end; first += kChunk - first % kChunk) {
    const int64_t limit = first + kChunk - first % kChunk, n = (limit < end ? limit : end) - first;
    for (int64_t j = 0; j < n; ++j) {
      const int64_t slot = cache.slot(first + j);
      const int64_t row = slot * cache.kv_heads + cache.head, width = rules.key_width, v_width = rules.value_width;
      keys[j] = load_row(cache.keys + slot * cache.key_stride, width, cache.key_scales, row, wide_keys.at(j * width));
      values[j] = load_row(cache.values + slot * cache.value_stride, v_width, cache.value_scales, row, wide_values.at(j * v_width));
    }
    for (int64_t r = 0; r < count;) {
      const int64_t left = count - r;
      const int64_t taken = left >= 4 ? 4 : left;
      switch (taken) {
        case 4: score<4>(rows + r, keys, n, rules.key_width, scores); break;
        case 3: score<3>(rows + r, keys, n, rules.key_width, scores); break;
        case 2: score<2>(rows + r, keys, n, rules.key_width, scores); break;
        default: score<1>(rows + r, keys, n, rules.key_width, scores);
      }
      for (int64_t i = 0; i < taken; ++i) {
        for (int64_t j = n; j < kChunk; ++j) scores[i][j] = 0.0f;
        soften(rows[r + i], states[r + i], scores[i], first, n, rules);
      }
      switch (taken) {
        case 4: accumulate<4>(states + r, scores, values, n, rules.value_width); break;
        case 3: accumulate<3>(states + r, scores, values, n, rules.value_width); break;
        case 2: accumulate<2>(states + r, scores, values, n, rules.value_width); break;
        default: accumulate<1>(states + r, scores, values, n, rules.value_width);
      }
      r += taken;
    }
  }
}
