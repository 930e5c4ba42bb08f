// Owns the kernel for few queries and many keys, which reads each key and value once.
//
// The keys that a row of the batch sees are cut into parts of equal length; a task is one part, of
// all kv heads or some, so that pages are read from end to end. It goes through blocks of keys; for
// each kv head up to four query rows at a time have the products with a block, their softmax and
// the weighted sum of its values, straight from the cache and with those of the next two kv heads
// on their way. A cache of eight bits is made float32 first, a block of one kv head at a time, in
// memory that stays near: half the bytes come from afar. The parts of a row are merged in their
// order. Neither the parts nor that order depend on the threads, so no bit does. Sanovar et al.,
// LeanAttention (arXiv:2405.10480); Dao et al., Flash-Decoding (2023).

#include <cmath>
#include <type_traits>
#include <utility>

namespace jax_flash::cpu {
namespace {

// Queries of T, a cache of C.
template <class T, class Op, class C = T>
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
  static constexpr bool kQuantized = !std::is_same_v<T, C>;
  using Read = std::conditional_t<kQuantized, float, T>;  // what the tile reads
  using Tile = DecodeTile<Read, Op>;
  using Block = DecodeBlock<C>;
  using Wide = typename Tile::Block;
  using Share = typename Tile::Share;
  using Ahead = typename Tile::Ahead;

  static constexpr int64_t kBlock = Tile::kBlock;
  static constexpr int64_t kTile = 4;  // query rows
  static constexpr int64_t kTwo = Tile::kTwo;
  static constexpr int64_t kLeastPart = 2 * kBlock;
  static constexpr int64_t kMostParts = 32;  // of one row of the batch

  struct RowPlan {
    int64_t lo, hi;      // the keys that some query sees
    int64_t part;        // keys in one part, a multiple of kBlock
    int64_t first_part;  // its index among those of all rows
    bool refused;
  };

  Share ShareOf(const Wide& block, int64_t kv) const {
    return {&block, kv * head_dim_, kv * value_ld_};
  }
  Decode(const DecodeCall& call, RowPlan* plans)
      : call_(call),
        in_(call.in),
        scoring_(call.in),
        group_(in_.shapes.q_heads / in_.shapes.kv_heads),
        rows_(in_.shapes.q_len * group_),
        head_dim_(in_.shapes.head_dim),
        value_dim_(in_.shapes.value_dim),
        value_ld_(call.values_in_keys ? head_dim_ : value_dim_),
        tile_(in_),
        state_ld_(tile_.StateSize()),
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
      const int64_t to = Slot(b, position), from = b * s.q_len + t, page = PageOf(b, position);
      Write(static_cast<const T*>(call_.new_k) + from * key, head_dim_,
            call_.key_scale + page * call_.key_scale_ld, static_cast<C*>(call_.k) + to * key);
      if (call_.values_in_keys) continue;
      Write(static_cast<const T*>(call_.new_v) + from * value, value_dim_,
            call_.value_scale + page * call_.value_scale_ld, static_cast<C*>(call_.v) + to * value);
    }
  }
  // A position of all kv heads, over their scales.
  void Write(const T* from, int64_t dim, const float* scales, C* to) const {
    const int64_t heads = in_.shapes.kv_heads;
    if constexpr (kQuantized) {
      for (int64_t i = 0; i < heads * dim; ++i)
        FromFloat(ToFloat(from[i]) / scales[i / dim], to + i);
    } else {
      std::memcpy(to, from, static_cast<size_t>(heads * dim) * sizeof(T));
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
          if (!kQuantized) return;
          task.wide = arena.Take<Wide>(1);
          task.keys = arena.Take<float>(kBlock * head_dim_);
          task.values = arena.Take<float>(kBlock * value_dim_);
          task.query = arena.Take<float>(head_dim_);
        })) {
      return false;
    }
    const Head head(in_, b, 0);
    for (int64_t r = 0; r < rows_; ++r) task.rows[r] = head.RowAt(r);
    for (int64_t kv = first; kv < last; ++kv) {
      const T* q = static_cast<const T*>(in_.q) + kv * group_ * head_dim_;
      for (int64_t r = 0; r < rows_; ++r) {
        const T* row = q + head.QueryOffset(task.rows[r], head_dim_);
        float* packed = task.Query(kv - first, rows_, head_dim_) + r * RowWords<Op>(head_dim_);
        if constexpr (kQuantized) {
          Widen(row, head_dim_, 1.0f, task.query);
          tile_.PackQuery(task.query, packed);
        } else {
          tile_.PackQuery(row, packed);
        }
      }
      float* state = State(part, kv);
      std::memset(state, 0, static_cast<size_t>(rows_ * state_ld_) * 4);
      for (int64_t r = 0; r < rows_; ++r) tile_.Largest(state + r * state_ld_) = -kInfinity;
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
        if constexpr (kQuantized) {
          const bool ends = kv + 1 == last;
          WidenBlock(*block, kv, ends ? *next : *block, ends ? first : kv + 1, task);
          const Share here = {task.wide, 0, 0};
          AddRows(task, kv - first, here, {here, here}, State(part, kv));
        } else {
          auto after = [&](int64_t i) {
            return kv + i < last ? ShareOf(*block, kv + i)
                                 : ShareOf(*next, Least(first + kv + i, 2 * last - 1) - last);
          };
          AddRows(task, kv - first, ShareOf(*block, kv), {after(1), after(2)}, State(part, kv));
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
    // With kQuantized the block of a kv head in float32, and a row of queries.
    Wide* wide = nullptr;
    float *keys = nullptr, *values = nullptr, *query = nullptr;
    float* Query(int64_t kv, int64_t rows, int64_t dim) const {
      return q + kv * rows * RowWords<Op>(dim);
    }
  };

  // The query rows of one kv head of the task against a block.
  void AddRows(const Task& task, int64_t kv, const Share& here, const Ahead& following,
               float* states) const {
    const Ahead none = {here, here};
    const int64_t words = RowWords<Op>(head_dim_);
    for (int64_t r = 0; r < rows_; r += kTile) {
      const Ahead& ahead = r == 0 ? following : none;
      const float* q = task.Query(kv, rows_, head_dim_) + r * words;
      float* state = states + r * state_ld_;
      const int64_t left = rows_ - r;
      if (left >= 4) {
        tile_.template AddBlock<4>(task.rows + r, q, here, ahead, state);
      } else if (left == 3) {
        tile_.template AddBlock<2>(task.rows + r, q, here, ahead, state);
        tile_.template AddBlock<1>(task.rows + r + 2, q + 2 * words, here, none,
                                   state + 2 * state_ld_);
      } else if (left == 2) {
        tile_.template AddBlock<2>(task.rows + r, q, here, ahead, state);
      } else {
        tile_.template AddBlock<1>(task.rows + r, q, here, ahead, state);
      }
    }
  }

  template <class X>
  static void Widen(const X* from, int64_t dim, float scale, float* to) {
    for (int64_t d = 0; d < dim; ++d) to[d] = ToFloat(from[d]) * scale;
  }
  // The keys and values of a kv head times their scales, while those of the next come nearer.
  [[gnu::noinline]] void WidenBlock(const Block& block, int64_t kv, const Block& next,
                                    int64_t next_kv, const Task& task) const {
    constexpr int64_t kLine = 64;
    const int64_t page_keys = call_.page_size * in_.shapes.kv_heads * head_dim_;
    Wide& wide = *task.wide;
    wide.first = block.first;
    wide.valid = block.valid;
    const auto widen = [&](const C* from, const C* ahead, int64_t dim, float scale, float* to) {
      for (int64_t d = 0; d < dim; d += kLine) __builtin_prefetch(ahead + d, 0, 2);
      Widen(from, dim, scale, to);
    };
    for (int64_t j = 0; j < block.valid; ++j) {
      const int64_t page = (block.keys[j] - static_cast<const C*>(in_.k)) / page_keys;
      float* key = task.keys + j * head_dim_;
      widen(block.keys[j] + kv * head_dim_, next.keys[j] + next_kv * head_dim_, head_dim_,
            call_.key_scale[page * call_.key_scale_ld + kv], key);
      wide.keys[j] = wide.values[j] = key;
      if (call_.values_in_keys) continue;
      float* value = task.values + j * value_dim_;
      widen(block.values[j] + kv * value_dim_, next.values[j] + next_kv * value_dim_, value_dim_,
            call_.value_scale[page * call_.value_scale_ld + kv], value);
      wide.values[j] = value;
    }
    Fill(&wide);
  }

  // Repeats the last key and value to the end of a block.
  template <class X>
  static void Fill(DecodeBlock<X>* block) {
    for (int64_t j = block->valid; j < kBlock + kLanes; ++j) {
      block->keys[j] = block->keys[block->valid - 1];
      if (j < kBlock) block->values[j] = block->values[block->valid - 1];
    }
  }

  [[gnu::noinline]] void Locate(int64_t b, int64_t first, int64_t end, Block* block) const {
    const Shapes& s = in_.shapes;
    block->first = first;
    block->valid = Most(0, Least(kBlock, end - first));
    const C* k = static_cast<const C*>(in_.k);
    const C* v = call_.values_in_keys ? k : static_cast<const C*>(in_.v);
    int64_t slot = 0;
    for (int64_t j = 0; j < block->valid; ++j) {
      slot = j == 0 || (first + j) % call_.page_size == 0 ? Slot(b, first + j) : slot + 1;
      block->keys[j] = k + slot * s.kv_heads * head_dim_;
      block->values[j] = v + slot * s.kv_heads * value_ld_;
    }
    if (block->valid > 0) Fill(block);
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
        most = tile_.Largest(state(i)) > most ? tile_.Largest(state(i)) : most;
      float* total = parts > 0 ? state(0) : nullptr;
      for (int64_t i = 0; i < parts; ++i) {
        const float base = most > -kInfinity ? most : 0.0f;
        const float weight = exp2f((tile_.Largest(state(i)) - base) * scoring_.to_log2);
        sum += weight * ReduceAdd(Load(tile_.Sum(state(i))));
        for (int64_t d = 0; d < value_dim_; d += kLanes) {
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
        for (int64_t i = 0; i < kTwo; ++i) ordered[i] = two[Tile::PlaceOf(i)];
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
  const Tile tile_;
  const int64_t state_ld_;
  RowPlan* plans_;
  float* states_ = nullptr;
};

}  // namespace
}  // namespace jax_flash::cpu
