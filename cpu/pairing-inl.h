// Owns one step of the backward: a block of rows of q and dout against a block of keys.
//
// With p = exp(score - lse), delta = rowsum(out * dout) - dlse and ds = p * (dout v^T - delta):
//   dv = p^T dout,  dk = scale * ds^T q,  dq = scale * ds k.
// The weights p and ds of the step are computed once into L2 and serve all three sums. Read next:
// backward-inl.h (which steps, by whom).

namespace jax_flash::cpu {
namespace {

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
  [[gnu::noinline]] void Fill(const BackwardCall& call, const Head& head, const float* deltas,
                              const Row* rows, int64_t count) {
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
  static int64_t BlockKeys(const Inputs& in) {
    return KeysWithin(in, in.shapes.head_dim + in.shapes.value_dim <= 512 ? 192 : 64);
  }

  // rows: of this head, see RowAt. delta: laid out as lse.
  Pairing(const BackwardCall& call, const Head& head, const float* delta)
      : call_(call),
        in_(call.in),
        head_(head),
        scoring_(call.in),
        capped_(call.in.problem.softcap > 0.0f),
        delta_(delta),
        head_dim_(in_.shapes.head_dim),
        value_dim_(in_.shapes.value_dim),
        head_ld_(RoundUp(head_dim_, kLanes)),
        value_ld_(RoundUp(value_dim_, kLanes)),
        keys_(BlockKeys(call.in)),
        score_ld_(keys_ + kLanes) {}

  bool Allocate() {
    return PlaceInScratch([this](Arena& arena) { Place(arena); });
  }

  // The row (t, n), or one that sees nothing where the forward pass saw nothing.
  static Row RowAt(const BackwardCall& call, const Head& head, int64_t t, int64_t n) {
    Row row = head.RowAt(t, n);
    if (call.lse[head.LseOffset(row)] == -kInfinity) row.lo = row.hi = 0;
    return row;
  }

  [[gnu::noinline]] void SetKeys(int64_t first, int64_t valid, bool for_query) {
    block_ = BlockAt(head_, first, valid, keys_, segments_, positions_);
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
    if (!AnySees(head_, rows, count, block_)) return false;
    own_.Fill(call_, head_, delta_, rows, count);
    Use(own_, rows, count, 0);
    return true;
  }

  // The same for `count` rows from `first` among those that `packed` holds.
  bool SetRows(const PackedRows<T, Op>& packed, const Row* rows, int64_t first, int64_t count) {
    if (!AnySees(head_, rows + first, count, block_)) return false;
    Use(packed.From(first, in_.shapes), rows + first, count, first);
    return true;
  }

  // p and ds of the current rows and keys, as words of the sums to come.
  [[gnu::noinline]] void Weights() {
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
  [[gnu::noinline]] void AddToQuery(float* dq) const {
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
      sum.into = Into::kAdd;
      Multiply<Op>(sum, Least(kTileRows, count_ - first), head_ld_ / kLanes, kPanel);
    }
  }

  void ClearKeySums() {
    Clear(dk_, keys_ * head_ld_);
    Clear(dv_, keys_ * value_ld_);
  }

  // dk += ds^T q and dv += p^T dout.
  [[gnu::noinline]] void AddToKeys() {
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
      sum.into = Into::kAdd;
      Multiply<Op>(sum, keys, value_ld_ / kLanes, kPanel);
      sum.a = ds_ + word * score_ld_ + key;
      sum.b = packed_.q_lanes + word * head_ld_;
      sum.b_word = head_ld_;
      sum.c = dk_ + key * head_ld_;
      sum.c_row = head_ld_;
      sum.into = Into::kAdd;
      Multiply<Op>(sum, keys, head_ld_ / kLanes, kPanel);
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

  [[gnu::noinline]] void StoreKeySums() const {
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

  // The same with p * dout v^T, whose sum over a row is delta: where that is 0 so far.
  template <class Visit>
  void VisitWeightGradients(Visit visit) {
    capped_ = false;
    VisitScoreGradients(visit);
    capped_ = in_.problem.softcap > 0.0f;
  }

 private:
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
    positions_ = arena.Take<int32_t>(keys_);
    bad_ = arena.Take<int32_t>(keys_);
  }

  // p and ds of at most kTileRows rows, within the span.
  [[gnu::noinline]] void Tile(int64_t first, int64_t rows, const Span& span, float* p, float* ds) {
    MultiplyKeys<Op>(packed_.q_rows + first * RowWords<Op>(head_dim_), k_columns_, head_dim_, rows,
                     span, p, score_ld_);
    MultiplyKeys<Op>(packed_.dout_rows + first * RowWords<Op>(value_dim_), v_columns_, value_dim_,
                     rows, span, ds, score_ld_);
    if (span.empty()) return;
    for (int64_t r = 0; r < rows; ++r) {
      RowWeights(first + r, span, p + r * score_ld_, ds + r * score_ld_);
    }
  }

  // In: scores q k^T and dout v^T. Out: p (after dropout) and ds.
  [[gnu::noinline]] void RowWeights(int64_t r, const Span& span, float* p, float* ds) {
    const Row& row = rows_[r];
    const bool capped = capped_;
    const bool dropout = in_.dropout_state != nullptr;
    const bool hides = span.partial || in_.bias.data;  // a bias of -inf does too
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
      if (hides) {
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
  bool capped_;
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
  int32_t* positions_ = nullptr;
  int32_t* bad_ = nullptr;
};

}  // namespace
}  // namespace jax_flash::cpu
