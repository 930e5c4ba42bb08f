// The consumer warpgroup of forward_products.cuh: the way from scores to weights. Read
// forward_units.cuh next.
#pragma once

#include "sm90/forward_products.cuh"

namespace forward {

// What is known of a later block when its products start: with kDrainsToHide, whether its elements
// need tests.
enum Known { kUnknown, kWhole, kPartial };

// Scores to weights.
struct Warpgroup : WarpgroupProducts {
  // Masks the first kCount of `scores`; with kInFlight beside wgmma.
  template <int kCount, bool kInFlight>
  __device__ __forceinline__ void mask_scores(Scores& scores) const {
    const UnitInfo& t = unit();
    const bool one_segment = block >= t.one.begin && block < t.one.end;
    const auto query_of = [&](int row) { return packed_row(t, row) / kPackedHeads; };
    RowBits now = bits;
    if constexpr (kListsLayout) {
      now.show_all();
    } else if constexpr (kHasMask && !kBitsAhead) {
      fetch_bits(now, block, true);
    }
    hide_scores<kCount, !kInFlight>(p, t.batch, seen(t), query_of, block * kBlockKV, one_segment,
                                    now, scores);
  }
  // Are the columns of the second half hidden from all rows of the warp?
  __device__ __forceinline__ bool sees_first_half_only() const {
    const UnitInfo& t = unit();
    const int last_query = packed_row(t, 1) / kPackedHeads;
    const Range columns = row_columns(seen(t), last_query, block * kBlockKV);
    return __all_sync(0xffffffffu, columns.end <= kBlockKV / 2);
  }
  // Scores to logits, as score_function has them; unless kWhole without the factors of rows.
  template <bool kWhole = true>
  __device__ __forceinline__ void apply_terms(Scores& scores) {
    operands.scale_capped(scores);
    add_terms<kWhole>(scores);
    score_function<kPreScale>(p, scores);
  }
  // The same but for score_function.
  template <bool kWhole = true>
  __device__ __forceinline__ void add_terms(Scores& scores) {
    add_bias(scores);
    if constexpr (kHasScoreFunction) {
      if constexpr (kTakesLine && kScoreIsLevel) {
        if (UnitLine::is_one()) {
          UnitLine::add_to(p, scores);
          return;
        }
      }
      const UnitInfo& t = unit();
      const auto query_of = [&](int row) { return packed_row(t, row); };
      const auto row_of = [&](const Place&, int row) { return UnitRows::row(row); };
      apply_function<kWhole, ForwardParams>(*this, row_of, query_of, block * kBlockKV, scores);
    }
  }
  __device__ __forceinline__ void add_bias(Scores& scores) {
    if constexpr (kHasBias && !kBiasTiles) {
      biases.visit([&](int i, float bias) { scores[i] = with_bias(p, scores[i], bias); });
      // That of the last block once more: a branch beside products would serialise them.
      if constexpr (kBiasAhead) fetch_bias(max(block - 1, 0));
    }
  }
  // What is dropped of the block's 32 keys from 16 * i on, for an even i.
  __device__ __forceinline__ auto drawing() {
    const UnitInfo& t = unit();
    const Draws of(p, ptx::uniform(t.batch), ptx::uniform(t.head));
    const int column = fragment::first_column(ptx::opaque(threadIdx.x));
    const RowDraws draws(of, packed_row(t, 0), block * kBlockKV + column);
    return [=](int i) {
      if (i % 2 == 0) dropped.draw(p, draws, i);
    };
  }
  // What goes among the exponentials of a block: what is dropped of it.
  __device__ __forceinline__ auto among_exponentials() {
    if constexpr (kHoldsDraws) {
      const auto draw = [this] { Drawing::draw(p, dropped, block * kBlockKV); };
      return After<decltype(draw)>{draw};
    } else if constexpr (kDrawsByParts) {
      return drawing();
    } else if constexpr (kDrawsAmong) {
      const auto draw = [part = drawing()] {
#pragma unroll
        for (int i = 0; i < kBlockKV / 16; i += 2) part(i);
      };
      return After<decltype(draw)>{draw};
    } else {
      return Alone{};
    }
  }
  template <Known kKnown>
  __device__ __forceinline__ bool later_is_full() const {
    if constexpr (kKnown != kUnknown) return kKnown == kWhole;
    return kLaterAreFull || is_full(unit());
  }
  template <Known kKnown>
  __device__ __forceinline__ void mask_later(Scores& scores) const {
    if (!later_is_full<kKnown>()) {
      mask_scores<kBlockKV / 2, kKnown != kPartial && !kApart>(scores);
    }
  }
  __device__ __forceinline__ bool searches_now() const {
    return !softmax.is_started() || is_again(unit().number);
  }
  // Weights of the unit's first block. Half of the warps see half of a diagonal one.
  __device__ __forceinline__ void start_softmax(Scores& scores) {
    apply_terms(scores);
    if (!is_full(unit()) && sees_first_half_only()) {
      mask_scores<kBlockKV / 4, false>(scores);
      softmax.start<kBlockKV / 4>(scores, operands.logit_scale(p), among_exponentials());
    } else {
      if (!is_full(unit())) mask_scores<kBlockKV / 2, false>(scores);
      softmax.start<kBlockKV / 2>(scores, operands.logit_scale(p), among_exponentials());
    }
    if constexpr (kSumsByProduct) softmax.hold_first_block();
    searches = searches_now();
  }
  // With UnitRows::kHasFactor: the exponentials have the factors of rows.
  static constexpr bool kLeavesFactor = UnitRows::kHasFactor && !kTakesLine && !kApart && !kSoftcap;
  __device__ __forceinline__ RowFactor row_factor(float of_all) const {
    return {of_all * UnitRows::factor(0), of_all * UnitRows::factor(1)};
  }
  // Weights of a later block. True: `correction` has to be applied to the output.
  template <Known kKnown>
  __device__ __forceinline__ bool extend_softmax(Scores& scores) {
    bool rescale;
    if constexpr (kLeavesCap) {
      OddFactor factor = whole_factor(p);
      if (later_is_full<kKnown>() && !searches) {
        factor = score_factor(p, scores);
      } else {
        apply_terms(scores);
        mask_later<kKnown>(scores);
      }
      rescale = softmax.extend<kAsksRow>(scores, p.scale_log2, factor, searches, correction,
                                         among_exponentials());
    } else if constexpr (kSharesLine) {
      const bool straight = later_is_full<kKnown>() && !searches && UnitLine::is_one();
      const LineFactor<kScoreIsLevel> line = UnitLine::factor();
      float lowered = 0.0f;
      if (straight && softmax.lower_along(line.step, lowered)) {
        add_bias(scores);
        const CommonLine factor{line.factor, line.step, line.first_start() - softmax.base[0]};
        rescale = softmax.extend<kAsksRow>(scores, p.scale_log2, factor, false, correction,
                                           among_exponentials());
      } else {
        apply_terms(scores);
        mask_later<kKnown>(scores);
        rescale = softmax.extend<kAsksRow>(scores, p.scale_log2, searches, correction,
                                           among_exponentials());
      }
      if (__any_sync(0xffffffffu, lowered != 0.0f)) {  // kept as one number: two would be spilled
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const float grown = ptx::exp2_approx(fmaxf(row == 0 ? lowered : -lowered, 0.0f));
          correction[row] = rescale ? grown * correction[row] : grown;
        }
        rescale = true;
      }
    } else if constexpr (kTakesLine) {
      LineFactor<kScoreIsLevel> factor{p.scale_log2};
      if (later_is_full<kKnown>() && !searches && UnitLine::is_one()) {
        add_bias(scores);
        factor = UnitLine::factor();
      } else {
        apply_terms(scores);
        mask_later<kKnown>(scores);
      }
      rescale = softmax.extend<kAsksRow>(scores, p.scale_log2, factor, searches, correction,
                                         among_exponentials());
    } else if constexpr (kLeavesFactor) {
      apply_terms<false>(scores);
      RowFactor factor = row_factor(p.scale_log2);
      if (!later_is_full<kKnown>() || searches) {
        const RowFactor whole = row_factor(1.0f);
        multiply_rows(whole.factor[0], whole.factor[1], scores);
        mask_later<kKnown>(scores);
        factor = {p.scale_log2, p.scale_log2};
      }
      rescale = softmax.extend<kAsksRow>(scores, p.scale_log2, factor, searches, correction,
                                         among_exponentials());
    } else {
      apply_terms(scores);
      mask_later<kKnown>(scores);
      rescale = softmax.extend<kAsksRow>(scores, operands.logit_scale(p), searches, correction,
                                         among_exponentials());
    }
    if (searches) searches = searches_now();
    return rescale;
  }
  // A half of a block's weights. A template: the operands of 16 bits have none.
  template <int kPart, class Of>
  __device__ __forceinline__ void pack_part(Of& of) const {
    if constexpr (kApart) of.template pack_part<kPart>(scores);
  }
  template <class Of>
  __device__ __forceinline__ bool weigh_by_product(Of& of, float scale, float (&correction)[2]) {
    if constexpr (kSumsByProduct) return of.weigh(scores, softmax, scale, searches, correction);
    return false;
  }
  // With kApart: the same, the output rescaled and the weights packed. `plain`: no element needs a
  // test and no base is searched, asked ahead. What is rare is in two places, one before the
  // exponentials and one behind them.
  __device__ __forceinline__ void extend_apart(bool plain) {
    float correction[2];
    operands.scale_capped(scores);
    add_terms(scores);
    score_function<kPreScale>(p, scores);
    const float scale = operands.logit_scale(p);
    if (together(!plain)) {
      if (!is_full(unit())) mask_scores<kBlockKV / 2, false>(scores);
      if (kSumsByProduct || together(searches)) {
        softmax.search<false>(scores, scale, correction);
        rescale_output(correction);
      }
    }
    if constexpr (kSumsByProduct) {
      if (weigh_by_product(operands, scale, correction)) rescale_output(correction);
      return;
    }
    float apart[2];
    const Threshold threshold = kAsksRow ? kSuspect : kDecisiveOfThread;
    const bool suspect = softmax.weigh(scores, OneFactor{scale}, threshold, apart, Alone{});
    // A half among the exponentials. (More of it spills 12 to 80 bytes at head dim 128.)
    pack_part<0>(operands);
    if (__any_sync(0xffffffffu, suspect && !searches)) {
      if (!kAsksRow || __any_sync(0xffffffffu, softmax.rises(apart))) {
        softmax.raise(scores, correction);
        rescale_output(correction);
        pack_part<0>(operands);
      }
    }
    pack_part<1>(operands);
  }
  __device__ __forceinline__ void draw_after() {
    if constexpr (kHasDropout && !kDrawsAmong) {
      const auto draw = drawing();
#pragma unroll
      for (int i = 0; i < kBlockKV / 16; i += 2) draw(i);
    }
  }
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int i = 0; i < kValueColumns / 2; ++i) output[i] = 0.0f;
  }
  __device__ __forceinline__ void rescale_output() { rescale_output(correction); }
  __device__ __forceinline__ void rescale_output(const float (&correction)[2]) {
#pragma unroll
    for (int i = 0; i < kValueColumns / 2; ++i) output[i] *= correction[fragment::row(i)];
  }
};

}  // namespace forward
