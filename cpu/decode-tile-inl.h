// Owns what a block of keys and values gives up to four query rows of the kernel for few queries:
// scores, weights and the weighted sum. Read next: decode-inl.h.

namespace jax_flash::cpu {
namespace {

constexpr int64_t kDecodeBlock = 64;  // keys

// Where a block's keys and values are.
template <class T>
struct DecodeBlock {
  int64_t first = 0, valid = 0;
  const T* keys[kDecodeBlock + kLanes];  // of kv head 0; those past `valid` repeat the last
  const T* values[kDecodeBlock];         // likewise
};

template <class T, class Op>
class DecodeTile {
 public:
  static constexpr int64_t kBlock = kDecodeBlock;
  static constexpr int64_t kTwo = 2 * kLanes;
  using Block = DecodeBlock<T>;

  // A kv head's share of a block.
  struct Share {
    const Block* block;
    int64_t key, value;  // elements before the head's
    const T* Key(int64_t j) const { return block->keys[j] + key; }
    const T* Value(int64_t j) const { return block->values[j] + value; }
  };
  // The two shares that follow.
  struct Ahead {
    Share near, far;
  };

  explicit DecodeTile(const Inputs& in)
      : in_(in),
        scoring_(in),
        head_dim_(in.shapes.head_dim),
        value_dim_(in.shapes.value_dim),
        out_ld_(RoundUp(value_dim_, kLanes)) {}

  // A row's sums: weighted values, sum of weights by lane, the largest score.
  int64_t StateSize() const { return out_ld_ + 2 * kLanes; }
  float* Sum(float* state) const { return state + out_ld_; }
  float& Largest(float* state) const { return state[out_ld_ + kLanes]; }

  // Which element is in place i of two vectors of the sums.
  static int64_t PlaceOf(int64_t i) {
    return Op::kPair == 1 ? PlaceOfTwo(T{}, i) : PlaceOfPairs(i);
  }

  // A row of queries in the order in which Scores meets the elements of keys.
  void PackQuery(const T* q, float* to) const {
    auto pack = [&](int64_t d, int64_t n) {
      F x[kStep];
      LoadStep(q + d, n, x);
      for (int i = 0; i < kStep; ++i) Store(to + d / Op::kPair + i * kLanes, x[i]);
    };
    const int64_t whole = head_dim_ / kElements * kElements;
    for (int64_t d = 0; d < whole; d += kElements) pack(d, kElements);
    for (int64_t d = whole; d < head_dim_; d += kLanes * Op::kPair) {
      Store(to + d / Op::kPair, LoadWords<Op>(q + d, head_dim_ - d));
    }
  }

  // kRows query rows of one kv head against a block.
  template <int kRows>
  void AddBlock(const Row* rows, const float* q, const Share& here, const Ahead& ahead,
                float* state) const {
    const Block& block = *here.block;
    int64_t begin = block.valid, end = 0;            // of the union of the rows
    int64_t full_begin = 0, full_end = block.valid;  // of their intersection
    int64_t lo[kRows], hi[kRows];
    for (int r = 0; r < kRows; ++r) {
      lo[r] = Most(rows[r].lo - block.first, 0);
      hi[r] = Most(lo[r], Least(rows[r].hi - block.first, block.valid));
      full_begin = Most(full_begin, lo[r]);
      full_end = Least(full_end, hi[r]);
      if (lo[r] < hi[r]) {
        begin = Least(begin, lo[r]);
        end = Most(end, hi[r]);
      }
    }
    if (begin >= end) return;
    alignas(64) float scores[kRows * kScoreLd];  // in the end weights
    alignas(64) float pairs[kRows * kPairLd];    // those of two keys in a word, where kPair is 2
    float rescale[kRows];
    Scores<kRows>(q, here, ahead, begin, end, scores);
    for (int r = 0; r < kRows; ++r) {
      rescale[r] = Weights(lo[r], hi[r], begin, end, scores + r * kScoreLd, pairs + r * kPairLd,
                           state + r * StateSize());
    }
    // Keys that only some of the rows see, whose values may be nan: one by one, as is half a pair.
    full_begin = RoundUp(full_begin, Op::kPair);
    full_end = Most(full_begin, full_end / Op::kPair * Op::kPair);
    AddValues<kRows>(here, ahead, full_begin, full_end, Op::kPair == 1 ? scores : pairs, rescale,
                     state);
    for (int64_t j = begin; j < end; ++j) {
      if (j == full_begin) j = full_end;
      if (j >= end) break;
      for (int r = 0; r < kRows; ++r) {
        if (j >= lo[r] && j < hi[r]) {
          AddValue(here.Value(j), scores[r * kScoreLd + j], state + r * StateSize());
        }
      }
    }
  }

 private:
  static constexpr int kStep = Op::kPair == 1 ? 2 : 1;              // vectors of a step of
  static constexpr int64_t kElements = kStep * kLanes * Op::kPair;  // so many of a row
  static constexpr int64_t kScoreLd = kBlock + kLanes;
  static constexpr int64_t kPairLd = kBlock / 2;
  static constexpr int64_t kWeightLd = Op::kPair == 1 ? kScoreLd : kPairLd;

  // Brings elements of the next two shares nearer, a line of 64 bytes for each that is loaded:
  // bursts fill what keeps track of misses and hold up the loads behind them. Zen 4 drops what
  // finds no room there, so each line is asked for twice. 16k keys of bfloat16 on one
  // core of a busy machine, a plain sum's time over ours: 0.51 in bursts, 0.74 to 0.94 once, 0.88
  // to 1.04 twice.
  template <int64_t kCount>
  static void Prefetch(const T* near, const T* far, int64_t d) {
    constexpr int64_t kLine = 64 / sizeof(T);
    if (kCount < kLine && d % kLine != 0) return;
#pragma GCC unroll 8
    for (int64_t i = 0; i < kCount; i += kLine) {
      __builtin_prefetch(near + d + i, 0, 2);
      __builtin_prefetch(far + d + i, 0, 2);
    }
  }

  // Two vectors of a value in the order of the sums, of which element i is in place PlaceOf(i).
  static void LoadValue(const T* p, F& first, F& second) {
    if constexpr (Op::kPair == 1) {
      LoadTwo(p, first, second);
    } else {
      InterleaveTwo(nullptr, p, first, second);  // bfloat16 in the upper half of a word: float32
    }
  }
  static void LoadStep(const T* p, int64_t n, F (&x)[kStep]) {
    if constexpr (Op::kPair == 1) {
      LoadTwo(p, x[0], x[1]);
    } else {
      x[0] = LoadWords<Op>(p, n);
    }
  }

  // scores[r][j] = the product of query row r and key j, for j from begin to end.
  template <int kRows>
  void Scores(const float* q, const Share& here, const Ahead& ahead, int64_t begin, int64_t end,
              float* scores) const {
    constexpr int kKeys = kLanes / kRows;  // one vector of sums takes kRows x kKeys products
    const int64_t q_ld = RowWords<Op>(head_dim_);
    const int64_t whole = head_dim_ / kElements * kElements;
    for (int64_t j = begin; j < end; j += kKeys) {
      const T* keys[kKeys];
      const T* near[kKeys];
      const T* far[kKeys];
      F sums[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        keys[i] = here.Key(j + i);
        near[i] = ahead.near.Key(j + i);
        far[i] = ahead.far.Key(j + i);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) sums[i] = Zero();
      for (int64_t d = 0; d < whole; d += kElements) {
        F x[kRows][kStep];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
          for (int s = 0; s < kStep; ++s) {
            x[r][s] = Load(q + r * q_ld + d / Op::kPair + s * kLanes);
          }
        }
#pragma GCC unroll 16
        for (int i = 0; i < kKeys; ++i) {
          F k[kStep];
          LoadStep(keys[i] + d, kElements, k);
          Prefetch<kElements>(near[i], far[i], d);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
            for (int s = 0; s < kStep; ++s) {
              sums[r * kKeys + i] = Op::Dot(x[r][s], k[s], sums[r * kKeys + i]);
            }
          }
        }
      }
      for (int64_t d = whole; d < head_dim_; d += kLanes * Op::kPair) {
#pragma GCC unroll 16
        for (int i = 0; i < kKeys; ++i) {
          const F k = LoadWords<Op>(keys[i] + d, head_dim_ - d);
          Prefetch<kLanes * Op::kPair>(near[i], far[i], d);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const F x = Load(q + r * q_ld + d / Op::kPair);
            sums[r * kKeys + i] = Op::Dot(x, k, sums[r * kKeys + i]);
          }
        }
      }
      float each[kLanes];
      Store(each, SumEach(sums));
      for (int r = 0; r < kRows; ++r) {
        std::memcpy(scores + r * kScoreLd + j, each + r * kKeys, kKeys * 4);
      }
    }
  }

  // Scores of one row become weights relative to its largest score so far, 0 outside of [lo, hi).
  // Returns what brings its earlier sums to that scale.
  float Weights(int64_t lo, int64_t hi, int64_t begin, int64_t end, float* s, float* pairs,
                float* state) const {
    constexpr int64_t kStride = kLanes * Op::kPair;
    const int64_t first = begin / kStride * kStride;
    const int64_t last = RoundUp(end, kStride);
    const F scale = Set1(in_.problem.scale), hidden = Set1(-kInfinity);
    const float cap = in_.problem.softcap;
    F most = hidden;
    for (int64_t j = first; j < last; j += kLanes) {
      F x = Load(s + j);
      if (scoring_.modified) x = Mul(x, scale);
      if (cap > 0.0f) x = Mul(Tanh(Mul(x, Set1(1.0f / cap))), Set1(cap));
      if (j < lo || j + kLanes > hi) x = Select(LanesBetween(lo - j, hi - j), x, hidden);
      Store(s + j, x);
      most = Max(most, x);
    }
    const float before = Largest(state);
    const float here = ReduceMax(most);
    const float now = here > before ? here : before;
    Largest(state) = now;
    const F base = Set1(now > -kInfinity ? now : 0.0f), factor = Set1(scoring_.to_log2);
    F sum = Zero();
    for (int64_t j = first; j < last; j += kStride) {
      F p[Op::kPair];
#pragma GCC unroll 2
      for (int i = 0; i < Op::kPair; ++i) {
        p[i] = Exp2<T>(Mul(Sub(Load(s + j + i * kLanes), base), factor));
        sum = Add(sum, p[i]);
        Store(s + j + i * kLanes, p[i]);
      }
      if constexpr (Op::kPair == 2) Store(pairs + j / 2, PackPairs(p[0], p[1]));
    }
    float rescale[kLanes];
    Store(rescale, Exp2<float>(Mul(Sub(Set1(before), base), factor)));
    Store(Sum(state), Fma(Load(Sum(state)), Set1(rescale[0]), sum));
    return rescale[0];
  }

  // state = state * rescale + the weighted values of keys [begin, end), which all rows see.
  template <int kRows>
  void AddValues(const Share& here, const Ahead& ahead, int64_t begin, int64_t end,
                 const float* weights, const float* rescale, float* state) const {
    int64_t d = 0;
    for (; d + kPanel <= value_dim_; d += kPanel) {
      AddPanel<kRows, kTileVectors>(here, ahead, begin, end, weights, rescale, d, state);
    }
    for (; d + kTwo <= value_dim_; d += kTwo) {
      AddPanel<kRows, 2>(here, ahead, begin, end, weights, rescale, d, state);
    }
    for (; d < value_dim_; d += kLanes) {
      AddPanel<kRows, 1>(here, ahead, begin, end, weights, rescale, d, state);
    }
  }

  // kVectors of the value of key j, or of the pair of keys j and j + 1, from element d on.
  template <int kVectors>
  void LoadValues(const Share& here, const Ahead& ahead, int64_t j, int64_t d,
                  F (&x)[kVectors]) const {
    const T* value = here.Value(j) + d;
    Prefetch<kVectors * kLanes>(ahead.near.Value(j), ahead.far.Value(j), d);
    if constexpr (Op::kPair == 1) {
      if constexpr (kVectors == 1) {
        x[0] = LoadPartial(value, value_dim_ - d);
      } else {
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; i += 2) LoadTwo(value + i * kLanes, x[i], x[i + 1]);
      }
    } else {
      const T* odd = here.Value(j + 1) + d;
      Prefetch<kVectors * kLanes>(ahead.near.Value(j + 1), ahead.far.Value(j + 1), d);
      if constexpr (kVectors == 1) {
        auto bits = [](const T* p) { return reinterpret_cast<const uint16_t*>(p); };
        x[0] = InterleavePairs(bits(value), bits(odd), value_dim_ - d);
      } else {
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; i += 2) {
          InterleaveTwo(value + i * kLanes, odd + i * kLanes, x[i], x[i + 1]);
        }
      }
    }
  }

  // kVectors of the sums, two at a time in the order of PlaceOf. One vector alone has fewer than
  // kTwo elements left.
  template <int kRows, int kVectors>
  void AddPanel(const Share& here, const Ahead& ahead, int64_t begin, int64_t end,
                const float* weights, const float* rescale, int64_t d, float* state) const {
    F sum[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        sum[r][i] = Mul(Load(state + r * StateSize() + d + i * kLanes), Set1(rescale[r]));
      }
    }
    for (int64_t j = begin; j < end; j += Op::kPair) {
      F x[kVectors];
      LoadValues<kVectors>(here, ahead, j, d, x);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const F p = Set1(weights[r * kWeightLd + j / Op::kPair]);
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) sum[r][i] = Op::Dot(p, x[i], sum[r][i]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        Store(state + r * StateSize() + d + i * kLanes, sum[r][i]);
      }
    }
  }

  void AddValue(const T* value, float weight, float* state) const {
    const F p = Set1(weight);
    auto add = [&](int64_t d, F x) { Store(state + d, Fma(p, x, Load(state + d))); };
    int64_t d = 0;
    for (; d + kTwo <= value_dim_; d += kTwo) {
      F first, second;
      LoadValue(value + d, first, second);
      add(d, first);
      add(d + kLanes, second);
    }
    for (; d < value_dim_; d += kLanes) add(d, LoadPartial(value + d, value_dim_ - d));
  }

  const Inputs& in_;
  const Scoring scoring_;
  const int64_t head_dim_, value_dim_, out_ld_;
};

}  // namespace
}  // namespace jax_flash::cpu
