// Owns the backward kernel: the steps of pairing-inl.h, shared out among tasks.
//
// A task owns some of the key blocks of a kv head, so dk and dv need no exchange; dq is summed in
// float32 per task and the tasks of a head are added in a fixed order, so the result does not
// depend on timing. Where those sums would take too much memory, or the result may not depend on
// the number of threads, dq gets a pass of its own over blocks of rows. Dao, "FlashAttention-2",
// 2023.

namespace jax_flash::cpu {
namespace {

template <class T, class Op>
class Backward {
 public:
  static bool Run(const BackwardCall& call, Workers& workers) {
    return Backward(call, workers).Run();
  }

 private:
  using Step = Pairing<T, Op>;
  // A unit in the last place: out is rounded by at most half of it, and so are weights.
  static constexpr float kRounding = std::is_same<T, Float16>::value ? 0x1p-10f : 0x1p-7f;

  Backward(const BackwardCall& call, Workers& workers)
      : call_(call),
        s_(call.in.shapes),
        workers_(workers),
        heads_(s_.batch * s_.kv_heads),
        group_(s_.kv_heads ? s_.q_heads / s_.kv_heads : 0),
        rows_(s_.q_len * group_),
        head_ld_(RoundUp(s_.head_dim, kLanes)),
        keys_(Step::BlockKeys(call.in)) {}

  bool Run() {
    const Memory delta(s_.batch * s_.q_heads * s_.q_len * 4);
    delta_ = delta.get<float>();
    if (!delta_) return false;
    if (sizeof(T) == 2 && call_.dbias) {
      const Memory sizes(s_.batch * s_.q_heads * s_.q_len * 4);
      if (!sizes.get<float>()) return false;
      DeltasOfWeights(sizes.get<float>());
      Deltas(sizes.get<float>());
    } else {
      Deltas(nullptr);
    }

    const int64_t blocks = (s_.kv_len + keys_ - 1) / keys_;
    int64_t parts = 1;  // tasks per head
    const int64_t most = Least(blocks, 2 * workers_.count());
    while (parts < most && !Balanced(heads_ * parts)) ++parts;
    const int64_t sums = rows_ * head_ld_ * 4;
    const int64_t budget = Most(int64_t{64} << 20, heads_ * sums);
    if (parts > 1 && (call_.in.problem.deterministic || heads_ * parts * sums > budget)) {
      KeyTasks(blocks, nullptr);
      QueryTasks();
    } else if (parts > 1) {
      const Memory dq(heads_ * parts * sums);
      if (!dq.get<float>()) return false;
      KeyTasks(parts, dq.get<float>());
      ReduceQuery(dq.get<float>(), parts);
    } else {
      HeadTasks();
    }
    if (call_.dbias && !failed_) BiasGradient();
    return !failed_;
  }

  bool Balanced(int64_t tasks) const {
    const int64_t threads = workers_.count();
    return tasks * 10 >= (tasks + threads - 1) / threads * threads * 9;
  }

  // delta = rowsum(out * dout) - dlse, laid out as lse. With `sizes` delta_ has the sums of
  // DeltasOfWeights, which stay where they differ by no more than rounding: else lse is of more
  // keys than these, as in a ring, whose part of delta they are.
  void Deltas(const float* sizes) {
    const T* out = static_cast<const T*>(call_.out);
    const T* dout = static_cast<const T*>(call_.dout);
    ForEach(workers_, s_.batch * s_.q_heads, [&](int64_t i) {
      for (int64_t t = 0; t < s_.q_len; ++t) {
        const int64_t at = i * s_.q_len + t;
        const int64_t row =
            ((i / s_.q_heads * s_.q_len + t) * s_.q_heads + i % s_.q_heads) * s_.value_dim;
        F sum = Zero(), size = Zero();
        for (int64_t d = 0; d < s_.value_dim; d += kLanes) {
          const F x = LoadPartial(out + row + d, s_.value_dim - d);
          const F y = LoadPartial(dout + row + d, s_.value_dim - d);
          sum = Fma(x, y, sum);
          if (sizes) size = Add(size, Magnitude(Mul(x, y)));
        }
        float delta = ReduceAdd(sum);
        if (sizes) {
          const float rounding = kRounding * (sizes[at] + ReduceAdd(size));
          const float off = delta_[at] - delta;
          if (off <= rounding && -off <= rounding) delta = delta_[at];
        }
        delta_[at] = delta - (call_.dlse ? call_.dlse[at] : 0.0f);
      }
    });
  }

  // rowsum(out * dout) as the sum of p * dout v^T over the keys, in float32: two products more,
  // without the rounding of `out` to 16 bits, which a peaked softmax's gradient of the bias would
  // show. sizes: the sums of magnitudes.
  void DeltasOfWeights(float* sizes) {
    Clear(delta_, s_.batch * s_.q_heads * s_.q_len);
    ForRowBlocks([&](const Head& head, int64_t first, int64_t count) {
      float sums[Step::kMostRows] = {}, magnitudes[Step::kMostRows] = {};
      Row rows[Step::kMostRows];
      Rows(head, rows, first, count);
      WalkRows(head, rows, count, false, [&](Step& step) {
        step.VisitWeightGradients([&](int64_t r, const Span& span, const float* products) {
          F sum = Zero(), size = Zero();
          for (int64_t j = span.begin; j < span.end; j += kLanes) {
            sum = Add(sum, Load(products + j));
            size = Add(size, Magnitude(Load(products + j)));
          }
          sums[r] += ReduceAdd(sum);
          magnitudes[r] += ReduceAdd(size);
        });
      });
      for (int64_t r = 0; r < count; ++r) {
        const int64_t at = head.LseOffset(rows[r]);
        delta_[at] = sums[r];
        sizes[at] = magnitudes[r];
      }
    });
  }

  static F Magnitude(F x) { return Max(x, Sub(Zero(), x)); }

  void Fail() { __atomic_store_n(&failed_, true, __ATOMIC_RELAXED); }

  Head HeadAt(int64_t i) const { return Head(call_.in, i / s_.kv_heads, i % s_.kv_heads); }

  void Rows(const Head& head, Row* rows, int64_t first, int64_t count) const {
    for (int64_t r = 0; r < count; ++r) {
      const int64_t t = (first + r) / group_;
      rows[r] = Step::RowAt(call_, head, t, head.kv * group_ + (first + r) % group_);
    }
  }

  // Key blocks part, part + parts, ... of a head; adds to dq[rows][head_ld] unless it is null. Rows
  // are packed once if `pack_all`, else again for every block of keys.
  void WalkKeys(const Head& head, int64_t part, int64_t parts, float* dq, bool pack_all) {
    Row* rows = nullptr;
    PackedRows<T, Op> packed;
    auto place = [&](Arena& arena) {
      rows = arena.Take<Row>(rows_);
      if (pack_all) packed.Place(arena, rows_, s_);
    };
    Arena count(nullptr);
    place(count);
    const Memory memory(count.used());
    Step step(call_, head, delta_);
    if (!memory.get<void>() || !step.Allocate()) return Fail();
    Arena arena(memory.get<void>());
    place(arena);
    Rows(head, rows, 0, rows_);
    if (pack_all) packed.Fill(call_, head, delta_, rows, rows_);
    for (int64_t key = part * keys_; key < s_.kv_len; key += parts * keys_) {
      step.SetKeys(key, Least(keys_, s_.kv_len - key), dq != nullptr);
      step.ClearKeySums();
      for (int64_t r = 0; r < rows_; r += Step::kMostRows) {
        const int64_t block = Least(Step::kMostRows, rows_ - r);
        if (!(pack_all ? step.SetRows(packed, rows, r, block) : step.SetRows(rows + r, block))) {
          continue;
        }
        step.Weights();
        if (dq) step.AddToQuery(dq + r * head_ld_);
        step.AddToKeys();
      }
      step.StoreKeySums();
    }
  }

  // dq of rows first .. first + count of a head, from their sums.
  void StoreQuery(const Head& head, int64_t first, int64_t count, const float* dq) const {
    const F scale = Set1(call_.in.problem.scale);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t t = (first + r) / group_, n = head.kv * group_ + (first + r) % group_;
      T* to = static_cast<T*>(call_.dq) + head.QueryOffset(Row{t, n, 0, 0}, s_.head_dim);
      for (int64_t d = 0; d < s_.head_dim; d += kLanes) {
        StorePartial(to + d, Mul(scale, Load(dq + r * head_ld_ + d)), s_.head_dim - d);
      }
    }
  }

  void HeadTasks() {
    ForEach(workers_, heads_, [&](int64_t i) {
      const Head head = HeadAt(i);
      const Memory dq(rows_ * head_ld_ * 4);
      if (!dq.get<float>()) return Fail();
      Clear(dq.get<float>(), rows_ * head_ld_);
      WalkKeys(head, 0, 1, dq.get<float>(), true);
      StoreQuery(head, 0, rows_, dq.get<float>());
    });
  }

  void KeyTasks(int64_t parts, float* dq) {
    ForEach(workers_, heads_ * parts, [&](int64_t i) {
      float* sums = dq ? dq + i * rows_ * head_ld_ : nullptr;
      if (sums) Clear(sums, rows_ * head_ld_);
      WalkKeys(HeadAt(i / parts), i % parts, parts, sums, false);
    });
  }

  void ReduceQuery(float* dq, int64_t parts) {
    constexpr int64_t kRows = 256;
    const int64_t chunks = (rows_ + kRows - 1) / kRows;
    ForEach(workers_, heads_ * chunks, [&](int64_t i) {
      const int64_t first = i % chunks * kRows, count = Least(kRows, rows_ - first);
      float* sum = dq + (i / chunks * parts * rows_ + first) * head_ld_;
      for (int64_t part = 1; part < parts; ++part) {
        const float* add = sum + part * rows_ * head_ld_;
        for (int64_t d = 0; d < count * head_ld_; d += kLanes) {
          Store(sum + d, Add(Load(sum + d), Load(add + d)));
        }
      }
      StoreQuery(HeadAt(i / chunks), first, count, sum);
    });
  }

  void QueryTasks() {
    ForRowBlocks([&](const Head& head, int64_t first, int64_t count) {
      const Memory dq(count * head_ld_ * 4);
      if (!dq.get<float>()) return Fail();
      Clear(dq.get<float>(), count * head_ld_);
      Row rows[Step::kMostRows];
      Rows(head, rows, first, count);
      WalkRows(head, rows, count, true, [&](Step& step) {
        step.Weights();
        step.AddToQuery(dq.get<float>());
      });
      StoreQuery(head, first, count, dq.get<float>());
    });
  }

  // Tasks visit(head, first, count), one for every block of rows.
  template <class Visit>
  void ForRowBlocks(Visit visit) {
    const int64_t blocks = (rows_ + Step::kMostRows - 1) / Step::kMostRows;
    ForEach(workers_, heads_ * blocks, [&](int64_t i) {
      const int64_t first = (blocks - 1 - i / heads_) * Step::kMostRows;
      visit(HeadAt(i % heads_), first, Least(Step::kMostRows, rows_ - first));
    });
  }

  // Calls visit(step) with rows of a head against every block of keys that they see.
  template <class Visit>
  void WalkRows(const Head& head, const Row* rows, int64_t count, bool for_query, Visit visit) {
    Step step(call_, head, delta_);
    if (!step.Allocate()) return Fail();
    int64_t lo = s_.kv_len, hi = 0;
    for (int64_t r = 0; r < count; ++r) {
      if (rows[r].lo >= rows[r].hi) continue;
      lo = Least(lo, rows[r].lo);
      hi = Most(hi, rows[r].hi);
    }
    // From where a walk over all keys has its blocks: so dq has the same bits as in HeadTasks.
    for (int64_t key = lo / keys_ * keys_; key < hi; key += keys_) {
      step.SetKeys(key, Least(keys_, s_.kv_len - key), for_query);
      if (step.SetRows(rows, count)) visit(step);
    }
  }

  // The gradient of the bias is ds summed over the axes along which the bias broadcasts. It gets a
  // pass of its own, so that every element is summed by one task, in a fixed order.
  void BiasGradient() {
    const Broadcast& bias = call_.in.bias;
    if (bias.rows == 1) {
      BiasByKeys(bias);
    } else {
      BiasByRows(bias);
    }
  }

  // Calls visit(b, n) for the batch rows and heads that share the stored plane i of the bias.
  template <class Visit>
  void ForPlane(const Broadcast& bias, int64_t plane, Visit visit) const {
    for (int64_t b = 0; b < s_.batch; ++b) {
      if (bias.batch[b] != plane / bias.heads) continue;
      const int64_t first = bias.heads == 1 ? 0 : plane % bias.heads;
      const int64_t last = bias.heads == 1 ? s_.q_heads : first + 1;
      for (int64_t n = first; n < last; ++n) visit(b, n);
    }
  }

  void StoreBias(int64_t at, const float* sum, int64_t count) const {
    for (int64_t j = 0; j < count; j += kLanes) {
      const F x = LoadPartial(sum + j, count - j);
      switch (call_.in.bias_dtype) {
        case DType::kBFloat16:
          StorePartial(static_cast<BFloat16*>(call_.dbias) + at + j, x, count - j);
          break;
        case DType::kFloat16:
          StorePartial(static_cast<Float16*>(call_.dbias) + at + j, x, count - j);
          break;
        default:
          StorePartial(static_cast<float*>(call_.dbias) + at + j, x, count - j);
      }
    }
  }

  // A bias with one value per key, or one altogether: a task sums a block of keys over all rows.
  void BiasByKeys(const Broadcast& bias) {
    const int64_t planes = bias.batch_count * bias.heads;
    const int64_t blocks = (s_.kv_len + keys_ - 1) / keys_;
    const Memory totals(planes * blocks * 4);
    if (!totals.get<float>()) return Fail();
    ForEach(workers_, planes * blocks, [&](int64_t i) {
      const int64_t plane = i / blocks, key = i % blocks * keys_;
      const int64_t valid = Least(keys_, s_.kv_len - key);
      const Memory sums((keys_ + kLanes) * 4);
      float* sum = sums.get<float>();
      if (!sum) return Fail();
      Clear(sum, keys_ + kLanes);
      ForPlane(bias, plane, [&](int64_t b, int64_t n) {
        const Head head(call_.in, b, n / group_);
        Step step(call_, head, delta_);
        if (!step.Allocate()) return Fail();
        step.SetKeys(key, valid, false);
        Row rows[Step::kMostRows];
        for (int64_t t = 0; t < s_.q_len; t += Step::kMostRows) {
          const int64_t count = Least(Step::kMostRows, s_.q_len - t);
          for (int64_t r = 0; r < count; ++r) rows[r] = Step::RowAt(call_, head, t + r, n);
          if (!step.SetRows(rows, count)) continue;
          step.VisitScoreGradients([&](int64_t, const Span& span, const float* ds) {
            for (int64_t j = span.begin; j < span.end; j += kLanes) {
              Store(sum + j, Add(Load(sum + j), Load(ds + j)));
            }
          });
        }
      });
      if (bias.keys != 1) return StoreBias(plane * bias.keys + key, sum, valid);
      float total = 0.0f;
      for (int64_t j = 0; j < valid; ++j) total += sum[j];
      totals.get<float>()[i] = total;
    });
    if (bias.keys != 1) return;
    for (int64_t plane = 0; plane < planes; ++plane) {
      float total = 0.0f;
      for (int64_t i = 0; i < blocks; ++i) total += totals.get<float>()[plane * blocks + i];
      StoreBias(plane, &total, 1);
    }
  }

  // A bias with values per row: a task sums a block of rows, block by block of keys.
  void BiasByRows(const Broadcast& bias) {
    const int64_t planes = bias.batch_count * bias.heads;
    const int64_t blocks = (s_.q_len + Step::kMostRows - 1) / Step::kMostRows;
    const int64_t ld = keys_ + kLanes;
    ForEach(workers_, planes * blocks, [&](int64_t i) {
      const int64_t plane = i / blocks, t = i % blocks * Step::kMostRows;
      const int64_t count = Least(Step::kMostRows, s_.q_len - t);
      const Memory sums(Step::kMostRows * ld * 4);
      float* sum = sums.get<float>();
      if (!sum) return Fail();
      const int64_t at = (plane * bias.rows + t) * bias.keys;
      Clear(sum, Step::kMostRows * ld);
      for (int64_t key = 0; key < s_.kv_len; key += keys_) {
        const int64_t valid = Least(keys_, s_.kv_len - key);
        if (bias.keys != 1) Clear(sum, count * ld);
        ForPlane(bias, plane, [&](int64_t b, int64_t n) {
          const Head head(call_.in, b, n / group_);
          Step step(call_, head, delta_);
          if (!step.Allocate()) return Fail();
          Row rows[Step::kMostRows];
          for (int64_t r = 0; r < count; ++r) rows[r] = Step::RowAt(call_, head, t + r, n);
          step.SetKeys(key, valid, false);
          if (!step.SetRows(rows, count)) return;
          step.VisitScoreGradients([&](int64_t r, const Span& span, const float* ds) {
            float* to = sum + r * ld;
            for (int64_t j = span.begin; j < span.end; j += kLanes) {
              Store(to + j, Add(Load(to + j), Load(ds + j)));
            }
          });
        });
        if (bias.keys == 1) continue;
        for (int64_t r = 0; r < count; ++r)
          StoreBias(at + r * bias.keys + key, sum + r * ld, valid);
      }
      if (bias.keys != 1) return;
      for (int64_t r = 0; r < count; ++r) {
        F total = Zero();
        for (int64_t j = 0; j < keys_; j += kLanes) total = Add(total, Load(sum + r * ld + j));
        const float x = ReduceAdd(total);
        StoreBias(at + r, &x, 1);
      }
    });
  }

  const BackwardCall& call_;
  const Shapes& s_;
  Workers& workers_;
  const int64_t heads_, group_, rows_, head_ld_, keys_;
  float* delta_ = nullptr;
  bool failed_ = false;
};

}  // namespace
}  // namespace jax_flash::cpu
