#pragma once
// A weight that a folder stores quantised, as transformers, bitsandbytes and the makers of FP8 models write it: where
// its parts lie, and its values.
//
//   4 bits of bitsandbytes   W: two codes a byte, the first in the high half; W.absmax, W.quant_map, and with double
//                            quantisation W.nested_absmax, W.nested_quant_map; W.quant_state.bitsandbytes__nf4 (or
//                            fp4): JSON. w = map[code] * absmax
//   8 bits of bitsandbytes   W: int8 [out, in]; SCB of the same module: fp32 [out]. w = code * SCB / 127
//   MXFP4 of gpt-oss         W_blocks: uint8 [experts, out, in / 32, 16], two codes e2m1 a byte, the first in the low
//                            half; W_scales: uint8 [experts, out, in / 32]. w = code * 2^(scale - 127). W is their
//                            transpose [experts, in, out].
//   FP8                      W: e4m3 [out, in]; W_scale_inv (quant_method fp8) or W_scale (compressed-tensors,
//                            fbgemm_fp8): one a tile [ceil(out / 128), ceil(in / 128)], one a row [out] or [out, 1], or
//                            one. w = code * scale. Or experts in one tensor [experts, out, in], whose scales have that
//                            dimension first, or are one. The module may have an activation_scale or input_scale, which
//                            is of no use here.
//   8 bits of                W: int8 [out, in]; W_scale as above. w = code * scale
//   compressed-tensors
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/spec/weight_format.h"

namespace tierflow {

// A tensor of any type in a file.
struct RawTensor {
  std::string dtype;  // as the file spells it
  std::vector<std::int64_t> shape;
  int file = 0;
  std::uint64_t offset = 0, bytes = 0;
};

// The folder that holds the parts; outlives the weight.
struct PackedParts {
  std::function<const RawTensor*(const std::string& name)> find;  // null if there is none
  std::function<void(const RawTensor& tensor, std::uint64_t offset, std::span<std::byte> out)> read;
  // Elements of a tensor of floating-point numbers.
  std::function<void(const std::string& name, std::uint64_t first, std::span<float> out)> floats;
};

class PackedWeight {
 public:
  virtual ~PackedWeight() = default;
  const std::vector<std::int64_t>& shape() const { return shape_; }
  // The names of the tensors that it consists of, without the one of its codes.
  const std::vector<std::string>& parts() const { return parts_; }
  // Elements [first, first + out.size()), as fp32 products without another rounding. Any thread may call it.
  virtual void read(std::uint64_t first, std::span<float> out) const = 0;
  // Whether its codes and scales are those of this format. It may be several such weights below each other.
  virtual bool has(WeightFormat) const { return false; }
  // If has() is true: the stored bytes (weight_format.h) of elements [first, first + count). These must be
  // whole rows for fp8_rows, and whole matrices for other formats.
  virtual std::vector<std::byte> read_unconverted(WeightFormat format, std::uint64_t first, std::uint64_t count) const;

 protected:
  std::vector<std::int64_t> shape_;
  std::vector<std::string> parts_;
};

// If a tensor of this name may hold the codes of a weight: the name of that weight.
std::string packed_name(const std::string& name_of_codes);
// The weight `name`, if its codes and the other tensors make one; else null. Throws Exception (kind input) naming
// `where` and the tensor whose parts do not fit together.
std::shared_ptr<const PackedWeight> packed_weight(const std::string& name, const std::string& where,
                                                  const PackedParts& parts);

}  // namespace tierflow
