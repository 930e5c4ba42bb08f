#include "ffi/operands.h"

#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace jax_flash {
namespace {

namespace ffi = xla::ffi;
using Dims = std::vector<std::int64_t>;

template <class Range>
std::string Show(const Range& dims) {
  std::string text = "[";
  for (std::int64_t dim : dims) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  }
  return text + "]";
}

// Reads buffers one after another, stopping at the first one that is not as it should be.
class Reader {
 public:
  Reader(ffi::RemainingArgs args, ffi::RemainingRets rets) : args_(args), rets_(rets) {}

  const ffi::Error& error() const { return error_; }
  bool ok() const { return error_.success(); }
  void Fail(std::string text) {
    if (ok()) error_ = ffi::Error::InvalidArgument("jax_flash: " + std::move(text));
  }

  std::optional<ffi::AnyBuffer> Operand(const char* name) {
    return Take(name, args_.get<ffi::AnyBuffer>(arg_++));
  }
  std::optional<ffi::AnyBuffer> Result(const char* name) {
    auto result = rets_.get<ffi::AnyBuffer>(ret_++);
    if (result.has_error()) {
      Fail(std::string("the result ") + name + " is missing");
      return std::nullopt;
    }
    return **result;
  }

  // Checks dtype and shape; the dims whose letter in `letters` is one of `ones` may be 1 instead.
  void Check(const char* name, const std::optional<ffi::AnyBuffer>& buffer, ffi::DataType dtype,
             const Dims& shape, const std::string& letters = "", const std::string& ones = "") {
    if (!ok()) return;
    bool fits = static_cast<std::size_t>(buffer->dimensions().size()) == shape.size();
    for (std::size_t i = 0; fits && i < shape.size(); ++i) {
      const std::int64_t dim = buffer->dimensions()[i];
      fits = dim == shape[i] || (dim == 1 && !ones.empty() && ones.find(letters[i]) != ones.npos);
    }
    if (!fits) {
      Fail(std::string(name) + " has shape " + Show(buffer->dimensions()) + ", expected " +
           Show(shape) +
           (ones.empty() ? "" : " (" + letters + ", 1 in place of any of " + ones + ")"));
    } else if (buffer->element_type() != dtype) {
      Fail(std::string(name) + " has XLA element type " +
           std::to_string(static_cast<int>(buffer->element_type())) + ", expected " +
           std::to_string(static_cast<int>(dtype)));
    }
  }

  void CheckAllRead() {
    if (ok() && args_.size() != arg_) {
      Fail(std::to_string(args_.size()) + " operands, expected " + std::to_string(arg_));
    }
  }

 private:
  std::optional<ffi::AnyBuffer> Take(const char* name, ffi::ErrorOr<ffi::AnyBuffer> buffer) {
    if (buffer.has_value()) return *buffer;
    Fail(std::string("the operand ") + name + " is missing");
    return std::nullopt;
  }

  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  std::size_t arg_ = 0;
  std::size_t ret_ = 0;
  ffi::Error error_;
};

Dims Join(ffi::Span<const std::int64_t> batch, std::initializer_list<std::int64_t> rest) {
  Dims dims(batch.begin(), batch.end());
  dims.insert(dims.end(), rest);
  return dims;
}

void* Data(const std::optional<ffi::AnyBuffer>& buffer) {
  return buffer ? buffer->untyped_data() : nullptr;
}

bool IsFloat(ffi::DataType dtype) {
  return dtype == ffi::F32 || dtype == ffi::BF16 || dtype == ffi::F16;
}

void CheckProblem(const ProblemAttribute& p, Reader* reader) {
  if (!std::isfinite(p.scale)) reader->Fail("scale is not finite");
  if (p.window_left < -1 || p.window_right < -1) {
    reader->Fail("window (" + std::to_string(p.window_left) + ", " +
                 std::to_string(p.window_right) + ") has a size below -1");
  }
  if (!(p.softcap >= 0 && std::isfinite(p.softcap))) reader->Fail("softcap is not in [0, inf)");
  if (!(p.dropout_rate >= 0 && p.dropout_rate < 1)) reader->Fail("dropout_rate is not in [0, 1)");
  if (p.dropout_rate > 0 && !p.Has(kDropoutState)) reader->Fail("dropout_rate without its state");
  if (p.Has(kBlockNumbers) != p.Has(kBlockBits)) {
    reader->Fail("block_numbers and block_bits come together");
  }
  if (p.Has(kQuerySegments) != p.Has(kKeyValueSegments)) {
    reader->Fail("query_segments and key_value_segments come together");
  }
  if (p.Has(kQueryPositions) != p.Has(kKeyValuePositions)) {
    reader->Fail("query_positions and key_value_positions come together");
  }
  if (p.Has(kQueryPositions) && p.bottom_right) reader->Fail("bottom_right with positions");
  if (p.terms < 0 || p.terms >> kTermCount != 0) {
    reader->Fail("terms = " + std::to_string(p.terms) + " has unknown bits");
  }
  if (p.HasFunction()) reader->Fail("the CPU kernels have no function of the scores");
}

// Reads q, k and v, from which all other shapes follow.
void ReadInputs(Reader* reader, Operands* to) {
  const auto q = reader->Operand("q");
  const auto k = reader->Operand("k");
  const auto v = reader->Operand("v");
  if (!reader->ok()) return;
  const auto q_dims = q->dimensions();
  const std::size_t rank = q_dims.size();
  if (rank < 3 || k->dimensions().size() != rank || v->dimensions().size() != rank) {
    return reader->Fail("q " + Show(q_dims) + ", k " + Show(k->dimensions()) + " and v " +
                        Show(v->dimensions()) + " need one rank of 3 or more");
  }
  to->batch = ffi::Span<const std::int64_t>(q_dims.begin(), rank - 3);
  Sizes& s = to->sizes;
  s.batch = 1;
  for (std::int64_t dim : to->batch) s.batch *= dim;
  s.q_len = q_dims[rank - 3];
  s.q_heads = q_dims[rank - 2];
  s.head_dim = q_dims[rank - 1];
  s.kv_len = k->dimensions()[rank - 3];
  s.kv_heads = k->dimensions()[rank - 2];
  s.value_dim = v->dimensions()[rank - 1];
  to->dtype = q->element_type();
  if (!IsFloat(to->dtype)) return reader->Fail("q is neither float32 nor bfloat16 nor float16");
  reader->Check("k", k, to->dtype, Join(to->batch, {s.kv_len, s.kv_heads, s.head_dim}));
  reader->Check("v", v, to->dtype, Join(to->batch, {s.kv_len, s.kv_heads, s.value_dim}));
  if (s.q_heads != 0 && (s.kv_heads == 0 || s.q_heads % s.kv_heads != 0)) {
    return reader->Fail("the " + std::to_string(s.kv_heads) +
                        " heads of k and v do not divide the " + std::to_string(s.q_heads) +
                        " of q");
  }
  to->q = q->untyped_data();
  to->k = k->untyped_data();
  to->v = v->untyped_data();
}

// The element type of a term's dtype; INVALID where this buffer cannot be one.
ffi::DataType TermType(const TermRow& row, const ffi::AnyBuffer& buffer) {
  const std::string_view dtype = row.dtype;
  if (dtype == "float")
    return IsFloat(buffer.element_type()) ? buffer.element_type() : ffi::DataType::INVALID;
  if (dtype == "sum") return ffi::F32;
  if (dtype == "bool") return ffi::PRED;
  if (dtype == "uint16") return ffi::U16;
  if (dtype == "uint32") return ffi::U32;
  return ffi::S32;
}

// `own`: the dim as it is, where more than one would do.
std::int64_t TermDim(char letter, const Sizes& s, std::int64_t own) {
  switch (letter) {
    case 'I':
    case 'J':
    case 'C':
    case 'D':
    case 'E':
      return own;
    case 'T':
      return s.q_len;
    case 'S':
      return s.kv_len;
    case 'N':
      return s.q_heads;
    case 'U':
      return 2;  // batch row and head
    default:
      return own == 6 ? 6 : 4;  // W: words of the state of dropout
  }
}

// Blocks of D queries and D keys, E words of 16 keys for each query.
void CheckBlockMask(Reader* reader, const Operands& operands) {
  if (!reader->ok() || !operands.terms[kBlockBits]) return;
  const auto numbers = operands.terms[kBlockNumbers]->dimensions();
  const auto bits = operands.terms[kBlockBits]->dimensions();
  const std::size_t rank = operands.batch.size() + 3;
  const std::int64_t block = bits[rank - 2];
  const auto count = [&](std::int64_t length) { return (length + block - 1) / block; };
  if (block < 1 || block % 16 != 0 || bits[rank - 1] != block / 16 || bits[rank - 3] < 1 ||
      numbers[rank - 2] != count(operands.sizes.q_len) ||
      numbers[rank - 1] != count(operands.sizes.kv_len)) {
    reader->Fail("block_numbers " + Show(numbers) + " and block_bits " + Show(bits) +
                 " do not fit each other and " + std::to_string(operands.sizes.q_len) +
                 " queries, " + std::to_string(operands.sizes.kv_len) + " keys");
  }
}

void ReadTerms(const ProblemAttribute& problem, Reader* reader, Operands* to) {
  const Sizes& s = to->sizes;
  for (int i = 0; i < kTermCount && reader->ok(); ++i) {
    const Term term = static_cast<Term>(i);
    if (!problem.Has(term)) continue;
    const TermRow& row = kTerms[i];
    const auto buffer = reader->Operand(row.name);
    if (!reader->ok()) return;
    to->terms[i] = buffer;
    const ffi::DataType dtype = TermType(row, *buffer);
    if (dtype == ffi::DataType::INVALID) {
      return reader->Fail(std::string(row.name) + " is not floating point");
    }
    Dims shape(to->batch.begin(), to->batch.end());
    const std::size_t leading = to->batch.size();
    for (const char* letter = row.dims; *letter != 0; ++letter) {
      const std::size_t i = shape.size();
      const bool there = i < static_cast<std::size_t>(buffer->dimensions().size());
      shape.push_back(TermDim(*letter, s, there ? buffer->dimensions()[i] : 0));
    }
    reader->Check(row.name, buffer, dtype, shape, std::string(leading, 'B') + row.dims, row.ones);
  }
  CheckBlockMask(reader, *to);
}

}  // namespace

std::string TermName(Term term) { return kTerms[term].name; }

std::vector<std::string> TermRows() {
  std::vector<std::string> rows;
  for (const auto& [name, dtype, dims, ones] : kTerms) {
    rows.push_back(std::string(name) + " " + dtype + " [" + dims + "] 1:[" + ones + "]");
  }
  return rows;
}

ffi::Error ReadForward(ffi::RemainingArgs args, ffi::RemainingRets rets,
                       const ProblemAttribute& problem, ForwardOperands* operands) {
  Reader reader(args, rets);
  CheckProblem(problem, &reader);
  ReadInputs(&reader, operands);
  ReadTerms(problem, &reader, operands);
  reader.CheckAllRead();
  if (!reader.ok()) return reader.error();
  const Sizes& s = operands->sizes;
  const auto out = reader.Result("out");
  const auto lse = reader.Result("lse");
  reader.Check("out", out, operands->dtype,
               Join(operands->batch, {s.q_len, s.q_heads, s.value_dim}));
  reader.Check("lse", lse, ffi::F32, Join(operands->batch, {s.q_heads, s.q_len}));
  if (!reader.ok()) return reader.error();
  operands->out = out->untyped_data();
  operands->lse = static_cast<float*>(lse->untyped_data());
  return ffi::Error::Success();
}

ffi::Error ReadBackward(ffi::RemainingArgs args, ffi::RemainingRets rets,
                        const ProblemAttribute& problem, bool with_dlse, bool with_dbias,
                        BackwardOperands* operands) {
  Reader reader(args, rets);
  CheckProblem(problem, &reader);
  if (with_dbias && !problem.Has(kBias)) reader.Fail("a bias gradient without a bias");
  ReadInputs(&reader, operands);
  if (!reader.ok()) return reader.error();
  const Sizes& s = operands->sizes;
  const Dims out_shape = Join(operands->batch, {s.q_len, s.q_heads, s.value_dim});
  const Dims lse_shape = Join(operands->batch, {s.q_heads, s.q_len});
  const auto out = reader.Operand("out");
  const auto lse = reader.Operand("lse");
  const auto dout = reader.Operand("dout");
  const auto dlse = with_dlse ? reader.Operand("dlse") : std::nullopt;
  reader.Check("out", out, operands->dtype, out_shape);
  reader.Check("lse", lse, ffi::F32, lse_shape);
  reader.Check("dout", dout, operands->dtype, out_shape);
  if (with_dlse) reader.Check("dlse", dlse, ffi::F32, lse_shape);
  ReadTerms(problem, &reader, operands);
  reader.CheckAllRead();
  const auto dq = reader.Result("dq");
  const auto dk = reader.Result("dk");
  const auto dv = reader.Result("dv");
  reader.Check("dq", dq, operands->dtype, Join(operands->batch, {s.q_len, s.q_heads, s.head_dim}));
  reader.Check("dk", dk, operands->dtype,
               Join(operands->batch, {s.kv_len, s.kv_heads, s.head_dim}));
  reader.Check("dv", dv, operands->dtype,
               Join(operands->batch, {s.kv_len, s.kv_heads, s.value_dim}));
  if (with_dbias) operands->dbias = reader.Result("dbias");
  if (!reader.ok()) return reader.error();
  if (with_dbias) {
    const auto& bias = *operands->terms[kBias];
    reader.Check("dbias", operands->dbias, bias.element_type(),
                 Dims(bias.dimensions().begin(), bias.dimensions().end()));
    if (!reader.ok()) return reader.error();
  }
  operands->out = out->untyped_data();
  operands->lse = static_cast<const float*>(lse->untyped_data());
  operands->dout = dout->untyped_data();
  operands->dlse = dlse ? static_cast<const float*>(dlse->untyped_data()) : nullptr;
  operands->dq = dq->untyped_data();
  operands->dk = dk->untyped_data();
  operands->dv = dv->untyped_data();
  return ffi::Error::Success();
}

ffi::Error ReadDecode(ffi::RemainingArgs args, ffi::RemainingRets rets,
                      const ProblemAttribute& problem, const DecodeAttributes& attributes,
                      DecodeOperands* operands) {
  Reader reader(args, rets);
  CheckProblem(problem, &reader);
  if (problem.dropout_rate > 0 || problem.terms & ~(std::int64_t{1} << kSinks)) {
    reader.Fail("decoding has no term but sinks");
  }
  const bool with_v = attributes.value_dim == 0;
  const auto q = reader.Operand("q");
  const auto k = reader.Operand("k");
  const auto v = with_v ? reader.Operand("v") : std::nullopt;
  const auto lengths = reader.Operand("lengths");
  const auto table = attributes.paged ? reader.Operand("page_table") : std::nullopt;
  const auto new_k = attributes.appends ? reader.Operand("new_k") : std::nullopt;
  const auto new_v = attributes.appends && with_v ? reader.Operand("new_v") : std::nullopt;
  if (!reader.ok()) return reader.error();
  const ffi::DataType cached = k->element_type();
  const bool quantized = cached == ffi::F8E4M3FN || cached == ffi::S8;
  const auto key_scale = quantized ? reader.Operand("key_scale") : std::nullopt;
  const auto value_scale = quantized && with_v ? reader.Operand("value_scale") : std::nullopt;
  if (!reader.ok()) return reader.error();
  const auto q_dims = q->dimensions(), k_dims = k->dimensions();
  const std::size_t rank = k_dims.size(), v_rank = with_v ? v->dimensions().size() : rank;
  if (q_dims.size() != 4 || rank < 3 || v_rank != rank ||
      (attributes.paged && table->dimensions().size() != 2)) {
    reader.Fail("q " + Show(q_dims) + " and k " + Show(k_dims) +
                " need ranks 4 and 3 or more, v that of k, page_table rank 2");
    return reader.error();
  }
  const ffi::Span<const std::int64_t> pages(k_dims.begin(), rank - 3);
  const std::int64_t columns = attributes.paged ? table->dimensions()[1] : 1;
  operands->batch = ffi::Span<const std::int64_t>(q_dims.begin(), 1);
  operands->dtype = q->element_type();
  operands->pages = 1;
  for (std::int64_t dim : pages) operands->pages *= dim;
  operands->page_size = k_dims[rank - 3];
  operands->values_in_keys = !with_v;
  Sizes& s = operands->sizes;
  s.batch = q_dims[0];
  s.q_len = q_dims[1];
  s.kv_len = columns * operands->page_size;
  s.q_heads = q_dims[2];
  s.kv_heads = k_dims[rank - 2];
  s.head_dim = q_dims[3];
  s.value_dim = with_v ? v->dimensions()[rank - 1] : attributes.value_dim;
  if (!IsFloat(operands->dtype)) {
    reader.Fail("q is neither float32 nor bfloat16 nor float16");
  }
  const ffi::DataType stored = quantized ? cached : operands->dtype;
  reader.Check("k", k, stored, Join(pages, {operands->page_size, s.kv_heads, s.head_dim}));
  if (with_v) {
    reader.Check("v", v, stored, Join(pages, {operands->page_size, s.kv_heads, s.value_dim}));
  } else if (s.value_dim < 1 || s.value_dim > s.head_dim) {
    reader.Fail("value_dim " + std::to_string(s.value_dim) + " is not in [1, " +
                std::to_string(s.head_dim) + "]");
  }
  if (!attributes.paged && operands->pages != s.batch) {
    reader.Fail("k " + Show(k_dims) + " has not one page for each row of q " + Show(q_dims));
  }
  if (s.q_heads != 0 && (s.kv_heads == 0 || s.q_heads % s.kv_heads != 0)) {
    reader.Fail("the " + std::to_string(s.kv_heads) + " heads of k do not divide the " +
                std::to_string(s.q_heads) + " of q");
  }
  reader.Check("lengths", lengths, ffi::S32, {s.batch});
  if (table) reader.Check("page_table", table, ffi::S32, {s.batch, columns});
  if (new_k) {
    reader.Check("new_k", new_k, operands->dtype, {s.batch, s.q_len, s.kv_heads, s.head_dim});
  }
  if (new_v) {
    reader.Check("new_v", new_v, operands->dtype, {s.batch, s.q_len, s.kv_heads, s.value_dim});
  }
  const auto read_scale = [&](const char* name, const std::optional<ffi::AnyBuffer>& scale,
                              const float** to, std::int64_t* ld) {
    *to = static_cast<const float*>(Data(scale));
    *ld = 0;
    if (!scale) return;
    reader.Check(name, scale, ffi::F32, {operands->pages, s.kv_heads}, "PK", "P");
    if (reader.ok() && scale->dimensions()[0] != 1) *ld = s.kv_heads;
  };
  read_scale("key_scale", key_scale, &operands->key_scale, &operands->key_scale_ld);
  read_scale("value_scale", value_scale, &operands->value_scale, &operands->value_scale_ld);
  operands->is_float8 = cached == ffi::F8E4M3FN;
  ReadTerms(problem, &reader, operands);
  reader.CheckAllRead();
  const auto out = reader.Result("out");
  const auto lse = reader.Result("lse");
  const auto k_cache = new_k ? reader.Result("k") : std::nullopt;
  const auto v_cache = new_v ? reader.Result("v") : std::nullopt;
  if (!reader.ok()) return reader.error();
  reader.Check("out", out, operands->dtype, {s.batch, s.q_len, s.q_heads, s.value_dim});
  reader.Check("lse", lse, ffi::F32, {s.batch, s.q_heads, s.q_len});
  if (!reader.ok()) return reader.error();
  operands->q = Data(q);
  operands->k = Data(k);
  operands->v = Data(v);
  operands->lengths = static_cast<const std::int32_t*>(Data(lengths));
  operands->page_table = static_cast<const std::int32_t*>(Data(table));
  operands->new_k = Data(new_k);
  operands->new_v = Data(new_v);
  operands->k_cache = Data(k_cache);
  operands->v_cache = Data(v_cache);
  operands->out = Data(out);
  operands->lse = static_cast<float*>(Data(lse));
  // XLA was told that these are one; else what is read would miss what is written.
  if ((operands->k_cache && operands->k_cache != operands->k) ||
      (operands->v_cache && operands->v_cache != operands->v)) {
    reader.Fail("the caches of operands and results are not the same buffers");
    return reader.error();
  }
  return ffi::Error::Success();
}

std::int64_t BroadcastRow(const Operands& operands, Term term, std::int64_t batch) {
  const auto dims = operands.terms[term]->dimensions();
  const std::size_t leading = operands.batch.size();
  std::int64_t stride = 1;
  for (std::size_t i = leading; i < dims.size(); ++i) stride *= dims[i];
  std::int64_t index = 0;
  for (std::size_t i = leading; i-- > 0;) {
    if (dims[i] != 1) index += batch % operands.batch[i] * stride;
    batch /= operands.batch[i];
    stride *= dims[i];
  }
  return index;
}

}  // namespace jax_flash
