// PagedAttention: rotates q and k, appends k and v to the pools in place, attends over the sequence's blocks.
//
// Inputs: q [T, Hq·D] (or q|k|v [T, (Hq + Hkv)·D + Hkv·Dv] when k and v are absent), k, v, cos and sin [T, R / 2] (absent: no
// rotation), the layer's pools [slots, Hkv·D] and [slots, Hkv·Dv], slot_mapping [T], block_tables [B, blocks],
// seq_lens [B], cu_q_lens [B + 1], sinks [Hq], slopes [Hq]; for pools of int8, those of their scales [slots, Hkv] each.
// Output [T, Hq·Dv].
//
// The pools are graph inputs that this operator writes to: onnxruntime passes bound buffers by address, so nothing is
// copied however large the pools are.
#pragma once
#include "attend.h"
#include "op.h"
#include "rotate.h"

template <typename T>  // of the pools
class PagedAttention {
 public:
  static constexpr bool kFloats = sizeof(T) == sizeof(float);
  static constexpr ort::ElementType kPool = kFloats ? ort::kFloat : ort::kInt8;
  static constexpr const char* kName = kFloats ? "PagedAttention" : "PagedAttentionInt8";
  static constexpr ort::Input kInputs[] = {
      {ort::kFloat},       {ort::kFloat, true}, {ort::kFloat, true}, {ort::kFloat, true},  {ort::kFloat, true},
      {kPool},             {kPool},             {ort::kInt32},       {ort::kInt32},        {ort::kInt32},
      {ort::kInt32},       {ort::kFloat, true}, {ort::kFloat, true}, {ort::kFloat, kFloats}, {ort::kFloat, kFloats}};

  explicit PagedAttention(const ort::Attributes& attributes)
      : q_heads_(attributes.integer("q_heads")),
        kv_heads_(attributes.integer("kv_heads")),
        block_size_(attributes.integer("block_size")),
        interleaved_(attributes.integer("interleaved")),
        scale_(attributes.real("scale")),
        rules_{attributes.integer("key_width"), attributes.integer("value_width"), attributes.integer("window"), attributes.real("softcap")} {}

  void compute(ort::Context& c) {
    Step s;
    read(c, s);
    const int64_t dims[] = {s.tokens, q_heads_ * rules_.value_width};
    s.out = c.output(dims, 2);
    if (c.error() != nullptr) return;
    s.rotated = rotated_.at_least(s.tokens * q_heads_ * rules_.key_width);
    const int64_t share = 8;
    c.parallel((s.tokens + share - 1) / share, [&](int64_t task) {
      for (int64_t t = task * share; t < s.tokens && t < (task + 1) * share; ++t) prepare(s, t);
    });
    plan(s);
    c.parallel(count_, [&](int64_t i) { run(s, tasks_.data()[i]); });
    for (int64_t b = 0; b < s.sequences; ++b) merge(s, b);
  }

 private:
  struct Step {
    const float *q, *k, *v, *cos, *sin, *sinks, *slopes;
    T *keys, *values;
    float *key_scales, *value_scales, *out, *rotated;
    const int32_t *slots, *tables, *lengths, *starts;
    int64_t tokens, sequences, table_width, half, q_stride, k_stride, v_stride;
  };

  // Tokens [begin, end) of a sequence, one kv head, keys [first, last). partial: where to leave unmerged sums, or -1.
  struct Task {
    int64_t sequence, head, begin, end, first, last, partial;
  };

  void read(ort::Context& c, Step& s) {
    const auto q = c.input<const float>(0), k = c.input<const float>(1), v = c.input<const float>(2);
    const auto cos = c.input<const float>(3), sin = c.input<const float>(4);
    const auto keys = c.input<T>(5), values = c.input<T>(6);
    const auto slots = c.input<const int32_t>(7), tables = c.input<const int32_t>(8);
    const auto lengths = c.input<const int32_t>(9), starts = c.input<const int32_t>(10);
    const auto sinks = c.input<const float>(11), slopes = c.input<const float>(12);
    const auto key_scales = c.input<float>(13), value_scales = c.input<float>(14);
    const int64_t q_width = q_heads_ * rules_.key_width, k_width = kv_heads_ * rules_.key_width;
    const int64_t v_width = kv_heads_ * rules_.value_width;
    const bool packed = !k;
    s.tokens = q.dims[0];
    s.q = q.data;
    s.k = packed ? q.data + q_width : k.data;
    s.v = packed ? q.data + q_width + k_width : v.data;
    s.q_stride = packed ? q_width + k_width + v_width : q_width;
    s.k_stride = packed ? s.q_stride : k_width;
    s.v_stride = packed ? s.q_stride : v_width;
    s.cos = cos.data, s.sin = sin.data, s.half = cos ? cos.width() : 0;
    s.keys = keys.data, s.values = values.data;
    s.key_scales = key_scales.data, s.value_scales = value_scales.data;
    s.slots = slots.data, s.tables = tables.data, s.lengths = lengths.data, s.starts = starts.data;
    s.sequences = lengths.width(), s.table_width = tables.width();
    s.sinks = sinks.data, s.slopes = slopes.data;
  }

  void prepare(const Step& s, int64_t t) const {
    const int64_t width = rules_.key_width;
    const float *cos = s.cos + t * s.half, *sin = s.sin + t * s.half;
    for (int64_t h = 0; h < q_heads_; ++h) {
      rotate(s.q + t * s.q_stride + h * width, s.rotated + (t * q_heads_ + h) * width, width, cos, sin, s.half, interleaved_, scale_);
    }
    for (int64_t h = 0; h < kv_heads_; ++h) {
      const int64_t row = int64_t(s.slots[t]) * kv_heads_ + h, v_width = rules_.value_width;
      alignas(32) float key[kMaxWidth];
      rotate(s.k + t * s.k_stride + h * width, key, width, cos, sin, s.half, interleaved_, 1.0f);
      store_row(key, width, s.keys + row * width, s.key_scales, row);
      store_row(s.v + t * s.v_stride + h * v_width, v_width, s.values + row * v_width, s.value_scales, row);
    }
  }

  // Share out the work. Several tokens: a task a few tokens over all their keys. One token: a task a chunk of keys.
  void plan(const Step& s) {
    int64_t count = 0, partials = 0;
    const int64_t group = q_heads_ / kv_heads_, few = kMaxRows / group < 1 ? 1 : kMaxRows / group;
    for (int pass = 0; pass < 2; ++pass) {  // first count, then fill
      Task* tasks = tasks_.at_least(count);
      count = partials = 0;
      for (int64_t b = 0; b < s.sequences; ++b) {
        const int64_t begin = s.starts[b], end = s.starts[b + 1], length = s.lengths[b], cached = length - (end - begin);
        for (int64_t h = 0; h < kv_heads_; ++h) {
          if (end - begin == 1) {
            for (int64_t first = oldest(length - 1); first < length; first += kChunk - first % kChunk) {
              const int64_t limit = first + kChunk - first % kChunk;
              if (pass == 1) tasks[count] = {b, h, begin, end, first, limit < length ? limit : length, partials};
              ++count, ++partials;
            }
            continue;
          }
          for (int64_t t = begin; t < end; t += few) {
            const int64_t until = t + few < end ? t + few : end;
            if (pass == 1) tasks[count] = {b, h, t, until, oldest(cached + t - begin), cached + until - begin, -1};
            ++count;
          }
        }
      }
    }
    partials_.at_least(partials * group * partial_width());
    count_ = count;
  }

  int64_t oldest(int64_t position) const {
    return rules_.window > 0 && position >= rules_.window ? position - rules_.window + 1 : 0;
  }
  int64_t partial_width() const { return 2 + rules_.value_width; }

  void run(const Step& s, const Task& task) const {
    const int64_t group = q_heads_ / kv_heads_, width = rules_.value_width;
    alignas(32) float values[kMaxRows * kMaxWidth];
    QueryRow rows[kMaxRows];
    RowState states[kMaxRows];
    const CachedHead<T> cache = {s.keys + task.head * rules_.key_width, s.values + task.head * width,
                                 s.key_scales, s.value_scales,
                                 s.tables + task.sequence * s.table_width, block_size_,
                                 kv_heads_ * rules_.key_width, kv_heads_ * width, kv_heads_, task.head};
    const int64_t newest = s.lengths[task.sequence] - 1, last_token = s.starts[task.sequence + 1] - 1;
    // A group wider than kMaxRows goes in slices of its heads.
    for (int64_t t = task.begin; t < task.end;) {
      const int64_t tokens = task.end - t;
      for (int64_t g = 0; g < group; g += kMaxRows) {
        const int64_t heads = group - g < kMaxRows ? group - g : kMaxRows;
        const int64_t count = group <= kMaxRows ? tokens * heads : heads;
        for (int64_t r = 0; r < count; ++r) {
          const int64_t token = t + r / heads, head = task.head * group + g + r % heads;
          rows[r] = {s.rotated + (token * q_heads_ + head) * rules_.key_width, newest - (last_token - token), s.slopes ? s.slopes[head] : 0.0f};
          states[r] = {-FLT_MAX, 0.0f, values + r * width};
        }
        memset(values, 0, count * width * sizeof(float));
        attend(cache, rows, states, count, task.first, task.last, rules_);
        for (int64_t r = 0; r < count; ++r) {
          const int64_t token = t + r / heads, head = task.head * group + g + r % heads;
          if (task.partial < 0) finish(s, states[r], token, head);
          else keep(states[r], task.partial * group + g + r);
        }
      }
      t = group <= kMaxRows ? task.end : t + 1;
    }
  }

  // Divides by the total, in which the head's sink has its part.
  void finish(const Step& s, const RowState& state, int64_t token, int64_t head) const {
    float top = state.top, total = state.total, shrink = 1.0f;
    if (s.sinks != nullptr) {
      top = s.sinks[head] > top ? s.sinks[head] : top;
      shrink = exp1(state.top - top);
      total = total * shrink + exp1(s.sinks[head] - top);
    }
    float* out = s.out + (token * q_heads_ + head) * rules_.value_width;
    for (int64_t d = 0; d < rules_.value_width; d += 8) store8(out + d, load8(state.values + d) * splat8(shrink / total));
  }

  void keep(const RowState& state, int64_t at) const {
    float* partial = partials_.data() + at * partial_width();
    partial[0] = state.top;
    partial[1] = state.total;
    memcpy(partial + 2, state.values, rules_.value_width * sizeof(float));
  }

  // Adds up the partial sums of a sequence with one token, chunk by chunk in order.
  void merge(const Step& s, int64_t b) const {
    if (s.starts[b + 1] - s.starts[b] != 1) return;
    const int64_t group = q_heads_ / kv_heads_;
    const Task* tasks = tasks_.data();
    int64_t i = 0;
    while (tasks[i].sequence != b) ++i;
    for (int64_t h = 0; h < kv_heads_; ++h) {
      int64_t end = i;
      while (end < count_ && tasks[end].sequence == b && tasks[end].head == h) ++end;
      for (int64_t g = 0; g < group; ++g) merge_row(s, tasks, i, end, g);
      i = end;
    }
  }

  void merge_row(const Step& s, const Task* tasks, int64_t i, int64_t end, int64_t g) const {
    const int64_t group = q_heads_ / kv_heads_;
    alignas(32) float values[kMaxWidth] = {};
    RowState state = {-FLT_MAX, 0.0f, values};
    for (int64_t j = i; j < end; ++j) {
      const float top = partials_.data()[(tasks[j].partial * group + g) * partial_width()];
      state.top = top > state.top ? top : state.top;
    }
    for (int64_t j = i; j < end; ++j) {
      const float* partial = partials_.data() + (tasks[j].partial * group + g) * partial_width();
      const float shrink = exp1(partial[0] - state.top);
      state.total += shrink * partial[1];
      for (int64_t d = 0; d < rules_.value_width; d += 8) {
        store8(values + d, load8(values + d) + splat8(shrink) * load8(partial + 2 + d));
      }
    }
    finish(s, state, tasks[i].begin, tasks[i].head * group + g);
  }

  int64_t q_heads_, kv_heads_, block_size_, interleaved_;
  float scale_;
  Rules rules_;
  int64_t count_ = 0;
  ort::Buffer<float> rotated_, partials_;
  ort::Buffer<Task> tasks_;
};
