// Owns the kernel for few queries and many keys, which reads each key and value once.
//
// The keys that a row of the batch sees are cut into parts of equal length; a task is one part, of
// all kv heads or some, so that pages are read from end to end. It goes through blocks of keys; for
// each kv head up to four query rows at a time have the products with a block, their softmax and
// the weighted sum of its values, straight from the cache and with those of the next two kv heads
// on their way. The parts of a row are merged in their order. Neither the parts nor that order
// depend on the threads, so no bit does.
// Sanovar et al., LeanAttention (arXiv:2405.10480); Dao et al., Flash-Decoding (2023).

#include <cmath>
#include <utility>

namespace jax_flash::cpu {
namespace {

template <class T, class Op>
class Decode {
 public:
  static bool Run(const DecodeCall& call, Workers& workers) {
    const Shapes& s = call.in.shapes;
    if (s.batch == 0 || s.q_heads == 0 || s.kv_heads == 0 || s.q_len == 0) return true;
    const Memory rows(s.batch * static_cast<int64_t>(sizeof(RowPlan)));
    if (!rows.get<RowPlan>()) return false;
    Decode decode(call, rows.get<RowPlan>());
    if (call.new_k) {
      ForEach(workers, s.batch, [&](int64_t b) { decode.Append(b); });
    }
    const int64_t parts = decode.PlanRows();
    const Memory states(parts * s.kv_heads * decode.rows_ * decode.state_ld_ * 4);
    decode.states_ = states.get<float>();
    if (!decode.states_) return false;
    // All kv heads in one task, unless too few parts are there to keep every thread busy.
    const int64_t shares =
        Least(s.kv_heads, (4 * workers.count() + Most(parts, 1) - 1) / Most(parts, 1));
    const int64_t heads = (s.kv_heads + shares - 1) / shares;
    const int64_t groups = (s.kv_heads + heads - 1) / heads;
    bool failed = false;
    ForEach(workers, parts * groups, [&](int64_t i) {
      const int64_t first = i % groups * heads;
      if (!decode.Attend(i / groups, first, Least(first + heads, s.kv_heads))) {
        __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
      }
    });
    if (failed) return false;
    ForEach(workers, s.batch * s.kv_heads,
            [&](int64_t i) { decode.Merge(i / s.kv_heads, i % s.kv_heads); });
    return true;
  }

 private:
  static constexpr int64_t kBlock = 64;                             // keys
  static constexpr int64_t kTile = 4;                               // query rows
  static constexpr int kStep = Op::kPair == 1 ? 2 : 1;              // vectors of a step of
  static constexpr int64_t kElements = kStep * kLanes * Op::kPair;  // so many of a row
  static constexpr int64_t kScoreLd = kBlock + kLanes;
  static constexpr int64_t kPairLd = kBlock / 2;
  static constexpr int64_t kWeightLd = Op::kPair == 1 ? kScoreLd : kPairLd;
  static constexpr int64_t kTwo = 2 * kLanes;
  static constexpr int64_t kLeastPart = 2 * kBlock;
  static constexpr int64_t kMostParts = 32;  // of one row of the batch

  struct RowPlan {
    int64_t lo, hi;      // the keys that some query sees
    int64_t part;        // keys in one part, a multiple of kBlock
    int64_t first_part;  // its index among those of all rows
    bool refused;
  };

  // Where a block's keys and values are.
  struct Block {
    int64_t first = 0, valid = 0;
    const T* keys[kBlock + kLanes];  // of kv head 0; those past `valid` repeat the last
    const T* values[kBlock];         // likewise
  };

  // A kv head's share of a block.
  struct Share {
    const Block* block;
    int64_t key, value;  // elements before the head's
    const T* Key(int64_t j) const { return block->keys[j] + key; }
    const T* Value(int64_t j) const { return block->values[j] + value; }
  };
  Share ShareOf(const Block& block, int64_t kv) const {
    return {&block, kv * head_dim_, kv * value_ld_};
  }
  // The two shares that follow.
  struct Ahead {
    Share near, far;
  };

  Decode(const DecodeCall& call, RowPlan* plans)
      : call_(call),
        in_(call.in),
        scoring_(call.in),
        group_(in_.shapes.q_heads / in_.shapes.kv_heads),
        rows_(in_.shapes.q_len * group_),
        head_dim_(in_.shapes.head_dim),
        value_dim_(in_.shapes.value_dim),
        value_ld_(call.values_in_keys ? head_dim_ : value_dim_),
        out_ld_(RoundUp(value_dim_, kLanes)),
        state_ld_(out_ld_ + 2 * kLanes),
        plans_(plans) {}

  // The page of a position, or -1.
  int64_t PageOf(int64_t b, int64_t position) const {
    if (!call_.page_table) return b;
    const int64_t columns = in_.shapes.kv_len / call_.page_size;
    const int64_t page = call_.page_table[b * columns + position / call_.page_size];
    return page < call_.pages ? Most(page, -1) : -1;
  }

  // The place of a position among all pages; it has to have a page.
  int64_t Slot(int64_t b, int64_t position) const {
    return PageOf(b, position) * call_.page_size + position % call_.page_size;
  }

  [[gnu::noinline]] void Append(int64_t b) {
    const Shapes& s = in_.shapes;
    if (in_.kv_lengths[b] > s.kv_len) return;  // such a row is refused
    const int64_t key = s.kv_heads * head_dim_, value = s.kv_heads * value_dim_;
    for (int64_t t = 0; t < s.q_len; ++t) {
      const int64_t position = in_.kv_lengths[b] - s.q_len + t;
      if (position < 0 || PageOf(b, position) < 0) continue;
      const int64_t to = Slot(b, position), from = b * s.q_len + t;
      std::memcpy(static_cast<T*>(call_.k) + to * key,
                  static_cast<const T*>(call_.new_k) + from * key,
                  static_cast<size_t>(key) * sizeof(T));
      if (call_.values_in_keys) continue;
      std::memcpy(static_cast<T*>(call_.v) + to * value,
                  static_cast<const T*>(call_.new_v) + from * value,
                  static_cast<size_t>(value) * sizeof(T));
    }
  }

  // Cuts every row's keys into parts; returns how many there are.
  [[gnu::noinline]] int64_t PlanRows() {
    const Shapes& s = in_.shapes;
    int64_t parts = 0;
    for (int64_t b = 0; b < s.batch; ++b) {
      const Head head(in_, b, 0);
      RowPlan& plan = plans_[b];
      plan = {s.kv_len, 0, kBlock, parts, call_.checked && in_.kv_lengths[b] > s.kv_len};
      for (int64_t t = 0; t < s.q_len; ++t) {
        const Row row = head.RowAt(t, 0);
        if (row.lo >= row.hi) continue;
        plan.lo = Least(plan.lo, row.lo);
        plan.hi = Most(plan.hi, row.hi);
      }
      for (int64_t at = plan.lo; !plan.refused && at < plan.hi; at += call_.page_size) {
        plan.refused |= PageOf(b, at) < 0;
      }
      if (plan.lo < plan.hi) plan.refused |= PageOf(b, plan.hi - 1) < 0;
      if (plan.refused || plan.lo >= plan.hi) {
        plan.lo = plan.hi = 0;
        continue;
      }
      // A part's sums, of rows_ * value_dim floats, stay few beside its keys and values.
      const int64_t keys = plan.hi - plan.lo;
      plan.part =
          RoundUp(Most((keys + kMostParts - 1) / kMostParts, Most(kLeastPart, 4 * rows_)), kBlock);
      parts += (keys + plan.part - 1) / plan.part;
    }
    return parts;
  }

  int64_t Parts(const RowPlan& plan) const {
    return (plan.hi - plan.lo + plan.part - 1) / plan.part;
  }

  // Sums of a part for one kv head: rows_ x state_ld_ = weighted values, sum of weights by lane,
  // the largest score.
  float* State(int64_t part, int64_t kv) const {
    return states_ + (part * in_.shapes.kv_heads + kv) * rows_ * state_ld_;
  }
  float* Sum(float* state) const { return state + out_ld_; }
  float& Largest(float* state) const { return state[out_ld_ + kLanes]; }

  // The row of the batch that a part belongs to.
  int64_t RowOf(int64_t part) const {
    int64_t b = 0, end = in_.shapes.batch;  // first_part[b] <= part < first_part[end]
    while (end - b > 1) {
      const int64_t middle = (b + end) / 2;
      (plans_[middle].first_part <= part ? b : end) = middle;
    }
    return b;
  }

  // One part, for the kv heads from `first` to `last`.
  bool Attend(int64_t part, int64_t first, int64_t last) const {
    const int64_t b = RowOf(part);
    const RowPlan& plan = plans_[b];
    Task task;
    if (!PlaceInScratch([&](Arena& arena) {
          task.rows = arena.Take<Row>(rows_);
          task.q = arena.Take<float>((last - first) * rows_ * RowWords<Op>(head_dim_));
          task.blocks = arena.Take<Block>(2);
        })) {
      return false;
    }
    const Head head(in_, b, 0);
    for (int64_t r = 0; r < rows_; ++r) task.rows[r] = head.RowAt(r);
    for (int64_t kv = first; kv < last; ++kv) {
      const T* q = static_cast<const T*>(in_.q) + kv * group_ * head_dim_;
      for (int64_t r = 0; r < rows_; ++r) {
        PackQuery(q + head.QueryOffset(task.rows[r], head_dim_),
                  task.Query(kv - first, rows_, head_dim_) + r * RowWords<Op>(head_dim_));
      }
      float* state = State(part, kv);
      std::memset(state, 0, static_cast<size_t>(rows_ * state_ld_) * 4);
      for (int64_t r = 0; r < rows_; ++r) Largest(state + r * state_ld_) = -kInfinity;
    }
    const int64_t begin = plan.lo + (part - plan.first_part) * plan.part;
    const int64_t end = Least(begin + plan.part, plan.hi);
    Block* block = task.blocks;
    Block* next = task.blocks + 1;
    Locate(b, begin, end, block);
    for (int64_t at = begin; at < end; at += kBlock) {
      Locate(b, at + kBlock, end, next);
      if (next->valid == 0) next = block;
      for (int64_t kv = first; kv < last; ++kv) {
        const Share here = ShareOf(*block, kv);
        auto after = [&](int64_t i) {
          return kv + i < last ? ShareOf(*block, kv + i)
                               : ShareOf(*next, Least(first + kv + i, 2 * last - 1) - last);
        };
        const Ahead following = {after(1), after(2)}, none = {here, here};
        for (int64_t r = 0; r < rows_; r += kTile) {
          const Ahead& ahead = r == 0 ? following : none;
          const float* q = task.Query(kv - first, rows_, head_dim_) + r * RowWords<Op>(head_dim_);
          float* state = State(part, kv) + r * state_ld_;
          const int64_t left = rows_ - r;
          if (left >= 4) {
            Tile<4>(task.rows + r, q, here, ahead, state);
          } else if (left == 3) {
            Tile<2>(task.rows + r, q, here, ahead, state);
            Tile<1>(task.rows + r + 2, q + 2 * RowWords<Op>(head_dim_), here, none,
                    state + 2 * state_ld_);
          } else if (left == 2) {
            Tile<2>(task.rows + r, q, here, ahead, state);
          } else {
            Tile<1>(task.rows + r, q, here, ahead, state);
          }
        }
      }
      std::swap(block, next);
    }
    return true;
  }

  struct Task {
    Row* rows = nullptr;
    float* q = nullptr;  // [kv heads of the task][rows_][RowWords]
    Block* blocks = nullptr;
    float* Query(int64_t kv, int64_t rows, int64_t dim) const {
      return q + kv * rows * RowWords<Op>(dim);
    }
  };

  [[gnu::noinline]] void Locate(int64_t b, int64_t first, int64_t end, Block* block) const {
    const Shapes& s = in_.shapes;
    block->first = first;
    block->valid = Most(0, Least(kBlock, end - first));
    const T* k = static_cast<const T*>(in_.k);
    const T* v = call_.values_in_keys ? k : static_cast<const T*>(in_.v);
    int64_t slot = 0;
    for (int64_t j = 0; j < block->valid; ++j) {
      slot = j == 0 || (first + j) % call_.page_size == 0 ? Slot(b, first + j) : slot + 1;
      block->keys[j] = k + slot * s.kv_heads * head_dim_;
      block->values[j] = v + slot * s.kv_heads * value_ld_;
    }
    if (block->valid == 0) return;
    for (int64_t j = block->valid; j < kBlock + kLanes; ++j) {
      block->keys[j] = block->keys[block->valid - 1];
      if (j < kBlock) block->values[j] = block->values[block->valid - 1];
    }
  }

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
  static int64_t PlaceOf(int64_t i) {
    return Op::kPair == 1 ? PlaceOfTwo(T{}, i) : PlaceOfPairs(i);
  }

  static void LoadStep(const T* p, int64_t n, F (&x)[kStep]) {
    if constexpr (Op::kPair == 1) {
      LoadTwo(p, x[0], x[1]);
    } else {
      x[0] = LoadWords<Op>(p, n);
    }
  }

  // kRows query rows of one kv head against a block.
  template <int kRows>
  void Tile(const Row* rows, const float* q, const Share& here, const Ahead& ahead,
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
                           state + r * state_ld_);
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
          AddValue(here.Value(j), scores[r * kScoreLd + j], state + r * state_ld_);
        }
      }
    }
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
        sum[r][i] = Mul(Load(state + r * state_ld_ + d + i * kLanes), Set1(rescale[r]));
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
        Store(state + r * state_ld_ + d + i * kLanes, sum[r][i]);
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

  // The rows of one kv head of batch row b from its parts, in their order.
  [[gnu::noinline]] void Merge(int64_t b, int64_t kv) const {
    const RowPlan& plan = plans_[b];
    const Head head(in_, b, kv);
    const int64_t parts = Parts(plan);
    for (int64_t r = 0; r < rows_; ++r) {
      const Row row = head.RowAt(r);
      T* out = static_cast<T*>(call_.out) + head.QueryOffset(row, value_dim_);
      float* lse = call_.lse + head.LseOffset(row);
      if (plan.refused) {
        for (int64_t d = 0; d < value_dim_; ++d) FromFloat(__builtin_nanf(""), out + d);
        *lse = __builtin_nanf("");
        continue;
      }
      auto state = [&](int64_t i) { return State(plan.first_part + i, kv) + r * state_ld_; };
      float most = -kInfinity, sum = 0.0f;
      for (int64_t i = 0; i < parts; ++i)
        most = Largest(state(i)) > most ? Largest(state(i)) : most;
      float* total = parts > 0 ? state(0) : nullptr;
      for (int64_t i = 0; i < parts; ++i) {
        const float base = most > -kInfinity ? most : 0.0f;
        const float weight = exp2f((Largest(state(i)) - base) * scoring_.to_log2);
        sum += weight * ReduceAdd(Load(Sum(state(i))));
        for (int64_t d = 0; d < out_ld_; d += kLanes) {
          const F part = Mul(Load(state(i) + d), Set1(weight));
          Store(total + d, i == 0 ? part : Add(Load(total + d), part));
        }
      }
      const bool seen = most > -kInfinity || sum != 0.0f;  // nan counts as seen
      float logit = most * scoring_.to_logit, share = 1.0f;
      const float sink =
          in_.sinks.data ? static_cast<const float*>(in_.sinks.data)[in_.sinks.Offset(b, row.n, 0)]
                         : -kInfinity;
      if (seen && sink != -kInfinity) {
        const float joint = sink > logit ? sink : logit;
        share = expf(logit - joint);
        sum = sum * share + expf(sink - joint);
        logit = joint;
      }
      *lse = seen ? logit + logf(sum) : sink;
      const F factor = Set1(share / sum);
      int64_t d = 0;
      for (; d + kTwo <= value_dim_; d += kTwo) {
        float two[kTwo], ordered[kTwo];
        Store(two, seen ? Mul(Load(total + d), factor) : Zero());
        Store(two + kLanes, seen ? Mul(Load(total + d + kLanes), factor) : Zero());
        for (int64_t i = 0; i < kTwo; ++i) ordered[i] = two[PlaceOf(i)];
        StorePartial(out + d, Load(ordered), kLanes);
        StorePartial(out + d + kLanes, Load(ordered + kLanes), kLanes);
      }
      for (; d < value_dim_; d += kLanes) {
        StorePartial(out + d, seen ? Mul(Load(total + d), factor) : Zero(), value_dim_ - d);
      }
    }
  }

  const DecodeCall& call_;
  const Inputs& in_;
  const Scoring scoring_;
  const int64_t group_, rows_, head_dim_, value_dim_;
  const int64_t value_ld_;  // between the values of two kv heads
  const int64_t out_ld_, state_ld_;
  RowPlan* plans_;
  float* states_ = nullptr;
};

}  // namespace
}  // namespace jax_flash::cpu
