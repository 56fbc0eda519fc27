#pragma once
// How a frozen weight is stored, and what its stored bytes mean: the one definition, of which every device gives the
// same bits. A stored tensor is one run of bytes, in sections; each section begins at a multiple of 4 bytes, gaps are
// zero, and the whole is a multiple of 4 bytes. Numbers are little-endian. n counts the elements in row-major order.
//
//   bf16        n words.
//   int8        codes: n signed bytes | absmax: fp32 for each 256 elements.
//               w = code * (absmax / 127); code = round(w / absmax * 127), ties to even.
//   nf4         codes: ceil(n / 2) bytes, element 2i in the HIGH half of byte i | absmax: fp32 for each 64 elements.
//               w = nf4_map[code] * absmax. The last half byte of an odd n is the code of 0.
//   nf4_double  codes as in nf4 | q: a byte for each absmax | nested absmax: fp32 for each 256 of these | offset: fp32.
//               absmax[i] = dynamic_map[q[i]] * nested[i / 256] + offset; offset is the mean of the absmax.
//   fp8         codes: n bytes e4m3fn | scales: fp32 [ceil(rows / 128), ceil(columns / 128)]. Of shape [rows, columns],
//               or [..., rows, columns] with rows in multiples of 128, whose matrices follow one another. w = code *
//               scale.
//   fp8_rows    codes as in fp8 | scales: fp32 for each row. Of any shape [..., columns]. w = code * scale.
//   mxfp4       codes: n / 2 bytes, element 2i in the LOW half of byte i | scales: a byte for each 32 rows of each
//               column [rows / 32, columns]. Of shape [..., rows, columns]. w = e2m1(code) * 2^(scale - 127), as
//               gpt-oss has its experts (OCP Microscaling Formats 1.0), exact in bf16.
//   fp32        n fp32 values, exact: what a router adds to its scores.
//
// All arithmetic is fp32, one rounding an operation, never fused; w, but of fp32, is then rounded to bf16, ties to
// even (of fp8 and fp8_rows away from zero, as a store rounds what it reads), and any NaN becomes 0x7fc0. Of two codes
// as near, nf4 and q take the lower. nf4 and nf4_double are bitsandbytes' 4-bit NF4 with blocks of 64, bit for bit, but
// for what depends on the device there: the mean is summed in fp64 here (there the last bit depends on the number of
// threads), and q is the nearest code (its kernel for the CPU looks q up in steps of 2^-15).
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace tierflow {

enum class WeightFormat : std::uint8_t { bf16, int8, nf4, nf4_double, fp8, mxfp4, fp32, fp8_rows };

// "bf16", "int8", "nf4" or "nf4-double", the formats that are made here, or "fp8", "fp8-rows" or "mxfp4", which are
// not. Anything else throws Exception (kind usage).
WeightFormat parse_weight_format(std::string_view name);
const char* weight_format_name(WeightFormat format);
// Weights come in it from a folder and stay so; nothing is converted to it.
inline constexpr bool is_unconverted(WeightFormat format) {
  return format == WeightFormat::fp8 || format == WeightFormat::fp8_rows || format == WeightFormat::mxfp4;
}

// Where the sections lie, in bytes from the first. What a format lacks is empty and lies where the next section does.
struct WeightLayout {
  std::uint64_t elements = 0;
  std::uint64_t columns = 0;  // of the last dimension
  std::uint64_t scales = 0;   // absmax, q or scales
  std::uint64_t nested = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;  // of the whole
};
// Throws Exception (kind input) for fp8 of fewer than two dimensions, or of more where rows are no multiple of 128; and
// for mxfp4 of fewer, of rows that are no multiple of 32, or of an odd number of columns.
WeightLayout weight_layout(WeightFormat format, const std::vector<std::int64_t>& shape);
std::uint64_t stored_bytes(WeightFormat format, const std::vector<std::int64_t>& shape);

// Values that are best handed to a quantiser at once, and the bytes that a tensor and what makes it then take; 0 of
// bf16.
inline constexpr std::uint64_t kQuantisedPiece = 1 << 21;
std::uint64_t quantising_bytes(WeightFormat format, const std::vector<std::int64_t>& shape);

// Makes the stored bytes of one tensor as int8, nf4, nf4_double or fp32. Holds these, one block of values and, for
// nf4_double, an fp32 absmax a block. How the values are cut into pieces does not change the bytes.
class Quantiser {
 public:
  Quantiser(WeightFormat format, const std::vector<std::int64_t>& shape);
  // The next values in row-major order. Throws Exception (kind input) if one is not finite; the caller names it.
  void add(std::span<const float> values);
  // After the last value.
  std::vector<std::byte> finish();

 private:
  void put(std::span<const float> values);
  void encode_blocks(const float* values, std::size_t blocks);
  void encode_short_block();
  void refuse_unless(bool finite) const;
  void put_absmax(std::span<const float> absmax);
  void nest_absmax();

  WeightFormat format_;
  WeightLayout layout_;
  std::size_t block_;
  std::vector<std::byte> stored_;
  std::vector<float> absmax_;   // nf4_double
  std::vector<float> pending_;  // less than a block
  std::uint64_t encoded_ = 0;   // elements
};

// The bf16 words, those of fp32 rounded, of elements [first, first + out.size()). Any thread may call it, on any piece.
void dequantise(WeightFormat format, const std::vector<std::int64_t>& shape, std::span<const std::byte> stored,
                std::uint64_t first, std::span<std::uint16_t> out);

}  // namespace tierflow
