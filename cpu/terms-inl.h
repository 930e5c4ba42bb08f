// Owns the scores of a tile: which keys a row sees, its products with them, and what bias, softcap
// and dropout do to those.
// Ranges are settled first: a tile is skipped, free of tests, or partial, and only partial tiles
// look at single scores.

namespace jax_flash::cpu {
namespace {

// One query row: index t, query head n, visible keys [lo, hi) before positions, segments and mask;
// of these it sees the ones whose positions are in [first, last].
struct Row {
  int64_t t, n, lo, hi;
  int32_t first = INT32_MIN, last = INT32_MAX;
  const int32_t* blocks = nullptr;  // numbers of the block mask's, by block of keys
};

// One (batch row, kv head) of a call.
struct Head {
  const Inputs* in;
  int64_t b, kv;
  int64_t group;          // query heads per kv head
  int64_t q_len, kv_len;  // valid lengths of this batch row
  int64_t offset;         // query 0 stands at this key

  Head(const Inputs& inputs, int64_t batch, int64_t kv_head) : in(&inputs), b(batch), kv(kv_head) {
    const Shapes& s = in->shapes;
    group = s.q_heads / s.kv_heads;
    auto clamp = [](int64_t x, int64_t most) { return Most(0, Least(x, most)); };
    q_len = in->q_lengths ? clamp(in->q_lengths[b], s.q_len) : s.q_len;
    kv_len = in->kv_lengths ? clamp(in->kv_lengths[b], s.kv_len) : s.kv_len;
    offset = in->problem.bottom_right ? kv_len - q_len : 0;
  }

  Row RowAt(int64_t t, int64_t n) const {
    const Problem& p = in->problem;
    Row row{t, n, 0, kv_len};
    if (in->blocks.numbers.data) row.blocks = in->blocks.RowAt(b, n, t);
    if (in->q_positions) {
      const int64_t at = in->q_positions[b * in->shapes.q_len + t];
      if (p.window_left >= 0) row.first = Narrow(at - p.window_left);
      if (p.window_right >= 0) row.last = Narrow(at + p.window_right);
    } else {
      const int64_t at = t + offset;
      if (p.window_left >= 0 && p.window_left < at) row.lo = at - p.window_left;
      if (p.window_right >= 0 && p.window_right < kv_len - 1 - at) {
        row.hi = at + p.window_right + 1;
      }
    }
    if (t >= q_len || row.hi <= row.lo) row.lo = row.hi = 0;
    return row;
  }
  // Rows of one kv head in the order (t, query head within the group).
  Row RowAt(int64_t r) const { return RowAt(r / group, kv * group + r % group); }

  // Element offset of row (t, n) in an array [B, T, N, dim].
  int64_t QueryOffset(const Row& row, int64_t dim) const {
    return ((b * in->shapes.q_len + row.t) * in->shapes.q_heads + row.n) * dim;
  }
  // Element offset of key j in an array [B, S, K, dim].
  int64_t KeyOffset(int64_t j, int64_t dim) const {
    return ((b * in->shapes.kv_len + j) * in->shapes.kv_heads + kv) * dim;
  }
  // The nearest int32.
  static int32_t Narrow(int64_t x) {
    return static_cast<int32_t>(Most(INT32_MIN, Least(INT32_MAX, x)));
  }
  // Offset of row (t, n) in lse, [B, N, T].
  int64_t LseOffset(const Row& row) const {
    return (b * in->shapes.q_heads + row.n) * in->shapes.q_len + row.t;
  }
};

// Scores after the product with the keys are `scale` * qk + bias, capped. Where neither bias nor
// cap is there, the scale is left to the exponential.
struct Scoring {
  bool modified;
  float to_logit;  // times a (modified) score: the logit
  float to_log2;   // times a (modified) score: the exponent of 2

  explicit Scoring(const Inputs& in) {
    modified = in.bias.data || in.problem.softcap > 0.0f || !(in.problem.scale > 0.0f);
    to_logit = modified ? 1.0f : in.problem.scale;
    to_log2 = to_logit * kLog2E;
  }
};

// A number for each key of a block, and their range: all of int32 where there are none.
struct Labels {
  const int32_t* values = nullptr;  // [block], or null
  int32_t min = INT32_MIN, max = INT32_MAX;
};

// Labels `valid` keys, copied into to[keys].
inline Labels Label(const int32_t* from, int64_t valid, int64_t keys, int32_t* to) {
  Labels labels{to, INT32_MAX, INT32_MIN};
  for (int64_t j = 0; j < valid; ++j) {
    to[j] = from[j];
    if (from[j] < labels.min) labels.min = from[j];
    if (from[j] > labels.max) labels.max = from[j];
  }
  for (int64_t j = valid; j < keys; ++j) to[j] = 0;
  return labels;
}

// A block of keys: [first, first + valid) exist.
struct KeyBlock {
  int64_t first, valid;
  Labels segments, positions;
};

// The block of `valid` keys from `first`; their segments and positions, if any, are copied into
// segments[keys] and positions[keys].
[[gnu::noinline]] inline KeyBlock BlockAt(const Head& head, int64_t first, int64_t valid,
                                          int64_t keys, int32_t* segments, int32_t* positions) {
  const int64_t at = head.b * head.in->shapes.kv_len + first;
  KeyBlock block{first, valid, {}, {}};
  if (head.in->kv_segments)
    block.segments = Label(head.in->kv_segments + at, valid, keys, segments);
  if (head.in->kv_positions) {
    block.positions = Label(head.in->kv_positions + at, valid, keys, positions);
  }
  return block;
}

// Keys in a block of at most `most`: no more than in one of the block mask's, which may be empty.
inline int64_t KeysWithin(const Inputs& in, int64_t most) {
  return in.blocks.numbers.data ? Least(most, RoundUp(in.blocks.size, 64)) : most;
}

// Calls visit(numbers) for the rows in turn, those next to each other with the same numbers once,
// until it returns true; returns whether it did.
template <class Visit>
bool ForBlockRows(const Row* rows, int64_t count, Visit visit) {
  const int32_t* last = nullptr;
  for (int64_t r = 0; r < count; ++r) {
    if (rows[r].blocks == last || rows[r].lo >= rows[r].hi) continue;
    last = rows[r].blocks;
    if (visit(last)) return true;
  }
  return false;
}

// Whether the block mask shows a key of the block to some row.
inline bool AnyShown(const Head& head, const Row* rows, int64_t count, const KeyBlock& block) {
  const int64_t size = head.in->blocks.size;
  const int64_t first = block.first / size, last = (block.first + block.valid - 1) / size;
  return ForBlockRows(rows, count, [&](const int32_t* numbers) {
    for (int64_t i = first; i <= last; ++i) {
      if (numbers[i] != kEmptyBlock) return true;
    }
    return false;
  });
}

// Whether some row may see a key of the block, by ranges of indices and positions and by blocks.
[[gnu::noinline]] inline bool AnySees(const Head& head, const Row* rows, int64_t count,
                                      const KeyBlock& block) {
  if (head.in->blocks.numbers.data && !AnyShown(head, rows, count, block)) return false;
  for (int64_t r = 0; r < count; ++r) {
    if (rows[r].lo < block.first + block.valid && rows[r].hi > block.first &&
        rows[r].first <= block.positions.max && rows[r].last >= block.positions.min) {
      return true;
    }
  }
  return false;
}

// Keys [begin, end) of a block, for the rows of a tile.
struct Span {
  int64_t begin = 0, end = 0;  // multiples of the granule; equal: nothing to see
  bool partial = false;        // some score within is masked
  bool empty() const { return begin >= end; }
};

inline const uint8_t* MaskRow(const Head& head, const Row& row) {
  const Broadcast& mask = head.in->mask;
  return static_cast<const uint8_t*>(mask.data) + mask.Offset(head.b, row.n, row.t);
}

// The part of a span that the block mask shows to some row.
inline Span ShownSpan(const Head& head, const Row* rows, int64_t count, const KeyBlock& block,
                      int64_t granule, Span span) {
  const int64_t size = head.in->blocks.size;
  const int64_t first = (block.first + span.begin) / size;
  const int64_t last = (block.first + Least(span.end, block.valid) - 1) / size;
  int64_t low = last + 1, high = first;
  bool full = true;
  ForBlockRows(rows, count, [&](const int32_t* numbers) {
    for (int64_t i = first; i <= last; ++i) {
      full &= numbers[i] == kFullBlock;
      if (numbers[i] == kEmptyBlock) continue;
      low = Least(low, i);
      high = Most(high, i + 1);
    }
    return false;
  });
  if (low >= high) return Span();
  span.begin = Most(span.begin, (low * size - block.first) / granule * granule);
  span.end = Least(span.end, RoundUp(high * size - block.first, granule));
  span.partial |= !full;
  return span;
}

[[gnu::noinline]] inline Span VisibleSpan(const Head& head, const Row* rows, int64_t count,
                                          const KeyBlock& block, int64_t granule) {
  const Inputs& in = *head.in;
  if (in.blocks.numbers.data && !AnyShown(head, rows, count, block)) return Span();
  int64_t lo = block.valid, hi = 0;            // of the union of the rows
  int64_t full_lo = 0, full_hi = block.valid;  // of their intersection
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row_lo = Most(rows[r].lo - block.first, 0);
    const int64_t row_hi = Least(rows[r].hi - block.first, block.valid);
    full_lo = Most(full_lo, row_lo);
    full_hi = Least(full_hi, row_hi);
    if (row_lo < row_hi) {
      lo = Least(lo, row_lo);
      hi = Most(hi, row_hi);
    }
  }
  Span span;
  if (lo >= hi) return span;
  span.begin = lo / granule * granule;
  span.end = RoundUp(hi, granule);
  span.partial = span.begin < full_lo || span.end > full_hi;

  if (block.positions.values) {
    bool any = false;
    for (int64_t r = 0; r < count; ++r) {
      if (rows[r].lo >= rows[r].hi) continue;
      any |= rows[r].first <= block.positions.max && rows[r].last >= block.positions.min;
      span.partial |= rows[r].first > block.positions.min || rows[r].last < block.positions.max;
    }
    if (!any) return Span();
  }

  if (block.segments.values) {
    int32_t least = INT32_MAX, most = INT32_MIN;
    for (int64_t r = 0; r < count; ++r) {
      if (rows[r].lo >= rows[r].hi) continue;
      const int32_t id = in.q_segments[head.b * in.shapes.q_len + rows[r].t];
      least = id < least ? id : least;
      most = id > most ? id : most;
    }
    if (most < block.segments.min || least > block.segments.max) return Span();
    span.partial |= least != most || block.segments.min != least || block.segments.max != most;
  }

  if (in.blocks.numbers.data) {
    span = ShownSpan(head, rows, count, block, granule, span);
    if (span.empty()) return span;
  }

  if (in.mask.data) {
    bool any = false, all = true;
    for (int64_t r = 0; r < count; ++r) {
      const uint8_t* p = MaskRow(head, rows[r]);
      if (in.mask.keys == 1) {
        any |= *p != 0;
        all &= *p != 0;
        continue;
      }
      const int64_t end = Least(span.end, block.valid);
      for (int64_t j = span.begin; j < end && (all || !any); ++j) {
        any |= p[block.first + j] != 0;
        all &= p[block.first + j] != 0;
      }
    }
    if (!any) return Span();
    span.partial |= !all;
  }
  return span;
}

// c[r][j] = the product of packed row r and key j of the span, for at most kTileRows `rows`; the
// keys are packed as columns of `dim` elements.
template <class Op>
[[gnu::noinline]] void MultiplyKeys(const float* a, const float* columns, int64_t dim, int64_t rows,
                                    const Span& span, float* c, int64_t c_row) {
  Product product{};
  product.words = Words<Op>(dim);
  product.a = a;
  product.a_row = RowWords<Op>(dim);
  product.a_word = 1;
  product.b_word = kPanel;
  product.c_row = c_row;
  for (int64_t j = span.begin; j < span.end;) {
    const int64_t stop = Least(span.end, (j / kPanel + 1) * kPanel);
    product.b = columns + j / kPanel * product.words * kPanel + j % kPanel;
    product.c = c + j;
    product.into = Into::kStore;
    MicroProduct<Op>(product, rows, (stop - j) / kLanes);
    j = stop;
  }
}

// Scores outside of what the row sees become -inf.
[[gnu::noinline]] inline void HideScores(const Head& head, const Row& row, const KeyBlock& block,
                                         const Span& span, float* s) {
  const Inputs& in = *head.in;
  const F hidden = Set1(-kInfinity);
  const int64_t lo = row.lo - block.first, hi = row.hi - block.first;
  for (int64_t j = span.begin; j < span.end; j += kLanes) {
    if (j >= lo && j + kLanes <= hi) continue;
    Store(s + j, Select(LanesBetween(lo - j, hi - j), Load(s + j), hidden));
  }
  if (block.positions.values) {
    for (int64_t j = span.begin; j < span.end; j += kLanes) {
      const M seen = Between(block.positions.values + j, row.first, row.last);
      Store(s + j, Select(seen, Load(s + j), hidden));
    }
  }
  if (block.segments.values) {
    const int32_t id = in.q_segments[head.b * in.shapes.q_len + row.t];
    for (int64_t j = span.begin; j < span.end; j += kLanes) {
      Store(s + j, Select(Equal(block.segments.values + j, id), Load(s + j), hidden));
    }
  }
  if (in.blocks.numbers.data) {
    static_assert(16 % kLanes == 0, "lanes have their bits in one word");
    const int64_t size = in.blocks.size;
    const int32_t* numbers = row.blocks;
    for (int64_t j = span.begin; j < span.end; j += kLanes) {
      const int64_t key = block.first + j;
      if (key >= in.shapes.kv_len) break;  // hidden above
      const int32_t number = numbers[key / size];
      if (number == kFullBlock) continue;
      uint64_t bits = 0;
      if (number >= 0) {
        const uint16_t* words = in.blocks.WordsAt(head.b, row.t, number);
        bits = static_cast<uint64_t>(words[key % size / 16]) >> key % 16;
      }
      uint8_t bytes[16];  // byte i holds bit i
      for (int half = 0; half < 2; ++half) {
        const uint64_t spread =
            (bits >> 8 * half & 0xff) * 0x0101010101010101u & 0x8040201008040201u;
        std::memcpy(bytes + 8 * half, &spread, 8);
      }
      Store(s + j, Select(NonZero(bytes), Load(s + j), hidden));
    }
  }
  if (in.mask.data) {
    const uint8_t* p = MaskRow(head, row);
    for (int64_t j = span.begin; j < span.end; j += kLanes) {
      uint8_t bytes[kLanes > 16 ? kLanes : 16] = {};
      const int64_t n = Least(kLanes, block.valid - j);
      if (in.mask.keys == 1) {
        std::memset(bytes, *p, kLanes);
      } else if (n > 0) {
        std::memcpy(bytes, p + block.first + j, static_cast<size_t>(n));
      }
      Store(s + j, Select(NonZero(bytes), Load(s + j), hidden));
    }
  }
}

inline F LoadBias(DType dtype, const void* data, int64_t at, int64_t n) {
  switch (dtype) {
    case DType::kBFloat16:
      return LoadPartial(static_cast<const BFloat16*>(data) + at, n);
    case DType::kFloat16:
      return LoadPartial(static_cast<const Float16*>(data) + at, n);
    default:
      return LoadPartial(static_cast<const float*>(data) + at, n);
  }
}

// s = softcap(scale * s + bias). Where slope is not null, d(capped) / d(uncapped) goes there.
[[gnu::noinline]] inline void ModifyScores(const Head& head, const Row& row, const KeyBlock& block,
                                           const Span& span, float* s, float* slope) {
  const Inputs& in = *head.in;
  const F scale = Set1(in.problem.scale);
  const float cap = in.problem.softcap;
  const int64_t bias_at = in.bias.data ? in.bias.Offset(head.b, row.n, row.t) : 0;
  const bool per_key = in.bias.keys != 1;
  F bias = Zero();
  if (in.bias.data && !per_key) {
    float first[kLanes];
    Store(first, LoadBias(in.bias_dtype, in.bias.data, bias_at, 1));
    bias = Set1(first[0]);
  }
  for (int64_t j = span.begin; j < span.end; j += kLanes) {
    if (in.bias.data && per_key) {
      bias = LoadBias(in.bias_dtype, in.bias.data, bias_at + block.first + j, block.valid - j);
    }
    F x = Fma(Load(s + j), scale, bias);
    if (cap > 0.0f) {
      const F y = Tanh(Mul(x, Set1(1.0f / cap)));
      x = Mul(y, Set1(cap));
      if (slope) Store(slope + j, Fma(Sub(Zero(), y), y, Set1(1.0f)));
    }
    Store(s + j, x);
  }
}

// keep[j] = 1 / (1 - rate) where the weight of key j survives dropout, else 0. The block begins at
// a multiple of 16 keys and keep has room for a multiple of 4 * kPhilox. jax_flash/_philox.py says
// which bits are whose. Inlined by gcc 12, it costs bfloat16 forwards without dropout 10 to 15 %.
[[gnu::noinline]] inline void DropoutFactors(const Head& head, const Row& row,
                                             const KeyBlock& block, const Span& span, float* keep) {
  const Inputs& in = *head.in;
  const int64_t words_of = in.dropout_words;
  const uint32_t* state = in.dropout_state + (head.b * in.shapes.q_heads + row.n) * words_of;
  const uint32_t first_query = words_of == 6 ? state[4] : 0,
                 first_key = words_of == 6 ? state[5] : 0;
  const uint32_t threshold = DropoutThreshold(in.problem.dropout_rate);
  const float kept = static_cast<float>(1.0 / (1.0 - in.problem.dropout_rate));
  const uint32_t t = static_cast<uint32_t>(row.t), query = first_query + t / 16 * 4 + t % 4;
  // Rows t and t + 8 share a counter: `which` of its two words is this row's.
  const uint32_t which = t / 8 % 2, factor = which == 0 ? 0x93D765DDu : 0xD2511F53u;
  constexpr int64_t kKeys = 4 * kPhilox;
  for (int64_t j = span.begin / kKeys * kKeys; j < span.end; j += kKeys) {
    const uint32_t key = first_key + static_cast<uint32_t>((block.first + j) / 4);
    uint32_t words[4][kPhilox], numbers[2][kPhilox];
    Philox(state[2], query, state[3], key, state[0], state[1], words);
    for (uint32_t i = 0; i < kPhilox; ++i) {
      // Words 2 and 3 where cells of 16 queries and keys, four counters each, have it so.
      const uint32_t last = 0 - ((query ^ (key + i) ^ t) / 4 % 2);
      const uint32_t own = words[which][i] ^ ((words[which][i] ^ words[which + 2][i]) & last);
      const uint32_t first = words[1 - which][i], third = words[3 - which][i];
      numbers[0][i] = own;
      numbers[1][i] = own * factor + (first ^ ((first ^ third) & last));
    }
    for (int64_t half = 0; half < 2; ++half) {  // keys 0 to 7 and 8 to 15 of each 16
      for (int64_t i = 0; i < kPhilox; ++i) {
        const uint32_t number = numbers[half][i];
        float* two = keep + j + i / 4 * 16 + half * 8 + i % 4 * 2;
        two[0] = (number & 0x7fff) >= threshold ? kept : 0.0f;
        two[1] = (number >> 16 & 0x7fff) >= threshold ? kept : 0.0f;
      }
    }
  }
}

}  // namespace
}  // namespace jax_flash::cpu
