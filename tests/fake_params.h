// The arguments of the kernels as JSON, by the names of their fields: for tests/fake_cuda.cc.
//
// A pointer is {"pointer": its value}. A field that is not listed here is found: those that are
// must fill their struct, but for what alignment leaves between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <type_traits>

#include "cuda/runtime/families/decode_params.h"
#include "cuda/runtime/families/sm80_params.h"
#include "cuda/runtime/families/sm90_params.h"
#include "tests/fake_cuda.h"

// Of a struct, in order: JSON_FIELDS(a, b) makes a member function that lists the struct's fields a
// and b.
#define JSON_FIELDS(...) \
  void List(JsonFields& fields) const { fields.Add(#__VA_ARGS__, __VA_ARGS__); }

template <class Struct>
struct Named;  // a Struct with JSON_FIELDS

class JsonFields {
 public:
  template <class Struct>
  static std::string Of(const Struct& value) {
    const Named<Struct> named{value};
    JsonFields fields(&named);
    named.List(fields);
    fields.Require(sizeof(Struct), alignof(Struct));
    return "{" + fields.text_ + "}";
  }

  // `names`: of the values, separated by commas.
  template <class... Values>
  void Add(const std::string& names, const Values&... values) {
    std::istringstream words(names);
    (AddOne(words, values), ...);
  }

 private:
  explicit JsonFields(const void* start) : start_(static_cast<const char*>(start)) {}

  template <class Value>
  void AddOne(std::istringstream& names, const Value& value) {
    std::string name;
    std::getline(names >> std::ws, name, ',');
    Require(reinterpret_cast<const char*>(&value) - start_, alignof(Value));
    end_ += sizeof value;
    text_ += (text_.empty() ? "\"" : ", \"") + name + "\": " + Json(value);
  }

  // What follows the last field lies at `offset`: no other fits between.
  void Require(std::size_t offset, std::size_t alignment) {
    const std::size_t next = (end_ + alignment - 1) / alignment * alignment;
    if (offset != next) {
      std::fprintf(stderr, "tests/fake_params.h has no field at byte %zu, after %s\n", end_,
                   text_.c_str());
      std::abort();
    }
    end_ = offset;
  }

  template <class Value>
  static std::string Json(const Value& value) {
    if constexpr (std::is_pointer_v<Value>) {
      return "{\"pointer\": " + std::to_string(reinterpret_cast<std::uint64_t>(value)) + "}";
    } else if constexpr (std::is_array_v<Value>) {
      std::string text;
      for (const auto& one : value) text += (text.empty() ? "" : ", ") + Json(one);
      return "[" + text + "]";
    } else if constexpr (std::is_class_v<Value>) {
      return Of(value);
    } else {
      std::ostringstream text;
      text.precision(17);
      text << value;
      return text.str();
    }
  }
  static std::string Json(const TensorMap& map) {
    FakeMap made;
    std::memcpy(&made, map.bytes, sizeof made);
    return made.address == nullptr ? "null" : Of(made);
  }

  const char* start_;
  std::size_t end_ = 0;
  std::string text_;
};

template <>
struct Named<FakeMap> : FakeMap {
  JSON_FIELDS(address, dims, strides, box, type, swizzle)
};
template <>
struct Named<Broadcast> : Broadcast {
  JSON_FIELDS(data, batch, head, query, key)
};
template <>
struct Named<Capture> : Capture {
  JSON_FIELDS(data, batch)
};
template <>
struct Named<Mask> : Mask {
  JSON_FIELDS(bytes, words, flags, batch, head)
};
template <>
struct Named<BlockMask> : BlockMask {
  JSON_FIELDS(numbers, bits, flags, bits_batch, batch, head, stored, flag_count)
};
template <>
struct Named<ForwardParams> : ForwardParams {
  JSON_FIELDS(query, key, value, query_data, key_data, value_data, out, lse, query_lengths,
              key_value_lengths, query_segments, key_value_segments, bias, mask, sinks,
              sinks_batch_stride, dropout_state, marks, unit_counter, segment_ranges, segment_plan,
              batch, query_len, kv_len, query_heads, kv_heads, query_blocks, l2_heads, window_left,
              window_right, scale, scale_log2, softcap_inner, softcap_bias, dropout_threshold,
              dropout_scale, query_positions, key_value_positions, key_position_ranges,
              query_position_ranges, score_ids, captures, block_mask, bias_map, result_scale,
              query_halves, key_halves, value_halves, query_factors, key_factors, value_factors,
              query_norms, key_norms)
};
template <>
struct Named<BackwardParams> : BackwardParams {
  JSON_FIELDS(query, key, value, dout, dkey, dvalue, query_data, key_data, value_data, out_data,
              dout_data, lse, dlse, dquery, dkey_data, dvalue_data, dbias, query_lengths,
              key_value_lengths, query_segments, key_value_segments, bias, mask, dropout_state,
              lse_log2, minus_delta, dq_sum, next_unit, turns, query_segment_ranges,
              key_segment_ranges, dbias_sum, marks, bias_elements, bias_batches, bias_heads,
              dbias_parts, batch, query_len, kv_len, query_heads, kv_heads, l2_heads, window_left,
              window_right, scale, scale_log2, softcap_inner, softcap_bias, dropout_threshold,
              dropout_scale, query_positions, key_value_positions, key_position_ranges,
              query_position_ranges, score_ids, captures, block_mask, bias_map, result_scale,
              first_kv_head, launched_kv_heads, query_halves, key_halves, value_halves, dout_halves,
              query_factors, key_factors, value_factors, dout_factors, dout_row_factors,
              shared_units, shares, dquery_map, ring_counts, dq_marks, ring_heads, ring_sets,
              ring_lag, key_sums, key_turns)
};
template <>
struct Named<Sm80ForwardParams> : Sm80ForwardParams {
  JSON_FIELDS(query_data, key_data, value_data, out, lse, query_lengths, key_value_lengths,
              query_segments, key_value_segments, query_positions, key_value_positions, bias, mask,
              sinks, sinks_batch_stride, dropout_state, key_segment_ranges, key_position_ranges,
              batch, query_len, kv_len, query_heads, kv_heads, query_blocks, l2_heads, window_left,
              window_right, scale, scale_log2, softcap_inner, softcap_bias, dropout_threshold,
              dropout_scale, score_ids, captures, block_mask, result_scale, query_halves,
              key_halves, value_halves, query_factors, key_factors, value_factors)
};
template <>
struct Named<Sm80BackwardParams> : Sm80BackwardParams {
  JSON_FIELDS(query_data, key_data, value_data, out_data, dout_data, lse, dlse, dquery, dkey_data,
              dvalue_data, dbias, query_lengths, key_value_lengths, query_segments,
              key_value_segments, query_positions, key_value_positions, bias, mask, dropout_state,
              lse_log2, minus_delta, dq_sum, next_unit, turns, query_segment_ranges,
              key_segment_ranges, query_position_ranges, key_position_ranges, dbias_sum, marks,
              bias_elements, bias_batches, bias_heads, dbias_parts, batch, query_len, kv_len,
              query_heads, kv_heads, l2_heads, window_left, window_right, scale, scale_log2,
              softcap_inner, softcap_bias, dropout_threshold, dropout_scale, score_ids, captures,
              block_mask, result_scale, first_kv_head, launched_kv_heads, query_halves, key_halves,
              value_halves, dout_halves, query_factors, key_factors, value_factors, dout_factors)
};
template <>
struct Named<DecodeParams> : DecodeParams {
  JSON_FIELDS(key, value, key_data, value_data, query, lengths, page_table, new_key, new_value,
              sinks, key_cache, value_cache, out, lse, partial_out, partial_rows,
              sinks_batch_stride, batch, query_len, query_heads, kv_heads, pages, page_size,
              columns, row_groups, shares, parts, window_left, scale_log2, softcap_inner,
              frequencies)
};
