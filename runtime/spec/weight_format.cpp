#include "runtime/spec/weight_format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>

#include "runtime/base/exception.h"
#include "runtime/spec/weight_codes.h"
#include "runtime/spec/weight_kernels.h"

namespace tierflow {
namespace {

using weights::kFp8Tile;
using weights::kInt8Block;
using weights::kMostBlocks;
using weights::kMxBlock;
using weights::kNestedBlock;
using weights::kNf4Block;

constexpr std::array<std::pair<WeightFormat, const char*>, 8> kNames = {{{WeightFormat::bf16, "bf16"},
                                                                         {WeightFormat::int8, "int8"},
                                                                         {WeightFormat::nf4, "nf4"},
                                                                         {WeightFormat::nf4_double, "nf4-double"},
                                                                         {WeightFormat::fp8, "fp8"},
                                                                         {WeightFormat::mxfp4, "mxfp4"},
                                                                         {WeightFormat::fp32, "fp32"},
                                                                         {WeightFormat::fp8_rows, "fp8-rows"}}};

constexpr std::uint64_t pieces(std::uint64_t n, std::uint64_t piece) {
  return (n + piece - 1) / piece;
}
constexpr std::uint64_t padded(std::uint64_t bytes) {
  return pieces(bytes, 4) * 4;
}

float load(const std::byte* from, std::uint64_t index) {
  float value;
  std::memcpy(&value, from + index * sizeof(value), sizeof(value));
  return value;
}

const std::uint8_t* codes_of(std::span<const std::byte> stored) {
  return reinterpret_cast<const std::uint8_t*>(stored.data());
}

float largest_magnitude(std::span<const float> values) {
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

// bitsandbytes treats a short block at the end in its own way: the values are divided by the absmax, where in a whole
// block they are multiplied by its inverse, and an absmax of zero is stored as the smallest divisor.
float short_block_absmax(std::span<const float> values) {
  return std::max(largest_magnitude(values), weights::kSmallestDivisor);
}

float nf4_absmax(WeightFormat format, const WeightLayout& at, const std::byte* stored, std::uint64_t block) {
  if (format == WeightFormat::nf4) return load(stored + at.scales, block);
  const auto q = static_cast<std::uint8_t>(stored[at.scales + block]);
  const float nested = weights::kDynamic.at[q] * load(stored + at.nested, block / kNestedBlock);
  return nested + load(stored + at.offset, 0);
}

void dequantise_nf4(WeightFormat format, const WeightLayout& at, std::span<const std::byte> stored, std::uint64_t first,
                    std::span<std::uint16_t> out) {
  std::array<float, kMostBlocks> absmax;
  while (!out.empty()) {
    const std::uint64_t block = first / kNf4Block, within = first % kNf4Block;
    const std::uint8_t* codes = codes_of(stored) + block * (kNf4Block / 2);
    if (within == 0 && out.size() >= kNf4Block) {
      const std::size_t blocks = std::min<std::size_t>(kMostBlocks, out.size() / kNf4Block);
      for (std::size_t i = 0; i < blocks; ++i) absmax[i] = nf4_absmax(format, at, stored.data(), block + i);
      weights::decode_nf4(codes, absmax.data(), blocks, out.data());
      first += blocks * kNf4Block;
      out = out.subspan(blocks * kNf4Block);
      continue;
    }
    std::array<std::uint8_t, kNf4Block / 2> padded_codes{};
    std::array<std::uint16_t, kNf4Block> words;
    std::copy_n(codes, pieces(std::min(kNf4Block, at.elements - block * kNf4Block), 2), padded_codes.begin());
    absmax[0] = nf4_absmax(format, at, stored.data(), block);
    weights::decode_nf4(padded_codes.data(), absmax.data(), 1, words.data());
    const std::size_t n = std::min<std::size_t>(kNf4Block - within, out.size());
    std::copy_n(words.begin() + static_cast<std::ptrdiff_t>(within), n, out.begin());
    first += n;
    out = out.subspan(n);
  }
}

void dequantise_int8(const WeightLayout& at, std::span<const std::byte> stored, std::uint64_t first,
                     std::span<std::uint16_t> out) {
  while (!out.empty()) {
    const std::size_t n = std::min<std::size_t>(kInt8Block - first % kInt8Block, out.size());
    const float scale = load(stored.data() + at.scales, first / kInt8Block) / 127;
    weights::decode_int8(codes_of(stored) + first, scale, n, out.data());
    first += n;
    out = out.subspan(n);
  }
}

// rows, columns: of what has one scale.
void dequantise_fp8(const WeightLayout& at, std::uint64_t rows, std::uint64_t columns,
                    std::span<const std::byte> stored, std::uint64_t first, std::span<std::uint16_t> out) {
  const std::uint64_t across = pieces(at.columns, columns);
  while (!out.empty()) {
    const std::uint64_t row = first / at.columns, column = first % at.columns;
    const std::uint64_t end = std::min(at.columns, (column / columns + 1) * columns);
    const std::size_t n = std::min<std::size_t>(end - column, out.size());
    const float scale = load(stored.data() + at.scales, row / rows * across + column / columns);
    weights::decode_e4m3(codes_of(stored) + first, scale, n, out.data());
    first += n;
    out = out.subspan(n);
  }
}

void dequantise_mxfp4(const WeightLayout& at, std::span<const std::byte> stored, std::uint64_t first,
                      std::span<std::uint16_t> out) {
  const std::uint8_t *codes = codes_of(stored), *scales = codes + at.scales;
  const auto one = [&](std::uint64_t element) {
    const unsigned code = codes[element / 2] >> (element % 2 == 0 ? 0 : 4);
    const std::uint64_t row = element / at.columns, column = element % at.columns;
    return weights::rounded(weights::e2m1(code) * weights::e8m0(scales[row / kMxBlock * at.columns + column]));
  };
  while (!out.empty()) {
    const std::uint64_t row = first / at.columns, column = first % at.columns;
    std::size_t n = std::min<std::size_t>(at.columns - column, out.size()) & ~std::size_t{1};
    if (first % 2 != 0 || n == 0) {
      out.front() = one(first);
      n = 1;
    } else {
      weights::decode_mxfp4(codes + first / 2, scales + row / kMxBlock * at.columns + column, n, out.data());
    }
    first += n;
    out = out.subspan(n);
  }
}

}  // namespace

void dequantise(WeightFormat format, const std::vector<std::int64_t>& shape, std::span<const std::byte> stored,
                std::uint64_t first, std::span<std::uint16_t> out) {
  const WeightLayout at = weight_layout(format, shape);
  switch (format) {
    case WeightFormat::bf16:
      std::ranges::copy(stored.subspan(first * sizeof(out[0]), out.size_bytes()), std::as_writable_bytes(out).begin());
      return;
    case WeightFormat::int8:
      return dequantise_int8(at, stored, first, out);
    case WeightFormat::nf4:
    case WeightFormat::nf4_double:
      return dequantise_nf4(format, at, stored, first, out);
    case WeightFormat::fp8:
      return dequantise_fp8(at, kFp8Tile, kFp8Tile, stored, first, out);
    case WeightFormat::fp8_rows:
      return dequantise_fp8(at, 1, at.columns, stored, first, out);
    case WeightFormat::mxfp4:
      return dequantise_mxfp4(at, stored, first, out);
    case WeightFormat::fp32:
      for (std::uint16_t& word : out) word = weights::rounded(load(stored.data(), first++));
      return;
  }
}

WeightFormat parse_weight_format(std::string_view name) {
  for (const auto& [format, known] : kNames)
    if (name == known && format != WeightFormat::fp32) return format;
  fail_usage("no weight format is called \"" + std::string(name) +
             "\"; there are bf16, fp8, fp8-rows, mxfp4, int8, nf4 and nf4-double");
}

const char* weight_format_name(WeightFormat format) {
  return kNames[static_cast<std::size_t>(format)].second;
}

WeightLayout weight_layout(WeightFormat format, const std::vector<std::int64_t>& shape) {
  const auto n = static_cast<std::uint64_t>(
      std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<std::int64_t>()));
  WeightLayout at{.elements = n, .columns = shape.empty() ? 1 : static_cast<std::uint64_t>(shape.back())};
  std::uint64_t codes = n, scales = 0, nested = 0, offset = 0;
  switch (format) {
    case WeightFormat::bf16:
      codes = 2 * n;
      break;
    case WeightFormat::int8:
      scales = 4 * pieces(n, kInt8Block);
      break;
    case WeightFormat::nf4:
      codes = pieces(n, 2);
      scales = 4 * pieces(n, kNf4Block);
      break;
    case WeightFormat::nf4_double:
      codes = pieces(n, 2);
      scales = pieces(n, kNf4Block);
      nested = 4 * pieces(scales, kNestedBlock);
      offset = 4;
      break;
    case WeightFormat::fp8:
      if (shape.size() < 2 || (shape.size() > 2 && shape.rbegin()[1] % static_cast<std::int64_t>(kFp8Tile) != 0))
        throw Exception(io::ErrorKind::input,
                        "an fp8 weight is a matrix, or several with rows in multiples of 128; store it as bf16");
      scales = 4 * pieces(n / std::max<std::uint64_t>(1, at.columns), kFp8Tile) * pieces(at.columns, kFp8Tile);
      break;
    case WeightFormat::fp8_rows:
      scales = 4 * (n / std::max<std::uint64_t>(1, at.columns));
      break;
    case WeightFormat::mxfp4:
      if (shape.size() < 2 || shape.rbegin()[1] % static_cast<std::int64_t>(kMxBlock) != 0 || shape.back() % 2 != 0)
        throw Exception(
            io::ErrorKind::input,
            "a weight in mxfp4 has rows in multiples of 32 and an even number of columns; store it as bf16");
      codes = n / 2;
      scales = n / kMxBlock;
      break;
    case WeightFormat::fp32:
      codes = 4 * n;
      break;
  }
  at.scales = padded(codes);
  at.nested = at.scales + padded(scales);
  at.offset = at.nested + nested;
  at.bytes = at.offset + offset;
  return at;
}

std::uint64_t stored_bytes(WeightFormat format, const std::vector<std::int64_t>& shape) {
  return weight_layout(format, shape).bytes;
}

std::uint64_t quantising_bytes(WeightFormat format, const std::vector<std::int64_t>& shape) {
  if (format == WeightFormat::bf16) return 0;
  const WeightLayout at = weight_layout(format, shape);
  if (format == WeightFormat::fp8 ||
      format == WeightFormat::fp8_rows) {  // copied; of several matrices one at a time beside the whole
    std::uint64_t matrices = 1;
    for (std::size_t i = 0; i + 2 < shape.size(); ++i) matrices *= static_cast<std::uint64_t>(shape[i]);
    return at.bytes + at.bytes - at.scales + (matrices > 1 ? at.bytes / matrices : 0);
  }
  if (format == WeightFormat::mxfp4) return 2 * at.bytes;  // turned
  const std::uint64_t absmax = format == WeightFormat::nf4_double ? 4 * pieces(at.elements, kNf4Block) : 0;
  return at.bytes + absmax + 4 * std::min(at.elements, kQuantisedPiece);
}

Quantiser::Quantiser(WeightFormat format, const std::vector<std::int64_t>& shape)
    : format_(format),
      layout_(weight_layout(format, shape)),
      block_(format == WeightFormat::int8 ? kInt8Block : kNf4Block) {
  if (format == WeightFormat::bf16 || is_unconverted(format))
    throw Exception(io::ErrorKind::internal, std::string("a quantiser makes no ") + weight_format_name(format));
  stored_.resize(layout_.bytes);
  if (format == WeightFormat::nf4_double) absmax_.reserve(pieces(layout_.elements, kNf4Block));
  pending_.reserve(block_);
}

void Quantiser::add(std::span<const float> values) {
  if (values.size() > layout_.elements - encoded_ - pending_.size())
    throw Exception(io::ErrorKind::internal, "a quantiser was given more values than its tensor has");
  if (format_ == WeightFormat::fp32) return put(values);
  while (!values.empty()) {
    std::size_t taken = 0;
    if (pending_.empty() && values.size() >= block_) {
      const std::size_t blocks = std::min<std::size_t>(kMostBlocks, values.size() / block_);
      encode_blocks(values.data(), blocks);
      taken = blocks * block_;
    } else {
      taken = std::min(block_ - pending_.size(), values.size());
      pending_.insert(pending_.end(), values.begin(), values.begin() + static_cast<std::ptrdiff_t>(taken));
      if (pending_.size() == block_) {
        encode_blocks(pending_.data(), 1);
        pending_.clear();
      }
    }
    values = values.subspan(taken);
  }
}

std::vector<std::byte> Quantiser::finish() {
  if (encoded_ + pending_.size() != layout_.elements)
    throw Exception(io::ErrorKind::internal, "a quantiser was given fewer values than its tensor has");
  if (!pending_.empty()) encode_short_block();
  if (format_ == WeightFormat::nf4_double) nest_absmax();
  return std::move(stored_);
}

void Quantiser::put(std::span<const float> values) {
  std::memcpy(stored_.data() + encoded_ * sizeof(float), values.data(), values.size_bytes());
  encoded_ += values.size();
}

void Quantiser::encode_blocks(const float* values, std::size_t blocks) {
  std::array<float, kMostBlocks> absmax;
  auto* const codes = reinterpret_cast<std::uint8_t*>(stored_.data());
  if (format_ == WeightFormat::int8)
    refuse_unless(weights::encode_int8(values, blocks, codes + encoded_, absmax.data()));
  else
    refuse_unless(weights::encode_nf4(values, blocks, codes + encoded_ / 2, absmax.data()));
  put_absmax({absmax.data(), blocks});
  encoded_ += blocks * block_;
}

void Quantiser::encode_short_block() {
  auto* const codes = reinterpret_cast<std::uint8_t*>(stored_.data());
  const std::size_t n = pending_.size();
  float absmax = 0;
  if (format_ == WeightFormat::int8) {
    std::array<std::uint8_t, kInt8Block> block_codes;
    pending_.resize(block_);
    refuse_unless(weights::encode_int8(pending_.data(), 1, block_codes.data(), &absmax));
    std::copy_n(block_codes.begin(), n, codes + encoded_);
  } else {
    refuse_unless(std::ranges::all_of(pending_, [](float value) { return std::isfinite(value); }));
    absmax = short_block_absmax(pending_);
    if (n % 2 != 0) pending_.push_back(0);
    for (std::size_t i = 0; i < n; i += 2) {
      const int first = weights::kNf4.code(pending_[i] / absmax), second = weights::kNf4.code(pending_[i + 1] / absmax);
      codes[(encoded_ + i) / 2] = static_cast<std::uint8_t>(first << 4 | second);
    }
  }
  put_absmax({&absmax, 1});
  encoded_ += n;
}

void Quantiser::refuse_unless(bool finite) const {
  if (finite) return;
  throw Exception(io::ErrorKind::input,
                  std::string("a value is NaN or infinite, which ") + weight_format_name(format_) + " cannot hold");
}

// In order: those of the elements from `encoded_` on.
void Quantiser::put_absmax(std::span<const float> absmax) {
  if (format_ == WeightFormat::nf4_double)
    absmax_.insert(absmax_.end(), absmax.begin(), absmax.end());
  else
    std::memcpy(stored_.data() + layout_.scales + encoded_ / block_ * sizeof(float), absmax.data(),
                absmax.size_bytes());
}

void Quantiser::nest_absmax() {
  const double sum = std::accumulate(absmax_.begin(), absmax_.end(), 0.0);
  const auto offset = static_cast<float>(sum / static_cast<double>(std::max<std::size_t>(1, absmax_.size())));
  std::memcpy(stored_.data() + layout_.offset, &offset, sizeof(offset));
  for (float& absmax : absmax_) absmax -= offset;
  for (std::size_t begin = 0; begin < absmax_.size(); begin += kNestedBlock) {
    const auto block = std::span(absmax_).subspan(begin, std::min<std::size_t>(kNestedBlock, absmax_.size() - begin));
    const bool whole = block.size() == kNestedBlock;
    const float nested = whole ? largest_magnitude(block) : short_block_absmax(block);
    const float inverse = 1 / std::max(nested, weights::kSmallestDivisor);
    for (std::size_t i = 0; i < block.size(); ++i)
      stored_[layout_.scales + begin + i] =
          std::byte{weights::kDynamic.code(whole ? block[i] * inverse : block[i] / nested)};
    std::memcpy(stored_.data() + layout_.nested + begin / kNestedBlock * sizeof(nested), &nested, sizeof(nested));
  }
}

}  // namespace tierflow
