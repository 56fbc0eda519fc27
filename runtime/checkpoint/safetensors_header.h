#pragma once
// The header of a safetensors file: u64 length (little-endian), that many bytes of JSON, then the tensors' bytes
// without a gap.
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tierflow {

inline constexpr std::uint64_t safetensors_header_limit = 16 << 20;
// In the metadata of a file of adapters: the hash of the weights that they are for.
inline constexpr const char* kBaseWeights = "tierflow_base_weights";

struct HeaderEntry {
  std::string name;
  std::string dtype;  // as the file spells it: "BF16", "F32", "I64", ...
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // from the first byte after the header
};

// Checks and returns the entries, in the order of their bytes. `json` is the header's text, `data_bytes` what follows
// it in the file. metadata: what the header says besides, where it is wanted. Throws Exception (kind input) naming
// `where` and the tensor.
std::vector<HeaderEntry> parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                                  const std::string& where,
                                                  std::map<std::string, std::string>* metadata = nullptr);

}  // namespace tierflow
