// Owns the forward kernel: tiled attention with an online softmax.
//
// A unit of work is a block of query rows of one kv head, all query heads of its group included. It
// walks the blocks of keys its rows can see; per block it packs keys and values once, then takes
// kTileRows rows at a time through scores, softmax and the product with the values, with the scores
// of a tile in L1 and the output accumulators in registers.
// Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
// "FlashAttention", 2022.

#include <cmath>

namespace jax_flash::cpu {
namespace {

// Keys in a block: packed keys and values of one block take 256 KiB or less of a 1 MiB L2.
inline int64_t BlockKeys(int64_t head_dims) {
  return head_dims <= 256 ? 256 : head_dims <= 512 ? 128 : 64;
}

template <class T, class Op>
class Forward {
 public:
  static bool Run(const ForwardCall& call, Workers& workers) {
    const Shapes& s = call.in.shapes;
    const int64_t heads = s.batch * s.kv_heads;
    if (heads == 0 || s.q_len == 0) return true;
    const int64_t rows = s.q_len * (s.q_heads / s.kv_heads);
    const int64_t block = RowBlock(rows, heads, workers.count(), s.head_dim + s.value_dim);
    const int64_t blocks = (rows + block - 1) / block;
    bool failed = false;
    // Last rows first: under a causal mask they see the most keys.
    ForEach(workers, blocks * heads, [&](int64_t i) {
      const int64_t head = i % heads;
      const int64_t first = (blocks - 1 - i / heads) * block;
      Forward unit(call, head / s.kv_heads, head % s.kv_heads, Least(block, rows - first));
      if (!unit.Allocate()) {
        __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
      } else {
        unit.Compute(first);
      }
    });
    return !failed;
  }

 private:
  static constexpr int64_t kGranule = kLanes * Op::kPair;
  static constexpr int64_t kMostRows = 1024;
  static constexpr int64_t kScratchLanes = kTileRows + kLanes;

  // Many rows share a packed block of keys, as long as every thread finds about 4 units and a
  // unit's queries and sums take no more than about 1 MiB.
  static int64_t RowBlock(int64_t rows, int64_t heads, int64_t threads, int64_t head_dims) {
    const int64_t most = Most(kMostRows / ((head_dims + 255) / 256), 8 * kTileRows);
    const int64_t units = Most((4 * threads + heads - 1) / heads, (rows + most - 1) / most);
    return Most(RoundUp((rows + units - 1) / units, kTileRows), 8 * kTileRows);
  }

  Forward(const ForwardCall& call, int64_t b, int64_t kv, int64_t rows)
      : call_(call),
        in_(call.in),
        head_(call.in, b, kv),
        scoring_(call.in),
        rows_(rows),
        head_dim_(in_.shapes.head_dim),
        value_dim_(in_.shapes.value_dim),
        out_ld_(RoundUp(value_dim_, kLanes)),
        keys_(KeysWithin(call.in,
                         Least(BlockKeys(head_dim_ + value_dim_), RoundUp(in_.shapes.kv_len, 64)))),
        score_ld_(keys_ + kLanes) {}

  bool Allocate() {
    return PlaceInScratch([this](Arena& arena) { Place(arena); });
  }

  void Place(Arena& arena) {
    row_ = arena.Take<Row>(rows_);
    q_ = arena.Take<float>(rows_ * RowWords<Op>(head_dim_));
    out_ = arena.Take<float>(rows_ * out_ld_);
    max_ = arena.Take<float>(rows_);
    sum_ = arena.Take<float>(rows_ * kLanes);
    k_ = arena.Take<float>(RoundUp(keys_, kPanel) * Words<Op>(head_dim_));
    v_ = arena.Take<float>(keys_ / Op::kPair * out_ld_);
    bad_values_ = arena.Take<int32_t>(keys_);
    segments_ = arena.Take<int32_t>(keys_);
    positions_ = arena.Take<int32_t>(keys_);
    scores_ = arena.Take<float>(kTileRows * score_ld_);
    keep_ = arena.Take<float>(keys_);
  }

  void Compute(int64_t first_row) {
    int64_t lo = in_.shapes.kv_len, hi = 0;
    for (int64_t r = 0; r < rows_; ++r) {
      row_[r] = head_.RowAt(first_row + r);
      if (row_[r].lo < row_[r].hi) {
        lo = Least(lo, row_[r].lo);
        hi = Most(hi, row_[r].hi);
      }
      max_[r] = -kInfinity;
    }
    std::memset(out_, 0, static_cast<size_t>(rows_ * out_ld_) * 4);
    std::memset(sum_, 0, static_cast<size_t>(rows_ * kLanes) * 4);
    const T* q = static_cast<const T*>(in_.q);
    PackRows<Op, T>([&](int64_t r) { return q + head_.QueryOffset(row_[r], head_dim_); }, rows_,
                    head_dim_, q_);
    // The same blocks of keys for any rows: no bit depends on how they are shared out.
    for (int64_t key = lo / keys_ * keys_; key < hi; key += keys_) {
      const int64_t valid = Least(keys_, hi - key);
      block_ = BlockAt(head_, key, valid, keys_, segments_, positions_);
      if (!AnySees(head_, row_, rows_, block_)) continue;
      PackKeys(key, valid);
      for (int64_t r = 0; r < rows_; r += kTileRows) Tile(r, Least(kTileRows, rows_ - r));
    }
    for (int64_t r = 0; r < rows_; ++r) Finish(r);
  }

  [[gnu::noinline]] void PackKeys(int64_t first, int64_t valid) {
    const T* k = static_cast<const T*>(in_.k) + head_.KeyOffset(first, head_dim_);
    PackColumns<Op>(k, in_.shapes.kv_heads * head_dim_, valid, RoundUp(valid, kGranule), head_dim_,
                    k_);
    bad_count_ = PackLanes<Op, T>([&](int64_t j) { return j < valid ? Value(j) : nullptr; },
                                  RoundUp(valid, kGranule), value_dim_, out_ld_, v_, bad_values_);
  }

  const T* Value(int64_t j) const {
    return static_cast<const T*>(in_.v) + head_.KeyOffset(block_.first + j, value_dim_);
  }

  [[gnu::noinline]] void Tile(int64_t first, int64_t count) {
    const Span span = VisibleSpan(head_, row_ + first, count, block_, kGranule);
    if (span.empty()) return;

    MultiplyKeys<Op>(q_ + first * RowWords<Op>(head_dim_), k_, head_dim_, count, span, scores_,
                     score_ld_);
    float rescale[kScratchLanes];
    Softmax(first, count, span, rescale);

    Product values{};
    values.words = (span.end - span.begin) / Op::kPair;
    values.a = scores_ + span.begin / Op::kPair;
    values.a_row = score_ld_;
    values.a_word = 1;
    values.b = v_ + span.begin / Op::kPair * out_ld_;
    values.b_word = out_ld_;
    values.c = out_ + first * out_ld_;
    values.c_row = out_ld_;
    values.factor = rescale;
    values.into = Into::kScaleAdd;
    Multiply<Op>(values, count, out_ld_ / kLanes, kPanel);

    for (int64_t i = 0; i < bad_count_; ++i) {
      const int64_t j = bad_values_[i];
      if (j < span.begin || j >= span.end) continue;
      for (int64_t r = 0; r < count; ++r) {
        const float p = ElementOf<Op>(scores_ + r * score_ld_, j);
        if (p != 0.0f) AddNonFinite(p, Value(j), value_dim_, out_ + (first + r) * out_ld_);
      }
    }
  }

  // Scores of a tile become weights, relative to each row's largest score so far, as words of the
  // product to come; rescale[r] brings earlier sums of row r to the new scale. Three loops over the
  // rows, so that the latencies of one row's reduction hide behind the others.
  [[gnu::noinline]] void Softmax(int64_t first, int64_t count, const Span& span, float* rescale) {
    float most[kScratchLanes], base[kScratchLanes];
    for (int64_t r = 0; r < count; ++r) {
      float* s = scores_ + r * score_ld_;
      if (scoring_.modified) ModifyScores(head_, row_[first + r], block_, span, s, nullptr);
      if (span.partial) HideScores(head_, row_[first + r], block_, span, s);
      F even = Set1(-kInfinity), odd = even;
      int64_t j = span.begin;
      for (; j + kLanes < span.end; j += 2 * kLanes) {
        even = Max(even, Load(s + j));
        odd = Max(odd, Load(s + j + kLanes));
      }
      if (j < span.end) even = Max(even, Load(s + j));
      most[r] = ReduceMax(Max(even, odd));
    }
    const F to_log2 = Set1(scoring_.to_log2);
    for (int64_t r = 0; r < count; r += kLanes) {
      const F before = LoadPartial(max_ + first + r, count - r);
      const F now = Max(LoadPartial(most + r, count - r), before);
      const F finite = Select(EqualTo(now, Set1(-kInfinity)), Zero(), now);
      Store(rescale + r, Exp2<float>(Mul(Sub(before, finite), to_log2)));
      Store(base + r, finite);
      StorePartial(max_ + first + r, now, count - r);
    }
    for (int64_t r = 0; r < count; ++r) {
      float* sum = sum_ + (first + r) * kLanes;
      float* s = scores_ + r * score_ld_;
      const F weights = in_.dropout_state ? Weights<true>(row_[first + r], span, base[r], s)
                                          : Weights<false>(row_[first + r], span, base[r], s);
      Store(sum, Fma(Load(sum), Set1(rescale[r]), weights));
    }
  }

  // Scores of one row become weights relative to `base`, dropped out where asked for; returns their
  // sum before dropout. The difference is taken before it is scaled: one multiplication more than
  // exp2(s * to_log2 - base * to_log2), whose rounded product is off by 1 and more from logits of
  // 1e7 on, such as those of a bias of -1e10 over a whole row.
  template <bool kDropout>
  F Weights(const Row& row, const Span& span, float base, float* s) {
    if (kDropout) DropoutFactors(head_, row, block_, span, keep_);
    const F factor = Set1(scoring_.to_log2), most = Set1(base);
    F sum = Zero();
    for (int64_t j = span.begin; j < span.end; j += kGranule) {
      F p[Op::kPair];
      for (int i = 0; i < Op::kPair; ++i) {
        p[i] = Exp2<T>(Mul(Sub(Load(s + j + i * kLanes), most), factor));
        sum = Add(sum, p[i]);
        if (kDropout) p[i] = Mul(p[i], Load(keep_ + j + i * kLanes));
      }
      // Words never overtake the scores still to be read.
      if constexpr (Op::kPair == 1) {
        Store(s + j, p[0]);
      } else {
#if defined(JAX_FLASH_BF16_DOT)
        Store(s + j / 2, PackPairs(p[0], p[1]));
#endif
      }
    }
    return sum;
  }

  // One more logit of the row; -inf where there is none.
  float Sink(const Row& row) const {
    if (!in_.sinks.data) return -kInfinity;
    return static_cast<const float*>(in_.sinks.data)[in_.sinks.Offset(head_.b, row.n, 0)];
  }

  [[gnu::noinline]] void Finish(int64_t r) {
    float sum = ReduceAdd(Load(sum_ + r * kLanes));
    float most = max_[r] * scoring_.to_logit;
    float weight = 1.0f;
    const bool seen = most > -kInfinity || sum != 0.0f;  // nan counts as seen
    const float sink = Sink(row_[r]);
    if (seen && sink != -kInfinity) {
      const float joint = sink > most ? sink : most;
      weight = expf(most - joint);
      sum = sum * weight + expf(sink - joint);
      most = joint;
    }
    call_.lse[head_.LseOffset(row_[r])] = seen ? most + logf(sum) : sink;
    const F factor = Set1(seen ? weight / sum : 0.0f);
    T* out = static_cast<T*>(call_.out) + head_.QueryOffset(row_[r], value_dim_);
    for (int64_t d = 0; d < value_dim_; d += kLanes) {
      StorePartial(out + d, Mul(Load(out_ + r * out_ld_ + d), factor), value_dim_ - d);
    }
  }

  const ForwardCall& call_;
  const Inputs& in_;
  const Head head_;
  const Scoring scoring_;
  const int64_t rows_, head_dim_, value_dim_, out_ld_, keys_, score_ld_;
  KeyBlock block_{};
  int64_t bad_count_ = 0;
  Row* row_ = nullptr;
  float* q_ = nullptr;    // rows
  float* out_ = nullptr;  // [rows_][out_ld_], relative to max_
  float* max_ = nullptr;  // [rows_], the largest score
  float* sum_ = nullptr;  // [rows_][kLanes], relative to max_
  float* k_ = nullptr;    // columns
  float* v_ = nullptr;    // lanes
  int32_t* bad_values_ = nullptr;
  int32_t* segments_ = nullptr;
  int32_t* positions_ = nullptr;
  float* scores_ = nullptr;  // [kTileRows][score_ld_], then weights
  float* keep_ = nullptr;
};

}  // namespace
}  // namespace jax_flash::cpu
