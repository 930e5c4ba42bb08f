// Owns the backward kernel.
//
// With p = exp(score - lse), delta = rowsum(out * dout) - dlse and ds = p * (dout v^T - delta):
//   dv = p^T dout,  dk = scale * ds^T q,  dq = scale * ds k.
// Each block of rows against each block of keys is one step (class Pairing): the weights p and ds
// of the step are computed once into L2 and serve all three sums. A task owns some of the key
// blocks of a kv head, so dk and dv need no exchange; dq is summed in float32 per task and the
// tasks of a head are added in a fixed order, so the result does not depend on timing. Where those
// sums would take too much memory, dq gets a pass of its own over blocks of rows. Dao,
// "FlashAttention-2", 2023.

#include <cstdlib>

namespace jax_flash::cpu {
namespace {

// Memory of a task.
class Memory {
 public:
  explicit Memory(int64_t bytes)
      : data_(std::aligned_alloc(64, static_cast<size_t>(RoundUp(Most(bytes, 1), 64)))) {}
  ~Memory() { std::free(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  template <class X>
  X* get() const {
    return static_cast<X*>(data_);
  }

 private:
  void* data_;
};

inline void Clear(float* x, int64_t count) { std::memset(x, 0, static_cast<size_t>(count) * 4); }

// Packed rows of q and dout, with what else a row brings.
template <class T, class Op>
struct PackedRows {
  float* q_lanes = nullptr;
  float* dout_lanes = nullptr;
  float* q_copy = nullptr;
  float* dout_copy = nullptr;
  const float* q_rows = nullptr;
  const float* dout_rows = nullptr;
  float* lse = nullptr;
  float* delta = nullptr;
  int32_t* bad = nullptr;  // rows of dout that are not finite
  int64_t bad_count = 0;

  void Place(Arena& arena, int64_t rows, const Shapes& s) {
    const int64_t whole = RoundUp(rows, Op::kPair);
    q_lanes = arena.Take<float>(whole / Op::kPair * RoundUp(s.head_dim, kLanes));
    dout_lanes = arena.Take<float>(whole / Op::kPair * RoundUp(s.value_dim, kLanes));
    q_copy = arena.Take<float>(rows * RowWords<Op>(s.head_dim));
    dout_copy = arena.Take<float>(rows * RowWords<Op>(s.value_dim));
    lse = arena.Take<float>(rows);
    delta = arena.Take<float>(rows);
    bad = arena.Take<int32_t>(whole);
  }

  // deltas: laid out as lse.
  void Fill(const BackwardCall& call, const Head& head, const float* deltas, const Row* rows,
            int64_t count) {
    const Shapes& s = call.in.shapes;
    const T* q = static_cast<const T*>(call.in.q);
    const T* dout = static_cast<const T*>(call.dout);
    auto live = [&](int64_t r) { return r < count && rows[r].lo < rows[r].hi; };
    auto q_row = [&](int64_t r) {
      return live(r) ? q + head.QueryOffset(rows[r], s.head_dim) : nullptr;
    };
    auto dout_row = [&](int64_t r) {
      return live(r) ? dout + head.QueryOffset(rows[r], s.value_dim) : nullptr;
    };
    const int64_t whole = RoundUp(count, Op::kPair);
    const int64_t bad_queries =
        PackLanes<Op, T>(q_row, whole, s.head_dim, RoundUp(s.head_dim, kLanes), q_lanes, bad);
    bad_count = PackLanes<Op, T>(dout_row, whole, s.value_dim, RoundUp(s.value_dim, kLanes),
                                 dout_lanes, bad);
    // With one element a word the two layouts differ only where numbers are not finite.
    q_rows = q_lanes;
    dout_rows = dout_lanes;
    if (Op::kPair > 1 || bad_queries > 0) {
      PackRows<Op, T>(q_row, count, s.head_dim, q_copy);
      q_rows = q_copy;
    }
    if (Op::kPair > 1 || bad_count > 0) {
      PackRows<Op, T>(dout_row, count, s.value_dim, dout_copy);
      dout_rows = dout_copy;
    }
    for (int64_t r = 0; r < count; ++r) {
      const int64_t at = head.LseOffset(rows[r]);
      lse[r] = live(r) ? call.lse[at] : 0.0f;
      delta[r] = live(r) ? deltas[at] : 0.0f;
    }
  }

  // The rows from `first`, a multiple of Op::kPair, on. `bad` stays whole: see AddToKeys.
  PackedRows From(int64_t first, const Shapes& s) const {
    PackedRows part = *this;
    part.q_lanes += first / Op::kPair * RoundUp(s.head_dim, kLanes);
    part.dout_lanes += first / Op::kPair * RoundUp(s.value_dim, kLanes);
    part.q_rows += first * RowWords<Op>(s.head_dim);
    part.dout_rows += first * RowWords<Op>(s.value_dim);
    part.lse += first;
    part.delta += first;
    return part;
  }
};

// Blocks of rows against blocks of keys of one kv head, in the memory of the calling thread.
template <class T, class Op>
class Pairing {
 public:
  static constexpr int64_t kGranule = kLanes * Op::kPair;
  static constexpr int64_t kMostRows = 16 * kTileRows;

  // Keys in a block: whole tiles of rows of dk and dv, and whole panels.
  static int64_t BlockKeys(const Shapes& s) { return s.head_dim + s.value_dim <= 512 ? 192 : 64; }

  // rows: of this head, see RowAt. delta: laid out as lse.
  Pairing(const BackwardCall& call, const Head& head, const float* delta)
      : call_(call),
        in_(call.in),
        head_(head),
        scoring_(call.in),
        delta_(delta),
        head_dim_(in_.shapes.head_dim),
        value_dim_(in_.shapes.value_dim),
        head_ld_(RoundUp(head_dim_, kLanes)),
        value_ld_(RoundUp(value_dim_, kLanes)),
        keys_(BlockKeys(in_.shapes)),
        score_ld_(keys_ + kLanes) {}

  bool Allocate() {
    Arena count(nullptr);
    Place(count);
    void* memory = ThreadScratch(count.used());
    if (!memory) return false;
    Arena arena(memory);
    Place(arena);
    return true;
  }

  // The row (t, n), or one that sees nothing where the forward pass saw nothing.
  static Row RowAt(const BackwardCall& call, const Head& head, int64_t t, int64_t n) {
    Row row = head.RowAt(t, n);
    if (call.lse[head.LseOffset(row)] == -kInfinity) row.lo = row.hi = 0;
    return row;
  }

  void SetKeys(int64_t first, int64_t valid, bool for_query) {
    block_ = {first, valid, nullptr, INT32_MAX, INT32_MIN};
    if (in_.kv_segments) {
      const int32_t* ids = in_.kv_segments + head_.b * in_.shapes.kv_len + first;
      for (int64_t j = 0; j < valid; ++j) {
        segments_[j] = ids[j];
        if (ids[j] < block_.segment_min) block_.segment_min = ids[j];
        if (ids[j] > block_.segment_max) block_.segment_max = ids[j];
      }
      for (int64_t j = valid; j < keys_; ++j) segments_[j] = 0;
      block_.segments = segments_;
    }
    const int64_t count = RoundUp(valid, kGranule);
    const T* k = static_cast<const T*>(in_.k) + head_.KeyOffset(first, head_dim_);
    const T* v = static_cast<const T*>(in_.v) + head_.KeyOffset(first, value_dim_);
    const int64_t k_stride = in_.shapes.kv_heads * head_dim_;
    PackColumns<Op>(k, k_stride, valid, count, head_dim_, k_columns_);
    PackColumns<Op>(v, in_.shapes.kv_heads * value_dim_, valid, count, value_dim_, v_columns_);
    if (for_query) {
      PackLanes<Op, T>([&](int64_t j) { return j < valid ? k + j * k_stride : nullptr; }, count,
                       head_dim_, head_ld_, k_lanes_, bad_);
    }
  }

  // Packs rows. False where none of them can see a key of the current block.
  bool SetRows(const Row* rows, int64_t count) {
    if (!AnySees(rows, count)) return false;
    own_.Fill(call_, head_, delta_, rows, count);
    Use(own_, rows, count, 0);
    return true;
  }

  // The same for `count` rows from `first` among those that `packed` holds.
  bool SetRows(const PackedRows<T, Op>& packed, const Row* rows, int64_t first, int64_t count) {
    if (!AnySees(rows + first, count)) return false;
    Use(packed.From(first, in_.shapes), rows + first, count, first);
    return true;
  }

  // p and ds of the current rows and keys, as words of the sums to come.
  void Weights() {
    for (int64_t first = 0; first < count_; first += kTileRows) {
      const int64_t rows = Least(kTileRows, count_ - first);
      Span& span = span_[first / kTileRows];
      span = VisibleSpan(head_, rows_ + first, rows, block_, kGranule);
      if constexpr (Op::kPair == 1) {
        // In place: the products land where the weights will stand.
        Tile(first, rows, span, p_ + first * score_ld_, ds_ + first * score_ld_);
        for (int64_t r = first; r < first + rows; ++r) {
          ClearOutside(span, p_ + r * score_ld_);
          ClearOutside(span, ds_ + r * score_ld_);
        }
      } else {
#if defined(JAX_FLASH_BF16_DOT)
        Tile(first, rows, span, tile_p_, tile_ds_);
        for (int64_t r = 0; r < rows; r += 2) {
          const float* p = tile_p_ + r * score_ld_;
          const float* ds = tile_ds_ + r * score_ld_;
          const bool alone = r + 1 == rows;
          float* p_words = p_ + (first + r) / 2 * score_ld_;
          float* ds_words = ds_ + (first + r) / 2 * score_ld_;
          float* even = ds_rows_ + (first + r) * score_ld_;
          float* odd = even + score_ld_;
          for (int64_t j = span.begin; j < span.end; j += kLanes) {
            const F p1 = alone ? Zero() : Load(p + score_ld_ + j);
            const F ds1 = alone ? Zero() : Load(ds + score_ld_ + j);
            Store(p_words + j, InterleavePairs(Load(p + j), p1));
            Store(ds_words + j, InterleavePairs(Load(ds + j), ds1));
          }
          for (int64_t j = span.begin; j < span.end; j += kGranule) {
            Store(even + j / 2, PackPairs(Load(ds + j), Load(ds + j + kLanes)));
            if (alone) continue;
            Store(odd + j / 2,
                  PackPairs(Load(ds + score_ld_ + j), Load(ds + score_ld_ + j + kLanes)));
          }
          ClearOutside(span, p_words);
          ClearOutside(span, ds_words);
        }
#endif
      }
    }
  }

  // dq[count][head_ld] += ds k.
  void AddToQuery(float* dq) const {
    for (int64_t first = 0; first < count_; first += kTileRows) {
      const Span& span = span_[first / kTileRows];
      if (span.empty()) continue;
      Product sum{};
      sum.words = (span.end - span.begin) / Op::kPair;
      sum.a = (Op::kPair == 1 ? ds_ : ds_rows_) + first * score_ld_ + span.begin / Op::kPair;
      sum.a_row = score_ld_;
      sum.a_word = 1;
      sum.b = k_lanes_ + span.begin / Op::kPair * head_ld_;
      sum.b_word = head_ld_;
      sum.c = dq + first * head_ld_;
      sum.c_row = head_ld_;
      Multiply<Op, Into::kAdd>(sum, Least(kTileRows, count_ - first), head_ld_ / kLanes, kPanel);
    }
  }

  void ClearKeySums() {
    Clear(dk_, keys_ * head_ld_);
    Clear(dv_, keys_ * value_ld_);
  }

  // dk += ds^T q and dv += p^T dout.
  void AddToKeys() {
    const int64_t tiles = (count_ + kTileRows - 1) / kTileRows;
    for (int64_t key = 0; key < block_.valid; key += kTileRows) {
      const int64_t keys = Least(kTileRows, block_.valid - key);
      int64_t from = 0, to = tiles;
      auto sees = [&](int64_t tile) {
        return span_[tile].begin < key + keys && span_[tile].end > key;
      };
      while (from < to && !sees(from)) ++from;
      while (from < to && !sees(to - 1)) --to;
      if (from == to) continue;
      static_assert(kTileRows % Op::kPair == 0, "tiles begin at whole words");
      const int64_t word = from * kTileRows / Op::kPair;
      Product sum{};
      sum.words = Words<Op>(Least(to * kTileRows, count_)) - word;
      sum.a_row = 1;
      sum.a_word = score_ld_;
      sum.a = p_ + word * score_ld_ + key;
      sum.b = packed_.dout_lanes + word * value_ld_;
      sum.b_word = value_ld_;
      sum.c = dv_ + key * value_ld_;
      sum.c_row = value_ld_;
      Multiply<Op, Into::kAdd>(sum, keys, value_ld_ / kLanes, kPanel);
      sum.a = ds_ + word * score_ld_ + key;
      sum.b = packed_.q_lanes + word * head_ld_;
      sum.b_word = head_ld_;
      sum.c = dk_ + key * head_ld_;
      sum.c_row = head_ld_;
      Multiply<Op, Into::kAdd>(sum, keys, head_ld_ / kLanes, kPanel);
    }
    const T* dout = static_cast<const T*>(call_.dout);
    for (int64_t i = 0; i < packed_.bad_count; ++i) {
      const int64_t r = packed_.bad[i] - first_;
      if (r < 0 || r >= count_) continue;
      const T* row = dout + head_.QueryOffset(rows_[r], value_dim_);
      const float* words = p_ + r / Op::kPair * score_ld_;
      for (int64_t j = 0; j < block_.valid; ++j) {
        const float p = ElementOf<Op>(words + j, r % Op::kPair);
        if (p != 0.0f) AddNonFinite(p, row, value_dim_, dv_ + j * value_ld_);
      }
    }
  }

  void StoreKeySums() const {
    const F scale = Set1(in_.problem.scale);
    for (int64_t j = 0; j < block_.valid; ++j) {
      T* dk = static_cast<T*>(call_.dk) + head_.KeyOffset(block_.first + j, head_dim_);
      for (int64_t d = 0; d < head_dim_; d += kLanes) {
        StorePartial(dk + d, Mul(scale, Load(dk_ + j * head_ld_ + d)), head_dim_ - d);
      }
      T* dv = static_cast<T*>(call_.dv) + head_.KeyOffset(block_.first + j, value_dim_);
      for (int64_t d = 0; d < value_dim_; d += kLanes) {
        StorePartial(dv + d, Load(dv_ + j * value_ld_ + d), value_dim_ - d);
      }
    }
  }

  // For the bias gradient: visit(r, span, ds) with float32 ds for every row of a tile that sees
  // keys.
  template <class Visit>
  void VisitScoreGradients(Visit visit) {
    for (int64_t first = 0; first < count_; first += kTileRows) {
      const int64_t rows = Least(kTileRows, count_ - first);
      const Span span = VisibleSpan(head_, rows_ + first, rows, block_, kGranule);
      if (span.empty()) continue;
      Tile(first, rows, span, tile_p_, tile_ds_);
      for (int64_t r = 0; r < rows; ++r) visit(first + r, span, tile_ds_ + r * score_ld_);
    }
  }

 private:
  bool AnySees(const Row* rows, int64_t count) const {
    bool any = false;
    for (int64_t r = 0; r < count; ++r) {
      any |= rows[r].lo < block_.first + block_.valid && rows[r].hi > block_.first;
    }
    return any;
  }

  void Use(const PackedRows<T, Op>& packed, const Row* rows, int64_t count, int64_t first) {
    packed_ = packed;
    rows_ = rows;
    count_ = count;
    first_ = first;
  }

  void Place(Arena& arena) {
    k_columns_ = arena.Take<float>(RoundUp(keys_, kPanel) * Words<Op>(head_dim_));
    v_columns_ = arena.Take<float>(RoundUp(keys_, kPanel) * Words<Op>(value_dim_));
    k_lanes_ = arena.Take<float>(keys_ / Op::kPair * head_ld_);
    own_.Place(arena, kMostRows, in_.shapes);
    dk_ = arena.Take<float>(keys_ * head_ld_);
    dv_ = arena.Take<float>(keys_ * value_ld_);
    p_ = arena.Take<float>(kMostRows / Op::kPair * score_ld_);
    ds_ = arena.Take<float>(kMostRows / Op::kPair * score_ld_);
    if (Op::kPair > 1) ds_rows_ = arena.Take<float>(kMostRows * score_ld_);
    tile_p_ = arena.Take<float>(kTileRows * score_ld_);
    tile_ds_ = arena.Take<float>(kTileRows * score_ld_);
    slope_ = arena.Take<float>(keys_);
    keep_ = arena.Take<float>(keys_);
    segments_ = arena.Take<int32_t>(keys_);
    bad_ = arena.Take<int32_t>(keys_);
  }

  // p and ds of at most kTileRows rows, within the span.
  void Tile(int64_t first, int64_t rows, const Span& span, float* p, float* ds) {
    Columns(packed_.q_rows + first * RowWords<Op>(head_dim_), head_dim_, k_columns_, rows, span, p);
    Columns(packed_.dout_rows + first * RowWords<Op>(value_dim_), value_dim_, v_columns_, rows,
            span, ds);
    if (span.empty()) return;
    for (int64_t r = 0; r < rows; ++r) {
      RowWeights(first + r, span, p + r * score_ld_, ds + r * score_ld_);
    }
  }

  void Columns(const float* a, int64_t dim, const float* columns, int64_t rows, const Span& span,
               float* c) const {
    Product product{};
    product.words = Words<Op>(dim);
    product.a = a;
    product.a_row = RowWords<Op>(dim);
    product.a_word = 1;
    product.b_word = kPanel;
    product.c_row = score_ld_;
    for (int64_t j = span.begin; j < span.end;) {
      const int64_t stop = Least(span.end, (j / kPanel + 1) * kPanel);
      product.b = columns + j / kPanel * product.words * kPanel + j % kPanel;
      product.c = c + j;
      MicroProduct<Op, Into::kStore>(product, rows, (stop - j) / kLanes);
      j = stop;
    }
  }

  // In: scores q k^T and dout v^T. Out: p (after dropout) and ds.
  void RowWeights(int64_t r, const Span& span, float* p, float* ds) {
    const Row& row = rows_[r];
    const bool capped = in_.problem.softcap > 0.0f;
    const bool dropout = in_.dropout_state != nullptr;
    if (scoring_.modified) ModifyScores(head_, row, block_, span, p, slope_);
    if (span.partial) HideScores(head_, row, block_, span, p);
    if (dropout) DropoutFactors(head_, row, block_, span, keep_);
    const F to_logit = Set1(scoring_.to_logit), minus_lse = Set1(-packed_.lse[r]);
    const F delta = Set1(packed_.delta[r]);
    const F hidden = Set1(-kInfinity);
    for (int64_t j = span.begin; j < span.end; j += kLanes) {
      const F score = Load(p + j);
      // No weight is above 1, though an lse of 1e7 and more has no room for the log of the sum.
      const F log_weight = Min(Zero(), Fma(score, to_logit, minus_lse));
      F weight = Exp2<T>(Mul(log_weight, Set1(kLog2E)));
      F slope = weight;
      if (capped) slope = Mul(slope, Load(slope_ + j));
      F dweight = Load(ds + j);
      if (dropout) {
        const F keep = Load(keep_ + j);
        weight = Mul(weight, keep);
        dweight = Mul(dweight, keep);
      }
      F dscore = Mul(slope, Sub(dweight, delta));
      if (span.partial) {
        // Also where lse or dout v^T is not a number.
        const M out = EqualTo(score, hidden);
        weight = Select(out, Zero(), weight);
        dscore = Select(out, Zero(), dscore);
      }
      Store(p + j, weight);
      Store(ds + j, dscore);
    }
  }

  void ClearOutside(const Span& span, float* words) const {
    if (span.empty()) {
      std::memset(words, 0, static_cast<size_t>(keys_) * 4);
      return;
    }
    std::memset(words, 0, static_cast<size_t>(span.begin) * 4);
    std::memset(words + span.end, 0, static_cast<size_t>(keys_ - span.end) * 4);
  }

  const BackwardCall& call_;
  const Inputs& in_;
  const Head head_;
  const Scoring scoring_;
  const float* delta_;
  const int64_t head_dim_, value_dim_, head_ld_, value_ld_, keys_, score_ld_;
  KeyBlock block_{};
  const Row* rows_ = nullptr;
  int64_t first_ = 0, count_ = 0;  // of packed_
  Span span_[kMostRows / kTileRows];
  PackedRows<T, Op> own_, packed_;
  float* k_columns_ = nullptr;
  float* v_columns_ = nullptr;
  float* k_lanes_ = nullptr;
  float* dk_ = nullptr;       // [keys_][head_ld_]
  float* dv_ = nullptr;       // [keys_][value_ld_]
  float* p_ = nullptr;        // [kMostRows / kPair][score_ld_] words over rows
  float* ds_ = nullptr;       // [kMostRows / kPair][score_ld_] words over rows
  float* ds_rows_ = nullptr;  // [kMostRows][score_ld_] words over keys, where they differ from ds_
  float* tile_p_ = nullptr;   // [kTileRows][score_ld_]
  float* tile_ds_ = nullptr;  // [kTileRows][score_ld_]
  float* slope_ = nullptr;
  float* keep_ = nullptr;
  int32_t* segments_ = nullptr;
  int32_t* bad_ = nullptr;
};

template <class T, class Op>
class Backward {
 public:
  static bool Run(const BackwardCall& call, Workers& workers) {
    return Backward(call, workers).Run();
  }

 private:
  using Step = Pairing<T, Op>;

  Backward(const BackwardCall& call, Workers& workers)
      : call_(call),
        s_(call.in.shapes),
        workers_(workers),
        heads_(s_.batch * s_.kv_heads),
        group_(s_.kv_heads ? s_.q_heads / s_.kv_heads : 0),
        rows_(s_.q_len * group_),
        head_ld_(RoundUp(s_.head_dim, kLanes)),
        keys_(Step::BlockKeys(s_)) {}

  bool Run() {
    const Memory delta(s_.batch * s_.q_heads * s_.q_len * 4);
    delta_ = delta.get<float>();
    if (!delta_) return false;
    Deltas();

    const int64_t blocks = (s_.kv_len + keys_ - 1) / keys_;
    int64_t parts = 1;  // tasks per head
    const int64_t most = Least(blocks, 2 * workers_.count());
    while (parts < most && !Balanced(heads_ * parts)) ++parts;
    const int64_t sums = rows_ * head_ld_ * 4;
    const int64_t budget = Most(int64_t{64} << 20, heads_ * sums);
    if (parts > 1 && heads_ * parts * sums > budget) {
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

  // delta = rowsum(out * dout) - dlse, laid out as lse.
  void Deltas() {
    const T* out = static_cast<const T*>(call_.out);
    const T* dout = static_cast<const T*>(call_.dout);
    ForEach(workers_, s_.batch * s_.q_heads, [&](int64_t i) {
      for (int64_t t = 0; t < s_.q_len; ++t) {
        const int64_t at = i * s_.q_len + t;
        const int64_t row =
            ((i / s_.q_heads * s_.q_len + t) * s_.q_heads + i % s_.q_heads) * s_.value_dim;
        F sum = Zero();
        for (int64_t d = 0; d < s_.value_dim; d += kLanes) {
          sum = Fma(LoadPartial(out + row + d, s_.value_dim - d),
                    LoadPartial(dout + row + d, s_.value_dim - d), sum);
        }
        delta_[at] = ReduceAdd(sum) - (call_.dlse ? call_.dlse[at] : 0.0f);
      }
    });
  }

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
    const int64_t blocks = (rows_ + Step::kMostRows - 1) / Step::kMostRows;
    ForEach(workers_, heads_ * blocks, [&](int64_t i) {
      const Head head = HeadAt(i % heads_);
      const int64_t first = (blocks - 1 - i / heads_) * Step::kMostRows;
      const int64_t count = Least(Step::kMostRows, rows_ - first);
      const Memory dq(count * head_ld_ * 4);
      Row rows[Step::kMostRows];
      Step step(call_, head, delta_);
      if (!dq.get<float>() || !step.Allocate()) return Fail();
      Clear(dq.get<float>(), count * head_ld_);
      Rows(head, rows, first, count);
      int64_t lo = s_.kv_len, hi = 0;
      for (int64_t r = 0; r < count; ++r) {
        if (rows[r].lo >= rows[r].hi) continue;
        lo = Least(lo, rows[r].lo);
        hi = Most(hi, rows[r].hi);
      }
      for (int64_t key = lo / 64 * 64; key < hi; key += keys_) {
        step.SetKeys(key, Least(keys_, s_.kv_len - key), true);
        if (!step.SetRows(rows, count)) continue;
        step.Weights();
        step.AddToQuery(dq.get<float>());
      }
      StoreQuery(head, first, count, dq.get<float>());
    });
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
